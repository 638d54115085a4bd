"""The ports of event streams are chosen free, and a port in use is named before any process starts."""

from __future__ import annotations

import socket

import pytest

from scheduler_components import StartError
from scheduler_engine.engine.config import EngineConfig, TelemetryConfig
from scheduler_engine.engine.free_ports import check_ports_free, default_kv_events

pytestmark = pytest.mark.sockets

SIZES = {"dp_size": 2, "attn_cp_size": 1, "attn_tp_size": 2}


def test_the_default_ports_are_free_and_do_not_overlap() -> None:
    events = default_kv_events(EngineConfig(**SIZES))
    check_ports_free(EngineConfig(**SIZES, kv_events=events))
    plan = events.port_plan(1)
    assert plan.replay is not None and plan.load is not None
    first, replay, load = (each.port or 0 for each in (plan.events, plan.replay, plan.load))
    assert (replay - first, load - replay) == (4, 2)


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint", "load_endpoint"])
def test_a_port_in_use_is_named(name: str) -> None:
    events = default_kv_events(EngineConfig(**SIZES))
    host, _, port = getattr(events, name).removeprefix("tcp://").rpartition(":")
    with socket.create_server((host, int(port) + 1)), pytest.raises(StartError, match="is in use") as error:
        check_ports_free(EngineConfig(**SIZES, kv_events=events))
    assert f":{int(port) + 1}" in str(error.value)


def test_an_engine_without_streams_needs_no_ports() -> None:
    check_ports_free(EngineConfig(**SIZES))


def test_a_port_in_use_of_the_forward_pass_metrics_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        telemetry = TelemetryConfig(forward_pass_endpoint=f"tcp://127.0.0.1:{port - 1}")
        with pytest.raises(StartError, match=f":{port}: is in use"):
            check_ports_free(EngineConfig(**SIZES, telemetry=telemetry))
    check_ports_free(EngineConfig(**SIZES, telemetry=TelemetryConfig(forward_pass_endpoint="ipc:///nowhere/fpm")))
