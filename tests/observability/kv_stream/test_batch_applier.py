"""Batches are applied as far as they can be read, and a discarded snapshot leaves no blocks."""

from __future__ import annotations

import msgspec
import pytest
from kit.events import stored
from kit.follower_bench import live_bench, payload

from observability.kv_stream import (
    StreamState,
)
from scheduler_components import BlockStored


def test_a_batch_with_one_bad_event_applies_the_others() -> None:
    bench = live_bench()
    sound, bad = ("BlockStored", [6], None, [1, 2], 2, None), ("BlockStored", [1, 2], None, [1], 1, None)
    bench.follower.on_live_batch(1, msgspec.msgpack.encode((100.0, [sound, bad], 3)), 1.0)
    assert (bench.state, bench.view.blocks(3)) == (StreamState.PARTIAL, {5, 6})
    assert bench.follower.applier.decode_errors == 1


def test_a_batch_of_another_rank_is_counted() -> None:
    bench = live_bench()
    bench.follower.on_live_batch(1, payload(stored(6), rank=0), 1.0)
    assert bench.follower.applier.rank_mismatches == 1
    assert bench.view.blocks(3) == {5, 6}


def test_the_newest_batch_ages_also_when_it_was_replayed() -> None:
    """The clock of the bench says 110, and batches are stamped 100."""
    bench = live_bench()
    applier = bench.follower.applier
    assert bench.follower.stats("").newest_batch_age_s == 10.0
    applier.wall_clock = lambda: 99.0  # a reader whose clock is behind
    assert bench.follower.stats("").newest_batch_age_s == -1.0
    bench.follower.on_disconnected(1.0)
    bench.at(60.0)
    assert bench.state is StreamState.DEAD
    assert bench.follower.stats("").newest_batch_age_s is None


def test_a_snapshot_changes_the_age_when_it_replaces_the_view() -> None:
    bench = live_bench()
    applier = bench.follower.applier
    applier.start_staging()
    applier.apply_staged(5, payload(stored(7)), is_snapshot_chunk=True)
    later = msgspec.msgpack.encode((107.0, [], 3))
    applier.apply_staged(6, later, is_snapshot_chunk=False)
    assert bench.follower.stats("").newest_batch_age_s == 10.0
    applier.commit_staging()
    assert bench.follower.stats("").newest_batch_age_s == 3.0
    applier.start_staging()
    applier.apply_staged(7, payload(stored(7)), is_snapshot_chunk=True)
    applier.commit_staging()
    assert bench.follower.stats("").newest_batch_age_s is None  # a chunk has no time


@pytest.mark.parametrize("begins_another", [True, False])
def test_a_discarded_snapshot_leaves_no_blocks(begins_another: bool) -> None:
    bench = live_bench()
    applier, before = bench.follower.applier, bench.view.blocks(3)
    many = tuple(range(100, 20_000))
    applier.start_staging()
    applier.apply_staged(0, payload(BlockStored(many, None, many, 1, None)), is_snapshot_chunk=True)
    assert (bench.view.blocks(3), bench.view.is_swept) == (before, True)
    if begins_another:
        applier.start_staging()
    else:
        applier.abort_staging()
    assert not bench.view.is_swept  # its blocks wait for the sweep
    while bench.view.sweep():
        pass
    assert bench.view.blocks(3) == before
