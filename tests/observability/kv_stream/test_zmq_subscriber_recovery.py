"""The delivery contract over real sockets, against the kit's publisher, with a harmful proxy on the live channel.

Property: whatever is lost, cut or swapped, the view becomes the publisher's state, and is never live before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from kit.events import stored
from kit.waiting import wait_until

from observability.kv_stream import FollowPolicy, StreamState, StreamStats, Subscriber, open_subscriber, static_address
from scheduler_components import AllBlocksCleared, BlockStored, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import (
    CurveClientKeys,
    KVEventsConfig,
    StreamAddress,
    ZmqEventPublisher,
    write_key_pair,
)

pytestmark = [pytest.mark.faults, pytest.mark.sockets]

DEADLINE_S = 60.0
QUICK_RECOVERY = FollowPolicy(answer_timeout_s=2.0, retry_min_s=0.02, retry_max_s=0.1, probe_interval_s=0.1)
LOOPBACK = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "bind": True}

Frames = list[bytes]


class LiveProxy:
    """Forwards between a publisher and one subscriber; ``harm`` changes or drops each message."""

    def __init__(self, upstream: str) -> None:
        self.harm: Callable[[Frames], Frames | None] = lambda frames: frames
        self.context = zmq.Context()
        self.sub, self.pub = self.context.socket(zmq.SUB), self.context.socket(zmq.PUB)
        self.sub.subscribe(b"")
        self.sub.setsockopt(zmq.RECONNECT_IVL, 10)
        self.sub.connect(upstream)
        self.pub.bind("tcp://127.0.0.1:*")

    @property
    def endpoint(self) -> str:
        return self.pub.getsockopt_string(zmq.LAST_ENDPOINT)

    def pump(self) -> int:
        """Forward the waiting messages; return their number."""
        num_messages = 0
        while self.sub.poll(0):
            num_messages += 1
            frames = self.harm(self.sub.recv_multipart())
            if frames is not None:
                self.pub.send_multipart(frames)
        return num_messages

    def close(self) -> None:
        self.context.destroy(linger=0)


class RecoveryBench:
    """A publisher, the proxy, and a subscriber that reads live batches through it and replays directly."""

    def __init__(self, stack: ExitStack, **options: object) -> None:
        self.stack, self.options = stack, LOOPBACK | options
        self.held: set[int] = set()
        self.publisher = self.open_publisher()
        self.proxy = LiveProxy(self.publisher.endpoint)
        stack.callback(self.proxy.close)
        address = static_address(self.proxy.endpoint, replay=self.publisher.replay_endpoint)
        self.sub = stack.enter_context(open_subscriber([address], policy=QUICK_RECOVERY))

    def open_publisher(self) -> ZmqEventPublisher:
        publisher = ZmqEventPublisher(0, config=KVEventsConfig(**self.options))
        self.stack.callback(publisher.shutdown)
        return publisher

    def restart(self) -> None:
        """Restart the publisher at the same addresses; the proxy keeps the subscriber's connection open."""
        self.publisher.close(1.0)
        self.options |= {"endpoint": self.publisher.endpoint, "replay_endpoint": self.publisher.replay_endpoint}
        self.publisher = self.open_publisher()
        self.held = set()

    def publish(self, *events: KVCacheEvent) -> None:
        for event in events:
            self.held = self.held | set(event.block_hashes) if isinstance(event, BlockStored) else set()
            self.publisher.publish(KVEventBatch(ts=time.time(), events=(event,)))

    @property
    def stats(self) -> StreamStats:
        return self.sub.stats()[0]

    def until(self, condition: Callable[[], object]) -> None:
        def poll() -> None:
            self.proxy.pump()
            self.sub.poll(0.005)
            wrong = self.stats.state is StreamState.LIVE and self.is_current and self.sub.blocks(0) != self.held
            assert not wrong, self.stats

        wait_until(condition, poll=poll, describe=lambda: self.stats, deadline_s=DEADLINE_S)

    @property
    def is_current(self) -> bool:
        published = self.publisher.stats()
        return (
            self.stats.is_extended and not published.batches_pending and self.stats.last_seq == published.last_sequence
        )

    def until_converged(self) -> None:
        self.until(lambda: self.is_current and self.stats.state is StreamState.LIVE)
        assert self.sub.blocks(0) == self.held

    def until_heard(self) -> None:
        """Publish until a batch has passed proxy and subscriber, because PUB sends nothing before."""
        self.until_converged()
        while self.stats.lag_s is None:
            self.publish(stored(len(self.held)))
            self.until_converged()


def is_dropped(frames: Frames) -> Frames | None:
    return None


def test_a_probe_finds_a_dropped_last_clear(stack: ExitStack) -> None:
    bench = RecoveryBench(stack)
    bench.publish(*(stored(block) for block in range(100)))
    bench.until_heard()
    bench.proxy.harm = is_dropped
    bench.publish(AllBlocksCleared())
    bench.until_converged()
    assert bench.sub.blocks(0) == frozenset()
    assert bench.stats.snapshots == 1


