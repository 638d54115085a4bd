"""What the listener of a source reports is what the relay's stream publishes."""

from __future__ import annotations

import pytest

from observability.kv_stream import StreamState
from observability.relay.stream import RelayedStream, SourceListener
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder
from scheduler_components.testing import ListEventSink

OLD, NEW = (BlockStored((block,), None, (block,), 1, None) for block in (1, 2))


class Sink(ListEventSink):
    """Keeps the states too."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[str | None] = []

    def set_upstream_state(self, state: str | None) -> None:
        self.states.append(state)


class Bench:
    """One source of one stream, which has published ``OLD``."""

    def __init__(self) -> None:
        self.sink = Sink()
        self.stream = RelayedStream(0, (self.sink,), wall_clock=lambda: 5.0)
        self.stream.merger.add_source(0)
        self.listener = SourceListener(0, {0: self.stream})
        self.apply(OLD)

    def apply(self, *events: KVCacheEvent) -> None:
        batch = BatchDecoder().decode(BatchEncoder("array").encode(KVEventBatch(1.0, events, 0), 0))
        self.listener.on_batch_applied(0, 0, batch, replayed=False)

    def published(self) -> list[KVCacheEvent]:
        """Return what readers decode."""
        encoder, decoder = BatchEncoder("array"), BatchDecoder()
        batches = (decoder.decode(encoder.encode(each, 0)) for each in self.sink.batches)
        return [event for batch in batches for event in batch.events]


def test_a_view_that_was_cleared_is_cleared_for_readers_and_a_flush_sends() -> None:
    it = Bench()
    it.listener.on_view_cleared(0, "the publisher restarted")
    assert it.published() == [OLD, AllBlocksCleared()]
    for _ in range(2):
        it.stream.flush()
    assert it.sink.num_idled == 1


@pytest.mark.parametrize(("was_used", "gone"), [(True, OLD), (False, NEW)])
def test_a_snapshot_replaces_what_was_published_if_it_is_used(was_used: bool, gone: BlockStored) -> None:
    it = Bench()
    it.listener.on_snapshot_begin(0)
    it.apply(NEW)
    it.listener.on_snapshot_end(0, was_used=was_used)
    assert it.published() == [OLD, NEW, BlockRemoved(gone.block_hashes)]


def test_readers_hear_of_each_doubt_and_of_its_end() -> None:
    it = Bench()
    for old, new in ((StreamState.SYNCING, StreamState.LIVE), (StreamState.LIVE, StreamState.PARTIAL)):
        it.listener.on_state_changed(0, old, new)
    it.listener.on_state_changed(0, StreamState.PARTIAL, StreamState.LIVE)
    assert it.sink.states == [None, "partial", None]
