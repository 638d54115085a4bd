"""Property: whatever an engine does, the events keep the rules of the wire and add up to its block table."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant
from kit.searches import num_examples

from observability.kv_stream import BlockView
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, ConfigError, KVCacheEvent
from scheduler_components.cache import BlockTableRecorder, PrefixNamespace
from scheduler_components.cache.recorder import MAX_EVENT_TOKENS
from scheduler_components.events import Tier
from scheduler_components.testing import RecorderMachine
from scheduler_components.testing.interfaces import BLOCK_SIZE


class BlockTableMachine(RecorderMachine):
    """The kit's state machine on the kit's recorder, with a router's view that applies the events."""

    max_pending_blocks = 1_000

    def open_recorder(self) -> BlockTableRecorder:
        self.view = BlockView()
        self.own = BlockTableRecorder(BLOCK_SIZE, self.max_pending_blocks)
        return self.own

    def read(self, events: Sequence[KVCacheEvent]) -> None:
        super().read(events)
        self.view.apply(0, events)
        for medium, tier in ((None, Tier.DEVICE), ("CPU", Tier.HOST)):
            reachable = set().union(
                *(self.table.reachable_hashes(place) for place in self.places if place[0] == medium)
            )
            assert self.view.blocks(0, tier) == reachable
        counters = self.view.counters(0)
        assert (counters.duplicate_stores, counters.unknown_removals) == (0, 0)

    @invariant()
    def its_hashes_are_those_of_its_events(self) -> None:
        held = {(place[1], each) for (place, each), count in self.table.copies.items() if count}
        reachable = {(place[1], each) for place in self.places for each in self.table.reachable_hashes(place)}
        assert self.own.num_blocks == len(held)
        assert self.own.num_unreachable_blocks == len(held - reachable)
        for place in self.places:
            assert set(self.own.block_hashes(*place)) == self.table.reachable_hashes(place)


class CrampedTableMachine(BlockTableMachine):
    """Almost every drain follows a collapse."""

    max_pending_blocks = 3


TestBlockTable = pytest.mark.soak(BlockTableMachine.TestCase)
TestCrampedTable = pytest.mark.soak(CrampedTableMachine.TestCase)
TestBlockTable.settings = TestCrampedTable.settings = settings(
    max_examples=num_examples(1), stateful_step_count=40, deadline=None
)


# Sequences of calls, and their events.


def as_stored(event: KVCacheEvent) -> BlockStored:
    assert isinstance(event, BlockStored)
    return event


def test_blocks_of_one_chain_become_one_event_over_several_calls() -> None:
    recorder = BlockTableRecorder(1)
    recorder.store((1,), (11,))
    recorder.store((2, 3), (12, 13), 1)
    recorder.store((9,), (19,), 1)
    recorder.remove((9, 3))
    recorder.remove((2,))
    chain, branch, removed = recorder.take_events()
    assert chain == BlockStored((1, 2, 3), None, (11, 12, 13), 1, None)
    assert as_stored(branch).parent_block_hash == 1
    assert removed == BlockRemoved((9, 3, 2))


def test_a_very_long_run_becomes_several_events() -> None:
    recorder, many = BlockTableRecorder(1), MAX_EVENT_TOKENS + 1
    recorder.store(range(1, many + 1), [5] * many)
    first, second = (as_stored(event) for event in recorder.take_events())
    assert (len(first.block_hashes), second.block_hashes, second.parent_block_hash) == (many - 1, (many,), many - 1)
    recorder.remove(range(1, many + 1))
    assert [len(event.block_hashes) for event in recorder.take_events()] == [many - 1, 1]  # type: ignore[attr-defined]


def test_orphans_are_counted_and_published_with_their_parent() -> None:
    recorder = BlockTableRecorder(1)
    recorder.store((2,), (12,), 1)
    assert (recorder.num_orphans, recorder.num_unreachable_blocks, recorder.take_events()) == (1, 1, ())
    assert repr(recorder) == "<BlockTableRecorder 1 blocks, 1 hidden>"
    recorder.store((1,), (11,))
    assert recorder.take_events() == (BlockStored((1, 2), None, (11, 12), 1, None),)
    assert (recorder.num_orphans, recorder.num_unreachable_blocks) == (1, 0)


