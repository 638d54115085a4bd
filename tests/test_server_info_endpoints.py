"""Real sockets. Property: every endpoint that ``/server_info`` advertises listens and replies, and no other does."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import msgspec
import pytest
import zmq

from observability.kv_stream import StreamState, open_subscriber, parse_addresses, parse_worker_url
from scheduler_components import (
    AllBlocksCleared,
    GaugePacer,
    KVEventBatch,
    LoadPublisher,
    ParallelState,
    kv_events_server_info,
    open_load_publisher,
)
from scheduler_components.kv_events import (
    EventPublisher,
    ListeningStream,
    NullEventPublisher,
    ZmqEventPublisher,
    open_event_publisher,
)
from scheduler_components.load import open_zmq_load_reader
from scheduler_components.metrics import ZmqReportSink
from scheduler_components.values import LoadSnapshot

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

DEADLINE_S = 60.0
CLEARED = KVEventBatch(ts=1.0, events=(AllBlocksCleared(),))


def free_port_block(count: int) -> int:
    """Give the first of ``count`` neighbouring ports that the system has free on every interface just now."""
    while True:
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            sockets[0].bind(("", 0))
            base = int(sockets[0].getsockname()[1])
            try:
                for index, other in enumerate(sockets[1:], start=1):
                    other.bind(("", base + index))
            except (OSError, OverflowError):
                continue
            return base


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=DEADLINE_S).close()
    except ConnectionRefusedError:
        return False
    return True


def machine_has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as made:
        yield made


def hears(context: zmq.Context, address: str, topic: str, publisher: EventPublisher) -> int | None:
    """Publish until a subscriber at ``address`` hears it; give the rank in the batch, None when it never does."""
    with context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.IPV6, 1)
        sub.subscribe(topic)
        sub.connect(address)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            publisher.publish(CLEARED)
            if sub.poll(20):
                _, _, payload = sub.recv_multipart()
                return int(msgspec.msgpack.decode(payload)[2])
    return None


def replays_to_the_end(context: zmq.Context, address: str) -> bool:
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.connect(address)
        dealer.send_multipart((b"", (0).to_bytes(8, "big")))
        while dealer.poll(DEADLINE_S * 1000):
            if dealer.recv_multipart()[-2] == ZmqEventPublisher.END_SEQ:
                return True
    return False


def reports_its_load(address: str, publisher: LoadPublisher) -> int | None:
    """Publish until a reader at ``address`` has a sample; give the rank in it, None when it never does."""
    with closing(open_zmq_load_reader([address])) as reader:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            publisher.publish_load()
            for sample in reader.read(0.02).samples.values():
                return sample.stat.attn_dp_rank
    return None


@dataclass
class Load:
    """A replica's load."""

    dp_rank: int

    def get_loads(self) -> LoadSnapshot:
        return LoadSnapshot(dp_rank=self.dp_rank)


def open_load_gauges(stack: ExitStack, config: str, ranks: list[ParallelState]) -> list[LoadPublisher]:
    publishers = []
    for parallel in ranks:
        pacer = GaugePacer(min_interval_s=0.0, heartbeat_s=0.001)
        load = Load(parallel.kv_stream_index)
        publishers.append(open_load_publisher(config, parallel=parallel, load=load, pacer=pacer))
        stack.callback(publishers[-1].close)
    return publishers


def open_engine(stack: ExitStack, config: str, ranks: list[ParallelState]) -> list[EventPublisher]:
    publishers = []
    for parallel in ranks:
        publishers.append(open_event_publisher(config, parallel=parallel))
        stack.callback(publishers[-1].shutdown)
    return publishers


@pytest.mark.parametrize(
    ("host", "bind", "dialled"),
    [
        ("*", None, "127.0.0.1"),
        ("0.0.0.0", None, "127.0.0.1"),
        ("127.0.0.1", True, "127.0.0.1"),
        ("localhost", True, "127.0.0.1"),
        pytest.param("[::]", None, "127.0.0.1", marks=pytest.mark.skipif(not machine_has_ipv6(), reason="no IPv6")),
        pytest.param("[::1]", True, "[::1]", marks=pytest.mark.skipif(not machine_has_ipv6(), reason="no IPv6")),
    ],
)
def test_every_advertised_endpoint_listens_and_serves_its_rank(
    context: zmq.Context, host: str, bind: bool | None, dialled: str
) -> None:
    """2 DP x 2 CP x 2 TP: eight ranks, two streams, one port after each range that must stay closed."""
    base = free_port_block(9)
    config = json.dumps(
        {
            "publisher": "zmq",
            "endpoint": f"tcp://{host}:{base}",
            "replay_endpoint": f"tcp://{host}:{base + 3}",
            "load_endpoint": f"tcp://{host}:{base + 6}",
            "topic": "kv",
            "bind": bind,
        }
    )
    ranks = [ParallelState.from_tp_rank(rank, tp_size=8, attn_dp_size=2, attn_cp_size=2) for rank in range(8)]
    info = kv_events_server_info(config, block_size=16, dp_size=ranks[0].kv_stream_count)
    described = info["kv_events"]
    assert isinstance(described, dict)
    assert info.keys() == {"kv_events"}
    with ExitStack() as stack:
        publishers = open_engine(stack, config, ranks)
        gauges = open_load_gauges(stack, config, ranks)
        owners = {p.kv_stream_index: made for p, made in zip(ranks, publishers, strict=True) if p.owns_kv_stream}
        assert [isinstance(made, NullEventPublisher) for made in publishers] == [
            rank not in (0, 4) for rank in range(8)
        ]
        for rank in range(described["dp_size"]):
            events_at = f"tcp://{dialled}:{described['endpoint_port_base'] + rank}"
            assert hears(context, events_at, described["topic"], owners[rank]) == rank
            assert replays_to_the_end(context, f"tcp://{dialled}:{described['replay_endpoint_port_base'] + rank}")
            load_at = f"tcp://{dialled}:{described['load_endpoint_port_base'] + rank}"
            assert reports_its_load(load_at, gauges[4 * rank]) == rank
        for closed in (base + 2, base + 5, base + 8):
            assert not listens(dialled.strip("[]"), closed)
    for port in range(base, base + 9):
        assert not listens(dialled.strip("[]"), port)


