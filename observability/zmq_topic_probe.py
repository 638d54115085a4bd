"""Find the topics that a publisher uses, by subscribing to all of them for a short time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import zmq

from scheduler_components.kv_events import CurveClientKeys, Endpoint, StreamAddress
from scheduler_components.kv_events.codec import MAX_PAYLOAD_BYTES
from scheduler_components.kv_events.zmq_auth import apply_curve_client_keys

__all__ = ["probe_topics"]

Socket = zmq.Socket[bytes]

_MAX_TOPICS = 8


def probe_topics(
    addresses: Sequence[StreamAddress],
    *,
    listen_s: float,
    keys: CurveClientKeys | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, set[bytes]]:
    """Return the topics of each stream by rank; empty for a stream that sends nothing.

    Returns when every stream has sent a message, or after ``listen_s``.
    """
    topics: dict[int, set[bytes]] = {address.rank: set() for address in addresses}
    ranks: dict[Socket, int] = {}
    poller = zmq.Poller()
    context: zmq.Context[Socket] = zmq.Context()
    with context:
        try:
            for address in addresses:
                socket = _open_to_all_topics(context, address.events, keys)
                ranks[socket] = address.rank
                poller.register(socket, zmq.POLLIN)
            deadline_s = clock() + listen_s
            while not all(topics.values()) and (left_s := deadline_s - clock()) > 0:
                for socket, _ in poller.poll(int(1000 * left_s)):
                    topics_seen = topics[ranks[socket]]
                    frames = socket.recv_multipart()
                    if len(topics_seen) < _MAX_TOPICS:
                        topics_seen.add(frames[0])
        finally:
            for socket in ranks:
                socket.close(linger=0)
    return topics


def _open_to_all_topics(context: zmq.Context[Socket], endpoint: Endpoint, keys: CurveClientKeys | None) -> Socket:
    socket: Socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
    socket.setsockopt(zmq.IPV6, int(endpoint.is_ipv6))
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    if keys is not None:
        apply_curve_client_keys(socket, keys)
    socket.connect(str(endpoint))
    return socket
