"""Sessions: which part of a conversation a request continues, and the counters of all sessions."""

from __future__ import annotations

import msgspec

__all__ = ["SessionParams", "SessionStats"]


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
