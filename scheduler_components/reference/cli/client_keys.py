"""The options by which a command reads streams that ask clients for keys."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from scheduler_components import ConfigError
from scheduler_components.kv_events import CurveClientKeys

__all__ = ["PublisherKey", "SecretKey", "read_client_keys"]

SecretKey = Annotated[str | None, Parameter(help="This client's secret key, for a stream that asks for keys.")]
PublisherKey = Annotated[str | None, Parameter(help="The stream's public key, given with --secret-key-file.")]


def read_client_keys(secret_key_file: str | None, publisher_key_file: str | None) -> CurveClientKeys | None:
    """Read the two files; None without them.

    Raises:
        ConfigError: one of them is missing, or cannot be used.
    """
    if secret_key_file is None and publisher_key_file is None:
        return None
    if secret_key_file is None or publisher_key_file is None:
        missing = "secret_key_file" if secret_key_file is None else "publisher_key_file"
        raise ConfigError(missing, None, "is missing", "give both key files, or neither")
    return CurveClientKeys.read(secret_key_file, publisher_key_file)
