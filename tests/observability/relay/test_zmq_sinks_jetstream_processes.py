"""`relay --jetstream` as an operator runs it: a real server, a relay process, and kill -9."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.follow_policies import SOON_AGAIN

from observability.jetstream import JetStreamConfig, LogAddress, open_jetstream_subscriber
from observability.kv_stream import StreamState
from scheduler_components.kv_events import KVEventsConfig, ZmqEventPublisher

pytestmark = [pytest.mark.faults, pytest.mark.sockets, pytest.mark.processes]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ZmqEventPublisher]:
    at = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    publisher = ZmqEventPublisher(0, config=KVEventsConfig(**at, buffer_steps=20))
    yield publisher
    publisher.shutdown()


@pytest.fixture
def start(engine: ZmqEventPublisher, nats_server: Any, start_relay: Callable[..., Any]) -> Callable[[], Any]:
    """Start a relay that writes the engine's stream to the server."""
    source = f"{engine.endpoint},{engine.replay_endpoint}"
    into = ("--jetstream", nats_server.url, "--worker", "pod-1")
    return lambda: start_relay(source, arguments=into)


def kill(relay: Any) -> None:
    relay.process.kill()
    relay.process.wait()


@pytest.mark.soak_only  # in make test, a relay is killed together with its broker
def test_a_relay_that_is_killed_leaves_its_readers_equal_to_the_engine(
    engine: ZmqEventPublisher,
    nats_server: Any,
    start: Any,
    feed: Any,
    wait_for_whole: Any,
    poll_until: Any,
    soaking: bool,
) -> None:
    """The engine's replay buffer of 20 batches passes while no relay runs. The reader stays."""
    feeder = feed(engine)
    relay = start()
    config = JetStreamConfig(servers=nats_server.url)
    with open_jetstream_subscriber(config, [LogAddress("pod-1")], policy=SOON_AGAIN) as reader:
        wait_for_whole(reader, feeder)
        times = 5 if soaking else 2
        for number in range(times):
            feeder.churn(40)
            if number % 2:
                wait_for_whole(reader, feeder)
            kill(relay)  # the first time, and every second one, with batches in flight
            feeder.churn(40)
            poll_until(reader, lambda: reader.stats()[0].state is StreamState.CONNECTING)
            relay = start()
            feeder.churn(40)
            wait_for_whole(reader, feeder)
        stats = reader.stats()[0]
        assert (stats.restarts, stats.decode_errors, stats.losses) == (times, 0, 0)
        with open_jetstream_subscriber(config, [LogAddress("pod-1")], policy=SOON_AGAIN) as late:
            wait_for_whole(late, feeder)


def test_server_relay_and_reader_may_be_killed(
    engine: ZmqEventPublisher, nats_server: Any, start: Any, feed: Any, wait_for_whole: Any
) -> None:
    """Readers that start in between find the engine's blocks each time, and so does one that stays."""
    feeder = feed(engine)
    relay = start()
    config = JetStreamConfig(servers=nats_server.url)

    def read() -> None:
        with open_jetstream_subscriber(config, [LogAddress("pod-1")], policy=SOON_AGAIN) as reader:
            wait_for_whole(reader, feeder)

    with open_jetstream_subscriber(config, [LogAddress("pod-1")], policy=SOON_AGAIN) as stays:
        feeder.churn(40)
        wait_for_whole(stays, feeder)
        nats_server.kill()
        feeder.churn(40)
        nats_server.start()
        read()
        nats_server.kill()
        feeder.churn(40)
        kill(relay)
        relay = start()  # before its broker
        nats_server.start()
        feeder.churn(40)
        read()
        wait_for_whole(stays, feeder)
        stats = stays.stats()[0]
        assert (stats.restarts, stats.decode_errors, stats.losses) == (1, 0, 0)
    assert relay.get("/server_info")["kv_events_jetstream"]["worker"] == "pod-1"
    assert 'kv_log_is_connected{rank="0"} 1.0' in relay.get("/metrics")
    assert relay.stop()[0] == 143
