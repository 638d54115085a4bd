"""The blocks of one rank at several locations of a tier: each location's own set, and the tier as their union."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from observability.kv_stream.holder_tables import HolderTables, MaskTable
from observability.kv_stream.view import (
    RankBlocks,
    Site,
    TierBlocks,
    ViewCounters,
    drop_partial,
    location_of,
    remove,
    store,
    stored_events,
)
from scheduler_components import BlockRemoved, BlockStored
from scheduler_components.events import BlockLocation, Tier, block_location

PLACES = [block_location("GPU", group, None, None) for group in (None, 1, 2)]


class LocatedBlocks:
    """The blocks of one rank on one tier, with a site per location. The first location stored to is the main one."""

    def __init__(self) -> None:
        self.tables = HolderTables()
        tiers = tuple(TierBlocks(self.tables.tiers[tier], self.tables.away[tier]) for tier in Tier)
        self.blocks = RankBlocks(self.tables.allocate_bit(), tiers)
        self.tier = tiers[Tier.DEVICE]

    def site(self, location: BlockLocation, *, is_partial: bool = False) -> Site:
        if is_partial:
            own = self.tables.open_site(self.tables.partial, self.blocks.partial, location)
            return Site(self.tier, location, own, is_partial=True)
        if self.tier.main is None:
            self.tier.main = location
        if location == self.tier.main:
            return Site(self.tier, location)
        return Site(self.tier, location, self.tables.open_site(self.tables.further, self.tier.further, location))

    def held(self) -> dict[BlockLocation, set[int]]:
        found: defaultdict[BlockLocation, set[int]] = defaultdict(set)
        for location, kind, hashes in self.blocks.by_location():
            assert kind is None
            found[location] |= set(hashes)
        return {location: hashes for location, hashes in found.items() if hashes}


@settings(deadline=None, max_examples=100)
@given(
    actions=st.lists(
        st.tuples(st.booleans(), st.sampled_from(PLACES), st.lists(st.integers(0, 5), max_size=4, unique=True)),
        max_size=12,
    )
)
def test_each_location_has_its_own_blocks_and_the_tier_their_union(
    actions: list[tuple[bool, BlockLocation, list[int]]],
) -> None:
    rank = LocatedBlocks()
    model: defaultdict[BlockLocation, set[int]] = defaultdict(set)
    num_repeated = 0
    for is_store, location, hashes in actions:
        site, held = rank.site(location), model[location]
        if is_store:
            store(rank.blocks, site, hashes)
            num_repeated += len(held & set(hashes))
            held |= set(hashes)
        else:
            assert remove(rank.blocks, site, hashes) == len(held & set(hashes))
            held -= set(hashes)
        union = set().union(*model.values())
        assert set(rank.tier.table.holding(rank.blocks.bit)) == union
        assert rank.tier.num_blocks == len(union)
        assert rank.held() == {place: hashes for place, hashes in model.items() if hashes}
        assert rank.blocks.counters.duplicate_stores == num_repeated


def test_a_block_of_a_partial_group_leaves_full_attention_at_its_location() -> None:
    rank = LocatedBlocks()
    store(rank.blocks, rank.site(PLACES[0]), [1, 2])
    store(rank.blocks, rank.site(PLACES[0], is_partial=True), [2, 3])
    assert rank.tier.num_blocks == 1
    assert [(location, kind, set(hashes)) for location, kind, hashes in rank.blocks.by_location()] == [
        (PLACES[0], None, {1}),
        (PLACES[0], "sliding_window", {2, 3}),
    ]
    removed = BlockRemoved((2, 9), "GPU")
    assert location_of(removed) == PLACES[0]
    assert drop_partial(rank.blocks, removed) == 1
    assert drop_partial(rank.blocks, BlockRemoved((2,), "GPU", 7)) == 0, "there is no such group"


def test_the_stored_events_hold_every_block_with_its_location() -> None:
    rank = LocatedBlocks()
    store(rank.blocks, rank.site(PLACES[0]), [1, 2])
    store(rank.blocks, rank.site(PLACES[1]), [2])
    events = list(stored_events(rank.blocks))
    assert [(set(event.block_hashes), event.medium, event.group_idx) for event in events] == [
        ({1, 2}, "GPU", None), ({2}, "GPU", 1),
    ]  # fmt: skip
    assert all(isinstance(event, BlockStored) and event.parent_block_hash is None for event in events)


def test_only_a_few_blocks_are_remembered_for_a_quick_clear() -> None:
    rank = LocatedBlocks()
    site = rank.site(PLACES[0])
    store(rank.blocks, site, list(range(256)))
    assert rank.blocks.early == list(range(256))
    store(rank.blocks, site, [256])
    assert rank.blocks.early is None


def test_the_tables_of_a_rank_are_those_of_its_further_and_partial_locations() -> None:
    rank = LocatedBlocks()
    rank.site(PLACES[0])
    assert list(rank.blocks.own_tables()) == []
    own = [rank.site(PLACES[1]).own, rank.site(PLACES[2], is_partial=True).own]
    assert [id(table) for table in rank.blocks.own_tables()] == list(map(id, own))
    assert all(isinstance(table, MaskTable) for table in own)


def test_counters_of_two_views_add_up() -> None:
    counters = ViewCounters(1, 2, 3, 4, 5, 6, 7)
    counters.add(ViewCounters(10, 20, 30, 40, 50, 60, 70))
    assert counters == ViewCounters(11, 22, 33, 44, 55, 66, 77)
