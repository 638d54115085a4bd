"""The measured publishers behind one interface: the kit's, the peers', none, and the physical limit."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import msgspec
import zmq

from benchmarks.peer_publishers import load_peer
from benchmarks.workloads import Shape
from scheduler_components import BlockRemoved, BlockStored, KVEventBatch
from scheduler_components.events import ValidatedEvents
from scheduler_components.kv_events import KVEventsConfig, ZmqEventPublisher

KIT = "kit"
"""The kit's publishers with hand-made events, whose values are all validated."""

KIT_CACHE = "kit's caches"
"""The same with events of the kit's caches, which validated the tokens with the prompt."""

KIT_WITHOUT_IDLE = "kit without idle()"
KIT_INLINE = "kit, inline"
LIMIT = "limit"
OFF = "off"
END_SEQ = (-1).to_bytes(8, "big", signed=True)


class BenchmarkedPublisher(Protocol):
    """The publisher interface of a benchmark's scheduler."""

    def make_events(self, step: int, evicted: int | None = None) -> Any:
        """Make the step's events in the publisher's own classes, untimed. Events of step ``evicted`` come first."""
        ...

    def make_batch(self, events: Any, ts: float) -> Any: ...

    def publish(self, batch: Any) -> None: ...

    def idle(self) -> None:
        """Run the hook of a scheduler that waits for its device."""
        ...

    def num_pending(self) -> int:
        """Return the number of accepted batches that have not been sent."""
        ...

    def close(self) -> None: ...


class NoPublisher:
    """No publishing. The values of events exist, but no events, as in an engine without events."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def make_events(self, step: int, evicted: int | None = None) -> Any:
        removed = [] if evicted is None else self._shape.removed_fields(evicted)
        return removed + self._shape.fields(step)

    def make_batch(self, events: Any, ts: float) -> Any:
        return (ts, events)

    def publish(self, batch: Any) -> None:
        """Do nothing."""

    def idle(self) -> None:
        """Do nothing."""

    def num_pending(self) -> int:
        return 0

    def close(self) -> None:
        """Do nothing."""


class KitPublisher:
    """The kit's publisher with replay, which keeps a digest of every batch."""

    config = KVEventsConfig(bind=True)

    def __init__(self, shape: Shape, endpoint: str, replay_endpoint: str, buffer_steps: int) -> None:
        self._shape = shape
        self._publisher = ZmqEventPublisher(0, endpoint, replay_endpoint, buffer_steps, config=self.config)
        self.publish: Any = self._publisher.publish  # bound directly, so that no call of the benchmark is timed
        self.idle: Any = self._publisher.idle

    def make_events(self, step: int, evicted: int | None = None) -> Any:
        removed = [] if evicted is None else self._shape.removed_fields(evicted, tuple)
        stored = self._shape.fields(step, tuple)
        return (*(BlockRemoved(**fields) for fields in removed), *(BlockStored(**fields) for fields in stored))

    def make_batch(self, events: Any, ts: float) -> Any:
        return KVEventBatch(ts, events)

    def num_pending(self) -> int:
        return int(self._publisher.stats().batches_pending)

    def close(self) -> None:
        self._publisher.close(5.0)


class KitCachePublisher(KitPublisher):
    """The kit's publisher behind the kit's caches."""

    def make_batch(self, events: Any, ts: float) -> Any:
        return KVEventBatch(ts, ValidatedEvents(events))


class KitPublisherWithoutIdle(KitPublisher):
    """The kit's publisher in a scheduler that never calls ``idle``: a thread or ``publish()`` sends."""

    def __init__(self, shape: Shape, endpoint: str, replay_endpoint: str, buffer_steps: int) -> None:
        super().__init__(shape, endpoint, replay_endpoint, buffer_steps)
        self.idle = lambda: None


class KitInlinePublisher(KitPublisherWithoutIdle):
    """The same with ``send_mode`` inline, in which ``publish()`` sends."""

    config = KVEventsConfig(bind=True, send_mode="inline")


