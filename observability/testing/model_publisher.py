"""A publisher's cores without sockets, clock or thread, and the truth about what it published.

The truth is a naive fold, kept beside the stream for every number of every life.
"""

from __future__ import annotations

import msgspec

from observability.kv_stream.view import Tier
from scheduler_components.kv_events.codec import BatchEncoder
from scheduler_components.kv_events.event_stream import EventStream
from scheduler_components.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from scheduler_components.kv_events.folding import collapse
from scheduler_components.kv_events.replay_cursors import ReplayCursors

__all__ = ["Frame", "ModelPublisher", "State"]

MAX_PENDING = 2
"""Batches that may wait; more collapse into one."""

Frame = tuple[int, bytes]
"""Number and payload of a live batch."""

State = frozenset[tuple[int, Tier]]
_NO_BLOCKS: State = frozenset()


class ModelPublisher:
    """Stream and replay cursors as the ZMQ edge uses them; what waits beyond ``MAX_PENDING`` collapses."""

    def __init__(self, *, window: int, seq_base: str) -> None:
        self.window, self.seq_base = window, seq_base
        self.encoder = BatchEncoder("array")
        self.life = -1
        self.states: dict[tuple[int, int], State] = {}
        self.num_published = 0
        self.begin_life()

    def begin_life(self) -> list[Frame]:
        """Start, or start again with nothing; returns the live frames of the beginning."""
        self.life += 1
        first = 0 if self.seq_base == "zero" else 10_000 * self.life
        self.stream = EventStream(
            epoch=bytes([self.life + 1]) * 16, max_steps=self.window, max_bytes=10**6, first_sequence=first
        )
        self.cursors = ReplayCursors(self.stream, encoder=self.encoder, rank=0)
        self.is_poisoned = False
        self.pending: list[KVEventBatch] = []
        self.held = self.sent = _NO_BLOCKS
        self.states[self.life, first - 1] = _NO_BLOCKS
        if self.seq_base == "zero":
            return []
        self.publish(AllBlocksCleared())
        return self.send_pending()

    def publish(self, event: KVCacheEvent) -> None:
        """Accept one batch of one event; ``held`` is the naive fold of all that was accepted."""
        if isinstance(event, BlockStored):
            self.held |= {(each, _tier_of(event)) for each in event.block_hashes}
        elif isinstance(event, BlockRemoved):
            self.held -= {(each, _tier_of(event)) for each in event.block_hashes}
        else:
            self.held = _NO_BLOCKS
        self.num_published += 1
        self.pending.append(KVEventBatch(float(self.num_published), (event,), 0))

    def send_pending(self) -> list[Frame]:
        """Number what is pending, collapsed when it is too much; returns the live frames."""
        if len(self.pending) > MAX_PENDING:
            merged = collapse(self.pending)
            assert merged is not None
            self.pending, self.sent = [], self.held
            return [self.send(self.encoder.encode(merged, 0), self.held)]
        frames = []
        pending, held = self.pending, self.held
        self.pending, self.held = [], self.sent
        for batch in pending:
            self.publish(batch.events[0])
            frames.append(self.send(self.encoder.encode(batch, 0), self.held))
        self.pending, self.held, self.sent = [], held, held
        return frames

    def send(self, payload: bytes, state: State) -> Frame:
        """Number one payload, after which a reader holds ``state``."""
        sequence = self.stream.append(payload)
        self.fold()
        self.states[self.life, sequence] = state
        return sequence, payload

    def fold(self) -> None:
        """What a publisher does in each of its turns, whether it sends or answers."""
        self.stream.fold_some()
        if self.stream.is_held_up:
            self.cursors.cut_pinned()

    def send_poison(self) -> list[Frame]:
        """A batch with one event that nobody can read, which therefore changes nothing."""
        frames = self.send_pending()
        self.is_poisoned = True
        self.num_published += 1
        payload = msgspec.msgpack.encode((float(self.num_published), [["BlockMoved", [1, 2]]], 0))
        return [*frames, self.send(payload, self.held)]


def _tier_of(event: BlockStored | BlockRemoved) -> Tier:
    return Tier.DEVICE if event.medium is None else Tier.HOST
