"""SyncGroupRelay: the leading rank's input to all ranks over the groups by which they agree.

A broadcast made of MIN reductions: the leading rank brings its bytes as integers, all others the largest integer, and
the minimum is the leading rank's. So it takes the reduce_groups that any agreement takes (CP, TP, PP) and nothing else.

The first block has a fixed length. Its header holds, from every rank, its step, both digests and the number of the
call, each with its complement, so that all ranks find out in this very reduction when one of them stands elsewhere, and
all raise. Only when they agree does the rest of a long input follow, whose length the first block has told.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from scheduler_components.agreement import BLOCK_INTS, MIN_NEUTRAL, all_reduce_min, divergence_error
from scheduler_components.errors import ComponentError, SyncDivergenceError, SyncTimeoutError
from scheduler_components.ports import SyncGroup
from scheduler_components.values import RelayedInput, SyncCall

__all__ = ["SyncGroupRelay"]

_MAX_INTS = 65_536  # of one further reduction: half a megabyte
_NUM_EQUAL = 4
_HEADER_INTS = 2 * _NUM_EQUAL + 3
_ROOM_INTS = BLOCK_INTS - _HEADER_INTS

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode


@dataclass(slots=True, kw_only=True)
class SyncGroupRelay:
    """An ``InputRelay`` over any ``SyncGroup``. All ranks meet in each call, so the leading rank waits for the others.

    A call is bounded by the groups' timeout: an idle leading rank calls again before it is over.

    Attributes:
        rank: this one, in its world.
        leads: it is the one that receives.
        groups: the reduce_groups, as for a ``ParallelGroups``; no other component uses them.
        num_calls: so far.
    """

    rank: int
    leads: bool
    groups: tuple[SyncGroup, ...]
    num_calls: int = field(default=0, init=False)
    _failure: ComponentError | None = field(default=None, init=False)

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        if self._failure is not None:
            raise self._failure
        shown = f"input {own.input_digest:08x}, state {own.state_digest:08x}" + ", leads" * self.leads
        call = SyncCall(self.rank, self.num_calls, own.step, shown)
        self.num_calls += 1
        try:
            frames = self._broadcast(own, call)
        except (SyncTimeoutError, SyncDivergenceError) as error:
            self._failure = error  # ranks that failed once are not in step
            raise
        return own if self.leads else msgspec.structs.replace(own, frames=frames)

    def close(self) -> None:
        """Let go of the groups; safe to call twice."""
        for group in self.groups:
            group.close()

    def _broadcast(self, own: RelayedInput, call: SyncCall) -> tuple[bytes, ...]:
        payload = _encode(own.frames) if self.leads else b""
        words = _words_of(payload)
        equal = (own.step, own.state_digest, own.input_digest, call.number)
        header = [sign for value in equal for sign in (value, ~value)]
        header += (self.rank, ~self.rank, len(payload)) if self.leads else (MIN_NEUTRAL,) * 3
        reduced = all_reduce_min(self.groups, _filled(header + words[:_ROOM_INTS], BLOCK_INTS), call)
        # The reduced header is the same on all ranks, so all of them go on, or none.
        if not _agrees(reduced):
            raise divergence_error(self.groups, call)
        num_bytes = reduced[_HEADER_INTS - 1]
        brought = reduced[_HEADER_INTS:]
        num_words = -(-num_bytes // 8)
        while len(brought) < num_words:
            at, length = len(brought), min(_MAX_INTS, num_words - len(brought))
            brought += all_reduce_min(self.groups, _filled(words[at : at + length], length), call)
        return _decode(array("q", brought[:num_words]).tobytes()[:num_bytes])


def _agrees(header: Sequence[int]) -> bool:
    """All ranks stand at the same place, and exactly one of them leads."""
    at_one_place = all(header[2 * at] == ~header[2 * at + 1] for at in range(_NUM_EQUAL))
    return at_one_place and header[2 * _NUM_EQUAL] == ~header[2 * _NUM_EQUAL + 1]


def _words_of(payload: bytes) -> list[int]:
    return array("q", payload.ljust(-(-len(payload) // 8) * 8, b"\0")).tolist() if payload else []


def _filled(values: list[int], length: int) -> list[int]:
    return values + [MIN_NEUTRAL] * (length - len(values))
