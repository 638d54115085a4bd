"""PoolVerifier: compare a pool with its event stream, and name the batch that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.events import stored
from kit.reference_scheduler import ReferenceScheduler

from scheduler_components import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ConfigError,
    EventBatch,
    KVCacheEvent,
    RadixCache,
)
from scheduler_components.events import TIER_MEDIUM, MediumGroup, Tier, medium_group
from scheduler_components.ports import HeldBlocksSource, KvEventSink, OutputSink
from scheduler_components.testing import POOL_STREAM_CHECKS, ConformanceError, ListEventSink, PoolVerifier, next_token
from scheduler_components.testing.pool_verifier import PoolDifference
from scheduler_components.values import KvPoolSnapshot
from scheduler_engine.device.device import DeviceRequest, ScheduledBatch
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers

GPU, CPU = medium_group(None), medium_group("CPU")


def snapshot(sequence: int | None, *hashes: int, place: MediumGroup = GPU) -> KvPoolSnapshot:
    return KvPoolSnapshot({place: hashes}, sequence)


def verifier_of(*batches: Sequence[KVCacheEvent]) -> PoolVerifier:
    verifier = PoolVerifier()
    for number, events in enumerate(batches):
        verifier.apply(number, events)
    return verifier


def test_a_complete_stream_equals_the_pool() -> None:
    verifier = verifier_of([stored(1, 2, 3), stored(1, medium="CPU")], [BlockRemoved((2,))])
    assert verifier.compare(KvPoolSnapshot({GPU: {1, 3}, CPU: (1,)}, 1)) == []
    assert verifier.num_compared == 3


def test_a_missing_removal_lies_between_two_snapshots() -> None:
    verifier = verifier_of([stored(1, 2)], [stored(3)])
    assert verifier.compare(snapshot(1, 1, 2, 3)) == []
    for number in (2, 3, 4):
        verifier.apply(number, [stored(10 + number)])
    (found,) = verifier.compare(snapshot(4, 1, 3, 12, 13, 14))
    assert found == PoolDifference("pool-extra", 2, GPU, reported_by=0, since=2, found_at=4)
    assert str(found) == (
        "block 2 on GPU: batch 0 stored it and the pool does not hold it; wrong since one of the batches 2 to 4"
    )


def test_a_missing_store_is_reported_with_its_batch() -> None:
    verifier = verifier_of([stored(1)])
    assert verifier.compare(snapshot(0, 1)) == []
    verifier.apply(1, [stored(2)])
    (found,) = verifier.compare(snapshot(1, 1, 2, 3))
    assert str(found) == "block 3 on GPU: the pool holds it and no batch stored it; wrong since batch 1"


def test_a_removal_of_a_block_with_another_copy_is_reported() -> None:
    verifier = verifier_of([stored(1)])
    assert verifier.compare(snapshot(0, 1)) == []
    verifier.apply(1, [stored(2)])
    verifier.apply(2, [BlockRemoved((1,))])
    verifier.apply(3, [stored(4)])
    (found,) = verifier.compare(snapshot(3, 1, 2, 4))
    assert (found.rule, found.reported_by, found.since) == ("pool-missing", 2, 2)
    assert "the pool holds it and batch 2 removed it; wrong since one of the batches 2 to 3" in str(found)


def test_a_missing_batch_is_reported() -> None:
    verifier = verifier_of([stored(1)])
    assert verifier.compare(snapshot(0, 1)) == []
    (found,) = verifier.compare(snapshot(0, 1, 2))
    assert str(found).endswith("a batch is missing after 0")
    (found,) = PoolVerifier().compare(snapshot(-1, 1))
    assert str(found).endswith("no batch was ever sent")


def test_a_false_clear_is_reported_with_its_batch() -> None:
    verifier = verifier_of([stored(1)], [AllBlocksCleared()])
    (found,) = verifier.compare(snapshot(1, 1))
    assert (found.reported_by, found.since) == (1, 1)


def test_a_difference_is_reported_again_only_after_it_was_corrected() -> None:
    verifier = verifier_of([stored(1)])
    assert len(verifier.compare(snapshot(0))) == 1
    assert verifier.compare(snapshot(0)) == []
    assert verifier.compare(snapshot(0, 1)) == []
    assert len(verifier.compare(snapshot(0))) == 1


def test_differences_of_the_newest_batches_come_first() -> None:
    verifier = verifier_of([stored(1, 2)], [stored(3)], [stored(4)])
    assert [each.since for each in verifier.compare(snapshot(2, 1, 9))] == [2, 1, 0, 0]


def test_media_and_groups_without_an_oracle_are_not_compared() -> None:
    verifier = verifier_of([stored(1), stored(1, 2, medium="CPU")])
    assert verifier.compare(snapshot(0, 1)) == []
    assert verifier.compare(KvPoolSnapshot({}, 0)) == []
    (found,) = verifier.compare(KvPoolSnapshot({GPU: {1}, ("CPU", None): {1}, ("GPU", 1): {7}}, 0))[:1]
    assert (found.place, found.block_hash) == (CPU, 2)


def test_remote_blocks_are_ignored() -> None:
    remote = [BlockStored((1,), None, (5,), 1, None, locality="REMOTE"), BlockRemoved((2,), locality="REMOTE")]
    local = [BlockStored((2,), None, (6,), 1, None, locality="LOCAL")]
    assert verifier_of(local, remote).compare(snapshot(1, 2)) == []


def test_a_late_verifier_ignores_blocks_of_earlier_batches() -> None:
    verifier = PoolVerifier(is_complete=False)
    verifier.apply(50, [stored(2)])
    assert verifier.compare(snapshot(50, 1, 2)) == []
    verifier.apply(51, [BlockRemoved((1,))])
    assert [str(each)[:16] for each in verifier.compare(snapshot(51, 1, 2))] == ["block 1 on GPU: "]
    verifier.apply(52, [AllBlocksCleared()])
    assert verifier.compare(snapshot(52)) == []
    assert len(verifier.compare(snapshot(52, 9))) == 1


def test_blocks_of_batches_before_a_loss_are_not_compared() -> None:
    verifier = verifier_of([stored(1, 2)])
    verifier.mark_lost()
    verifier.apply(7, [stored(3)])
    assert verifier.compare(snapshot(7, 2, 3, 4)) == []


def test_a_snapshot_of_another_batch_raises_a_config_error() -> None:
    verifier = verifier_of([stored(1)], [stored(2)])
    with pytest.raises(ConfigError, match="before the last batch"):
        verifier.compare(snapshot(0, 1))
    with pytest.raises(ConfigError, match="does not name the last batch"):
        verifier.compare(snapshot(None, 1))


HASHES = st.integers(1, 6)
CHANGES = st.lists(st.lists(st.tuples(st.booleans(), HASHES), max_size=4), max_size=12)


@given(steps=CHANGES, missing=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3)), max_size=1))
def test_compared_after_each_batch_a_difference_names_the_batch_of_the_missing_event(
    steps: list[list[tuple[bool, int]]], missing: list[tuple[int, int]]
) -> None:
    """No event is missing, or one. A later event of the same batch may compensate for it."""
    verifier, pool = PoolVerifier(), set[int]()
    for number, changes in enumerate(steps):
        events: list[KVCacheEvent] = []
        for at, (adds, block) in enumerate(changes):
            (pool.add if adds else pool.discard)(block)
            if (number, at) not in missing:
                events.append(stored(block) if adds else BlockRemoved((block,)))
        verifier.apply(number, events)
        for each in verifier.compare(snapshot(number, *pool)):
            assert [each.since, each.found_at] == [batch for batch, _ in missing] * 2 == [number] * 2


# The checks of a scheduler.


class Reference(ReferenceScheduler):
    """The reference scheduler as its own oracle. ``change`` edits its events, given the number of the batch."""

    def __init__(
        self,
        events: KvEventSink,
        outputs: OutputSink,
        change: Callable[[int, Iterable[KVCacheEvent]], Iterable[KVCacheEvent]] = lambda _, events: events,
        tiers: CacheTiers | None = None,
    ) -> None:
        super().__init__(_ChangingSink(events, change), outputs, tiers)
        self.pool: HeldBlocksSource = self.scheduler.cache

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        return self.pool.held_blocks()


class _ChangingSink(ListEventSink):
    """A sink that forwards changed events."""

    def __init__(self, to: KvEventSink, change: Callable[[int, Iterable[KVCacheEvent]], Iterable[KVCacheEvent]]):
        super().__init__()
        self.to, self.change = to, change

    def publish(self, events: EventBatch) -> None:
        changed = msgspec.structs.replace(events, events=tuple(self.change(len(self.batches), events.events)))
        super().publish(changed)
        self.to.publish(changed)


@pytest.mark.parametrize("check", POOL_STREAM_CHECKS)
def test_the_reference_scheduler_passes(check: Callable[..., None]) -> None:
    check(Reference)


class OmitOneEvent:
    """Omits the first event of a kind on a medium, and records its batch."""

    def __init__(self, kind: type[KVCacheEvent], medium: str | None = None) -> None:
        self.kind, self.medium = kind, medium
        self.omitted_in: int | None = None

    def __call__(self, number: int, events: Iterable[KVCacheEvent]) -> Iterator[KVCacheEvent]:
        for event in events:
            is_match = isinstance(event, self.kind) and getattr(event, "medium", None) == self.medium
            if is_match and self.omitted_in is None:
                self.omitted_in = number
            else:
                yield event


@pytest.mark.parametrize(
    ("kind", "message"),
    [(BlockStored, "no batch stored it"), (BlockRemoved, "stored it and the pool does not hold it")],
)
def test_an_omitted_event_is_reported_with_its_batch(kind: type[KVCacheEvent], message: str) -> None:
    omit = OmitOneEvent(kind)
    with pytest.raises(ConformanceError) as failed:
        POOL_STREAM_CHECKS[0](lambda events, outputs: Reference(events, outputs, omit))
    assert omit.omitted_in is not None
    assert message in str(failed.value)
    assert f"wrong since batch {omit.omitted_in}'" in str(failed.value)


def test_all_tiers_are_compared_and_an_omitted_store_of_the_host_is_reported(
    open_host_tier: Callable[[], CacheTiers],
) -> None:
    """A tier moves pages, so the model computes its answers from the tokens instead of the pages."""

    class Tiered(Reference):
        def compute(self, batch: ScheduledBatch[DeviceRequest]) -> tuple[int, ...]:
            return tuple(next_token(chunk.request.token_ids[: chunk.end]) for chunk in batch.chunks)

    POOL_STREAM_CHECKS[0](lambda events, outputs: Tiered(events, outputs, tiers=open_host_tier()))
    omit = OmitOneEvent(BlockStored, TIER_MEDIUM[Tier.HOST])
    with pytest.raises(ConformanceError) as failed:
        POOL_STREAM_CHECKS[0](lambda events, outputs: Tiered(events, outputs, omit, open_host_tier()))
    assert omit.omitted_in is not None
    assert "on CPU: the pool holds it and no batch stored it" in str(failed.value)
    assert f"wrong since batch {omit.omitted_in}'" in str(failed.value)


def test_an_oracle_without_any_place_fails_the_check() -> None:
    class Blind(Reference):
        def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
            return {}

    with pytest.raises(ConformanceError, match="at least one place"):
        POOL_STREAM_CHECKS[0](Blind)


@pytest.mark.parametrize("record", [True, False])
def test_a_radix_cache_returns_its_held_blocks(record: bool) -> None:
    cache = RadixCache(page_size=2, capacity_tokens=40, record=record)
    for first in range(5):
        cache.insert([first, 2, 3, 4], cache.allocate(2))
    held = cache.held_blocks()
    assert list(held) == [GPU]
    assert list(held[GPU]) == list(cache.block_hashes())
    assert min(held[GPU]) < 0 < max(held[GPU])
    cache.clear()
    assert [list(hashes) for hashes in cache.held_blocks().values()] == [[]]
