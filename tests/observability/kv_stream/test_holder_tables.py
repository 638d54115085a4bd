"""Tables of masks and their bits, with changes between two slices of a sweep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.kv_stream import BlockView, holder_tables
from observability.kv_stream.holder_tables import HolderTables, MaskTable
from scheduler_components import BlockStored
from scheduler_components.events import BlockLocation, Tier


def test_the_lowest_free_bit_is_allocated_and_swept_bits_are_free_again() -> None:
    found = HolderTables()
    first, second, third = (found.allocate_bit() for _ in range(3))
    assert (first, second, third) == (1, 2, 4)
    table = found.tiers[Tier.HOST]
    table.add(first, (7,))
    table.add(second, range(10_000))
    found.retire_bit(second)
    assert not found.is_swept
    assert found.allocate_bit() == 8  # retired bits are still in masks
    found.release_bit(8)
    while not found.is_swept:
        found.sweep(1)
    assert table.masks == {7: first}
    assert (found.allocate_bit(), found.allocate_bit()) == (second, 8)


def test_a_bit_that_is_retired_during_a_sweep_is_swept_out_by_the_next() -> None:
    found = HolderTables()
    first, second, third = (found.allocate_bit() for _ in range(3))
    table = found.tiers[Tier.DEVICE]
    for bit in (first, second, third):
        table.add(bit, range(1_000))
    found.retire_bit(first)
    found.sweep(1)
    found.retire_bit(second)
    found.retire_bit(third)
    num_strides = 0
    while not found.is_swept:
        found.sweep(1)
        num_strides += 1
    assert table.is_empty
    assert num_strides > 1_000 / holder_tables.SWEEP_SLICE_HASHES * 2
    assert found.allocate_bit() == first


@pytest.mark.parametrize("name", ["further", "partial"])
def test_an_unused_table_is_deleted(name: str) -> None:
    found, location = HolderTables(), ("FS", None, None, "a")
    tables = getattr(found, name)
    kept, gone = MaskTable(), MaskTable()
    tables |= {location: gone, ("OBJ", None, None, None): kept}
    kept.num_users = 1
    bit = found.allocate_bit()
    gone.add(bit, (1, 2))
    found.retire_bit(bit)
    found.sweep(1_000)
    assert found.is_swept
    assert list(tables.values()) == [kept]


CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "drop", "sweep"]), st.sampled_from([1, 2, 1 << 40]), st.lists(st.integers(0, 9))),
    max_size=40,
)


@given(before=st.lists(st.integers(0, 9), unique=True), changes=CHANGES)
def test_a_table_in_a_sweep_is_a_dict_of_sets(before: list[int], changes: list[tuple[str, int, list[int]]]) -> None:
    old, gone = holder_tables.SWEEP_SLICE_HASHES, 8
    holder_tables.SWEEP_SLICE_HASHES = 2
    try:
        table, plain = MaskTable(), {block_hash: {gone} for block_hash in before}
        table.add(gone, before)
        sweep = table.sweep_bits(gone)
        for what, bit, hashes in changes:
            if what == "sweep":
                next(sweep, None)
                continue
            change, num_changed = (table.add if what == "add" else table.drop)(bit, tuple(hashes)), 0
            for block_hash in hashes:
                held = plain.setdefault(block_hash, set())
                num_changed += (bit in held) != (what == "add")
                (held.add if what == "add" else held.discard)(bit)
            assert change == num_changed
            assert not table.add(bit, ())
            for block_hash in range(10):
                held = plain.get(block_hash, set()) - {gone}
                assert table.lookup(block_hash, 0) & ~gone == sum(held)
                assert table.has(bit, block_hash) == (bit in held)
            assert sorted(table.holding(bit)) == sorted(each for each, held in plain.items() if bit in held)
        for _ in sweep:
            pass
    finally:
        holder_tables.SWEEP_SLICE_HASHES = old
    assert not table.is_moving
    assert table.lookup == table.masks.get
    assert table.masks == {block_hash: sum(held - {gone}) for block_hash, held in plain.items() if held - {gone}}


@pytest.mark.parametrize("num_blocks", [1, 1_000])
def test_masks_stay_narrow_however_often_a_rank_is_cleared_or_replaced(num_blocks: int) -> None:
    view = BlockView()
    blocks = BlockStored(tuple(range(num_blocks)), None, (), 1, None)
    foreign = BlockView()
    foreign.apply(0, (blocks,))
    for _ in range(20):
        staging, dropped = view.create_staging(), view.create_staging()
        for each in (view, staging, dropped):
            each.apply(0, (blocks,))
        view.replace(0, staging)
        view.discard_staging(dropped)
        for _ in view.prepare_replace(0, foreign):
            pass
        view.clear(0)
        while view.sweep():
            pass
    assert max(view._holders.allocate_bit() for _ in range(3)) <= 32


def test_a_hash_dropped_while_new_hashes_move_is_deleted() -> None:
    table = MaskTable()
    table.add(1, range(10))
    sweep = table.sweep_bits(4)
    next(sweep)
    table.add(1, range(1_000, 1_000 + 3 * holder_tables.SWEEP_SLICE_HASHES))  # kept apart from the dict of the sweep
    assert len(table.masks) == 10
    next(sweep)
    assert table.is_moving
    assert len(table.masks) > 10
    assert table.drop(1, range(5)) == 5
    assert set(table.masks) & set(range(10)) == set(range(5, 10))
    assert len(list(sweep)) < 4
    assert set(table.masks) == {*range(5, 10), *range(1_000, 1_000 + 3 * holder_tables.SWEEP_SLICE_HASHES)}


def test_an_unused_table_is_kept_until_it_is_swept() -> None:
    found, location = HolderTables(), ("FS", None, None, "a")
    used: dict[BlockLocation, MaskTable] = {}
    table, bit = found.open_site(found.further, used, location), found.allocate_bit()
    table.add(bit, range(10_000))
    found.retire_bit(bit)
    found.close_sites(found.further, used)
    assert (used, found.further) == ({}, {location: table})
    while not found.is_swept:
        found.sweep(1)
    assert found.further == {}
    assert table.is_empty


def test_a_hash_dropped_during_a_sweep_is_deleted_after_it() -> None:
    table = MaskTable()
    table.add(1, range(10))
    sweep = table.sweep_bits(4)
    next(sweep)
    assert table.drop(1, range(5)) == 5
    assert len(table.masks) == 10  # the dict of the sweep keeps its keys
    for _ in sweep:
        pass
    assert table.masks == dict.fromkeys(range(5, 10), 1)
