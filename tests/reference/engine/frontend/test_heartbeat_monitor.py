"""A replica is silent while one of its ranks is, each silence is told once, and a word ends it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_components.reference.engine.frontend.heartbeat_monitor import HeartbeatMonitor
from scheduler_components.reference.engine.messages import HEARTBEAT_INTERVAL_S, RankHeartbeat, RankStalled

RANKS = [RankHeartbeat(f"dp{replica}/tp{tp_rank}", replica) for replica in range(2) for tp_rank in range(2)]
PATIENCE = 3


@given(st.lists(st.just(None) | st.sampled_from(RANKS), max_size=60))
def test_silence_is_measured_from_the_last_heartbeat_of_each_rank(history: list[RankHeartbeat | None]) -> None:
    pulse = HeartbeatMonitor(timeout_s=PATIENCE * HEARTBEAT_INTERVAL_S)
    ages: dict[RankHeartbeat, int] = {}
    was_silent: set[int] = set()
    for word in history:
        if word is not None:
            pulse.on_heartbeat(word)
            ages[word] = 0
            continue
        ages = {rank: age + 1 for rank, age in ages.items()}
        new = pulse.tick()
        is_silent = {rank.replica for rank, age in ages.items() if age > PATIENCE}
        assert set(new) == is_silent - was_silent
        was_silent = is_silent
    told = {replica: str(error) for replica, error in pulse.silent_replicas().items()}
    assert set(told) == {rank.replica for rank, age in ages.items() if age > PATIENCE}
    for replica, text in told.items():
        longest = max(age for rank, age in ages.items() if rank.replica == replica)
        assert text in {
            f"rank {rank.rank} has sent no heartbeat for {longest * HEARTBEAT_INTERVAL_S:g} s"
            for rank, age in ages.items()
            if rank.replica == replica and age == longest
        }


def test_under_dp_attention_a_silent_rank_blocks_all_replicas() -> None:
    pulse = HeartbeatMonitor(timeout_s=PATIENCE * HEARTBEAT_INTERVAL_S, num_lockstep_replicas=2)
    for rank in RANKS:
        pulse.on_heartbeat(rank)
    for _ in range(PATIENCE + 1):
        for rank in RANKS[1:]:
            pulse.on_heartbeat(rank)
        new = pulse.tick()
    assert {replica: str(error) for replica, error in new.items()} == dict.fromkeys(
        (0, 1), "rank dp0/tp0 has sent no heartbeat for 2 s"
    )
    pulse.on_heartbeat(RANKS[0])
    assert not pulse.silent_replicas()


def test_a_stalled_rank_is_reported_with_its_place_until_its_next_heartbeat() -> None:
    pulse, rank = HeartbeatMonitor(timeout_s=PATIENCE * HEARTBEAT_INTERVAL_S), RANKS[0]
    pulse.on_heartbeat(rank)
    pulse.on_stall(RankStalled(rank, "step 3, phase device, request r1"))
    assert not pulse.silent_replicas(), "a stuck rank is no silent one yet"
    for _ in range(PATIENCE + 1):
        pulse.tick()
    assert str(pulse.silent_replicas()[0]).endswith(
        "has sent no heartbeat for 2 s; it is stuck in step 3, phase device, request r1"
    )
    pulse.on_heartbeat(rank)
    for _ in range(PATIENCE + 1):
        pulse.tick()
    assert str(pulse.silent_replicas()[0]).endswith("has sent no heartbeat for 2 s")
