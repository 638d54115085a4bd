"""The reference of each cached block and the counters of references, compared with a model that counts from scratch."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from collections import Counter
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_components import AllBlocksCleared, BlockStored, KVEventBatch
from scheduler_components.events import LOCAL_GPU, BlockLocation, block_location
from scheduler_components.kv_events import BatchEncoder
from scheduler_components.kv_events.snapshot import BlockRun, CachedBlocks, PayloadRef, StreamSnapshot

SITES = (LOCAL_GPU, block_location("CPU_PINNED", None, None, None))


class NoRuns:
    def runs(self, content: Any) -> list[BlockRun[Any]]:
        raise AssertionError("counting reads nothing")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from(SITES), st.lists(st.integers(0, 9), max_size=6, unique=True)),
        st.tuples(st.just("remove"), st.sampled_from(SITES), st.lists(st.integers(0, 9), max_size=4)),
        st.tuples(st.just("complete"), st.integers(1, 99)),
        st.tuples(st.just("rewrite"), st.integers(0, 20), st.integers(1, 99)),
        st.tuples(st.just("clear")),
    ),
    max_size=30,
)


@example(
    [
        ("store", LOCAL_GPU, [1, 2]),
        ("complete", 5),
        ("store", LOCAL_GPU, [3]),
        ("complete", 7),
        ("remove", LOCAL_GPU, [1, 2]),
    ]
)
@example(
    [("store", LOCAL_GPU, [1, 2, 3, 4]), ("complete", 5), ("remove", LOCAL_GPU, [1, 2]), ("remove", LOCAL_GPU, [3])]
)
@example(
    [
        ("store", LOCAL_GPU, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("complete", 9),
        ("remove", LOCAL_GPU, [0, 1, 2, 3]),
        ("rewrite", 0, 5),
        ("remove", LOCAL_GPU, [4, 5]),
    ]
)
@given(STEPS)
def test_references_are_counted_while_one_of_their_blocks_is_cached(steps: list[tuple[Any, ...]]) -> None:
    """A reference is listed as half gone once, when no more than half of its blocks are cached."""
    state: CachedBlocks[Any] = CachedBlocks(NoRuns())
    owner: dict[tuple[BlockLocation, int], PayloadRef] = {}
    completed: dict[int, tuple[PayloadRef, int, int]] = {}  # by serial: the reference, its bytes, its blocks
    num_reports: Counter[int] = Counter()
    ref = state.new_ref()
    for name, *values in steps:
        if name == "store":
            location, hashes = values
            state.store(location, array("q", hashes).tobytes(), ref)
            owner |= {(location, each): ref for each in hashes}
        elif name == "remove":
            location, hashes = values
            state.remove(location, array("q", hashes).tobytes())
            for each in hashes:
                owner.pop((location, each), None)
        elif name == "complete":
            if any(each is ref for each in owner.values()):
                completed[ref.serial] = ref, values[0], ref.num_stored
            state.complete(ref, bytes(values[0]))
            ref = state.new_ref()
        elif name == "rewrite" and completed:
            serial = sorted(completed)[values[0] % len(completed)]
            again, *_ = completed[serial]
            num_cached = sum(each is again for each in owner.values())
            if num_cached and again.content is not None:
                state.rewrite(again, bytes(values[1]), num_cached)
                completed[serial] = again, values[1], num_cached
                state.half_gone = type(state.half_gone)(each for each in state.half_gone if each is not again)
                num_reports[serial] = 0
        elif name == "clear":
            state.clear()
            owner.clear()
            completed.clear()
            num_reports.clear()
            ref = state.new_ref()
        standing = Counter(each.serial for each in owner.values())
        alive = {serial: found for serial, found in completed.items() if standing[serial]}
        assert len(state) == len(owner)
        assert state.num_bytes == sum(num_bytes for _, num_bytes, _ in alive.values())
        assert state.num_stored == sum(num_stored for _, _, num_stored in alive.values())
        for serial, (each, num_bytes, num_stored) in alive.items():
            assert (each.num_cached, each.content) == (standing[serial], bytes(num_bytes))
            if standing[serial] <= num_stored // 2:
                num_reports[serial] = 1
        assert {serial: count for serial, count in num_reports.items() if count and serial in alive} == Counter(
            each.serial for each in state.half_gone if each.num_cached
        )
        for serial in set(completed) - set(alive):
            assert completed[serial][0].content is None


def test_payloads_that_were_cleared_before_their_reference_was_full_are_dropped() -> None:
    snapshot, encoder = StreamSnapshot(), BatchEncoder()
    snapshot.fold(encoder.encode(KVEventBatch(1.0, (BlockStored((5,), None, (1,), 1, None),)), 0))
    snapshot.fold(encoder.encode(KVEventBatch(1.0, (AllBlocksCleared(),)), 0))
    assert list(snapshot.segments()) == []
    assert (len(snapshot), snapshot.num_bytes) == (0, 0)


def test_no_fold_copies_more_than_a_part_of_the_blocks() -> None:
    """Python copies a table in one go when it has grown. The largest fold of a single table allocates 1.2 MB here."""
    choose = random.Random(24)
    snapshot, encoder = StreamSnapshot(), BatchEncoder()
    largest = 0
    tracemalloc.start()
    try:
        for _ in range(1_500):
            hashes = tuple(choose.getrandbits(63) for _ in range(20))
            folded = encoder.encode_with_changes(KVEventBatch(1.0, (BlockStored(hashes, None, (7,) * 20, 1, None),)), 0)
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            snapshot.fold(*folded)
            largest = max(largest, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert len(snapshot) == 30_000
    assert largest < 400_000
