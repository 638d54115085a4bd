"""unused_path: choose the name of a new file so that it overwrites none."""

from __future__ import annotations

from itertools import count
from pathlib import Path

__all__ = ["unused_path"]


def unused_path(directory: Path, name: str, suffix: str) -> Path:
    """Return ``<name><suffix>`` in a directory, or ``<name>.1<suffix>`` and so on if that exists.

    An engine that restarts writes its traces next to those of the process before.
    """
    names = (f"{name}.{number}{suffix}" if number else f"{name}{suffix}" for number in count())
    return next(path for path in (directory / each for each in names) if not path.exists())
