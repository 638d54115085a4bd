"""The options of a command that reads streams with CURVE authentication."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from scheduler_components import ConfigError
from scheduler_components.kv_events import CurveClientKeys

SecretKey = Annotated[str | None, Parameter(help="This client's secret key, for a stream that requires keys.")]
PublisherKey = Annotated[str | None, Parameter(help="The stream's public key, used with --secret-key-file.")]


def read_client_keys(secret_key_file: str | None, publisher_key_file: str | None) -> CurveClientKeys | None:
    """Read the two key files; None if neither is given.

    Raises:
        ConfigError: one of the files is missing or unusable.
    """
    if secret_key_file is None and publisher_key_file is None:
        return None
    if secret_key_file is None or publisher_key_file is None:
        missing = "secret_key_file" if secret_key_file is None else "publisher_key_file"
        raise ConfigError(missing, None, "is missing", "give both key files, or neither")
    return CurveClientKeys.read(secret_key_file, publisher_key_file)
