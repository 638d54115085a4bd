"""A replica is silent while one of its ranks is. Each silence is reported once, and a heartbeat ends it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_engine.engine.messages import HEARTBEAT_INTERVAL_S, RankHeartbeat, RankStalled
from scheduler_engine.frontend.heartbeat_monitor import HeartbeatMonitor

RANKS = [RankHeartbeat(f"dp{replica}/tp{tp_rank}", replica) for replica in range(2) for tp_rank in range(2)]
TIMEOUT_TICKS = 3


@given(st.lists(st.just(None) | st.sampled_from(RANKS), max_size=60))
def test_silence_is_measured_from_the_last_heartbeat_of_each_rank(history: list[RankHeartbeat | None]) -> None:
    monitor = HeartbeatMonitor(timeout_s=TIMEOUT_TICKS * HEARTBEAT_INTERVAL_S)
    ages: dict[RankHeartbeat, int] = {}
    was_silent: set[int] = set()
    for heartbeat in history:
        if heartbeat is not None:
            monitor.on_heartbeat(heartbeat)
            ages[heartbeat] = 0
            continue
        ages = {rank: age + 1 for rank, age in ages.items()}
        new = monitor.tick()
        is_silent = {rank.replica for rank, age in ages.items() if age > TIMEOUT_TICKS}
        assert set(new) == is_silent - was_silent
        was_silent = is_silent
    errors = {replica: str(error) for replica, error in monitor.silent_replicas().items()}
    assert set(errors) == {rank.replica for rank, age in ages.items() if age > TIMEOUT_TICKS}
    for replica, text in errors.items():
        longest = max(age for rank, age in ages.items() if rank.replica == replica)
        assert text in {
            f"rank {rank.rank} has sent no heartbeat for {longest * HEARTBEAT_INTERVAL_S:g} s"
            for rank, age in ages.items()
            if rank.replica == replica and age == longest
        }


def test_under_dp_attention_a_silent_rank_blocks_all_replicas() -> None:
    monitor = HeartbeatMonitor(timeout_s=TIMEOUT_TICKS * HEARTBEAT_INTERVAL_S, num_lockstep_replicas=2)
    for rank in RANKS:
        monitor.on_heartbeat(rank)
    for _ in range(TIMEOUT_TICKS + 1):
        for rank in RANKS[1:]:
            monitor.on_heartbeat(rank)
        new = monitor.tick()
    assert {replica: str(error) for replica, error in new.items()} == dict.fromkeys(
        (0, 1), "rank dp0/tp0 has sent no heartbeat for 2 s"
    )
    monitor.on_heartbeat(RANKS[0])
    assert not monitor.silent_replicas()


def test_a_stalled_rank_is_reported_with_its_place_until_its_next_heartbeat() -> None:
    monitor, rank = HeartbeatMonitor(timeout_s=TIMEOUT_TICKS * HEARTBEAT_INTERVAL_S), RANKS[0]
    monitor.on_heartbeat(rank)
    monitor.on_stall(RankStalled(rank, "step 3, phase device, request r1"))
    assert not monitor.silent_replicas(), "a stuck rank is no silent one yet"
    for _ in range(TIMEOUT_TICKS + 1):
        monitor.tick()
    assert str(monitor.silent_replicas()[0]).endswith(
        "has sent no heartbeat for 2 s; it is stuck in step 3, phase device, request r1"
    )
    monitor.on_heartbeat(rank)
    for _ in range(TIMEOUT_TICKS + 1):
        monitor.tick()
    assert str(monitor.silent_replicas()[0]).endswith("has sent no heartbeat for 2 s")
