"""ReplicaSet: which replicas may get a request, over any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.routing import ReplicaSet, ReplicaState
from scheduler_components import ConfigError


def test_a_silent_replica_is_down_until_it_is_heard() -> None:
    replicas = ReplicaSet(silence_s=5)
    replicas.add("a", 0.0)
    replicas.add("b", 3.0)
    assert replicas.up(5.0) == ["a", "b"]
    assert replicas.up(6.0) == ["b"]
    assert replicas.state_of("a", 6.0) is ReplicaState.DOWN
    replicas.on_heartbeat("a", 7.0)
    assert replicas.up(8.0) == ["a", "b"]


def test_an_old_sign_of_life_does_not_age_a_replica() -> None:
    replicas = ReplicaSet(silence_s=5)
    replicas.add("a", 10.0)
    replicas.on_heartbeat("a", 1.0)
    assert replicas.up(15.0) == ["a"]


def test_a_draining_replica_gets_nothing_and_stays_known() -> None:
    replicas = ReplicaSet()
    replicas.add("a", 0.0)
    replicas.add("b", 0.0)
    replicas.drain("a")
    replicas.on_heartbeat("a", 1.0)
    assert replicas.up(1e9) == ["b"]
    assert (replicas.state_of("a", 1.0), "a" in replicas, len(replicas)) == (ReplicaState.DRAINING, True, 2)
    replicas.add("a", 2.0)
    assert replicas.state_of("a", 2.0) is ReplicaState.UP, "it has returned"


def test_a_failed_connection_is_down_until_a_sign_of_life() -> None:
    replicas = ReplicaSet(silence_s=60)
    replicas.add("a", 0.0)
    replicas.mark_down("a")
    assert replicas.up(0.0) == []
    replicas.on_heartbeat("a", 1.0)
    assert replicas.up(1.0) == ["a"]


def test_unknown_replicas_are_ignored() -> None:
    replicas = ReplicaSet()
    for act in (replicas.remove, replicas.drain, replicas.mark_down):
        act("a")
    replicas.on_heartbeat("a", 1.0)
    assert (replicas.up(1.0), replicas.state_of("a", 1.0)) == ([], None)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "drain", "mark_down", "on_heartbeat", "wait"]),
        st.integers(0, 2),
        st.sampled_from([0.0, 0.5, 2.0, 4.0]),
    ),
    max_size=40,
)


@given(STEPS)
def test_a_replica_without_a_sign_of_life_within_the_bound_is_not_up(steps: list[tuple[str, int, float]]) -> None:
    replicas, now_s, heard_s = ReplicaSet(silence_s=3.0), 0.0, dict[int, float]()
    for act, replica, wait_s in steps:
        now_s += wait_s
        if act in ("add", "on_heartbeat"):
            getattr(replicas, act)(replica, now_s)
            if act == "add" or replica in replicas:
                heard_s[replica] = now_s
        elif act != "wait":
            getattr(replicas, act)(replica)
            if act == "remove":
                heard_s.pop(replica, None)
        up = replicas.up(now_s)
        assert all(now_s - heard_s[each] <= 3.0 for each in up if isinstance(each, int))
        assert {replicas.state_of(each, now_s) for each in up} <= {ReplicaState.UP}


def test_a_wrong_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="silence_s"):
        ReplicaSet(silence_s=0)