@pytest.mark.parametrize("host", ["*", "127.0.0.1"])
def test_ports_assigned_by_the_system_are_advertised_and_found(host: str) -> None:
    """Four ranks, two streams, port 0 everywhere: no free port is searched before it is bound."""
    anywhere = f"tcp://{host}:0"
    config = json.dumps(
        {
            "publisher": "zmq",
            "endpoint": anywhere,
            "replay_endpoint": anywhere,
            "load_endpoint": anywhere,
            "bind": True,
        }
    )
    ranks = [ParallelState.from_tp_rank(rank, tp_size=4, attn_dp_size=2) for rank in range(4)]
    with ExitStack() as stack:
        publishers, gauges = open_engine(stack, config, ranks), open_load_gauges(stack, config, ranks)
        bound = [
            ListeningStream.parse(
                rank.kv_stream_index,
                publisher.endpoint,
                replay=publisher.replay_endpoint,
                load=gauge.sinks[0].endpoint,
            )
            for rank, publisher, gauge in zip(ranks, publishers, gauges, strict=True)
            if isinstance(publisher, ZmqEventPublisher) and gauge.sinks and isinstance(gauge.sinks[0], ZmqReportSink)
        ]
        info = kv_events_server_info(config, block_size=16, dp_size=2, publishers=bound)
        assert info.keys() == {"kv_events"}
        addresses = parse_addresses(json.loads(json.dumps(info)), parse_worker_url("http://127.0.0.1:30000"))
        with open_subscriber(addresses) as reader:
            for owner in (publishers[0], publishers[2]):
                owner.publish(CLEARED)
            assert all(reader.wait_until(rank, 0, DEADLINE_S) for rank in (0, 1))
            assert {stats.state for stats in reader.stats().values()} == {StreamState.LIVE}
        for address in addresses:
            assert reports_its_load(str(address.load), gauges[2 * address.rank]) == address.rank


def test_tp2_cp2_is_one_stream_as_rank_0_and_nothing_on_the_next_port(context: zmq.Context) -> None:
    base = free_port_block(2)
    config = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{base}"})
    ranks = [ParallelState.from_tp_rank(rank, tp_size=4, attn_cp_size=2) for rank in range(4)]
    with ExitStack() as stack:
        publishers = open_engine(stack, config, ranks)
        assert hears(context, f"tcp://127.0.0.1:{base}", "", publishers[0]) == 0
        assert all(isinstance(made, NullEventPublisher) for made in publishers[1:])
        assert not listens("127.0.0.1", base + 1)


def test_a_port_that_the_system_chose_is_reported(context: zmq.Context) -> None:
    config = '{"publisher": "zmq", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:*"}'
    ranks = [ParallelState.trivial(dp_size=2, dp_rank=rank) for rank in range(2)]
    with ExitStack() as stack:
        publishers = open_engine(stack, config, ranks)
        ports = []
        for rank, publisher in enumerate(publishers):
            assert isinstance(publisher, ZmqEventPublisher)
            assert publisher.replay_endpoint is not None
            ports += [int(text.rpartition(":")[2]) for text in (publisher.endpoint, publisher.replay_endpoint)]
            assert hears(context, f"tcp://127.0.0.1:{ports[-2]}", "", publisher) == rank
            assert replays_to_the_end(context, f"tcp://127.0.0.1:{ports[-1]}")
        assert len(set(ports)) == 4
        assert 0 not in ports


def test_ipc_paths_give_each_rank_its_own_stream(
    tmp_path_factory: pytest.TempPathFactory, context: zmq.Context
) -> None:
    base = f"ipc://{tmp_path_factory.mktemp('kv')}/s"
    config = json.dumps({"publisher": "zmq", "endpoint": base})
    with ExitStack() as stack:
        ranks = [ParallelState.trivial(dp_size=2, dp_rank=rank) for rank in range(2)]
        publishers = open_engine(stack, config, ranks)
        assert hears(context, base, "", publishers[0]) == 0
        assert hears(context, f"{base}_dp1", "", publishers[1]) == 1