class PeerEvents:
    """A step's events in SGLang's or vLLM's classes."""

    def __init__(self, peer: str, shape: Shape) -> None:
        self._module = load_peer(peer)
        self._shape = shape
        self._extra = {"lora_name": None} if peer == "vLLM" else {}

    def make_events(self, step: int, evicted: int | None = None) -> Any:
        removed = [] if evicted is None else self._shape.removed_fields(evicted)
        stored = [self._module.BlockStored(**fields, **self._extra) for fields in self._shape.fields(step)]
        return [self._module.BlockRemoved(**fields) for fields in removed] + stored

    def make_batch(self, events: Any, ts: float) -> Any:
        return self._module.KVEventBatch(ts, events)


class PeerPublisher(PeerEvents):
    """SGLang's or vLLM's publisher with replay. Neither has an ``idle`` hook."""

    def __init__(self, peer: str, shape: Shape, endpoint: str, replay_endpoint: str, buffer_steps: int) -> None:
        super().__init__(peer, shape)
        # The peers bind wildcard addresses only.
        at, replay_at = (text.replace("127.0.0.1", "*") for text in (endpoint, replay_endpoint))
        self._publisher = self._module.ZmqEventPublisher(0, at, replay_at, buffer_steps)
        self.publish = self._publisher.publish

    def idle(self) -> None:
        """Do nothing, because the peers have no such hook."""

    def num_pending(self) -> int:
        return int(self._publisher._event_queue.qsize())

    def close(self) -> None:
        self._publisher.shutdown()


class BareZmqPublisher:
    """The cheapest encoding, sending and answering with these libraries, without sequence numbers or counters.

    A thread that blocks on its socket answers replays from encoded payloads.
    """

    def __init__(self, shape: Shape, endpoint: str, replay_endpoint: str) -> None:
        self._shape = shape
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pub = self._context.socket(zmq.PUB)
        pub.sndhwm = 100_000
        pub.bind(endpoint)
        self._pub = pub
        self._send = super(zmq.Socket, pub).send
        self._kept: list[bytes] = []
        self._replay_endpoint = replay_endpoint
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def make_events(self, step: int, evicted: int | None = None) -> Any:
        removed = [] if evicted is None else self._shape.removed_fields(evicted)
        stored = [("BlockStored", *fields.values()) for fields in self._shape.fields(step)]
        return [("BlockRemoved", *fields.values()) for fields in removed] + stored

    def make_batch(self, events: Any, ts: float) -> Any:
        return (ts, events, 0)

    def publish(self, batch: Any) -> None:
        payload = self._encode(batch)
        self._send(b"", zmq.SNDMORE)
        self._send(len(self._kept).to_bytes(8, "big"), zmq.SNDMORE)
        self._send(payload)
        self._kept.append(payload)

    def idle(self) -> None:
        """Do nothing, because no batch is pending."""

    def num_pending(self) -> int:
        return 0

    def _answer(self) -> None:
        router = self._context.socket(zmq.ROUTER)
        router.sndhwm = 0
        router.bind(self._replay_endpoint)
        try:
            while True:
                client, _, start = router.recv_multipart()
                for sequence in range(int.from_bytes(start, "big"), len(self._kept)):
                    router.send_multipart((client, b"", sequence.to_bytes(8, "big"), self._kept[sequence]))
                router.send_multipart((client, b"", END_SEQ, b""))
        except zmq.ContextTerminated:
            router.close(linger=0)

    def close(self) -> None:
        self._pub.close(linger=5_000)
        self._context.term()
        self._thread.join()


def open_benchmarked_publisher(
    name: str, shape: Shape, endpoint: str, replay_endpoint: str, buffer_steps: int = 10_000
) -> BenchmarkedPublisher:
    """Open the publisher called ``name`` at two free addresses of this machine."""
    if name == OFF:
        return NoPublisher(shape)
    if name == KIT:
        return KitPublisher(shape, endpoint, replay_endpoint, buffer_steps)
    if name == KIT_CACHE:
        return KitCachePublisher(shape, endpoint, replay_endpoint, buffer_steps)
    if name == KIT_WITHOUT_IDLE:
        return KitPublisherWithoutIdle(shape, endpoint, replay_endpoint, buffer_steps)
    if name == KIT_INLINE:
        return KitInlinePublisher(shape, endpoint, replay_endpoint, buffer_steps)
    if name == LIMIT:
        return BareZmqPublisher(shape, endpoint, replay_endpoint)
    return PeerPublisher(name, shape, endpoint, replay_endpoint, buffer_steps)
