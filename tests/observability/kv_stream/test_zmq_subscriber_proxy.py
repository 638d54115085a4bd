"""A proxy delivers foreign frames: of a longer topic, of another epoch, of an unknown sender."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import zmq
from kit.follow_policies import FREQUENT_PROBES

from observability.kv_stream import FollowPolicy, StreamState, Subscriber, open_subscriber, static_address
from observability.kv_stream.stream_state import MAX_REPLAY_CREDIT
from scheduler_components import BlockStored, KVEventBatch
from scheduler_components.kv_events import BatchEncoder, KVEventsConfig, ZmqEventPublisher

pytestmark = pytest.mark.sockets

DEADLINE_S = 60.0
TOPICS = ("kv@pod1", "kv@pod10")


@dataclass
class Proxy:
    """XSUB for the publishers, XPUB for the readers; ``pass_on`` forwards the waiting messages."""

    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)

    def __post_init__(self) -> None:
        self.inside, self.outside = self.context.socket(zmq.XSUB), self.context.socket(zmq.XPUB)
        for socket in (self.inside, self.outside):
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
        self.outside.bind("tcp://127.0.0.1:0")
        self.endpoint = self.outside.getsockopt_string(zmq.LAST_ENDPOINT)

    def pass_on(self) -> None:
        for source, sink in ((self.inside, self.outside), (self.outside, self.inside)):
            while source.poll(0):
                sink.send_multipart(source.recv_multipart())

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_each_view_has_only_the_blocks_of_its_own_pod(stack: ExitStack) -> None:
    proxy = Proxy()
    stack.callback(proxy.close)
    publishers, subscribers = [], []
    for topic in TOPICS:
        config = KVEventsConfig(
            endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", bind=True, topic=topic
        )
        publisher = ZmqEventPublisher(0, config=config)
        stack.callback(publisher.shutdown)
        proxy.inside.connect(publisher.endpoint)
        address = static_address(proxy.endpoint, replay=publisher.replay_endpoint, topic=topic)
        publishers.append(publisher)
        subscribers.append(stack.enter_context(open_subscriber([address], policy=FREQUENT_PROBES)))
    published: list[set[int]] = [set(), set()]
    deadline_s = time.monotonic() + DEADLINE_S
    block = 0

    def is_right(which: int, sub: Subscriber) -> bool:
        """Check in addition that the view never has another pod's blocks."""
        assert sub.blocks(0) <= published[which]
        return sub.stats()[0].state is StreamState.LIVE and sub.blocks(0) == published[which]

    while not (block >= 64 and all(is_right(*each) for each in enumerate(subscribers))):
        assert time.monotonic() < deadline_s, [sub.stats() for sub in subscribers]
        if block < 64:
            for which, publisher in enumerate(publishers):
                own = 1_000 * which + block
                published[which].add(own)
                publisher.publish(KVEventBatch(time.time(), (BlockStored((own,), None, (1,), 1, None),)))
            block += 1
        proxy.pass_on()
        for which, sub in enumerate(subscribers):
            sub.poll(0.002)
            is_right(which, sub)
    shorter, longer = (sub.stats()[0] for sub in subscribers)
    assert shorter.other_topics > 0
    assert (longer.other_topics, shorter.splices, longer.splices) == (0, 0, 0)


def test_five_thousand_strays_cost_a_bounded_number_of_requests(stack: ExitStack) -> None:
    proxy = Proxy()
    stack.callback(proxy.close)
    config = KVEventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", bind=True, topic="kv")
    publisher = ZmqEventPublisher(0, config=config)
    stack.callback(publisher.shutdown)
    proxy.inside.connect(publisher.endpoint)
    policy = FollowPolicy()
    address = static_address(proxy.endpoint, replay=publisher.replay_endpoint, topic="kv")
    sub = stack.enter_context(open_subscriber([address], policy=policy))
    publisher.publish(KVEventBatch(time.time(), (BlockStored((1,), None, (1,), 1, None),)))
    began_s = time.monotonic()

    def poll_until(is_done: Callable[[], bool]) -> None:
        while not is_done():
            assert time.monotonic() < began_s + DEADLINE_S, sub.stats()
            proxy.pass_on()
            sub.poll(0.002)

    poll_until(lambda: sub.stats()[0].state is StreamState.LIVE and sub.blocks(0) == {1})
    num_requests = sub.stats()[0].replays_asked
    payload = BatchEncoder("array").encode(KVEventBatch(0.0, (BlockStored((666,), None, (1,), 1, None),)), 0)
    forged = 0
    from_s = time.monotonic()

    def all_read() -> bool:
        """Send more strays at each step, some while a request is open and some while none is."""
        nonlocal forged
        for _ in range(min(50, 5_000 - forged)):
            proxy.outside.send_multipart((b"kv", (9_000 + forged).to_bytes(8, "big"), payload))
            forged += 1
        stats = sub.stats()[0]
        return stats.gaps == 5_000 and stats.state is StreamState.LIVE

    poll_until(all_read)
    taken_s = time.monotonic() - from_s
    assert sub.stats()[0].replays_asked - num_requests <= MAX_REPLAY_CREDIT + taken_s / policy.request_interval_s + 1
    publisher.publish(KVEventBatch(time.time(), (BlockStored((2,), None, (1,), 1, None),)))
    poll_until(lambda: sub.stats()[0].state is StreamState.LIVE and sub.blocks(0) == {1, 2})
    assert sub.stats()[0].splices == 0
