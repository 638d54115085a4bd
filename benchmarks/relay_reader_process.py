"""Read two streams with equal batches in a separate process, and print the delay of each batch on both."""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec
import zmq

_SILENCE_MS = 10_000


class _Arguments(msgspec.Struct, frozen=True):
    endpoints: tuple[str, str]
    expected: int


def _receive(sockets: list[zmq.Socket[bytes]], expected: int) -> list[tuple[float, float]]:
    """Return the delays from a batch's timestamp in milliseconds, per stream. A relay keeps the timestamp."""
    read_time = msgspec.msgpack.Decoder(tuple[float, msgspec.Raw, Any]).decode
    delays: list[dict[float, float]] = [{}, {}]
    heard = [False, False]
    is_ready = False
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    while min(map(len, delays)) < expected:
        ready = dict(poller.poll(_SILENCE_MS))
        if not ready:
            break
        for number, socket in enumerate(sockets):
            while socket in ready:
                try:
                    payload = socket.recv_multipart(zmq.NOBLOCK)[-1]
                except zmq.Again:
                    break
                arrived_s = time.time()
                sent_s = read_time(payload)[0]
                heard[number] = True
                if sent_s:
                    delays[number][sent_s] = 1e3 * (arrived_s - sent_s)
        if all(heard) and not is_ready:
            is_ready = True
            sys.stdout.buffer.write(b"ready\n")
            sys.stdout.flush()
    direct, through = delays
    return [(delay, through[sent_s]) for sent_s, delay in direct.items() if sent_s in through]


def main() -> None:
    """Subscribe to the streams of the command line."""
    arguments = msgspec.json.decode(sys.argv[1], type=_Arguments)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = []
    for endpoint in arguments.endpoints:
        socket = context.socket(zmq.SUB)
        socket.rcvhwm = 0
        socket.linger = 0
        socket.subscribe(b"")
        socket.connect(endpoint)
        sockets.append(socket)
    found = _receive(sockets, arguments.expected)
    context.destroy()
    sys.stdout.buffer.write(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main()
