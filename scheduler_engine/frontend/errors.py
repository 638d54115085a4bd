"""Errors that the frontend raises to the clients of an engine."""

from __future__ import annotations

from scheduler_components.errors import ComponentError


class EngineFailedError(ComponentError):
    """The engine has failed and serves no further request. The text names the rank and the cause."""


class RankSilentError(ComponentError):
    """A rank has sent no heartbeat for so long that its replica counts as dead. The text names the rank."""


class RequestRefusedError(ComponentError):
    """The scheduler can never serve this request. The text says why."""


class RequestFailedError(ComponentError):
    """This request has no answer or only a part of it. The engine goes on."""


class RequestTimeoutError(ComponentError):
    """This request has reached its time limit before its first token. The text names the limit."""


class TooBusyError(ComponentError):
    """The frontend or the replica has reached its limit of requests. The client may try again later."""
