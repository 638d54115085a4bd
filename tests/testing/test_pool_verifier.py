"""Pool against stream: the judge names the batch that forgot; a scheduler of one's own is held to its own pool."""

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
from scheduler_components.ports import HeldBlocksSource, KvEventSink, NullHeldBlocksSource, OutputSink
from scheduler_components.reference.device.device import DeviceRequest, ScheduledBatch
from scheduler_components.reference.engine.scheduler.cache_tiers import CacheTiers
from scheduler_components.testing import POOL_STREAM_CHECKS, ConformanceError, ListEventSink, PoolVerifier, next_token
from scheduler_components.testing.pool_verifier import PoolDifference
from scheduler_components.values import KvPoolSnapshot

GPU, CPU = medium_group(None), medium_group("CPU")


def reading(sequence: int | None, *hashes: int, place: MediumGroup = GPU) -> KvPoolSnapshot:
    return KvPoolSnapshot({place: hashes}, sequence)


def judge_of(*batches: Sequence[KVCacheEvent]) -> PoolVerifier:
    judge = PoolVerifier()
    for number, events in enumerate(batches):
        judge.apply(number, events)
    return judge


def test_a_stream_that_tells_everything_differs_in_nothing() -> None:
    judge = judge_of([stored(1, 2, 3), stored(1, medium="CPU")], [BlockRemoved((2,))])
    assert judge.compare(KvPoolSnapshot({GPU: {1, 3}, CPU: (1,)}, 1)) == []
    assert judge.num_compared == 3


def test_a_forgotten_removal_is_bounded_by_the_readings_around_it() -> None:
    judge = judge_of([stored(1, 2)], [stored(3)])
    assert judge.compare(reading(1, 1, 2, 3)) == []
    for number in (2, 3, 4):
        judge.apply(number, [stored(10 + number)])
    (found,) = judge.compare(reading(4, 1, 3, 12, 13, 14))
    assert found == PoolDifference("pool-extra", 2, GPU, reported_by=0, since=2, found_at=4)
    assert str(found) == (
        "block 2 on GPU: batch 0 stored it and the pool does not hold it; wrong since one of the batches 2 to 4"
    )


def test_a_forgotten_store_is_named_with_its_batch() -> None:
    judge = judge_of([stored(1)])
    assert judge.compare(reading(0, 1)) == []
    judge.apply(1, [stored(2)])
    (found,) = judge.compare(reading(1, 1, 2, 3))
    assert str(found) == "block 3 on GPU: the pool holds it and no batch stored it; wrong since batch 1"


def test_the_removal_of_one_copy_told_as_the_removal_of_all_is_named() -> None:
    judge = judge_of([stored(1)])
    assert judge.compare(reading(0, 1)) == []
    judge.apply(1, [stored(2)])
    judge.apply(2, [BlockRemoved((1,))])
    judge.apply(3, [stored(4)])
    (found,) = judge.compare(reading(3, 1, 2, 4))
    assert (found.rule, found.reported_by, found.since) == ("pool-missing", 2, 2)
    assert "the pool holds it and batch 2 removed it; wrong since one of the batches 2 to 3" in str(found)


def test_a_batch_that_never_came_is_said_so() -> None:
    judge = judge_of([stored(1)])
    assert judge.compare(reading(0, 1)) == []
    (found,) = judge.compare(reading(0, 1, 2))
    assert str(found).endswith("a batch is missing after 0")
    (found,) = PoolVerifier().compare(reading(-1, 1))
    assert str(found).endswith("no batch was ever sent")


def test_a_clear_that_is_not_true_is_named() -> None:
    judge = judge_of([stored(1)], [AllBlocksCleared()])
    (found,) = judge.compare(reading(1, 1))
    assert (found.reported_by, found.since) == (1, 1)


def test_a_difference_is_told_once_until_it_was_right_again() -> None:
    judge = judge_of([stored(1)])
    assert len(judge.compare(reading(0))) == 1
    assert judge.compare(reading(0)) == []
    assert judge.compare(reading(0, 1)) == []
    assert len(judge.compare(reading(0))) == 1


def test_what_can_be_laid_to_the_fewest_batches_comes_first() -> None:
    judge = judge_of([stored(1, 2)], [stored(3)], [stored(4)])
    assert [each.since for each in judge.compare(reading(2, 1, 9))] == [2, 1, 0, 0]


def test_places_that_the_oracle_does_not_name_are_not_compared() -> None:
    judge = judge_of([stored(1), stored(1, 2, medium="CPU")])
    assert judge.compare(reading(0, 1)) == []
    assert judge.compare(KvPoolSnapshot(NullHeldBlocksSource().held_blocks(), 0)) == []
    (found,) = judge.compare(KvPoolSnapshot({GPU: {1}, ("CPU", None): {1}, ("GPU", 1): {7}}, 0))[:1]
    assert (found.place, found.block_hash) == (CPU, 2)


def test_a_remote_block_is_not_of_this_pool() -> None:
    remote = [BlockStored((1,), None, (5,), 1, None, locality="REMOTE"), BlockRemoved((2,), locality="REMOTE")]
    local = [BlockStored((2,), None, (6,), 1, None, locality="LOCAL")]
    assert judge_of(local, remote).compare(reading(1, 2)) == []


def test_what_was_told_before_the_judge_listened_is_not_missed() -> None:
    judge = PoolVerifier(is_complete=False)
    judge.apply(50, [stored(2)])
    assert judge.compare(reading(50, 1, 2)) == []
    judge.apply(51, [BlockRemoved((1,))])
    assert [str(each)[:16] for each in judge.compare(reading(51, 1, 2))] == ["block 1 on GPU: "]
    judge.apply(52, [AllBlocksCleared()])
    assert judge.compare(reading(52)) == []
    assert len(judge.compare(reading(52, 9))) == 1


