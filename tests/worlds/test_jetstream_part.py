"""A log in JetStream under faults: every promise holds, one seed is one history, and a late reader arrives."""

from __future__ import annotations

import pytest

from observability.kv_stream import StreamState
from worlds.jetstream_part import JetStreamPart
from worlds.timeline import Timeline
from worlds.world_counters import WorldCounters

_STORM_S = 12.0
_JUDGED_S = 3.0


def run(seed: int) -> JetStreamPart:
    """Run one history: a storm, a calm time in which a reader joins, and a quiet end."""
    timeline = Timeline(seed=seed)
    part = JetStreamPart(timeline, WorldCounters())
    timeline.run_until(1.0)
    part.begin_storm(_STORM_S)
    timeline.run_until(_STORM_S)
    part.begin_calm()
    part.join()
    until_s = _STORM_S + part.limit_s
    timeline.run_until(until_s)
    while until_s < _STORM_S + part.limit_s + _JUDGED_S:
        until_s += 0.25
        timeline.run_until(until_s)
        part.judge()
    part.begin_quiet()
    timeline.run_until(until_s + 2.0)
    part.check_converged()
    return part


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_promise_holds(soaking: bool) -> None:
    faults = WorldCounters().faults
    for seed in range(500 if soaking else 4):
        faults += run(seed).counters.faults
    assert len(faults) == 17 or not soaking, f"some kind of fault never happened: {sorted(faults)}"


def test_one_seed_is_one_history() -> None:
    first, second, other = run(7), run(7), run(8)
    assert first.timeline.digest == second.timeline.digest != other.timeline.digest
    assert first.truth == second.truth
    assert first.counters == second.counters
    assert [each.follower.stats("") for each in first.readers] == [each.follower.stats("") for each in second.readers]


def test_the_reader_that_joins_is_live() -> None:
    part = run(1)
    assert all(each.state is StreamState.LIVE for each in part.readers)
    assert part.readers[-1].follower.cursor.counters.snapshots == 1
