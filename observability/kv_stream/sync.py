"""Places in a stream, proved by their digest, and answers that lead from one to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from scheduler_components.kv_events.event_stream import CHAIN_BYTES, EPOCH_BYTES, chain_after
from scheduler_components.kv_events.replay_wire import Meta, Verb

__all__ = ["NO_EPOCH", "Position", "SyncQuestion", "Verdict"]

NO_EPOCH = bytes(EPOCH_BYTES)
"""The epoch of no life: what is asked with while nothing is held."""


@dataclass(slots=True)
class Position:
    """A place in one life of a publisher: ``chain`` is the digest of everything below ``next``.

    As it is made, it is no place in any life.
    """

    epoch: bytes = NO_EPOCH
    next: int = 0
    chain: bytes = bytes(CHAIN_BYTES)

    def advance(self, payload: bytes) -> None:
        """Go on by one batch."""
        self.chain = chain_after(self.chain, self.next, payload)
        self.next += 1

    def is_at(self, meta: Meta) -> bool:
        """True when the publisher, too, has this digest at this number of this life."""
        return (self.epoch, self.next, self.chain) == (meta.epoch, meta.start, meta.chain)

    def copy(self) -> Position:
        return Position(self.epoch, self.next, self.chain)


class Verdict(Enum):
    """What a message of an answer is worth.

    SPLICED: the publisher does not have what was applied under these numbers.
    """

    GOOD = "good"
    REPEATED = "repeated"
    BROKEN = "broken"
    SPLICED = "spliced"


class _Part(Enum):
    """What of an answer has begun."""

    NOTHING = "nothing"
    BASE = "base"
    BATCHES = "batches"


@dataclass(slots=True)
class SyncQuestion:
    """One open extended question, and its answer so far.

    Attributes:
        ask, verb: as asked.
        at: where the view stands; an incremental answer moves it.
        asked_at: where it stood when this was asked: a status is compared with that, not with what has come since.
        aside: where the view stands that a snapshot builds aside; None in an incremental answer.
        is_damaged: something in the snapshot could not be read.
        newest_seen: highest live number that came, and could not be used, while this was open.
    """

    ask: int
    verb: Verb
    at: Position
    asked_at: Position = field(init=False)
    aside: Position | None = None
    is_damaged: bool = False
    newest_seen: int = -1
    _part: _Part = _Part.NOTHING
    _num_chunks: int = 0
    _num_batches: int = 0

    def __post_init__(self) -> None:
        self.asked_at = self.at.copy()

    @property
    def is_base_open(self) -> bool:
        """True while chunks of the base come, not batches."""
        return self._part is _Part.BASE

    @property
    def has_advanced(self) -> bool:
        """True when a part of it is in the view for good."""
        return self.aside is None and self._num_batches > 0

    def take(self, seq: int, payload: bytes) -> Verdict:
        """Take a batch or a chunk of the base; GOOD when it is the next one."""
        place = self.aside or self.at
        if self._part is _Part.NOTHING:
            return Verdict.BROKEN
        wanted = self._num_chunks if self.is_base_open else place.next
        if seq != wanted:
            return Verdict.REPEATED if seq < wanted else Verdict.BROKEN
        if self.is_base_open:
            self._num_chunks += 1
        else:
            place.advance(payload)
            self._num_batches += 1
        return Verdict.GOOD

    def begin(self, meta: Meta) -> Verdict:
        """Open a snapshot, or a run of batches from a place on which both sides must agree."""
        if meta.snap:
            if self._part is not _Part.NOTHING:
                return Verdict.BROKEN
            self._part = _Part.BASE
            self.aside = Position(meta.epoch, meta.start, meta.chain)
            return Verdict.GOOD
        if self.is_base_open:
            is_whole = meta.chunks is None or meta.chunks == self._num_chunks
            if self.aside is None or not self.aside.is_at(meta) or not is_whole:
                return Verdict.BROKEN
        elif self._part is not _Part.NOTHING or self.verb is not Verb.SYNC:
            return Verdict.BROKEN
        elif not self.at.is_at(meta):
            return Verdict.SPLICED
        self._part = _Part.BATCHES
        return Verdict.GOOD

    def end(self, meta: Meta) -> Verdict:
        """Close the answer; GOOD when what came has the publisher's digest."""
        if self._part is not _Part.BATCHES:
            return Verdict.BROKEN
        if (self.aside or self.at).is_at(meta):
            return Verdict.GOOD
        return Verdict.SPLICED if self.aside is None else Verdict.BROKEN
