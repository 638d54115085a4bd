"""The options of an HTTP API key, for the server that requires it and for the commands that send it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scheduler_components import ConfigError

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
