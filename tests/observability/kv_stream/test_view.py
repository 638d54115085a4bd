"""The view equals a naive model with one set of hashes per rank and tier."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.events import MEDIA, stored
from kit.searches import num_examples

from observability.kv_stream import BlockView, Tier
from observability.kv_stream.holder_tables import SWEEP_SLICE_HASHES
from observability.kv_stream.view import CountingView
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

HASHES = st.lists(st.integers(-4, 4), min_size=1, max_size=5)
RANKS = st.integers(0, 3)
GROUPS = st.sampled_from([None, None, 1])
EVENTS = st.one_of(
    st.builds(
        lambda hashes, medium, group: BlockStored(
            tuple(hashes), None, tuple(range(len(hashes))), 1, None, medium, group_idx=group
        ),
        HASHES,
        st.sampled_from(list(MEDIA)),
        GROUPS,
    ),
    st.builds(
        lambda hashes, medium, group: BlockRemoved(tuple(hashes), medium, group),
        HASHES,
        st.sampled_from(list(MEDIA)),
        GROUPS,
    ),
    st.just(AllBlocksCleared()),
)


class NaiveView:
    """The naive model: each block with its location."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, str | None, int | None, int]] = set()

    def apply(self, rank: int, event: KVCacheEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks = {block for block in self.blocks if block[0] != rank}
        elif isinstance(event, BlockStored | BlockRemoved) and MEDIA[event.medium] is not None:
            medium = None if event.medium == "GPU" else event.medium
            named = {(rank, medium, event.group_idx, block_hash) for block_hash in event.block_hashes}
            self.blocks = self.blocks | named if isinstance(event, BlockStored) else self.blocks - named

    def held(self, rank: int, tier: Tier) -> set[int]:
        return {block[3] for block in self.blocks if block[0] == rank and MEDIA[block[1]] is tier}

    def depth(self, rank: int, tier: Tier, hashes: list[int]) -> int:
        held, depth = self.held(rank, tier), 0
        while depth < len(hashes) and hashes[depth] in held:
            depth += 1
        return depth


CHANGES = st.lists(st.tuples(RANKS, st.lists(EVENTS, max_size=4)), max_size=25)


@pytest.mark.soak
@given(changes=CHANGES, prompt=st.lists(st.integers(-4, 4)))
@settings(max_examples=num_examples(4), deadline=None)
def test_equals_the_naive_model(changes: list[tuple[int, list[KVCacheEvent]]], prompt: list[int]) -> None:
    view, naive = BlockView(), NaiveView()
    for rank, events in changes:
        view.apply(rank, events)
        for event in events:
            naive.apply(rank, event)
    for tier in Tier:
        for rank in range(4):
            assert view.blocks(rank, tier) == naive.held(rank, tier)
        depths = {rank: naive.depth(rank, tier, prompt) for rank in range(4)}
        assert view.match_lengths(prompt, tier) == {rank: depth for rank, depth in depths.items() if depth}
        for block_hash in range(-4, 5):
            holders = {rank for rank in range(4) if block_hash in naive.held(rank, tier)}
            assert set(view.ranks_holding(block_hash, tier)) == holders
    for rank in range(4):
        assert view.block_count(rank) == sum(len(naive.held(rank, tier)) for tier in Tier)
    while view.sweep():
        pass
    for tier in Tier:
        assert view.has_blocks(tier) == any(naive.held(rank, tier) for rank in range(4))


def test_harmless_events_are_counted() -> None:
    view = BlockView()
    view.apply(7, [stored(1, 2), stored(2, 3), BlockRemoved((1, 9)), stored(5, medium="TAPE"), AllBlocksCleared()])
    counters = view.counters(7)
    assert (counters.stored_blocks, counters.removed_blocks, counters.clears) == (4, 1, 1)
    assert (counters.duplicate_stores, counters.unknown_removals, counters.unknown_media) == (1, 1, 1)


def test_removals_from_an_unused_location_are_counted() -> None:
    view = BlockView()
    view.apply(7, [stored(1, 2), BlockRemoved((1, 2), None, 3), BlockRemoved((1,), "CPU"), BlockRemoved((1,), "TAPE")])
    counters = view.counters(7)
    assert (counters.removed_blocks, counters.unknown_removals, counters.unknown_media) == (0, 3, 1)
    assert view.blocks(7) == {1, 2}


def test_no_medium_means_the_device() -> None:
    view = BlockView()
    view.apply(7, [stored(1, medium="GPU"), stored(1), BlockRemoved((1,))])
    assert view.blocks(7) == frozenset()
    view.apply(7, [stored(2), BlockRemoved((2,), "GPU")])
    assert view.blocks(7) == frozenset()
    assert view.counters(7).duplicate_stores == 1


def test_locations_are_looked_up_again_after_a_clear_or_a_replacement() -> None:
    view, other = BlockView(), BlockView()
    view.apply(7, [stored(1), AllBlocksCleared(), stored(2)])
    assert view.blocks(7) == {2}
    other.apply(7, [stored(3)])
    view.replace(7, other)
    view.apply(7, [stored(4), BlockRemoved((3,))])
    assert view.blocks(7) == {4}
    assert other.blocks(7) == {3}


@given(ranks=st.lists(st.tuples(RANKS, EVENTS), max_size=20), staged=st.lists(EVENTS, max_size=20), late=EVENTS)
def test_a_prepared_replacement_is_invisible_until_it_is_used(
    ranks: list[tuple[int, KVCacheEvent]], staged: list[KVCacheEvent], late: KVCacheEvent
) -> None:
    prepared, at_once, other = BlockView(), BlockView(), BlockView()
    for rank, event in ranks:
        prepared.apply(rank, [event])
        at_once.apply(rank, [event])
    other.apply(1, staged)

    def shown(view: BlockView) -> list[object]:
        holders = [sorted(view.ranks_holding(each, tier)) for tier in Tier for each in range(-4, 5)]
        return [*holders, *(view.blocks(rank, tier) for tier in Tier for rank in range(4))]

    before = shown(prepared)
    for _ in prepared.prepare_replace(1, other):
        assert shown(prepared) == before
    if len(staged) % 2:  # a change invalidates the preparation
        prepared.apply(2, [late])
        at_once.apply(2, [late])
    prepared.replace(1, other)
    at_once.clear(1)
    at_once.apply(1, staged)
    assert [shown(prepared), prepared.block_count(1)] == [shown(at_once), at_once.block_count(1)]
    for rank in (1, 2):
        prepared.apply(rank, [late])
        at_once.apply(rank, [late])
    assert shown(prepared) == shown(at_once)


def test_all_ranks_with_the_same_depth_are_returned() -> None:
    view = BlockView()
    for rank in range(70):
        view.apply(rank, [stored(1, 2, 3) if rank % 2 else stored(1)])
    assert view.match_lengths([1, 2, 3, 4]) == {rank: 3 if rank % 2 else 1 for rank in range(70)}


def test_one_rank_is_cleared_without_the_others() -> None:
    view = BlockView()
    for rank in range(100):
        view.apply(rank, [stored(1, 2, 3)])
    view.clear(40)
    assert view.blocks(40) == frozenset()
    assert view.match_lengths([1, 2, 3]) == {rank: 3 for rank in range(100) if rank != 40}


def test_a_copy_of_the_blocks_does_not_change_with_the_view() -> None:
    view = BlockView()
    view.apply(0, [stored(1)])
    before = view.blocks(0)
    view.apply(0, [stored(2)])
    assert before == {1}


def test_an_unknown_rank_holds_nothing() -> None:
    view = BlockView()
    assert (view.blocks(3), view.block_count(3), view.ranks) == (frozenset(), 0, ())
    assert view.match_lengths([]) == view.match_lengths([1]) == {}


@pytest.mark.soak
@given(changes=CHANGES, aside=CHANGES, later=CHANGES)
@settings(max_examples=num_examples(2), deadline=None)
def test_a_replaced_rank_keeps_nothing_of_its_old_blocks(
    changes: list[tuple[int, list[KVCacheEvent]]],
    aside: list[tuple[int, list[KVCacheEvent]]],
    later: list[tuple[int, list[KVCacheEvent]]],
) -> None:
    view, other, expected = BlockView(), BlockView(), BlockView()
    for rank, events in changes:
        view.apply(rank, events)
        if rank != 0:
            expected.apply(rank, events)
    for _, events in aside:
        other.apply(0, events)
        expected.apply(0, events)
    view.replace(0, other)
    other.clear(0)
    for rank, events in later:
        view.apply(rank, events)
        expected.apply(rank, events)
    for tier in Tier:
        for rank in range(4):
            assert view.blocks(rank, tier) == expected.blocks(rank, tier)
        for block_hash in range(-4, 5):
            assert set(view.ranks_holding(block_hash, tier)) == set(expected.ranks_holding(block_hash, tier))


def stored_with(block_hash: int, **options: Any) -> BlockStored:
    return BlockStored((block_hash,), None, (7,), 1, None, **options)


def test_remote_blocks_are_ignored() -> None:
    view = BlockView()
    view.apply(
        0, [stored_with(1, locality="REMOTE"), stored_with(2, locality="LOCAL"), BlockRemoved((2,), locality="REMOTE")]
    )
    assert view.blocks(0) == {2}
    assert view.match_lengths([1]) == {}
    assert view.counters(0).remote_events == 2


def test_queries_cover_full_attention_unless_they_name_a_group() -> None:
    view = BlockView()
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    view.apply(
        0,
        [
            stored_with(1, group_idx=0, kv_cache_spec_kind="full_attention"),
            stored_with(1, **window),
            stored_with(2, **window),
        ],
    )
    assert view.match_lengths([1, 2]) == {0: 1}
    assert view.match_lengths([1, 2], group_idx=1) == {0: 2}
    assert (view.blocks(0), view.blocks(0, group_idx=1)) == ({1}, {1, 2})
    view.apply(0, [BlockRemoved((1,), group_idx=0), stored_with(2, group_idx=1)])
    assert view.blocks_by_location(0) == {("GPU", 1, None, None): {1, 2}}
    assert view.match_lengths([2]) == {0: 1}  # the last event applies: its group attends to the whole prefix
    view.apply(0, [BlockRemoved((1, 2), group_idx=1)])
    assert view.blocks_by_location(0) == {}


def test_a_removal_by_one_owner_keeps_the_copy_of_another() -> None:
    view = BlockView()
    view.apply(0, [stored_with(1, medium="FS", ownership="a"), stored_with(1, medium="OBJ"), BlockRemoved((1,), "FS")])
    assert view.blocks_by_location(0) == {("FS", None, None, "a"): {1}, ("OBJ", None, None, None): {1}}
    view.apply(0, [BlockRemoved((1,), "OBJ"), BlockRemoved((1,), "FS", ownership="a")])
    assert view.blocks(0, Tier.STORAGE) == frozenset()


@pytest.mark.parametrize("prompt", [[], [9], [9, 1]])
def test_an_unknown_block_has_no_holder(prompt: list[int]) -> None:
    view = BlockView()
    assert (view.best_ranks(prompt)[0], set(view.best_ranks(prompt)[1])) == (0, set())
    view.apply(0, [stored(1)])
    assert (view.best_ranks(prompt)[0], set(view.best_ranks(prompt)[1])) == (0, set())


NUM_MANY = 40_000
SLICE = 2_048


def test_a_large_clear_is_swept_in_slices() -> None:
    view = BlockView()
    view.apply(0, [stored(*range(first, first + 100)) for first in range(10, NUM_MANY, 100)])
    view.apply(1, [stored(1, 2), stored(10)])
    view.clear(0)
    assert (view.blocks(0), view.block_count(0), view.is_swept) == (frozenset(), 0, False)
    num_slices = 1
    while view.sweep():
        num_slices += 1
    # Each hash is visited once and deleted once.
    assert 2 * NUM_MANY / SLICE - 4 < num_slices < 2 * NUM_MANY / SLICE + 20
    assert view.is_swept
    assert not view.sweep()
    assert (view.blocks(1), view.ranks_holding(10)) == ({1, 2, 10}, (1,))


def test_batches_sweep_and_a_small_clear_needs_no_sweep() -> None:
    view = BlockView()
    view.apply(0, [stored(*range(100)), AllBlocksCleared()])
    assert view.is_swept
    view.apply(0, [stored(*range(20_000)), AllBlocksCleared()])
    num_batches = 0
    while not view.is_swept:
        view.apply(1, [stored(num_batches)])
        num_batches += 1
    assert 30 < num_batches < 200
    assert view.blocks(1) == set(range(num_batches))
    view.apply(1, [stored(*range(20_000))])
    view.apply(0, [stored(*range(100)), AllBlocksCleared()])
    assert view.is_swept


def test_a_discarded_snapshot_is_swept() -> None:
    view = BlockView()
    staging = view.create_staging()
    staging.apply(0, [stored(*range(20_000))])
    assert (view.blocks(0), view.match_lengths([1]), view.is_swept) == (frozenset(), {}, True)
    view.discard_staging(staging)
    assert not view.is_swept
    while view.sweep():
        pass
    assert staging.blocks(0) == frozenset()


def test_a_cleared_view_releases_its_memory() -> None:
    view = BlockView()
    tracemalloc.start()
    try:
        view.apply(0, [stored(*range(first, first + 100)) for first in range(1 << 40, (1 << 40) + NUM_MANY, 100)])
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        view.clear(0)
        while view.sweep():
            pass
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held > 50 * NUM_MANY
    assert left < held / 50


def test_a_replaced_view_releases_the_memory_of_its_old_blocks() -> None:
    view = BlockView()
    for rank in range(40):  # the last bits are not small integers, which Python caches
        view.apply(rank, [stored(1)])
    tracemalloc.start()
    try:
        hashes = tuple(range(1 << 40, (1 << 40) + NUM_MANY))
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        view.apply(39, [stored(*hashes)])
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
        staging = view.create_staging()
        staging.apply(39, [stored(*hashes)])
        view.replace(39, staging)
        assert view.block_count(39) == NUM_MANY
        while view.sweep():
            pass
        gc.collect()
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert left < held * 1.05


def test_an_empty_rank_chooses_its_main_location_again() -> None:
    view = BlockView()
    view.apply(
        0,
        [stored_with(1), BlockRemoved((1,)), stored_with(2, group_idx=1), stored_with(3), stored_with(4, group_idx=2)],
    )
    assert view.blocks_by_location(0) == {
        ("GPU", 1, None, None): {2},
        ("GPU", None, None, None): {3},
        ("GPU", 2, None, None): {4},
    }
    view.apply(0, [BlockRemoved((2,), group_idx=1), BlockRemoved((3,)), BlockRemoved((4,), group_idx=2)])
    view.apply(0, [stored_with(5, group_idx=3), stored_with(6, group_idx=2)])
    assert view.blocks_by_location(0) == {("GPU", 3, None, None): {5}, ("GPU", 2, None, None): {6}}
    assert (view.block_count(0), view.counters(0).unknown_removals) == (2, 0)
    view.apply(0, [BlockRemoved((5,), group_idx=3), BlockRemoved((6,), group_idx=2), stored_with(7, group_idx=1)])
    view.apply(0, [stored_with(8, group_idx=2), BlockRemoved((7,), group_idx=1)])
    assert view.blocks_by_location(0) == {("GPU", 2, None, None): {8}}
    assert (view.block_count(0), view.counters(0).unknown_removals) == (1, 0)


def test_a_preparation_applies_to_one_rank_and_one_view() -> None:
    view, first, second = BlockView(), BlockView(), BlockView()
    first.apply(0, [stored(1)])
    first.apply(1, [stored(2)])
    second.apply(0, [stored(3)])
    for prepared, rank, replaced, expected in (
        (first, 1, first, {2}),
        (first, 0, second, {3}),
        (second, 0, first, {1}),
    ):
        for _ in view.prepare_replace(0, prepared):
            pass
        view.replace(rank, replaced)
        assert view.blocks(rank) == expected


@pytest.mark.parametrize("kind", ["full_attention", "sliding_window"])
@pytest.mark.parametrize("num_blocks", [1, 1_000])
def test_unused_locations_are_deleted(kind: str, num_blocks: int) -> None:
    view = BlockView()
    hashes = tuple(range(num_blocks))
    tracemalloc.start()
    try:
        before = 0
        for round_number in range(3):
            for number in range(60):
                owner = f"{round_number} {number}"
                view.apply(
                    0, [BlockStored(hashes[:1], None, (), 1, None, "FS", ownership=owner, kv_cache_spec_kind=kind)]
                )
            view.apply(0, [BlockStored(hashes, None, (), 1, None), AllBlocksCleared()])
            while view.sweep():
                pass
            gc.collect()
            before = before or tracemalloc.get_traced_memory()[0]
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 60 * 100


def test_a_reused_bit_holds_no_old_blocks() -> None:
    view = BlockView()
    sites = [
        stored_with(1),
        stored_with(2, group_idx=1),
        stored_with(3, group_idx=1, kv_cache_spec_kind="sliding_window"),
    ]
    view.apply(0, [*sites, stored(*range(100, 1_000)), AllBlocksCleared()])
    while view.sweep():
        pass
    for rank in (1, 2, 3):  # one of them has the reused bit
        view.apply(rank, [stored_with(5), stored_with(6, group_idx=1), stored_with(2)])
        assert view.blocks_by_location(rank) == {("GPU", None, None, None): {5, 2}, ("GPU", 1, None, None): {6}}
        assert (view.block_count(rank), view.counters(rank).duplicate_stores) == (3, 0)


AT_SITES = (
    BlockStored((1, 2), None, (), 1, None, "GPU", group_idx=0, kv_cache_spec_kind="full_attention"),
    BlockStored((2, 3), None, (), 1, None, "CPU", group_idx=0, locality="LOCAL", ownership="a"),
    BlockStored((2, 4), None, (), 1, None, "CPU", group_idx=0, locality="LOCAL", ownership="b"),
    BlockStored((5,), None, (), 1, None, "CPU", group_idx=1, kv_cache_spec_kind="sliding_window"),
)


def test_a_copy_of_another_view_keeps_every_location() -> None:
    view, other = BlockView(), BlockView()
    other.apply(0, AT_SITES)
    view.replace(0, other)
    assert view.blocks_by_location(0) == other.blocks_by_location(0)
    assert view.blocks(0, Tier.HOST) == other.blocks(0, Tier.HOST) == {2, 3, 4}  # partial groups are separate
    for each in (view, other):
        each.apply(0, [BlockRemoved((2,), "CPU", 0, "LOCAL", "a")])
        assert each.ranks_holding(2, Tier.HOST) == (0,)
        each.apply(0, [BlockRemoved((2,), "CPU", 0, "LOCAL", "b")])
        assert each.ranks_holding(2, Tier.HOST) == ()


def test_one_location_field_is_enough_for_another_location() -> None:
    view = BlockView()
    view.apply(0, [stored(1, 2, 3, medium="CPU"), BlockRemoved((3,), "CPU")])
    for field, value in (("locality", "REMOTE"), ("ownership", "a"), ("group_idx", 1)):
        place = {field: value}
        view.apply(0, [BlockRemoved((1,), "CPU", **place), BlockStored((9,), None, (), 1, None, "CPU", **place)])  # type: ignore[arg-type]
        view.apply(0, [BlockRemoved((9,), "CPU", **place)])  # type: ignore[arg-type]
        assert view.blocks_by_location(0) == {("CPU", None, None, None): {1, 2}}
    assert view.counters(0).remote_events == 3


def test_a_location_is_kept_for_another_rank_that_uses_it() -> None:
    view = BlockView()
    at_site = BlockStored((1,), None, (), 1, None, "CPU", group_idx=1, ownership="a")
    removed = BlockRemoved((1,), "CPU", 1, None, "a")
    for rank in (0, 1):
        view.apply(rank, [stored(7, medium="CPU"), at_site, removed])
    view.clear(0)
    view.apply(1, [at_site])
    assert view.match_lengths((1,), Tier.HOST, group_idx=1) == {1: 1}


def test_a_group_query_covers_one_tier() -> None:
    view = BlockView()
    view.apply(0, AT_SITES)
    for prompt, group_idx in (((5,), 1), ((4,), 0)):
        assert view.match_lengths(prompt, Tier.HOST, group_idx=group_idx) == {0: 1}
        assert view.match_lengths(prompt, Tier.DEVICE, group_idx=group_idx) == {}


def test_a_preparation_is_done_in_slices_and_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a preparation, the replacement itself copies nothing."""
    view, other = BlockView(), BlockView()
    other.apply(0, [stored(*range(2 * SWEEP_SLICE_HASHES + 1))])
    assert len(list(view.prepare_replace(0, other))) == 3
    with monkeypatch.context() as patch:
        patch.setattr(BlockView, "prepare_replace", None)
        view.replace(0, other)
    assert view.blocks(0) == other.blocks(0)
    other.apply(0, [stored(-1)])
    view.replace(0, other)  # the preparation was used, so this copies again
    assert -1 in view.blocks(0)


def test_a_new_preparation_discards_the_one_before() -> None:
    view, other = BlockView(), BlockView()
    other.apply(0, [stored(1)])
    next(iter(view.prepare_replace(0, other)))
    for staging in (view.create_staging(), view.create_staging(), other):
        for _ in view.prepare_replace(0, staging):
            pass
    view.replace(0, other)
    assert view.blocks(0) == {1}


def test_a_used_staging_view_keeps_only_its_other_ranks() -> None:
    view = BlockView()
    view.apply(0, [stored(7)])
    staging = view.create_staging()
    staging.apply(1, [stored(7)])
    staging.apply(2, [stored(7)])
    view.replace(1, staging)
    assert (staging.match_lengths((7,)), staging.best_ranks((7,))[0]) == ({2: 1}, 1)
    view.discard_staging(staging)
    assert (staging.match_lengths((7,)), staging.best_ranks((7,)), staging.ranks) == ({}, (0, set()), ())
    assert view.match_lengths((7,)) == {0: 1, 1: 1}


def test_a_counting_view_counts_events_and_keeps_no_blocks() -> None:
    view, events = CountingView(), [stored(1, 2), BlockRemoved((1, 9, 8)), stored(5, medium="TAPE")]
    for _ in range(2):
        view.apply(7, [*events, AllBlocksCleared()])
    counters = view.counters(7)
    assert (counters.stored_blocks, counters.removed_blocks) == (4, 6)
    assert (counters.unknown_media, counters.clears) == (2, 2)
    assert view.blocks(7) == frozenset()
