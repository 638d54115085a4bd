"""A relay that also writes into JetStream: engine's publisher, relay, real server, reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import nats
import pytest
from prometheus_client import CollectorRegistry

from observability import LogCollector
from observability.catalog import LOG_METRICS
from observability.jetstream import (
    JetStreamConfig,
    LogAddress,
    open_jetstream_subscriber,
    open_jetstream_writer,
)
from observability.kv_stream import LogStats, StreamState, open_subscriber, static_address
from observability.relay import (
    RelayConfig,
    RelaySinks,
    RelaySource,
    ZmqRelay,
    open_relay,
    parse_relay_config,
)
from scheduler_components import ConfigError, KVEventBatch
from scheduler_components.kv_events import KVEventsConfig, ZmqEventPublisher

pytestmark = [pytest.mark.sockets, pytest.mark.processes]


@contextmanager
def polled(relay: ZmqRelay) -> Iterator[None]:
    """Poll on a separate thread."""
    stopping = threading.Event()

    def run() -> None:
        while not stopping.is_set():
            relay.poll(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


@pytest.fixture
def endpoints(free_ports: Callable[[int], int]) -> list[str]:
    first = free_ports(4)
    return [f"tcp://127.0.0.1:{first + number}" for number in range(4)]


def test_readers_of_both_sinks_have_the_blocks_of_the_engine(
    endpoints: list[str], free_server: Any, feed: Any, wait_for_whole: Any, poll_until: Any
) -> None:
    """The broker starts late: until then the relay serves its ZeroMQ readers."""
    engine = ZmqEventPublisher(
        0, config=KVEventsConfig(publisher="zmq", endpoint=endpoints[0], replay_endpoint=endpoints[1], bind=True)
    )
    settings = parse_relay_config(
        f'{{"endpoint": "{endpoints[2]}", "replay_endpoint": "{endpoints[3]}", "bind": true}}'
    )
    config = JetStreamConfig(servers=free_server.url)
    try:
        writer = open_jetstream_writer(config, "pod-1")
        sinks = RelaySinks(settings=settings, writer=writer)
        sources = RelayConfig(sources=(RelaySource.parse(f"{endpoints[0]},{endpoints[1]}", topic=None),))
        with open_relay(sources, sinks=sinks, report=str) as relay, polled(relay):
            feeder = feed(engine)
            feeder.churn(30)
            engine.idle()
            near = static_address(endpoints[2], replay=endpoints[3])
            with open_subscriber([near]) as reader:
                wait_for_whole(reader, feeder)
            with open_jetstream_subscriber(config, [LogAddress("pod-1")]) as reader:
                reader.poll(0.1)
                assert reader.stats()[0].state is StreamState.CONNECTING
                free_server.start()
                wait_for_whole(reader, feeder)
                feeder.churn(30)
                engine.idle()
                wait_for_whole(reader, feeder)
                engine.shutdown()
                poll_until(reader, lambda: reader.stats()[0].state is StreamState.PARTIAL)  # the relay lost its source
            registry = CollectorRegistry()
            LogCollector(registry, writer)
            read = {metric.path: registry.get_sample_value(metric.name, {"rank": "0"}) for metric in LOG_METRICS}
            assert read["is_connected"] == read["broker_losses"] == read["bases"] == 1
            assert read["stored"] + read["collapsed"] == read["last_seq"] + 1
            info = sinks.server_info(4, 1)["kv_events_jetstream"]
            assert info == {
                "servers": [free_server.url],
                "prefix": "kv-events",
                "worker": "pod-1",
                "topic": "",
                "subjects": ["kv-events.log.pod-1.=.0"],
            }
    finally:
        engine.shutdown()


TOMORROW = {
    "type": "BlockStored", "block_hashes": [2**63 + 5, 7], "parent_block_hash": None, "token_ids": [1, 2],
    "block_size": 1, "lora_id": None, "tomorrow": [{"a": 1}, None],
}  # fmt: skip


def test_an_event_goes_into_the_log_as_received_bytes(endpoints: list[str], nats_server: Any, poll_until: Any) -> None:
    """Unknown fields are kept, and the snapshot has the blocks stored before the log began."""
    settings = {"publisher": "zmq", "endpoint": endpoints[0], "replay_endpoint": endpoints[1], "dialect": "native"}
    engine = ZmqEventPublisher(0, config=KVEventsConfig(**settings, bind=True))
    raw = msgspec.Raw(msgspec.msgpack.encode(TOMORROW))
    config = JetStreamConfig(servers=nats_server.url)
    address = LogAddress("pod-1")
    published = parse_relay_config(
        f'{{"endpoint": "{endpoints[2]}", "replay_endpoint": "{endpoints[3]}", "bind": true}}'
    )
    try:
        writer = open_jetstream_writer(config, "pod-1")
        sinks = RelaySinks(settings=published, writer=writer)
        sources = RelayConfig(sources=(RelaySource.parse(f"{endpoints[0]},{endpoints[1]}"),))
        with open_relay(sources, sinks=sinks, report=str) as relay, polled(relay):
            with open_jetstream_subscriber(config, [address]) as reader:
                poll_until(reader, lambda: reader.stats()[0].state is StreamState.LIVE)
                engine.publish(KVEventBatch(1.0, (raw,)))  # type: ignore[arg-type]
                engine.idle()
                poll_until(reader, lambda: reader.blocks(0) == {5 - 2**63, 7})
        (logged,) = asyncio.run(_log_of(nats_server.url, address))
        assert msgspec.msgpack.decode(logged) == [1.0, [TOMORROW], 0]
    finally:
        engine.shutdown()


async def _log_of(url: str, address: LogAddress) -> list[bytes]:
    client = await nats.connect(url)
    try:
        broker = client.jetstream()
        last = (await broker.stream_info(address.log)).state.last_seq
        return [(await broker.get_msg(address.log, seq)).data for seq in range(1, last + 1)]
    finally:
        await client.close()


def test_every_counter_of_a_written_stream_has_one_metric() -> None:
    fields = {field.name for field in msgspec.structs.fields(LogStats)}
    assert sorted(metric.path for metric in LOG_METRICS) == sorted(fields - {"rank", "subject"})


def test_the_command_requires_the_workers_name(capsys: pytest.CaptureFixture[str]) -> None:
    from scheduler_engine.cli.relay_command import jetstream_writer

    assert jetstream_writer(None, None, "") is None
    with pytest.raises(ConfigError, match="worker"):
        jetstream_writer("nats://127.0.0.1:4222", None, "")
    with pytest.raises(ConfigError, match="servers"):
        jetstream_writer("http://127.0.0.1:4222", "pod-1", "")
