"""The stream of several sources is always the union of their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from kit import broken_relay_cores
from kit.events import removed_run, stored_run
from kit.searches import num_examples

from observability.kv_stream import BlockView, StreamState, Tier
from observability.relay.source_merger import SourceMerger, least_trusted_state
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

State = set[tuple[str, int]]


class ModelSource:
    """The blocks of a source and of its current snapshot."""

    def __init__(self) -> None:
        self.held: State = set()
        self.staged: State | None = None

    def apply(self, event: KVCacheEvent) -> None:
        into = self.held if self.staged is None else self.staged
        if isinstance(event, BlockStored):
            into.update((event.medium or "GPU", each) for each in event.block_hashes)
        elif isinstance(event, BlockRemoved):
            into.difference_update((event.medium or "GPU", each) for each in event.block_hashes)
        else:
            into.clear()


class MergeModel:
    """Sources, the merger, and a reader of its events."""

    def __init__(self, num_sources: int) -> None:
        self.sources = [ModelSource() for _ in range(num_sources)]
        self.merger = SourceMerger(range(num_sources))
        self.reader = BlockView()
        self.published: list[KVCacheEvent] = []

    def take(self, events: tuple[KVCacheEvent, ...]) -> None:
        self.published += events
        self.reader.apply(0, events)

    def apply(self, index: int, event: KVCacheEvent) -> None:
        key = index % len(self.sources)
        self.sources[key].apply(event)
        self.take(self.merger.on_batch_applied(key, (event,)))

    def store(self, index: int, first: int, count: int, on_host: bool) -> None:
        self.apply(index, stored_run(first, count, "CPU" if on_host else None))

    def remove(self, index: int, first: int, count: int, on_host: bool) -> None:
        self.apply(index, removed_run(first, count, "CPU" if on_host else None))

    def clear(self, index: int) -> None:
        self.apply(index, AllBlocksCleared())

    def restart(self, index: int) -> None:
        """The subscriber clears its view; it has discarded a snapshot before."""
        self.end(index, False)
        key = index % len(self.sources)
        self.sources[key].held = set()
        self.take(self.merger.on_view_cleared(key))

    def begin(self, index: int) -> None:
        key = index % len(self.sources)
        self.end(index, False)
        self.sources[key].staged = set()
        self.merger.on_snapshot_begin(key)

    def end(self, index: int, was_used: bool) -> None:
        key = index % len(self.sources)
        source = self.sources[key]
        if source.staged is not None:
            if was_used:
                source.held = source.staged
            source.staged = None
            self.take(self.merger.on_snapshot_end(key, was_used=was_used))

    def lose(self, index: int) -> None:
        key = index % len(self.sources)
        self.sources[key].staged = None
        self.take(self.merger.on_source_lost(key))

    def forget(self, index: int) -> None:
        """The source is removed, and added again without blocks."""
        key = index % len(self.sources)
        self.sources[key] = ModelSource()
        self.take(self.merger.remove_source(key))
        self.merger.add_source(key)

    def check(self) -> None:
        known = [each.held for each in self.sources] + [each.staged or set() for each in self.sources]
        union: State = set().union(*known)
        seen = {("GPU", each) for each in self.reader.blocks(0, Tier.DEVICE)}
        seen |= {("CPU", each) for each in self.reader.blocks(0, Tier.HOST)}
        assert seen == union

    def run(self, steps: list[tuple]) -> None:
        for name, *arguments in steps:
            getattr(self, name)(*arguments)
            self.check()


INDEX = st.integers(0, 2)
BLOCKS = st.integers(0, 5)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["store", "store", "remove"]), INDEX, BLOCKS, st.integers(1, 3), st.booleans()),
        st.tuples(st.sampled_from(["clear", "restart", "begin", "lose", "forget"]), INDEX),
        st.tuples(st.just("end"), INDEX, st.sampled_from([True, True, False])),
    ),
    max_size=40,
)  # fmt: skip


@pytest.mark.soak
@settings(max_examples=num_examples(3))
@given(steps=STEPS, num_sources=st.integers(1, 3))
@example(steps=[("begin", 0), ("store", 0, 0, 1, False), ("forget", 0)], num_sources=2)
@example(steps=[("store", 0, 0, 2, False), ("begin", 0), ("store", 0, 1, 2, False), ("forget", 0)], num_sources=2)
def test_the_stream_is_the_union_of_its_sources(steps: list[tuple], num_sources: int) -> None:
    MergeModel(num_sources).run(steps)


# --- broken variants: each is caught by the property ---

Break = Callable[[pytest.MonkeyPatch], None]
BROKEN: list[Any] = []


def caught_by(broken: Break, num_sources: int, *steps: tuple) -> None:
    """Register a broken merger with steps that expose it; `make soak` checks that random steps expose it too."""
    BROKEN.append(pytest.param(broken, num_sources, list(steps), id=broken.__name__))


caught_by(broken_relay_cores.a_restart_forgets_nothing, 1, ("store", 0, 0, 1, False), ("restart", 0))
caught_by(broken_relay_cores.a_clear_of_one_source_clears_all, 2, ("store", 0, 0, 1, False), ("clear", 1))
caught_by(
    broken_relay_cores.a_removal_counts_for_all_sources,
    2,
    ("store", 0, 0, 1, False),
    ("store", 1, 0, 1, False),
    ("clear", 0),
)
caught_by(broken_relay_cores.a_snapshot_replaces_nothing, 1, ("store", 0, 0, 1, False), ("begin", 0), ("end", 0, True))
caught_by(broken_relay_cores.a_cut_snapshot_is_kept, 1, ("begin", 0), ("store", 0, 0, 1, False), ("begin", 0))
caught_by(
    broken_relay_cores.a_snapshot_is_applied_to_the_view, 1, ("store", 0, 0, 1, False), ("begin", 0), ("clear", 0)
)
caught_by(
    broken_relay_cores.a_source_forgotten_during_its_snapshot_leaves_blocks,
    2,
    ("begin", 0),
    ("store", 0, 0, 1, False),
    ("forget", 0),
)
caught_by(
    broken_relay_cores.a_lost_source_keeps_its_unfinished_snapshot,
    1,
    ("begin", 0),
    ("store", 0, 0, 1, False),
    ("lose", 0),
)
caught_by(broken_relay_cores.media_are_one, 2, ("store", 0, 0, 1, False), ("store", 0, 0, 1, True))


@pytest.mark.broken_variants
@pytest.mark.soak
@pytest.mark.parametrize(("broken", "num_sources", "steps"), BROKEN)
def test_a_broken_merger_is_caught(
    broken: Break, num_sources: int, steps: list[tuple], soaking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    @settings(max_examples=500, database=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    @given(steps=STEPS, num_sources=st.integers(1, 3))
    def search(steps: list[tuple], num_sources: int) -> None:
        MergeModel(num_sources).run(steps)

    MergeModel(num_sources).run(steps)
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        MergeModel(num_sources).run(steps)
    if soaking:
        with pytest.raises(AssertionError):
            search()


# --- by example ---


def test_a_worker_with_one_source_sees_its_events_unchanged() -> None:
    merger = SourceMerger([0])
    events = (stored_run(0, 3), removed_run(2, 1), removed_run(77, 1), AllBlocksCleared(), stored_run(0, 1))
    assert merger.on_batch_applied(0, events) is events


def test_a_clear_of_one_source_removes_only_its_blocks() -> None:
    merger = SourceMerger([0, 1])
    merger.on_batch_applied(0, (stored_run(0, 4),))
    merger.on_batch_applied(1, (stored_run(0, 2), stored_run(0, 4, "CPU")))
    assert merger.on_batch_applied(0, (AllBlocksCleared(),)) == (BlockRemoved((2, 3)),)
    assert merger.on_view_cleared(1) == (AllBlocksCleared(),)


def test_group_owner_and_worker_distinguish_blocks() -> None:
    sites = [{}, {"group_idx": 1}, {"locality": "REMOTE"}, {"ownership": "shared"}, {"medium": "CPU", "group_idx": 1}]
    events = tuple(msgspec.structs.replace(stored_run(0, 1), **location) for location in sites)
    merger = SourceMerger([0, 1])
    assert merger.on_batch_applied(0, events) == events
    merger.on_batch_applied(1, events[:1])
    taken_back = merger.on_batch_applied(0, (AllBlocksCleared(),))
    assert taken_back == tuple(BlockRemoved((0,), **location) for location in sites[1:])


def test_a_block_repeated_by_a_snapshot_is_not_published_again() -> None:
    merger = SourceMerger([0])
    merger.on_batch_applied(0, (stored_run(0, 3),))
    merger.on_snapshot_begin(0)
    assert merger.on_batch_applied(0, (stored_run(0, 2), stored_run(3, 1))) == (stored_run(3, 1),)
    assert merger.on_snapshot_end(0, was_used=True) == (BlockRemoved((2,)),)


def test_removing_an_empty_source_publishes_nothing() -> None:
    merger = SourceMerger([0, 1])
    assert merger.on_view_cleared(0) == merger.remove_source(1) == merger.remove_source(1) == ()


def test_the_stream_has_the_state_of_its_least_trusted_source() -> None:
    merger = SourceMerger([0, 1])
    assert merger.upstream == "connecting"
    merger.on_state_changed(0, StreamState.LIVE)
    merger.on_state_changed(1, StreamState.PARTIAL)
    assert merger.upstream == "partial"
    merger.on_state_changed(1, StreamState.LIVE)
    assert merger.upstream is None
    merger.on_source_lost(0)
    assert merger.upstream == "connecting"
    merger.remove_source(0)
    assert merger.upstream is None
    assert least_trusted_state([]) is StreamState.CONNECTING
