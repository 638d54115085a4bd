"""A replica is silent while one of its ranks is, each silence is told once, and a word ends it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_components.reference.engine.messages import ALIVE_EVERY_S, RankAlive, RankStalled
from scheduler_components.reference.engine.pulse import RankPulse

RANKS = [RankAlive(f"dp{replica}/tp{tp_rank}", replica) for replica in range(2) for tp_rank in range(2)]
PATIENCE = 3


@given(st.lists(st.just(None) | st.sampled_from(RANKS), max_size=60))
def test_silence_is_that_of_the_ranks_since_their_last_words(history: list[RankAlive | None]) -> None:
    pulse = RankPulse(silent_after_s=PATIENCE * ALIVE_EVERY_S)
    ages: dict[RankAlive, int] = {}
    was_silent: set[int] = set()
    for word in history:
        if word is not None:
            pulse.heard(word)
            ages[word] = 0
            continue
        ages = {rank: age + 1 for rank, age in ages.items()}
        new = pulse.tick()
        is_silent = {rank.replica for rank, age in ages.items() if age > PATIENCE}
        assert set(new) == is_silent - was_silent
        was_silent = is_silent
    told = {replica: str(error) for replica, error in pulse.silent().items()}
    assert set(told) == {rank.replica for rank, age in ages.items() if age > PATIENCE}
    for replica, text in told.items():
        longest = max(age for rank, age in ages.items() if rank.replica == replica)
        assert text in {
            f"rank {rank.rank} has said nothing for {longest * ALIVE_EVERY_S:g} s"
            for rank, age in ages.items()
            if rank.replica == replica and age == longest
        }


def test_under_dp_attention_a_silent_rank_holds_up_all_replicas() -> None:
    pulse = RankPulse(silent_after_s=PATIENCE * ALIVE_EVERY_S, num_in_step=2)
    for rank in RANKS:
        pulse.heard(rank)
    for _ in range(PATIENCE + 1):
        for rank in RANKS[1:]:
            pulse.heard(rank)
        new = pulse.tick()
    assert {replica: str(error) for replica, error in new.items()} == dict.fromkeys(
        (0, 1), "rank dp0/tp0 has said nothing for 2 s"
    )
    pulse.heard(RANKS[0])
    assert not pulse.silent()


def test_a_silent_rank_that_is_stuck_is_told_with_its_place_until_it_speaks() -> None:
    pulse, rank = RankPulse(silent_after_s=PATIENCE * ALIVE_EVERY_S), RANKS[0]
    pulse.heard(rank)
    pulse.stalled(RankStalled(rank, "step 3, phase device, request r1"))
    assert not pulse.silent(), "a stuck rank is no silent one yet"
    for _ in range(PATIENCE + 1):
        pulse.tick()
    assert str(pulse.silent()[0]).endswith("has said nothing for 2 s; it is stuck in step 3, phase device, request r1")
    pulse.heard(rank)
    for _ in range(PATIENCE + 1):
        pulse.tick()
    assert str(pulse.silent()[0]).endswith("has said nothing for 2 s")
