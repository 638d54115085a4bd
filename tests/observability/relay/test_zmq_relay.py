"""The relay in this process, between scripted publishers and the kit's subscriber."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest
import zmq
from kit.events import stored_run
from prometheus_client import CollectorRegistry, generate_latest

from observability import RelayCollector
from observability.catalog import RELAY_METRICS
from observability.kv_stream import (
    FollowPolicy,
    NullStreamListener,
    StreamState,
    Subscriber,
    Tier,
    open_subscriber,
    parse_addresses,
)
from observability.relay import (
    RelayConfig,
    RelaySinks,
    RelaySource,
    RelayStatus,
    ZmqRelay,
    open_relay,
    zmq_relay,
)
from observability.relay.passthrough import PassthroughDecoder, RawStored
from scheduler_components import AllBlocksCleared, BlockRemoved, ConfigError, KVEventBatch, StartError
from scheduler_components.kv_events import (
    CurveClientKeys,
    DecodedBatch,
    KVEventsConfig,
    ZmqEventPublisher,
    write_key_pair,
)
from scheduler_components.testing import ScriptedPublisher

pytestmark = pytest.mark.sockets

DEADLINE_S = 60.0
QUICK = FollowPolicy(
    answer_timeout_s=0.3,
    retry_min_s=0.02,
    retry_max_s=0.1,
    request_interval_s=0.05,
    probe_interval_s=0.1,
    dead_after_s=DEADLINE_S,
)
OFFLOADED = {
    "type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": [], "block_size": 0,
    "lora_id": None, "medium": "CPU", "lora_name": None,
}  # fmt: skip
"""An event of vLLM's offloading tiers."""
LOOPBACK = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "bind": True}


