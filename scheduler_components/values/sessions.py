"""Sessions: which part of a conversation a request continues, and the counters of all sessions."""

from __future__ import annotations

import msgspec

__all__ = ["SessionParams"]


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
