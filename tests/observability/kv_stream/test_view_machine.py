"""A view that is cleared, replaced and swept always equals plain sets of blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from kit.searches import num_examples

from observability.kv_stream import BlockView, Tier, holder_tables, view
from observability.kv_stream.view import ViewCounters
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.events import BlockLocation, block_location, medium_tier

NUM_RANKS = 4
NUM_HASHES = 14
FULL, PARTIAL = "full_attention", "sliding_window"
PLACES: tuple[dict[str, Any], ...] = (
    {},
    {"medium": "GPU"},
    {"group_idx": 0},
    {"group_idx": 1},
    {"medium": "CPU"},
    {"medium": "FS", "ownership": "a"},
    {"medium": "FS", "ownership": "b", "group_idx": 1},
    {"medium": "OBJ"},
    {"locality": "REMOTE"},
    {"medium": "TAPE"},
)
"""Few locations, so that events collide: three on the device, three in storage."""

ranks = st.integers(0, NUM_RANKS - 1)
some_hashes = st.lists(st.integers(0, NUM_HASHES - 1), min_size=1, max_size=9).map(tuple)
places = st.sampled_from(PLACES)
stores = st.builds(
    lambda hashes, kind, where: BlockStored(hashes, None, (), 1, None, kv_cache_spec_kind=kind, **where),
    some_hashes,
    st.sampled_from((None, None, FULL, PARTIAL)),
    places,
)
removals = st.builds(lambda hashes, where: BlockRemoved(hashes, **where), some_hashes, places)
events = st.one_of(stores, stores, removals, removals, st.just(AllBlocksCleared()))
batches = st.lists(events, max_size=4)


class PlainBlocks:
    """One rank's blocks with their locations, whether their groups attend to a whole prefix, and the counters."""

    def __init__(self) -> None:
        self.at: dict[tuple[BlockLocation, int], bool] = {}
        self.counters = ViewCounters()

    def apply(self, batch: Iterable[KVCacheEvent]) -> None:
        for event in batch:
            if isinstance(event, AllBlocksCleared):
                self.at.clear()
                self.counters.clears += 1
            elif isinstance(event, BlockStored | BlockRemoved):
                if event.locality == "REMOTE":
                    self.counters.remote_events += 1
                elif medium_tier(event.medium) is None:
                    self.counters.unknown_media += 1
                else:
                    location = block_location(event.medium, event.group_idx, event.locality, event.ownership)
                    for block_hash in event.block_hashes:
                        self.change(event, (location, block_hash))

    def change(self, event: BlockStored | BlockRemoved, block: tuple[BlockLocation, int]) -> None:
        counters = self.counters
        if isinstance(event, BlockStored):
            is_full = event.kv_cache_spec_kind != PARTIAL
            counters.stored_blocks += 1
            counters.duplicate_stores += self.at.get(block) is is_full
            self.at[block] = is_full
        elif self.at.pop(block, None) is None:
            counters.unknown_removals += 1
        else:
            counters.removed_blocks += 1

    def on(self, tier: Tier, group_idx: int | None = None) -> set[int]:
        return {
            block_hash
            for (location, block_hash), is_full in self.at.items()
            if medium_tier(location[0]) == tier and (is_full if group_idx is None else location[1] == group_idx)
        }

    def by_site(self) -> dict[BlockLocation, set[int]]:
        found: dict[BlockLocation, set[int]] = {}
        for location, block_hash in self.at:
            found.setdefault(location, set()).add(block_hash)
        return found


def depth_in(held: set[int], prompt: Iterable[int]) -> int:
    depth = 0
    for block_hash in prompt:
        if block_hash not in held:
            break
        depth += 1
    return depth