class RelayBench:
    """A relay, its sources and its reader, all polled by one thread."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.publishers: list[ScriptedPublisher] = []
        self.readers: list[Subscriber] = []
        self.said: list[str] = []
        self.relay: ZmqRelay
        self.status: RelayStatus

    def publisher(self, **options: str) -> ScriptedPublisher:
        publisher = self.stack.enter_context(ScriptedPublisher.open(**options))
        self.publishers.append(publisher)
        return publisher

    def open(self, *sources: str, keys: CurveClientKeys | None = None, **settings: object) -> None:
        sinks = RelaySinks(settings=KVEventsConfig(**{"publisher": "zmq", "seq_base": "clock"} | LOOPBACK | settings))
        config = RelayConfig(sources=tuple(map(RelaySource.parse, sources)), keys=keys, policy=QUICK)
        self.relay = self.stack.enter_context(open_relay(config, sinks=sinks, report=self.said.append))
        self.status = RelayStatus(relay=self.relay, sinks=sinks)

    def read(self, keys: CurveClientKeys | None = None) -> Subscriber:
        addresses = parse_addresses(self.status.server_info(), httpx.URL("http://127.0.0.1:1"))
        self.readers.append(self.stack.enter_context(open_subscriber(addresses, policy=QUICK, keys=keys)))
        return self.readers[0]

    def until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, self.status.server_info()
            for publisher in self.publishers:
                publisher.idle()
            self.relay.poll(0.005)
            for reader in self.readers:
                reader.poll(0.005)

    def state(self, rank: int = 0) -> StreamState:
        return self.readers[0].stats()[rank].state


def source(publisher: ScriptedPublisher | ZmqEventPublisher, rank: int = 0) -> str:
    return f"{rank}={publisher.endpoint},{publisher.replay_endpoint}"


@pytest.fixture
def bench() -> Iterator[RelayBench]:
    with ExitStack() as stack:
        yield RelayBench(stack)


@pytest.mark.parametrize("dialect", ["array", "map", "vllm"])
@pytest.mark.parametrize("framing", ["seed", "topic"])
def test_a_plain_publisher_becomes_an_extended_one_in_another_dialect(
    bench: RelayBench, dialect: str, framing: str
) -> None:
    publisher = bench.publisher(dialect=dialect, framing=framing)
    publisher.publish_events(stored_run(0, 3, block_size=4))
    bench.open(source(publisher), dialect="array" if dialect == "map" else "map", replay_framing="topic", topic="t")
    bench.until(lambda: bench.status.health_problem() is None)
    reader = bench.read()
    publisher.publish_events(stored_run(3, 2, block_size=4), BlockRemoved((0,)))
    bench.until(lambda: reader.blocks(0) == {1, 2, 3, 4} and bench.state() is StreamState.LIVE)
    bench.until(lambda: reader.stats()[0].is_extended)
    assert bench.status.server_info()["kv_events"]["block_size"] == 4
    [followed] = bench.status.server_info()["relay"]["sources"]
    assert isinstance(followed["newest_batch_age_s"]["0"], float)


def test_unknown_history_is_partial_until_a_clear(bench: RelayBench) -> None:
    publisher = bench.publisher()
    for number in range(5):
        publisher.publish_events(stored_run(10 * number, 1))
    publisher.window = 2
    bench.open(source(publisher))
    bench.until(lambda: "partial" in (bench.status.health_problem() or ""))
    reader = bench.read()
    bench.until(lambda: reader.blocks(0) == {30, 40} and bench.state() is StreamState.PARTIAL)
    assert "partial" in bench.status.server_info()["kv_events_warning"]
    publisher.publish_events(AllBlocksCleared(), stored_run(7, 1))
    bench.until(lambda: reader.blocks(0) == {7} and bench.state() is StreamState.LIVE)
    assert bench.status.health_problem() is None


def test_a_restart_of_the_engine_continues_the_relays_numbers(bench: RelayBench) -> None:
    publisher = bench.publisher()
    publisher.publish_events(stored_run(0, 3))
    publisher.publish_events(stored_run(3, 3))
    bench.open(source(publisher))
    bench.until(lambda: bench.status.health_problem() is None)
    reader = bench.read()
    bench.until(lambda: reader.blocks(0) == set(range(6)))
    before = reader.stats()[0].last_seq
    publisher.restart()
    publisher.publish_events(stored_run(100, 2))
    bench.until(lambda: reader.blocks(0) == {100, 101} and bench.state() is StreamState.LIVE)
    stats = reader.stats()[0]
    assert (stats.last_seq > before, stats.gaps) == (True, 0)


def test_a_relayed_snapshot_has_the_current_time(bench: RelayBench) -> None:
    engine = ZmqEventPublisher(0, buffer_steps=1, config=KVEventsConfig(**LOOPBACK))
    bench.stack.callback(engine.shutdown)
    engine.publish(KVEventBatch(0.0, (stored_run(0, 1),)))
    bench.open(source(engine))
    bench.until(lambda: bench.status.health_problem() is None)
    reader = bench.read()
    bench.until(lambda: bench.state() is StreamState.LIVE)
    engine.publish(KVEventBatch(0.0, (stored_run(1, 1),)))
    bench.until(lambda: reader.blocks(0) == {0, 1} and reader.stats()[0].lag_s is not None)
    lag_s = reader.stats()[0].lag_s
    assert lag_s is not None
    assert abs(lag_s) < time.time() / 2


def test_two_sources_become_one_stream_and_clear_separately(bench: RelayBench) -> None:
    engine, tier = bench.publisher(), bench.publisher()
    engine.publish_events(stored_run(0, 3))
    tier.publish_events(stored_run(0, 5, "CPU"))
    bench.open(source(engine), source(tier))
    bench.until(lambda: bench.status.health_problem() is None)
    reader = bench.read()
    bench.until(lambda: reader.blocks(0) == {0, 1, 2} and reader.blocks(0, Tier.HOST) == set(range(5)))
    engine.publish_events(AllBlocksCleared())
    bench.until(lambda: not reader.blocks(0))
    assert reader.blocks(0, Tier.HOST) == set(range(5))
    engine.publish_events(stored_run(7, 1))
    tier.restart()
    tier.publish_events(stored_run(9, 1, "CPU"))
    bench.until(lambda: reader.blocks(0, Tier.HOST) == {9} and bench.state() is StreamState.LIVE)
    assert reader.blocks(0) == {7}
    tier.ends_answers = tier.answers = False  # nothing proves the source any more
    bench.until(lambda: bench.state() is StreamState.PARTIAL)
    assert bench.relay.stream_stats()[0].num_sources == 2


def test_ranks_are_relayed_separately(bench: RelayBench) -> None:
    first, second = bench.publisher(), bench.publisher()
    first.publish_events(stored_run(0, 1))
    second.publish_events(stored_run(50, 2))
    bench.open(source(first), source(second, rank=1))
    bench.until(lambda: bench.status.health_problem() is None)
    reader = bench.read()
    bench.until(lambda: (reader.blocks(0), reader.blocks(1)) == ({0}, {50, 51}))
    assert {bench.state(0), bench.state(1)} <= {StreamState.LIVE, StreamState.SYNCING}


def test_an_unreachable_source_is_named_and_the_others_are_relayed(
    bench: RelayBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_relay, "_SEARCH_INTERVAL_S", 0.05)
    publisher, late = bench.publisher(), bench.publisher()
    publisher.publish_events(stored_run(0, 3))
    late.publish_events(stored_run(5, 1))
    where: list[object] = []

    def discover(url: str, *, timeout_s: float, api_key: str | None) -> object:
        if not where:
            raise StartError(url, "refused", "start it")
        return where[0]

    monkeypatch.setattr("observability.relay.source.discover", discover)
    bench.open("http://127.0.0.1:1", source(publisher))
    assert len(bench.said) == 1
    assert "http://127.0.0.1:1 is not relayed: http://127.0.0.1:1: refused; start it" in bench.said[0]
    reader = bench.read()
    bench.until(lambda: reader.blocks(0) == {0, 1, 2} and bench.state() is StreamState.PARTIAL)
    assert "refused" in (bench.status.health_problem() or "")
    where.append(RelaySource.parse(source(late)).find(timeout_s=0.0))
    bench.until(lambda: reader.blocks(0) == {0, 1, 2, 5} and bench.state() is StreamState.LIVE)
    assert bench.said[1:] == ["http://127.0.0.1:1 is found"]


def test_a_worker_is_found_at_its_new_addresses(bench: RelayBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_relay, "_SEARCH_INTERVAL_S", 0.05)
    first = ScriptedPublisher.open()
    bench.publishers.append(first)
    first.publish_events(stored_run(0, 3))
    where = [first]
    monkeypatch.setattr(
        "observability.relay.source.discover",
        lambda url, *, timeout_s, api_key: RelaySource.parse(source(where[0])).find(timeout_s=timeout_s),
    )
    bench.open("http://127.0.0.1:1")
    reader = bench.read()
    bench.until(lambda: reader.blocks(0) == {0, 1, 2} and bench.state() is StreamState.LIVE)
    bench.publishers.remove(first)
    first.shutdown()
    bench.until(lambda: bench.state() is StreamState.PARTIAL)
    second = bench.publisher()
    second.publish_events(stored_run(1, 1))
    where[0] = second
    bench.until(lambda: reader.blocks(0) == {1} and bench.state() is StreamState.LIVE)


def test_a_tier_without_tokens_sets_no_block_size(bench: RelayBench) -> None:
    publisher = bench.publisher(dialect="native")
    publisher.publish_events(msgspec.Raw(msgspec.msgpack.encode(OFFLOADED)))  # type: ignore[arg-type]
    bench.open(source(publisher))
    bench.until(lambda: bench.status.health_problem() is None)
    reader = bench.read()
    bench.until(lambda: reader.blocks(0, Tier.HOST) == {5} and bench.state() is StreamState.LIVE)
    assert bench.status.server_info()["kv_events"]["block_size"] is None


class RecordingListener(NullStreamListener):
    """Records the bytes of stored events."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        self.stored += [event.raw for event in batch.events if isinstance(event, RawStored)]


