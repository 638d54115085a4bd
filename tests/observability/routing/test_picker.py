"""Pickers: what each prefers, and that a seed repeats it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.routing import (
    BoundedLoad,
    Candidate,
    LeastCost,
    Picker,
    PickerName,
    PowerOfTwo,
    Softmax,
    StickySessions,
    make_picker,
)
from scheduler_components import ConfigError


def candidates(*costs: float, loads: Sequence[float] = (), sent: Sequence[int] = ()) -> list[Candidate]:
    return [
        Candidate(place, cost, load_blocks=loads[place] if loads else cost, num_dispatched=sent[place] if sent else 0)
        for place, cost in enumerate(costs)
    ]


def pick(picker: Picker, among: Sequence[Candidate], session: str | None = None, now_s: float = 0.0) -> int | str:
    return picker.pick(among, session=session, now_s=now_s).replica


def test_least_cost_prefers_fewer_requests_and_then_the_first() -> None:
    assert pick(LeastCost(), candidates(3, 1, 2)) == 1
    assert pick(LeastCost(), candidates(1, 1, 1, sent=(4, 3, 3))) == 1


def test_softmax_picks_low_costs_more_often() -> None:
    picker = Softmax(rng=random.Random(1), temperature=0.5)
    counts = Counter(pick(picker, candidates(0, 50, 100)) for _ in range(600))
    assert counts[0] > counts[1] > counts[2] > 0
    cold = Softmax(rng=random.Random(1), temperature=0.01)
    assert {pick(cold, candidates(0, 50, 100)) for _ in range(100)} == {0}


def test_softmax_of_equal_costs_is_uniform() -> None:
    picker = Softmax(rng=random.Random(2))
    counts = Counter(pick(picker, candidates(7, 7, 7)) for _ in range(300))
    assert min(counts[place] for place in range(3)) > 70


def test_two_choices_never_pick_the_most_expensive() -> None:
    picker = PowerOfTwo(rng=random.Random(3))
    assert {pick(picker, candidates(5, 1, 9, 2)) for _ in range(100)} == {0, 1, 3}
    assert pick(picker, candidates(5)) == 0


def test_a_replica_above_the_bound_is_left_out() -> None:
    picker = BoundedLoad(factor=1.5)
    assert pick(picker, candidates(0, 9, 9, loads=(40, 10, 10))) == 1, "the mean is 20, the bound 30"
    assert pick(picker, candidates(0, 9, 9, loads=(30, 25, 25))) == 0


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=9), st.floats(1, 4))
def test_the_least_loaded_replica_is_within_any_bound(loads: list[float], factor: float) -> None:
    picker = BoundedLoad(factor=factor)
    chosen = picker.pick(candidates(*range(len(loads)), loads=loads), session=None, now_s=0.0)
    assert chosen.load_blocks <= max(min(loads), factor * sum(loads) / len(loads) * (1 + 1e-9))


def test_equal_loads_are_within_their_mean_whatever_it_is_rounded_to() -> None:
    load = 0.7258526014465152  # the sum of six, divided by six, is below it
    assert pick(BoundedLoad(factor=1), candidates(*range(6), loads=[load] * 6)) == 0


def test_a_session_stays_while_its_replica_is_a_candidate() -> None:
    picker = StickySessions(ttl_s=10)
    assert pick(picker, candidates(1, 2, 3), "a", 0.0) == 0
    assert pick(picker, candidates(9, 2, 3), "a", 9.0) == 0
    assert pick(picker, candidates(9, 2, 3), None, 9.0) == 1
    assert pick(picker, candidates(9, 2, 3)[1:], "a", 12.0) == 1, "the replica has gone"
    assert pick(picker, candidates(0, 2, 3), "a", 13.0) == 1, "the session has moved"
    assert pick(picker, candidates(0, 2, 3), "a", 23.0) == 0, "the session has expired"


def test_sessions_are_bounded() -> None:
    picker = StickySessions(max_sessions=2)
    for name in ("a", "b", "a", "c"):
        pick(picker, candidates(0, 1), name)
    assert picker.num_sessions == 2
    assert pick(picker, candidates(9, 1), "a") == 0, "b had the oldest request"
    assert pick(picker, candidates(9, 1), "b") == 1


def test_a_session_leaves_an_overloaded_replica() -> None:
    picker = BoundedLoad(factor=1.5, inner=StickySessions())
    assert pick(picker, candidates(1, 2, 3), "a") == 0
    assert pick(picker, candidates(100, 2, 3), "a") == 1
    assert pick(picker, candidates(1, 2, 3), "a") == 1


@pytest.mark.parametrize(
    "make", [lambda rng: Softmax(rng=rng), lambda rng: PowerOfTwo(rng=rng)], ids=["softmax", "power-of-two"]
)
def test_a_seed_repeats_the_picks(make: Callable[[random.Random], Picker]) -> None:
    first, second = (
        [pick(picker, candidates(3, 1, 2, 8)) for _ in range(50)]
        for picker in (make(random.Random(5)), make(random.Random(5)))
    )
    assert first == second


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Softmax(rng=random.Random(0), temperature=0), "temperature"),
        (lambda: BoundedLoad(factor=0.5), "factor"),
        (lambda: BoundedLoad(factor=float("nan")), "factor"),
        (lambda: StickySessions(ttl_s=0), "ttl_s"),
        (lambda: StickySessions(max_sessions=0), "max_sessions"),
    ],
)
def test_a_wrong_setting_is_refused(make: Callable[[], Picker], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()


def test_each_name_makes_its_picker_and_another_is_refused() -> None:
    kinds = [type(make_picker(name, random.Random(0))) for name in get_args(PickerName)]
    assert kinds == [LeastCost, Softmax, PowerOfTwo, BoundedLoad, StickySessions]
    with pytest.raises(ConfigError, match="picker='best': is not a picker"):
        make_picker("best", random.Random(0))
