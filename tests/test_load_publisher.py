"""The leading rank publishes a load that changed or that is due, and a failing sink does not affect the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError, GaugePacer, LoadPublisher, ParallelState, open_load_publisher
from scheduler_components.testing import VirtualClock
from scheduler_components.testing.fakes import ListSink
from scheduler_components.values import LoadSnapshot

Sink: TypeAlias = ListSink[LoadSnapshot]


@dataclass
class Load:
    running: int = 0
    reads: int = 0
    broken: bool = False

    def get_loads(self) -> LoadSnapshot:
        self.reads += 1
        if self.broken:
            raise RuntimeError("no load")
        return LoadSnapshot(sequence=self.reads, timestamp=self.reads, num_running_reqs=self.running)


def running(sink: Sink) -> list[int]:
    return [load.num_running_reqs for load in sink.sent]


def make(parallel: ParallelState | None = None) -> tuple[LoadPublisher, Load, Sink, VirtualClock]:
    load, sink, clock = Load(), Sink(), VirtualClock(0.0)
    pacer = GaugePacer(min_interval_s=0.5, heartbeat_s=2.0)
    parallel = parallel or ParallelState()
    return LoadPublisher(parallel=parallel, load=load, sinks=(sink,), pacer=pacer, clock=clock), load, sink, clock


def test_a_changed_load_is_sent_and_an_unchanged_one_waits_for_the_heartbeat() -> None:
    publisher, load, sink, clock = make()
    for clock.now_s, load.running in [(0, 1), (0.6, 1), (1.2, 2), (1.8, 2), (3.3, 2), (3.4, 9)]:
        publisher.publish_load()
    assert running(sink) == [1, 2, 2]
    assert (publisher.pacer.unchanged, publisher.pacer.throttled) == (2, 1)


def test_while_throttled_the_load_is_not_even_read() -> None:
    publisher, load, _, _ = make()
    for load.running in range(100):
        publisher.publish_load()
    assert load.reads == 1


def test_flush_sends_a_throttled_load_once() -> None:
    publisher, load, sink, clock = make()
    publisher.publish_load()
    load.running, clock.now_s = 5, 0.1
    publisher.publish_load()
    publisher.flush()
    publisher.flush()
    assert running(sink) == [0, 5]


@pytest.mark.parametrize("part", ["load", "sink"])
def test_a_failure_does_not_raise_into_the_step_and_the_load_is_sent_later(part: str) -> None:
    publisher, load, sink, clock = make()
    load.broken = part == "load"
    sink.error = OSError("gone") if part == "sink" else None
    publisher.publish_load()
    assert running(sink) == []
    assert publisher.failures.total == 1
    load.broken, sink.error, clock.now_s = False, None, 0.6
    publisher.publish_load()
    assert running(sink) == [0]


def test_a_failing_sink_does_not_keep_the_load_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    publisher, load, sink, clock = make()
    broken = Sink()
    broken.error = OSError("gone")
    publisher.sinks = (broken, sink)
    for load.running in range(3):
        publisher.publish_load()
        clock.now_s += 0.6
    assert running(sink) == [0, 1, 2]
    assert (publisher.failures.total, len(caplog.records)) == (3, 1)
    broken.error, load.running = None, 9
    publisher.publish_load()
    assert (running(sink)[-1], running(broken)) == (9, [9])


@settings(deadline=None)
@given(st.integers(0, 15))
def test_one_rank_of_each_cache_publishes(tp_rank: int) -> None:
    parallel = ParallelState.from_tp_rank(tp_rank, tp_size=16, attn_dp_size=4, attn_cp_size=2)
    publisher, load, sink, _ = make(parallel)
    publisher.publish_load()
    publisher.flush()
    assert running(sink) == [0] * parallel.owns_kv_stream
    assert load.reads == 2 * parallel.owns_kv_stream


def test_close_may_be_called_twice_and_nothing_is_sent_afterwards() -> None:
    publisher, _, sink, _ = make()
    sink.error = OSError("stuck")
    publisher.close()
    publisher.close()
    publisher.publish_load()
    publisher.flush()
    assert (sink.num_closed, publisher.failures.total) == (1, 1)


@pytest.mark.parametrize("config", [None, "", '{"publisher": "zmq"}', "{}"])
def test_without_a_load_endpoint_nothing_is_opened_or_read(config: str | None) -> None:
    load = Load()
    publisher = open_load_publisher(config, parallel=ParallelState(), load=load)
    publisher.publish_load()
    publisher.close()
    assert load.reads == 0


def test_the_load_is_not_read_for_a_sink_that_wants_none() -> None:
    publisher, load, sink, _ = make()
    sink.wants_reports = False
    publisher.publish_load()
    publisher.flush()
    assert (load.reads, sink.sent) == (0, [])
    sink.wants_reports = True
    publisher.publish_load()
    assert (load.reads, running(sink)) == (1, [0])


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ('{"load_endpoint": "tcp://*:5557"}', "load_endpoint"),  # the events' own port
        ('{"load_endpoint": "inproc://x"}', "load_endpoint"),
        ('{"load_endpoint": "tcp://*:65535"}', "load_endpoint"),  # no port left for the second stream
        ('{"load_endpoint": 5}', "load_endpoint"),
        ('{"load_endpoints": "tcp://*:5600"}', "load_endpoints"),
    ],
)
@pytest.mark.parametrize("tp_rank", [0, 1, 3])
def test_a_bad_configuration_fails_on_every_rank_alike(config: str, field: str, tp_rank: int) -> None:
    parallel = ParallelState.from_tp_rank(tp_rank, tp_size=4, attn_dp_size=2)
    with pytest.raises(ConfigError) as error:
        open_load_publisher(config, parallel=parallel, load=Load())
    assert error.value.field == field
