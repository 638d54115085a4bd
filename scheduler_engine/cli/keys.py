"""The options of keys: an HTTP API key, and the CURVE keys of a client of event streams."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scheduler_components import ConfigError
from scheduler_components.kv_events import CurveClientKeys

ApiKey = Annotated[
    str | None,
    Parameter(
        env_var="SCHEDULER_COMPONENTS_API_KEY",
        show_default=False,
        help="API key of the engine's HTTP server. The list of processes shows it: prefer the file or the variable.",
    ),
]
ApiKeyFile = Annotated[Path | None, Parameter(help="File with the API key.")]


def read_api_key(option: str, key: str | None, file: Path | None) -> str | None:
    """Return a key that is given directly or in a file; None without both.

    Raises:
        ConfigError: both are given, or the file cannot be read.
    """
    if file is None:
        return key
    if key is not None:
        raise ConfigError(f"{option}_file", str(file), f"is given together with {option}", "give one of the two")
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}_file", str(file), f"cannot be read ({error})", "name a text file") from error


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
