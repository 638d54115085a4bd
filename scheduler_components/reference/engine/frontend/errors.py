"""Errors that a client of the engine sees."""

from __future__ import annotations

from scheduler_components import (
    ComponentError,
)

__all__ = [
    "EngineFailedError",
    "RequestRefusedError",
    "RequestFailedError",
    "TooBusyError",
    "RankSilentError",
]


class EngineFailedError(ComponentError):
    """The engine cannot go on; the text says which rank failed and how."""


class RequestRefusedError(ComponentError):
    """The scheduler can never serve this request; the text is for its author."""


class RequestFailedError(ComponentError):
    """The engine goes on, and has no answer, or not the whole one, for this request."""


class TooBusyError(ComponentError):
    """More requests are open than the front takes at once, or come than a replica takes in; try again later."""


class RankSilentError(ComponentError):
    """A rank has been silent for so long that its replica serves nobody; the text says which, and for how long."""