def test_a_copy_with_another_content_is_counted_and_changes_nothing() -> None:
    recorder = BlockTableRecorder(1)
    recorder.store((1,), (11,))
    recorder.store((1,), (99,))
    recorder.store((1,), (11,), 5)
    assert recorder.num_conflicts == 2
    recorder.remove((1, 1))
    assert len(recorder.take_events()) == 1
    recorder.remove((1,))
    assert recorder.take_events() == (BlockRemoved((1,)),)


def test_the_device_has_two_names() -> None:
    recorder = BlockTableRecorder(1)
    recorder.store((1,), (11,), medium="GPU")
    recorder.store((1,), (11,))
    recorder.remove((1,), medium="GPU")
    assert list(recorder.block_hashes("GPU")) == [1]
    recorder.remove((1,))
    assert [event.medium for event in recorder.take_events()] == [None, None]  # type: ignore[attr-defined]


def test_events_are_split_by_namespace_and_carry_it() -> None:
    recorder = BlockTableRecorder(1)
    tenant = PrefixNamespace(lora_id=1, lora_name="a", cache_salt="s", extra_key="v", session_id="x")
    recorder.store((1, 2), (11, 12), namespace=tenant, extra_keys=[None, ["image", 3]])
    recorder.store((3,), (13,), 2)
    named, plain = (as_stored(event) for event in recorder.take_events())
    assert (named.lora_id, named.lora_name, named.cache_salt, named.session_id) == (1, "a", "s", "x")
    assert named.extra_keys == (("v",), ("v", "image", 3))
    assert (plain.block_hashes, plain.extra_keys, plain.cache_salt) == ((3,), None, None)


def test_a_collapse_happens_above_the_maximum_of_blocks_and_is_counted() -> None:
    recorder = BlockTableRecorder(1, max_pending_blocks=2)
    for num_collapses in range(1, 3):
        first = 10 * num_collapses
        recorder.store((first, first + 1), (1, 1))
        [event] = recorder.take_events()
        assert isinstance(event, BlockStored)
        recorder.store((first + 2, first + 3, first + 4), (1, 1, 1), first + 1)
        assert recorder.take_events()[0] == AllBlocksCleared()
        assert recorder.num_collapses == num_collapses


def test_a_collapsed_backlog_does_not_grow() -> None:
    recorder = BlockTableRecorder(1, max_pending_blocks=2)
    recorder.store((1, 2, 3), (1, 1, 1))
    tracemalloc.start()
    try:
        for _ in range(5_000):
            recorder.remove((3,))
            recorder.store((3,), (1,), 2)
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 100_000  # 5,000 events would be ten times as many
    assert recorder.num_collapses == 1


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("block_hash", {"block_hashes": ["1"], "token_ids": [1]}),
        ("block_hash", {"block_hashes": [b""], "token_ids": [1]}),
        ("block_hash", {"block_hashes": [1], "token_ids": [1], "parent_block_hash": 1.5}),
        ("token_ids", {"block_hashes": [1, 2], "token_ids": [1]}),
        ("token_ids", {"block_hashes": [1], "token_ids": [-1]}),
        ("extra_keys", {"block_hashes": [1], "token_ids": [1], "extra_keys": []}),
    ],
)
def test_an_invalid_store_is_refused_without_effect(field: str, call: dict[str, Any]) -> None:
    recorder = BlockTableRecorder(1)
    with pytest.raises(ConfigError) as refused:
        recorder.store(**call)
    assert refused.value.field == field
    assert (recorder.num_blocks, recorder.take_events()) == (0, ())


def test_sizes_below_one_are_refused() -> None:
    for sizes in ((0,), (1, 0)):
        with pytest.raises(ConfigError):
            BlockTableRecorder(*sizes)


def num_objects_of(module: str) -> int:
    """Count the live objects of a module's classes."""
    gc.collect()
    return sum(type(each).__module__ == module for each in gc.get_objects())


@pytest.mark.parametrize("medium", [None, "CPU"])
def test_no_entry_remains_of_a_parent_that_was_never_stored(medium: str | None) -> None:
    """An orphan creates an entry for its parent, which goes with the last orphan: a table is used for months."""
    recorder, module = BlockTableRecorder(1), BlockTableRecorder.__module__
    before = num_objects_of(module)
    for absent in range(100, 200):
        recorder.store([1, 2], [7, 7], absent, medium=medium)
        recorder.store([3], [7], absent, medium=medium)
        for gone in (3, 2, 1):
            recorder.remove([gone], medium=medium)
    assert recorder.num_blocks == 0
    assert num_objects_of(module) == before
    assert recorder.take_events() == ()
