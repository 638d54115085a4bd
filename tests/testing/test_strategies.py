"""What the strategies make is what they say: sound where sound, refused by name where bad."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError, ParallelState
from scheduler_components.kv_events import Endpoint, KVEventsConfig
from scheduler_components.testing.interfaces import Workload
from scheduler_components.testing.strategies import (
    config_texts,
    endpoints,
    invalid_config_texts,
    local_endpoints,
    parallel_states,
    tcp_endpoints,
    workloads,
)


@settings(deadline=None)
@given(text=config_texts(), streams=st.integers(1, 64))
def test_sound_configs_are_taken(text: str, streams: int) -> None:
    assert KVEventsConfig.from_cli(text).port_plan(streams).stream_count == streams


@settings(deadline=None, max_examples=200)
@given(case=invalid_config_texts())
def test_a_config_with_one_mistake_is_refused_by_its_name(case: tuple[str, str]) -> None:
    field, text = case
    try:
        KVEventsConfig.from_cli(text).port_plan(2)
    except ConfigError as error:
        assert error.field == field
        return
    raise AssertionError(f"taken: {text}")


@settings(deadline=None)
@given(any_endpoint=endpoints(), tcp=tcp_endpoints(), local=local_endpoints())
def test_endpoints_are_of_their_kind(any_endpoint: Endpoint, tcp: Endpoint, local: Endpoint) -> None:
    assert any_endpoint.transport in ("tcp", "ipc", "inproc")
    assert (tcp.port is None, local.port is None) == (False, True)


@settings(deadline=None)
@given(state=parallel_states())
def test_a_parallel_state_is_one_rank_of_a_world(state: ParallelState) -> None:
    assert 0 <= state.kv_stream_index < state.kv_stream_count


@settings(deadline=None)
@given(workload=workloads(max_requests=4, max_prompt_tokens=10, max_new_tokens=3, vocabulary=2))
def test_workloads_keep_their_bounds(workload: Workload) -> None:
    assert 1 <= len(workload) <= 4
    for prompt, new_tokens in workload:
        assert 1 <= len(prompt) <= 10
        assert set(prompt) <= {0, 1}
        assert 1 <= new_tokens <= 3