def test_what_was_told_before_a_loss_is_not_compared() -> None:
    judge = judge_of([stored(1, 2)])
    judge.mark_lost()
    judge.apply(7, [stored(3)])
    assert judge.compare(reading(7, 2, 3, 4)) == []


def test_a_reading_from_elsewhere_is_refused() -> None:
    judge = judge_of([stored(1)], [stored(2)])
    with pytest.raises(ConfigError, match="before the last batch"):
        judge.compare(reading(0, 1))
    with pytest.raises(ConfigError, match="does not name the last batch"):
        judge.compare(reading(None, 1))


HASHES = st.integers(1, 6)
CHANGES = st.lists(st.lists(st.tuples(st.booleans(), HASHES), max_size=4), max_size=12)


@given(steps=CHANGES, lies=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3)), max_size=1))
def test_read_after_each_batch_a_difference_names_the_batch_that_forgot(
    steps: list[list[tuple[bool, int]]], lies: list[tuple[int, int]]
) -> None:
    """Without a lie there is none; a lie may be made good within its batch."""
    judge, pool = PoolVerifier(), set[int]()
    for number, changes in enumerate(steps):
        events: list[KVCacheEvent] = []
        for at, (adds, block) in enumerate(changes):
            (pool.add if adds else pool.discard)(block)
            if (number, at) not in lies:
                events.append(stored(block) if adds else BlockRemoved((block,)))
        judge.apply(number, events)
        for each in judge.compare(reading(number, *pool)):
            assert [each.since, each.found_at] == [lie for lie, _ in lies] * 2 == [number] * 2


# A scheduler of one's own.


class Reference(ReferenceScheduler):
    """The reference scheduler as its own oracle; ``change`` edits its events.

    ``change`` is given the number of the batch and its events.
    """

    def __init__(
        self,
        events: KvEventSink,
        outputs: OutputSink,
        change: Callable[[int, Iterable[KVCacheEvent]], Iterable[KVCacheEvent]] = lambda _, events: events,
        tiers: CacheTiers | None = None,
    ) -> None:
        super().__init__(_Changed(events, change), outputs, tiers)
        self.pool: HeldBlocksSource = self.scheduler.cache

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        return self.pool.held_blocks()


class _Changed(ListEventSink):
    """Publishes other events than it is given."""

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


class ForgetsOne:
    """Leaves out the first event of a kind on a medium; remembers in which batch."""

    def __init__(self, kind: type[KVCacheEvent], medium: str | None = None) -> None:
        self.kind, self.medium = kind, medium
        self.forgot_in: int | None = None

    def __call__(self, number: int, events: Iterable[KVCacheEvent]) -> Iterator[KVCacheEvent]:
        for event in events:
            is_meant = isinstance(event, self.kind) and getattr(event, "medium", None) == self.medium
            if is_meant and self.forgot_in is None:
                self.forgot_in = number
            else:
                yield event


@pytest.mark.parametrize(
    ("kind", "message"),
    [(BlockStored, "no batch stored it"), (BlockRemoved, "stored it and the pool does not hold it")],
)
def test_a_missing_event_is_reported_with_its_batch(kind: type[KVCacheEvent], message: str) -> None:
    forgets = ForgetsOne(kind)
    with pytest.raises(ConformanceError) as failed:
        POOL_STREAM_CHECKS[0](lambda events, outputs: Reference(events, outputs, forgets))
    assert forgets.forgot_in is not None
    assert message in str(failed.value)
    assert f"wrong since batch {forgets.forgot_in}'" in str(failed.value)


def test_all_tiers_are_compared_and_one_forgotten_change_of_tier_is_named(
    open_host_tier: Callable[[], CacheTiers],
) -> None:
    """The model that reads KV by page cannot stand behind a tier that moves pages: it answers from the tokens."""

    class Tiered(Reference):
        def compute(self, batch: ScheduledBatch[DeviceRequest]) -> tuple[int, ...]:
            return tuple(next_token(chunk.request.token_ids[: chunk.end]) for chunk in batch.chunks)

    POOL_STREAM_CHECKS[0](lambda events, outputs: Tiered(events, outputs, tiers=open_host_tier()))
    forgets = ForgetsOne(BlockStored, TIER_MEDIUM[Tier.HOST])
    with pytest.raises(ConformanceError) as failed:
        POOL_STREAM_CHECKS[0](lambda events, outputs: Tiered(events, outputs, forgets, open_host_tier()))
    assert forgets.forgot_in is not None
    assert "on CPU: the pool holds it and no batch stored it" in str(failed.value)
    assert f"wrong since batch {forgets.forgot_in}'" in str(failed.value)


def test_an_oracle_that_names_no_place_proves_nothing() -> None:
    class Blind(Reference):
        def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
            return NullHeldBlocksSource().held_blocks()

    with pytest.raises(ConformanceError, match="at least one place"):
        POOL_STREAM_CHECKS[0](Blind)


@pytest.mark.parametrize("record", [True, False])
def test_a_radix_cache_says_what_it_holds(record: bool) -> None:
    cache = RadixCache(page_size=2, capacity_tokens=40, record=record)
    for first in range(5):
        cache.insert([first, 2, 3, 4], cache.allocate(2))
    held = cache.held_blocks()
    assert list(held) == [GPU]
    assert list(held[GPU]) == list(cache.block_hashes())
    assert min(held[GPU]) < 0 < max(held[GPU])
    cache.clear()
    assert [list(hashes) for hashes in cache.held_blocks().values()] == [[]]
