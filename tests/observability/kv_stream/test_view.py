"""The view equals a naive model: for each rank and tier a set of hashes, searched block by block."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.kv_stream import BlockView, Tier, tier_of
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

MEDIA = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.STORAGE,
    "EXTERNAL": Tier.STORAGE,
    "STORAGE": Tier.STORAGE,
    "TAPE": None,
}

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
    """Every block where it was stored, one by one."""

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


@given(changes=CHANGES, prompt=st.lists(st.integers(-4, 4)))
@settings(max_examples=400, deadline=None)
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
        assert view.deepest_prefix(prompt, tier) == {rank: depth for rank, depth in depths.items() if depth}
        for block_hash in range(-4, 5):
            holders = {rank for rank in range(4) if block_hash in naive.held(rank, tier)}
            assert set(view.ranks_holding(block_hash, tier)) == holders
    for rank in range(4):
        assert view.block_count(rank) == sum(len(naive.held(rank, tier)) for tier in Tier)


@pytest.mark.parametrize(("medium", "tier"), MEDIA.items())
def test_media_of_the_field_fall_into_three_tiers(medium: str | None, tier: Tier | None) -> None:
    assert tier_of(medium) is tier


def stored(*hashes: int, medium: str | None = None) -> BlockStored:
    return BlockStored(hashes, None, tuple(range(len(hashes))), 1, None, medium)


def test_harmless_events_are_counted() -> None:
    view = BlockView()
    view.apply(7, [stored(1, 2), stored(2, 3), BlockRemoved((1, 9)), stored(5, medium="TAPE"), AllBlocksCleared()])
    counters = view.counters(7)
    assert (counters.stored_blocks, counters.removed_blocks, counters.clears) == (4, 1, 1)
    assert (counters.duplicate_stores, counters.unknown_removals, counters.unknown_media) == (1, 1, 1)


def test_removals_from_a_place_where_nothing_was_stored_are_counted() -> None:
    view = BlockView()
    view.apply(7, [stored(1, 2), BlockRemoved((1, 2), None, 3), BlockRemoved((1,), "CPU"), BlockRemoved((1,), "TAPE")])
    counters = view.counters(7)
    assert (counters.removed_blocks, counters.unknown_removals, counters.unknown_media) == (0, 3, 1)
    assert view.blocks(7) == {1, 2}


def test_no_medium_and_the_device_are_one_place() -> None:
    view = BlockView()
    view.apply(7, [stored(1, medium="GPU"), stored(1), BlockRemoved((1,))])
    assert view.blocks(7) == frozenset()
    view.apply(7, [stored(2), BlockRemoved((2,), "GPU")])
    assert view.blocks(7) == frozenset()
    assert view.counters(7).duplicate_stores == 1


def test_places_known_before_a_clear_or_a_replacement_are_found_anew() -> None:
    view, other = BlockView(), BlockView()
    view.apply(7, [stored(1), AllBlocksCleared(), stored(2)])
    assert view.blocks(7) == {2}
    other.apply(7, [stored(3)])
    view.replace(7, other)
    view.apply(7, [stored(4), BlockRemoved((3,))])
    assert view.blocks(7) == {4}
    assert other.blocks(7) == {3}


@given(ranks=st.lists(st.tuples(RANKS, EVENTS), max_size=20), staged=st.lists(EVENTS, max_size=20), late=EVENTS)
def test_a_prepared_replacement_is_the_replacement_and_shows_nothing_before(
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
    for _ in prepared.preparing(1, other):
        assert shown(prepared) == before
    if len(staged) % 2:  # a change makes the preparation useless
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


def test_ranks_that_end_at_one_place_are_all_named() -> None:
    view = BlockView()
    for rank in range(70):
        view.apply(rank, [stored(1, 2, 3) if rank % 2 else stored(1)])
    assert view.deepest_prefix([1, 2, 3, 4]) == {rank: 3 if rank % 2 else 1 for rank in range(70)}


def test_one_rank_is_cleared_without_the_others() -> None:
    view = BlockView()
    for rank in range(100):
        view.apply(rank, [stored(1, 2, 3)])
    view.clear(40)
    assert view.blocks(40) == frozenset()
    assert view.deepest_prefix([1, 2, 3]) == {rank: 3 for rank in range(100) if rank != 40}


def test_a_copy_of_the_blocks_does_not_follow_the_view() -> None:
    view = BlockView()
    view.apply(0, [stored(1)])
    before = view.blocks(0)
    view.apply(0, [stored(2)])
    assert before == {1}


def test_a_rank_never_seen_holds_nothing() -> None:
    view = BlockView()
    assert (view.blocks(3), view.block_count(3), view.ranks) == (frozenset(), 0, ())
    assert view.deepest_prefix([]) == view.deepest_prefix([1]) == {}


@given(changes=CHANGES, aside=CHANGES, later=CHANGES)
@settings(max_examples=200, deadline=None)
def test_a_replaced_rank_is_as_if_it_had_never_been_another(
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


def told(block_hash: int, **options: Any) -> BlockStored:
    return BlockStored((block_hash,), None, (7,), 1, None, **options)


def test_remote_blocks_are_not_the_ranks_own() -> None:
    view = BlockView()
    view.apply(0, [told(1, locality="REMOTE"), told(2, locality="LOCAL"), BlockRemoved((2,), locality="REMOTE")])
    assert view.blocks(0) == {2}
    assert view.deepest_prefix([1]) == {}
    assert view.counters(0).remote_events == 2


def test_a_router_asks_for_full_attention_unless_it_names_a_group() -> None:
    view = BlockView()
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    view.apply(0, [told(1, group_idx=0, kv_cache_spec_kind="full_attention"), told(1, **window), told(2, **window)])
    assert view.deepest_prefix([1, 2]) == {0: 1}
    assert view.deepest_prefix([1, 2], group_idx=1) == {0: 2}
    assert (view.blocks(0), view.blocks(0, group_idx=1)) == ({1}, {1, 2})
    view.apply(0, [BlockRemoved((1,), group_idx=0), told(2, group_idx=1)])
    assert view.blocks_by_site(0) == {("GPU", 1, None, None): {1, 2}}
    assert view.deepest_prefix([2]) == {0: 1}  # what was said of it last: its group attends to all
    view.apply(0, [BlockRemoved((1, 2), group_idx=1)])
    assert view.blocks_by_site(0) == {}


def test_one_owners_removal_leaves_the_others_copy() -> None:
    view = BlockView()
    view.apply(0, [told(1, medium="FS", ownership="a"), told(1, medium="OBJ"), BlockRemoved((1,), "FS")])
    assert view.blocks_by_site(0) == {("FS", None, None, "a"): {1}, ("OBJ", None, None, None): {1}}
    view.apply(0, [BlockRemoved((1,), "OBJ"), BlockRemoved((1,), "FS", ownership="a")])
    assert view.blocks(0, Tier.STORAGE) == frozenset()