def test_batches_dropped_by_a_proxy_are_recovered(stack: ExitStack) -> None:
    bench = RecoveryBench(stack)
    bench.until_heard()
    num_seen = 0

    def drop_two_of_three(frames: Frames) -> Frames | None:
        nonlocal num_seen
        num_seen += 1
        return frames if num_seen % 3 == 0 else None

    bench.proxy.harm = drop_two_of_three
    for block in range(1_000, 1_300):
        bench.publish(stored(block))
        bench.proxy.pump()
        bench.sub.poll(0)
    bench.until_converged()
    assert (bench.stats.snapshots, bench.stats.splices, bench.stats.losses) == (1, 0, 0)
    assert bench.stats.recovered > 0


def test_the_digest_exposes_a_changed_payload(stack: ExitStack) -> None:
    bench = RecoveryBench(stack)
    bench.until_heard()
    bench.publish(stored(50))
    junk = [b"\xc1", b"", b"\x93\xcb", bytes(40)]
    bench.proxy.harm = lambda frames: [*frames[:2], junk.pop()] if junk else frames
    bench.publish(stored(51), stored(52), stored(53), stored(54))
    bench.until(lambda: bench.stats.splices)
    bench.until_converged()
    assert bench.stats.decode_errors > 0


@pytest.mark.parametrize("second_life", [1, 50, 300])
@pytest.mark.parametrize("seq_base", ["zero", "clock"])
def test_a_restart_behind_a_proxy_leaves_no_stale_block(stack: ExitStack, seq_base: str, second_life: int) -> None:
    bench = RecoveryBench(stack, seq_base=seq_base)
    bench.publish(*(stored(block) for block in range(100)))
    bench.until_heard()
    bench.restart()
    bench.publish(*(stored(10_000 + block) for block in range(second_life)))
    bench.until(lambda: bench.stats.restarts and bench.is_current and bench.stats.state is StreamState.LIVE)
    assert bench.sub.blocks(0) == bench.held
    assert bench.stats.disconnects == 0


def test_blocks_before_the_replay_buffer_are_recovered(stack: ExitStack) -> None:
    bench = RecoveryBench(stack, buffer_steps=100)
    bench.publish(*(stored(block) for block in range(1_000)))
    bench.until_converged()
    assert bench.sub.blocks(0) == set(range(1_000))


def test_a_large_snapshot_comes_in_chunks(stack: ExitStack) -> None:
    bench = RecoveryBench(stack, buffer_steps=1)
    for first in range(0, 40_000, 100):
        bench.publish(stored(*range(first, first + 100)))
    bench.until_converged()
    assert len(bench.sub.blocks(0)) == 40_000
    assert bench.stats.snapshots == 1


def test_a_reconnect_fetches_only_missing_batches(stack: ExitStack) -> None:
    bench = RecoveryBench(stack)
    bench.publish(*(stored(block) for block in range(500)))
    bench.until_heard()
    before, endpoint = bench.stats.recovered, bench.proxy.endpoint
    bench.proxy.harm = is_dropped
    bench.proxy.pub.close(linger=0)
    bench.until(lambda: bench.stats.state is StreamState.CONNECTING)
    bench.publish(stored(1_000), stored(1_001))
    bench.proxy.pub = bench.proxy.context.socket(zmq.PUB)
    bench.proxy.pub.bind(endpoint)
    bench.until_converged()
    assert (bench.stats.recovered - before, bench.stats.snapshots, bench.stats.disconnects) == (2, 1, 1)


def test_a_guarded_stream_needs_the_right_keys(stack: ExitStack, tmp_path: Path) -> None:
    publisher_key, secret = write_key_pair(tmp_path / "own", "publisher")
    client_key, client_secret = write_key_pair(tmp_path / "clients", "client")
    guard = {"auth": "required", "secret_key_file": str(secret), "client_keys_dir": str(client_key.parent)}
    publisher = ZmqEventPublisher(0, config=KVEventsConfig(**LOOPBACK, **guard))
    stack.callback(publisher.shutdown)
    publisher.publish(KVEventBatch(ts=time.time(), events=(stored(1, 2, 3),)))
    address = static_address(publisher.endpoint, replay=publisher.replay_endpoint)
    keys = CurveClientKeys.read(str(client_secret), str(publisher_key))
    sub = stack.enter_context(open_subscriber([address], policy=QUICK_RECOVERY, keys=keys))
    assert sub.wait_until(0, 0, DEADLINE_S)
    assert (sub.blocks(0), sub.stats()[0].state) == ({1, 2, 3}, StreamState.LIVE)
    assert not reads_anything(stack, address)


def reads_anything(stack: ExitStack, address: StreamAddress) -> bool:
    policy = FollowPolicy(answer_timeout_s=0.1, retry_min_s=0.02, probe_interval_s=0.1, dead_after_s=0.5)
    sub: Subscriber = stack.enter_context(open_subscriber([address], policy=policy))
    deadline_s = time.monotonic() + DEADLINE_S
    while sub.stats()[0].state is not StreamState.DEAD:
        assert time.monotonic() < deadline_s, sub.stats()
        sub.poll(0.05)
    return sub.stats()[0].batches > 0
