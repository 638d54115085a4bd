"""Parsing of a stream's ZeroMQ messages into number and payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_components.kv_events.replay_messages import END_SEQ

__all__ = ["END_SEQ_NUMBER", "FrameParser"]

END_SEQ_NUMBER = int.from_bytes(END_SEQ, "big", signed=True)
"""The number of an end marker."""


@dataclass(slots=True)
class FrameParser:
    """Parses one stream's messages and counts messages of other streams.

    A ZeroMQ subscription is a prefix: behind a proxy, a subscription to ``kv@pod1`` also delivers ``kv@pod10``, whose
    batches have similar numbers. The parser compares the whole topic, so that no such batch reaches a cursor.

    Attributes:
        topic: of the stream; empty accepts every topic.
        bad_frames: messages that are not frames of this wire.
        other_topics: live messages of another topic.
    """

    topic: bytes
    bad_frames: int = 0
    other_topics: int = 0

    def parse_live(self, frames: Sequence[bytes]) -> tuple[int, bytes] | None:
        """Return number and payload of a live message; None if it does not belong to this stream."""
        if len(frames) != 3:
            self.bad_frames += 1
            return None
        topic, number, payload = frames
        if topic != self.topic and self.topic:
            self.other_topics += 1
            return None
        seq = int.from_bytes(number, "big", signed=True)
        if seq < 0 or len(number) != 8:
            self.bad_frames += 1
            return None
        return seq, payload

    def parse_replay(self, frames: Sequence[bytes]) -> tuple[int, bytes] | None:
        """Return number and payload of a replay message, in either framing; None if it is malformed.

        The number of an end marker is ``END_SEQ_NUMBER``.
        """
        if len(frames) < 2 or len(frames[-2]) != 8:
            self.bad_frames += 1
            return None
        seq = int.from_bytes(frames[-2], "big", signed=True)
        if seq < END_SEQ_NUMBER:
            self.bad_frames += 1
            return None
        return seq, frames[-1]
