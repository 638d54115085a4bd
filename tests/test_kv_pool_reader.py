"""A snapshot carries the sequence of the batch that precedes it; recorded events are published first."""

from __future__ import annotations

import msgspec

from scheduler_components import KvPoolReader, ParallelState, RadixCache, SchedulerKvEventsPublisher
from scheduler_components.events import medium_group
from scheduler_components.testing import ListEventSink, PoolVerifier
from scheduler_components.values import KvPoolSnapshot, PublisherStats


class Numbering(ListEventSink):
    """Number the batches; ``num_pending`` of them are not sent yet."""

    num_pending = 0

    def stats(self) -> PublisherStats:
        return msgspec.structs.replace(
            super().stats(), last_sequence=len(self.batches) - 1, batches_pending=self.num_pending
        )


def opened(cache: RadixCache, sink: ListEventSink) -> SchedulerKvEventsPublisher:
    return SchedulerKvEventsPublisher(parallel=ParallelState.trivial(), source=cache, sink=sink)


def test_recorded_events_are_published_before_the_read() -> None:
    cache, sink = RadixCache(page_size=2, capacity_tokens=8, record=True), Numbering()
    reader = KvPoolReader(publisher=opened(cache, sink), blocks=cache)
    assert reader.read().sequence == -1
    cache.insert([1, 2, 3, 4], cache.allocate(2))
    reading = reader.read()
    assert (reading.sequence, reading.num_blocks, reading.rank) == (0, 2, 0)
    judge = PoolVerifier()
    judge.apply(0, sink.batches[0].events)
    assert judge.compare(reading) == []
    assert sink.num_idled == 2


def test_a_snapshot_with_pending_batches_has_no_sequence() -> None:
    cache, sink = RadixCache(page_size=2, capacity_tokens=8, record=True), Numbering()
    sink.num_pending = 1
    assert KvPoolReader(publisher=opened(cache, sink), blocks=cache).read().sequence is None


def test_without_an_oracle_no_place_is_named() -> None:
    cache = RadixCache(page_size=2, capacity_tokens=8, record=True)
    assert KvPoolReader(publisher=opened(cache, Numbering())).read() == KvPoolSnapshot({}, -1, 0)


def test_a_block_in_two_places_is_two() -> None:
    assert KvPoolSnapshot({medium_group(None): (1, 2), medium_group("CPU"): (1,)}, 0).num_blocks == 3
