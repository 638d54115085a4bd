"""The command line ``scheduler-components``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names

if TYPE_CHECKING:
    from scheduler_components.reference.cli.commands import app
    from scheduler_components.reference.cli.main import main

__all__ = [
    "app",
    "main",
]

__getattr__ = lazy_names(
    __name__,
    {
        "scheduler_components.reference.cli.commands": "app",
        "scheduler_components.reference.cli.main": "main",
    },
)
