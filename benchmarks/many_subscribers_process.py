"""Run many plain subscribers of one PUB socket: bare TCP with ZMTP 3.0, read twenty times per second.

Subscribers that read each batch immediately would use more processor time than the measured publisher. The process
prints ``ready`` when all have subscribed, and the received bytes when its input ends.
"""

from __future__ import annotations

import select
import socket
import sys

import msgspec

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
_SUBSCRIBE = b"\x00\x01\x01"
_PAUSE_S = 0.05
_CHUNK = 1 << 18


class _Arguments(msgspec.Struct, frozen=True):
    host: str
    port: int
    count: int


def _subscribe(host: str, port: int) -> socket.socket:
    subscriber = socket.create_connection((host, port))
    subscriber.sendall(_GREETING)
    _read_exactly(subscriber, len(_GREETING))
    subscriber.sendall(b"\x04" + bytes((len(_READY),)) + _READY)
    _flags, size = _read_exactly(subscriber, 2)
    _read_exactly(subscriber, size)
    subscriber.sendall(_SUBSCRIBE)
    return subscriber


def _read_exactly(subscriber: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = subscriber.recv(count - len(data))
        if not part:
            raise ConnectionError("the publisher hung up in the handshake")
        data += part
    return data


def main() -> None:
    """Open the subscriptions of the command line."""
    arguments = msgspec.json.decode(sys.argv[1], type=_Arguments)
    crowd = [_subscribe(arguments.host, arguments.port) for _ in range(arguments.count)]
    for subscriber in crowd:
        subscriber.setblocking(False)
    print("ready", flush=True)
    num_bytes = 0
    while True:
        is_over = bool(select.select([sys.stdin], [], [], _PAUSE_S)[0])
        for subscriber in crowd:
            try:
                num_bytes += len(subscriber.recv(_CHUNK))
            except BlockingIOError:
                continue
        if is_over:
            break
    for subscriber in crowd:
        subscriber.close()
    print(num_bytes, flush=True)


if __name__ == "__main__":
    main()
