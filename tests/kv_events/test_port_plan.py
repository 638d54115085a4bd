"""Port plans. Property: a plan is refused exactly when two of its endpoints would be one, or a port passes 65535."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.kv_events import Endpoint, PortPlan
from scheduler_components.testing.strategies import crowded_endpoints


def key(endpoint: Endpoint) -> object:
    """What two sockets cannot share: the port whatever the host, or the path of one transport."""
    return endpoint.port if endpoint.transport == "tcp" else (endpoint.transport, endpoint.path)


def fits(bases: list[Endpoint], stream_count: int) -> bool:
    try:
        every = [base.offset(index) for base in bases for index in range(stream_count)]
    except ConfigError:
        return False
    keys = [key(endpoint) for endpoint in every if endpoint.port != 0]
    return len(keys) == len(set(keys))


@settings(deadline=None)
@given(crowded_endpoints(), st.none() | crowded_endpoints(), st.none() | crowded_endpoints(), st.integers(1, 6))
@example(Endpoint.parse("ipc:///tmp/kv"), Endpoint.parse("ipc:///tmp/kv_dp1"), None, 2)
def test_a_plan_stands_exactly_when_all_its_endpoints_differ(
    events: Endpoint, replay: Endpoint | None, load: Endpoint | None, stream_count: int
) -> None:
    given_bases = [base for base in (events, replay, load) if base is not None]
    try:
        plan = PortPlan(events=events, replay=replay, load=load, stream_count=stream_count)
    except ConfigError as error:
        assert error.field in ("endpoint", "replay_endpoint", "load_endpoint")
        assert not fits(given_bases, stream_count)
        return
    assert fits(given_bases, stream_count)
    for index in range(stream_count):
        assert plan.event_endpoint(index) == events.offset(index)
        assert plan.replay_endpoint(index) == (None if replay is None else replay.offset(index))
        assert plan.load_endpoint(index) == (None if load is None else load.offset(index))


def test_the_habitual_replay_port_next_to_the_events_is_refused_with_two_streams() -> None:
    events, replay = Endpoint.parse("tcp://*:5557"), Endpoint.parse("tcp://*:5558")
    assert PortPlan(events=events, replay=replay, stream_count=1).replay_endpoint(0) == replay
    with pytest.raises(ConfigError) as refused:
        PortPlan(events=events, replay=replay, stream_count=2)
    assert refused.value.field == "replay_endpoint"
    assert "overlaps endpoint='tcp://*:5557' with 2 streams" in refused.value.problem
    assert "at least 2 apart" in refused.value.hint


def test_a_range_past_the_last_port_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        PortPlan(events=Endpoint.parse("tcp://*:5557"), load=Endpoint.parse("tcp://*:65530"), stream_count=8)
    assert refused.value.field == "load_endpoint"
    assert "at most 65528" in refused.value.hint


@pytest.mark.parametrize("stream_count", [0, -1, True, 1.0, "2", None])
def test_the_number_of_streams_is_a_number(stream_count: int) -> None:
    with pytest.raises(ConfigError, match="stream_count"):
        PortPlan(events=Endpoint.parse("tcp://*:5557"), stream_count=stream_count)


@pytest.mark.parametrize("index", [-1, 2, True, "0"])
def test_a_stream_outside_the_plan_has_no_endpoint(index: int) -> None:
    plan = PortPlan(
        events=Endpoint.parse("tcp://*:5557"),
        replay=Endpoint.parse("tcp://*:5567"),
        load=Endpoint.parse("tcp://*:5577"),
        stream_count=2,
    )
    for ask in (plan.event_endpoint, plan.replay_endpoint, plan.load_endpoint):
        with pytest.raises(ConfigError, match="give 0 to 1"):
            ask(index)
