"""Check that a path of a client is below the directory from which new weights may be read."""

from __future__ import annotations

from pathlib import Path

from scheduler_components import ConfigError

_MAX_SHOWN = 256


def default_weights_root(model_path: str) -> Path:
    """Return the served model's own folder, or the folder of its file."""
    path = Path(model_path)
    return path if path.is_dir() else path.parent


def resolve_below(root: Path | None, text: str, *, field: str = "model_path") -> Path:
    """Return the existing file or folder that a client names, with all symbolic links resolved.

    Args:
        root: the allowed directory, or None for none.
        text: a path, absolute or relative to ``root``.
        field: the client's field, for the error.

    Raises:
        ConfigError: there is no such path below ``root``. The text is the same for a path that does not exist and for
            one outside, so that a client learns nothing about other files.
    """
    if root is not None:
        try:
            allowed = root.resolve(strict=True)
            path = (allowed / text).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # missing, unreadable, a null byte, a loop of links
            path = None
        if path is not None and path.is_relative_to(allowed):
            return path
    hint = "name one below the directory of --weights-root"
    raise ConfigError(field, text[:_MAX_SHOWN], "is not in the allowed directory", hint)
