"""What a request asks besides pages (a grammar, a session, an adapter, a time limit), and counters of those waits."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

__all__ = [
    "AgreedQueueStats",
    "DeadlineStats",
    "GrammarKey",
    "GrammarKind",
    "GrammarStats",
    "LoraStats",
    "RequestTimeouts",
    "SessionParams",
    "SessionStats",
]


class RequestTimeouts(msgspec.Struct, frozen=True, gc=False):
    """How long a request may take, in seconds; None for no limit. Compared with the agreed clock (``StepAgreement``).

    Attributes:
        queue_s: until it is first admitted.
        total_s: until its end.
    """

    queue_s: float | None = None
    total_s: float | None = None


class DeadlineStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of ``RequestDeadlines``, equal on all ranks.

    Attributes:
        waiting: requests in flight that have a limit.
        queue_timeouts: requests that were not admitted in time.
        timeouts: requests that were not complete in time.
    """

    waiting: int = 0
    queue_timeouts: int = 0
    timeouts: int = 0


class AgreedQueueStats(msgspec.Struct, gc=False):
    """Counters of one ``AgreedQueue``. All but ``unknown`` are equal on all ranks.

    Attributes:
        waiting: requests that wait now.
        ready, failed, expired: departures, by reason.
        cancelled: requests that were aborted while they waited.
        refused: requests that were not added because the queue was full.
        unknown: reports of this rank about requests that did not wait.
    """

    waiting: int = 0
    ready: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    refused: int = 0
    unknown: int = 0


class LoraStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of a ``LoraQueue``, equal on all ranks.

    Attributes:
        registered: adapters that requests may name.
        waiting: requests that wait for their adapters.
        loads, loads_failed: adapters that all ranks loaded, and that some rank could not load.
        evictions: adapters that were unloaded.
        requests_failed, requests_refused: requests whose adapter could not be loaded, and that found the queue full.
    """

    registered: int = 0
    waiting: int = 0
    loads: int = 0
    loads_failed: int = 0
    evictions: int = 0
    requests_failed: int = 0
    requests_refused: int = 0


GrammarKind: TypeAlias = Literal["json_schema", "regex"]
"""The names of SGLang's sampling parameters."""


class GrammarKey(msgspec.Struct, frozen=True, gc=False):
    """The source of a grammar. Requests with equal keys share one compiled grammar.

    Attributes:
        kind: language of the source.
        source: a JSON schema as JSON text, or a regular expression that the whole output matches.
    """

    kind: GrammarKind
    source: str


class GrammarStats(msgspec.Struct, frozen=True, gc=False):
    """Statistics of the grammars of one rank.

    Attributes:
        waiting: requests that wait until all ranks have their grammar.
        compiling: grammars that are being compiled, or wait for the thread.
        cached: compiled grammars in the cache.
        compiled, failed: grammars that this rank compiled, and grammars that it could not compile.
        cache_hits: requests whose grammar was in the cache when they arrived.
        joined: requests whose grammar was already being compiled when they arrived.
        cancelled: compilations that ended before they began because no request waited for them any more.
        expired, refused: requests that waited too long, and requests for which the queue had no room.
        compile_s: total time of all compilations.
    """

    waiting: int = 0
    compiling: int = 0
    cached: int = 0
    compiled: int = 0
    failed: int = 0
    cache_hits: int = 0
    joined: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    compile_s: float = 0.0


class SessionParams(msgspec.Struct, frozen=True, gc=False):
    """What a request continues: SGLang's ``session_params`` (0.5.23).

    Attributes:
        id: the session.
        rid: the turn to continue, by its request id. None begins a new branch; in a streaming session it continues the
            last turn.
        offset: keep this many tokens of that turn and append after them. None and 0 keep all.
        replace: forget the turns that continue turn ``rid``, or without ``rid`` all turns of the session.
        drop_previous_output: continue the input of turn ``rid`` without its output.
    """

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class SessionStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of a ``SessionTable``. All but the first two and the last never decrease.

    Attributes:
        open: open sessions.
        held_pages: pages that open sessions have locked; a page that two sessions share counts twice.
        opened, closed, reaped: sessions that were opened, closed by a request, and closed because they were idle.
        refused: sessions and turns that were refused.
        turns: turns that ended and can be continued.
        pages_released: pages unlocked before their session ended, for running requests, for the limit of pages or for a
            clear.
        text_tokens: tokens of all turns that can be continued.
    """

    open: int = 0
    held_pages: int = 0
    opened: int = 0
    closed: int = 0
    reaped: int = 0
    refused: int = 0
    turns: int = 0
    pages_released: int = 0
    text_tokens: int = 0