@pytest.mark.parametrize("form", ["map", "array"])
def test_unknown_fields_are_forwarded_as_received_bytes(bench: RelayBench, form: str) -> None:
    """Live, and to a late reader by a snapshot that has a part of the first event."""
    publisher = bench.publisher(dialect="native")
    rows = [
        {"type": "BlockStored", "block_hashes": [2**63 + number, number], "parent_block_hash": None,
         "token_ids": [1, 2], "block_size": 1, "lora_id": None, "tomorrow": [{"number": number}, None]}
        for number in range(1, 9)
    ]  # fmt: skip
    if form == "array":
        rows = [[*list(row.values())[:6], *[None] * 11, row["tomorrow"]] for row in rows]  # type: ignore[misc]
    events = [msgspec.Raw(msgspec.msgpack.encode(row)) for row in rows]
    publisher.publish_events(events[0])  # type: ignore[arg-type]
    bench.open(source(publisher), dialect="native", buffer_steps=2)
    bench.until(lambda: bench.status.health_problem() is None)
    addresses = parse_addresses(bench.status.server_info(), httpx.URL("http://127.0.0.1:1"))
    with zmq.Context() as context, context.socket(zmq.SUB) as live:
        live.linger = 0
        live.subscribe(b"")
        bench.until(lambda: bench.relay.stream_stats()[0].publisher.batches_sent)  # before the reader connects
        live.connect(str(addresses[0].events))
        bench.until(lambda: bench.relay.stream_stats()[0].publisher.subscribers_seen)
        for event in (*events[1:4], BlockRemoved((2,)), *events[4:]):
            publisher.publish_events(event)  # type: ignore[arg-type]
        heard: list[bytes] = []
        while len(heard) < 8:
            bench.until(lambda: live.poll(0))
            heard.append(live.recv_multipart()[-1])
    assert heard == list(publisher.sent.values())[1:]
    late = RecordingListener()
    reader = open_subscriber(addresses, policy=QUICK, listener=late, new_decoder=PassthroughDecoder)
    bench.readers.append(bench.stack.enter_context(reader))
    bench.until(lambda: bench.state() is StreamState.LIVE and len(reader.blocks(0)) == 15)
    assert reader.stats()[0].snapshots == 1
    received = [msgspec.msgpack.decode(raw) for raw in late.stored]
    tomorrow = [fields["tomorrow"] if form == "map" else fields[17] for fields in received]
    assert [each[0]["number"] for each in tomorrow] == list(range(1, 9))
    assert [len(each) for each in tomorrow] == [2, 1, 2, 2, 2, 2, 2, 2]  # one block of the second event is removed