class ViewMachine(RuleBasedStateMachine):
    """A slice has one to three hashes, so nearly every step happens during a sweep."""

    def __init__(self) -> None:
        super().__init__()
        self.view = BlockView()
        self.plain = {rank: PlainBlocks() for rank in range(NUM_RANKS)}
        self.staging: tuple[int, BlockView, PlainBlocks] | None = None
        self.is_foreign = False

    @rule(rank=ranks, batch=batches)
    def apply(self, rank: int, batch: list[KVCacheEvent]) -> None:
        self.view.apply(rank, batch)
        self.plain[rank].apply(batch)

    @rule(rank=ranks)
    def clear(self, rank: int) -> None:
        self.view.clear(rank)
        self.plain[rank].apply([AllBlocksCleared()])

    @rule()
    def sweep(self) -> None:
        self.view.sweep()

    @precondition(lambda self: self.staging is None)
    @rule(rank=ranks, is_foreign=st.booleans(), batch=batches)
    def start_staging(self, rank: int, is_foreign: bool, batch: list[KVCacheEvent]) -> None:
        self.is_foreign = is_foreign
        self.staging = rank, BlockView() if is_foreign else self.view.create_staging(), PlainBlocks()
        self.stage(batch)

    @precondition(lambda self: self.staging is not None)
    @rule(batch=batches)
    def stage(self, batch: list[KVCacheEvent]) -> None:
        assert self.staging is not None
        rank, staging, plain = self.staging
        staging.apply(rank, batch)
        plain.apply(batch)
        assert staging.blocks(rank) == plain.on(Tier.DEVICE)
        assert staging.block_count(rank) == sum(len(plain.on(tier)) for tier in Tier)

    @precondition(lambda self: self.staging is not None)
    @rule(num_slices=st.integers(0, 9), between=st.booleans(), batch=batches)
    def replace(self, num_slices: int, between: bool, batch: list[KVCacheEvent]) -> None:
        """A preparation may be complete, abandoned, or invalidated by a change."""
        assert self.staging is not None
        rank, staging, plain = self.staging
        for _ in zip(range(num_slices), self.view.prepare_replace(rank, staging), strict=False):
            self.shows_what_plain_sets_show()
        if between:
            self.apply(rank, batch)
        self.view.replace(rank, staging)
        if not self.is_foreign:
            assert (staging.match_lengths(range(NUM_HASHES)), staging.block_count(rank)) == ({}, 0)
        plain.counters.add(self.plain[rank].counters)
        self.plain[rank], self.staging = plain, None

    @precondition(lambda self: self.staging is not None)
    @rule()
    def forget(self) -> None:
        assert self.staging is not None
        rank, staging, _ = self.staging
        self.view.discard_staging(staging)
        assert staging.blocks(rank) == set()
        self.staging = None

    @invariant()
    def shows_what_plain_sets_show(self) -> None:
        for tier in Tier:
            held = {rank: plain.on(tier) for rank, plain in self.plain.items()}
            for rank in range(NUM_RANKS):
                assert self.view.blocks(rank, tier) == held[rank]
            for block_hash in range(NUM_HASHES):
                holding = {rank for rank in held if block_hash in held[rank]}
                assert self.view.ranks_holding(block_hash, tier) == tuple(
                    rank for rank in self.view.ranks if rank in holding
                )
            self.answers(tier, held)
            for group_idx in (0, 1):
                of_group = {rank: plain.on(tier, group_idx) for rank, plain in self.plain.items()}
                assert {rank: self.view.blocks(rank, tier, group_idx=group_idx) for rank in of_group} == of_group
                self.answers(tier, of_group, group_idx)
        for rank, plain in self.plain.items():
            assert self.view.block_count(rank) == sum(len(plain.on(tier)) for tier in Tier)
            assert self.view.blocks_by_location(rank) == plain.by_site()
            assert self.view.counters(rank) == plain.counters

    def answers(self, tier: Tier, held: dict[int, set[int]], group_idx: int | None = None) -> None:
        for prompt in (range(NUM_HASHES), range(NUM_HASHES - 1, -1, -2)):
            depths = {rank: depth_in(blocks, prompt) for rank, blocks in held.items()}
            depths = {rank: depth for rank, depth in depths.items() if depth}
            best = max(depths.values(), default=0)
            assert self.view.match_lengths(prompt, tier, group_idx=group_idx) == depths
            depth, holding = self.view.best_ranks(prompt, tier, group_idx=group_idx)
            assert (depth, set(holding)) == (best, {rank for rank in depths if depths[rank] == best})

    def teardown(self) -> None:
        """Check that every cleared block is swept out in the end."""
        for _ in range(1_000):
            if not self.view.sweep():
                break
        assert self.view.is_swept
        self.shows_what_plain_sets_show()


@pytest.mark.soak
@pytest.mark.parametrize("stride", [1, 3])
def test_a_view_always_equals_plain_sets(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_tables, "SWEEP_SLICE_HASHES", stride)
    monkeypatch.setattr(view, "_MAX_EARLY_HASHES", 4)
    monkeypatch.setattr(view, "_SLICES_PER_BATCH", 1)
    monkeypatch.setattr(view, "_SLICES_PER_SWEEP", 1)
    run_state_machine_as_test(
        ViewMachine, settings=settings(max_examples=num_examples(1), stateful_step_count=40, deadline=None)
    )


near_places = st.sampled_from(PLACES[1:4])
few_hashes = st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple)
near_stores = st.builds(
    lambda hashes, kind, where: BlockStored(hashes, None, (), 1, None, kv_cache_spec_kind=kind, **where),
    few_hashes,
    st.sampled_from((None, None, PARTIAL)),
    near_places,
)
near_removals = st.builds(lambda hashes, where: BlockRemoved(hashes, **where), few_hashes, near_places)
near_events = st.one_of(near_stores, near_stores, near_removals, st.just(AllBlocksCleared()))


@pytest.mark.soak
@given(changes=st.lists(st.tuples(st.sampled_from((0, 0, 1)), near_events), max_size=40))
@settings(max_examples=num_examples(3))
def test_locations_and_groups_of_one_tier_are_separate(changes: list[tuple[int, KVCacheEvent]]) -> None:
    """Few locations and hashes, so that each event meets the blocks of earlier ones."""
    machine = ViewMachine()
    for rank, event in changes:
        machine.apply(rank, [event])
        machine.shows_what_plain_sets_show()
    for rank in (0, 1):
        machine.apply(rank, [BlockRemoved(tuple(range(4)), **where) for where in PLACES[1:4]])
    machine.shows_what_plain_sets_show()
    assert machine.view.blocks_by_location(0) == machine.view.blocks_by_location(1) == {}
