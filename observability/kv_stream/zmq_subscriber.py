"""Following all streams of a worker over ZeroMQ: one object, polled by one thread, queried by any.

A ``Subscriber`` owns one ``ZmqStream`` per rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import zmq

from observability.kv_stream.batch_applier import BatchApplier, NullStreamListener, StreamListener
from observability.kv_stream.follower import FollowPolicy, StreamFollower
from observability.kv_stream.stream_cursor import StreamCursor
from observability.kv_stream.subscriber_base import SubscriberBase, check_ranks
from observability.kv_stream.thread_fair_rlock import FairRLock
from observability.kv_stream.view import BlockView
from observability.kv_stream.zmq_stream import Socket, SocketFactory, ZmqReplayChannel, ZmqStream
from scheduler_components.kv_events import BatchDecoder, CurveClientKeys, StreamAddress

__all__ = ["Subscriber", "open_subscriber", "wait_any"]

_SOCKETS_PER_STREAM = 4
"""SUB, its monitor's two ends, DEALER."""

_SPARE_SOCKETS = 64
"""A closed socket counts until libzmq has reaped it."""


class Subscriber(SubscriberBase):
    """Follows streams over ZeroMQ and keeps one view of them. ``open_subscriber`` creates it."""

    def __init__(
        self,
        streams: dict[int, ZmqStream],
        view: BlockView,
        context: zmq.Context[Socket],
        lock: FairRLock,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(streams, view, lock, clock)
        self._streams = streams
        self._context = context

    def __enter__(self) -> Subscriber:
        return self

    def close(self) -> None:
        """Close every socket; the view and the counters stay readable. Safe to call twice."""
        with self._lock:
            for stream in self._streams.values():
                stream.close()
        self._context.term()

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s`` for input, then apply it. Return True if there was any."""
        has_input = wait_any((self,), timeout_s)
        self.drain()
        return has_input

    def sockets(self) -> list[Socket]:
        """Return the sockets to poll for input."""
        return [socket for stream in self._streams.values() for socket in stream.sockets()]

    @property
    def due_in_s(self) -> float:
        """The latest time for the next ``drain``, in seconds from now."""
        return self._until_sweep_s(min(stream.next_deadline_s for stream in self._streams.values()) - self._clock())

    def drain(self) -> None:
        """Apply the waiting input, a slice of each stream, and handle the deadlines."""
        now_s = self._clock()
        for stream in self._streams.values():
            with self._lock:
                stream.drain(now_s)
        self._sweep()


def wait_any(subscribers: Sequence[Subscriber], timeout_s: float) -> bool:
    """Wait up to ``timeout_s`` until one of ``subscribers`` must be drained. Return True when there is input.

    For a thread that polls several subscribers: it then drains each of them.
    """
    waiting = [(socket, zmq.POLLIN) for subscriber in subscribers for socket in subscriber.sockets()]
    due_in_s = min((subscriber.due_in_s for subscriber in subscribers), default=timeout_s)
    # zmq_poll() truncates to whole milliseconds: without one more it would return just before the deadline.
    wait_s = max(0.0, min(timeout_s, due_in_s + 0.001))
    if waiting:
        return bool(zmq.zmq_poll(waiting, int(1000 * wait_s)))
    time.sleep(wait_s)  # between two attempts to connect there is no socket, and zmq_poll() does not wait without one
    return False


def open_subscriber(
    addresses: Iterable[StreamAddress],
    *,
    policy: FollowPolicy | None = None,
    listener: StreamListener | None = None,
    keys: CurveClientKeys | None = None,
    view: BlockView | None = None,
    new_decoder: Callable[[], BatchDecoder] | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> Subscriber:
    """Open all streams and return their subscriber. Use it in a ``with`` block, or close it.

    Return without waiting for the connections: the subscriber keeps dialing a publisher that is not there yet.

    Args:
        addresses: from ``discover`` or ``static_address``.
        policy: how long to wait.
        listener: receives every batch and change of state. It may query the subscriber, but must not wait for another
            thread that does.
        keys: for publishers that require CURVE keys of clients.
        view: an empty view for the blocks; by default a ``BlockView``.
        new_decoder: creates the decoder of one stream; by default a ``BatchDecoder``, which decodes tokens only for a
            listener.
        clock: monotonic seconds, for deadlines.
        wall_clock: seconds since the epoch, for the lag.

    Raises:
        ConfigError: no address, too many, or two with one rank.
    """
    checked = tuple(addresses)
    check_ranks([address.rank for address in checked])
    context: zmq.Context[Socket] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _SPARE_SOCKETS + _SOCKETS_PER_STREAM * len(checked))
    socket_factory = SocketFactory(context, keys)
    blocks = BlockView() if view is None else view
    streams, lock = dict[int, ZmqStream](), FairRLock()
    subscriber = Subscriber(streams, blocks, context, lock, clock)
    try:
        for address in checked:
            channel = ZmqReplayChannel(socket_factory, address.replay)
            follower = StreamFollower(
                cursor=StreamCursor(has_replay=address.replay is not None),
                applier=BatchApplier(
                    rank=address.rank,
                    view=blocks,
                    decoder=BatchDecoder(decode_tokens=listener is not None) if new_decoder is None else new_decoder(),
                    listener=NullStreamListener() if listener is None else listener,
                    wall_clock=wall_clock,
                ),
                channel=channel,
                policy=FollowPolicy() if policy is None else policy,
            )
            follower.begin(clock())
            streams[address.rank] = ZmqStream(socket_factory, address, follower, channel, lock)
            streams[address.rank].open()
    except BaseException:
        subscriber.close()
        raise
    return subscriber