def test_both_sides_may_require_keys(bench: RelayBench, tmp_path: Path) -> None:
    public, secret = write_key_pair(tmp_path / "own", "engine")
    client, client_secret = write_key_pair(tmp_path / "clients", "client")
    auth = {"auth": "required", "secret_key_file": str(secret), "client_keys_dir": str(client.parent)}
    keys = CurveClientKeys.read(str(client_secret), str(public))
    engine = ZmqEventPublisher(0, config=KVEventsConfig(**LOOPBACK | auth))
    bench.stack.callback(engine.shutdown)
    bench.open(source(engine), keys=keys, **auth)
    reader = bench.read(keys)
    bench.until(lambda: bench.state() is StreamState.LIVE and reader.stats()[0].is_extended)


def test_a_taken_port_is_an_error_at_the_start(bench: RelayBench) -> None:
    publisher = bench.publisher()
    with pytest.raises(StartError, match=re.escape(publisher.endpoint)):
        bench.open(source(publisher), endpoint=publisher.endpoint)


def test_metrics_cover_followed_and_published_streams(bench: RelayBench) -> None:
    publisher = bench.publisher()
    publisher.publish_events(stored_run(0, 3))
    text = source(publisher)
    bench.open(text)
    bench.until(lambda: bench.status.health_problem() is None)
    bench.until(lambda: bench.relay.stream_stats()[0].publisher.batches_sent == 2)  # its thread may have the sockets
    registry = CollectorRegistry()
    RelayCollector(registry, bench.relay.followed, bench.relay.relayed)
    labels = {"source": text, "rank": "0"}
    assert registry.get_sample_value("kv_stream_state", {**labels, "state": "live"}) == 1
    assert registry.get_sample_value("kv_stream_blocks_held", labels) == 3
    assert registry.get_sample_value("kv_relay_is_whole", {"rank": "0"}) == 1
    assert registry.get_sample_value("kv_relay_events_batches_sent_total", {"rank": "0"}) == 2
    page = generate_latest(registry).decode()
    assert all(metric.name in page for metric in RELAY_METRICS)
    with pytest.raises(ConfigError, match="kv_relay_"):
        RelayCollector(registry, bench.relay.followed, bench.relay.relayed)
