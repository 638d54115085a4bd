"""SyncGroupRelay: broadcast the leading rank's input over the groups that the ranks agree with.

It builds a broadcast from MIN reductions. The leading rank contributes its bytes as integers, every other rank
contributes the largest integer, so the minimum is the leading rank's input. It needs only the reduce groups that any
agreement uses (CP, TP, PP).

The first block has a fixed length. Its header has each rank's step, both digests and the number of the call, each with
its complement. If one rank differs, all ranks see it in this reduction and raise. If they agree, the remainder of a
long input follows; the first block contains its length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from scheduler_components.agreement import (
    BLOCK_INTS,
    MIN_NEUTRAL,
    SyncCall,
    SyncGroup,
    all_reduce_min,
    close_groups,
    divergence_error,
)
from scheduler_components.errors import ComponentError, SyncDivergenceError, SyncTimeoutError
from scheduler_components.values import RelayedInput

__all__ = ["SyncGroupRelay"]

_MAX_INTS = 65_536
"""Size of one further reduction: half a megabyte."""

_NUM_EQUAL = 4
_HEADER_INTS = 2 * _NUM_EQUAL + 3
_FIRST_PAYLOAD_INTS = BLOCK_INTS - _HEADER_INTS

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode


@dataclass(slots=True, kw_only=True)
class SyncGroupRelay:
    """An `InputRelay` over any `SyncGroup`.

    All ranks meet in each call, so the leading rank waits for the others. The groups' timeout limits the call: an idle
    leading rank must call again before it expires.

    Attributes:
        rank: global rank of this process.
        leads: whether it is the leading rank.
        groups: the reduce groups, as for `ParallelGroups`. No other component uses them.
        num_calls: calls so far.
    """

    rank: int
    leads: bool
    groups: tuple[SyncGroup, ...]
    num_calls: int = field(default=0, init=False)
    _failure: ComponentError | None = field(default=None, init=False)

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        if self._failure is not None:
            raise self._failure
        operation = f"input {own.input_digest:08x}, state {own.state_digest:08x}" + ", leads" * self.leads
        call = SyncCall(self.rank, self.num_calls, own.step, operation)
        self.num_calls += 1
        try:
            frames = self._broadcast(own, call)
        except (SyncTimeoutError, SyncDivergenceError) as error:
            self._failure = error  # after one failure the ranks are out of step
            raise
        return own if self.leads else msgspec.structs.replace(own, frames=frames)

    def close(self) -> None:
        """Close the groups. Safe to call twice."""
        close_groups(self.groups)

    def _broadcast(self, own: RelayedInput, call: SyncCall) -> tuple[bytes, ...]:
        payload = _encode(own.frames) if self.leads else b""
        words = _as_words(payload)
        equal = (own.step, own.state_digest, own.input_digest, call.number)
        header = [sign for value in equal for sign in (value, ~value)]
        header += (self.rank, ~self.rank, len(payload)) if self.leads else (MIN_NEUTRAL,) * 3
        first = header + words[:_FIRST_PAYLOAD_INTS].tolist()
        reduced = all_reduce_min(self.groups, _padded(first, BLOCK_INTS), call)
        # The reduced header is the same on all ranks, so either all of them continue or none.
        if not _agrees(reduced):
            raise divergence_error(self.groups, call)
        num_bytes = reduced[_HEADER_INTS - 1]
        received = array("q", reduced[_HEADER_INTS:])
        num_words = -(-num_bytes // 8)
        for start in range(_FIRST_PAYLOAD_INTS, num_words, _MAX_INTS):
            length = min(_MAX_INTS, num_words - start)
            piece = all_reduce_min(self.groups, _padded(words[start : start + length].tolist(), length), call)
            if not self.leads:  # the leading rank has the input
                received.extend(piece)
        return () if self.leads else _decode(memoryview(received).cast("B")[:num_bytes])


def _agrees(header: Sequence[int]) -> bool:
    """Return whether all ranks gave equal values and exactly one of them leads."""
    is_equal = all(header[2 * at] == ~header[2 * at + 1] for at in range(_NUM_EQUAL))
    return is_equal and header[2 * _NUM_EQUAL] == ~header[2 * _NUM_EQUAL + 1]


def _as_words(payload: bytes) -> memoryview:
    """Return the bytes as int64, with zeros at the end; a view, because a Python integer takes four times as much."""
    return memoryview(payload if not len(payload) % 8 else payload + bytes(-len(payload) % 8)).cast("q")


def _padded(values: list[int], length: int) -> list[int]:
    return values + [MIN_NEUTRAL] * (length - len(values))
