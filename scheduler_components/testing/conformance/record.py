"""What was heard of one stream: the raw frames, before anybody judges them."""

from __future__ import annotations

import msgspec

__all__ = ["Expectations", "Frames", "ReplayAnswer", "StreamRecord"]

Frames = tuple[bytes, ...]


class ReplayAnswer(msgspec.Struct, frozen=True):
    """One answer of a replay channel.

    Attributes:
        start: the number that was asked from; None for a request that is none.
        messages: what came, without the leading empty delimiter and without the end marker.
        ended: whether the end marker came in time.
        is_overlong: the reader stopped reading: more came than it keeps, or for longer than it waits.
    """

    start: int | None
    messages: tuple[Frames, ...] = ()
    ended: bool = False
    is_overlong: bool = False

    @property
    def is_silence(self) -> bool:
        """Nothing came at all."""
        return not self.messages and not self.ended


class StreamRecord(msgspec.Struct, frozen=True):
    """Everything heard of one stream.

    Attributes:
        live: messages of the PUB socket in order of arrival.
        history: the answer to a request from 0, asked before listening; None without a replay channel.
        again: the answer to a request from the end of ``history`` or the first live number, whichever is lower, asked
            after listening.
        past_end: the answer to a request from beyond the end.
        malformed: the answer to a request of a wrong length.
        extended: whether the publisher knows this kit's extended requests; None when it was not asked or gave no
            end marker.
    """

    live: tuple[Frames, ...] = ()
    history: ReplayAnswer | None = None
    again: ReplayAnswer | None = None
    past_end: ReplayAnswer | None = None
    malformed: ReplayAnswer | None = None
    extended: bool | None = None


class Expectations(msgspec.Struct, frozen=True):
    """What was advertised of the stream, None where nothing was."""

    rank: int = 0
    topic: bytes | None = None
    block_size: int | None = None
