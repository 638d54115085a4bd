"""Run a subscriber in a separate process that records the arrival of every batch as fast as Python can.

It ends after the expected number of measured batches, or when its input has ended and the stream is silent.
"""

from __future__ import annotations

import select
import sys
import time
from typing import Any

import msgspec
import zmq

from benchmarks.processes import Delivery

_SILENCE_MS = 3_000
_POLL_MS = 250


class _Arguments(msgspec.Struct, frozen=True):
    endpoint: str
    expected: int


def _receive(socket: zmq.Socket[bytes], expected: int) -> Delivery:
    # Decode the time only, because the subscriber shares the machine with the measured process.
    read_time = msgspec.msgpack.Decoder(tuple[float, msgspec.Raw, Any]).decode
    receive, now = super(zmq.Socket, socket).recv, time.time
    delays_s: list[float] = []
    times_s: list[float] = []
    is_ready = False
    while len(times_s) < expected and _wait(socket):
        while len(times_s) < expected:
            try:
                receive(zmq.NOBLOCK)
            except zmq.Again:
                break
            receive()
            payload = receive()
            arrived_s = now()
            sent_s = read_time(payload)[0]
            if sent_s:
                delays_s.append(arrived_s - sent_s)
                times_s.append(arrived_s)
            elif not is_ready:
                is_ready = True
                sys.stdout.buffer.write(b"ready\n")
                sys.stdout.flush()
    return Delivery(delays_s=delays_s, times_s=times_s)


def _wait(socket: zmq.Socket[bytes]) -> bool:
    """Wait for a batch; return False if no more will arrive."""
    while not socket.poll(_POLL_MS):
        if select.select([sys.stdin], [], [], 0)[0]:
            return bool(socket.poll(_SILENCE_MS))
    return True


def main() -> None:
    """Subscribe to the stream of the command line."""
    arguments = msgspec.json.decode(sys.argv[1], type=_Arguments)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.rcvhwm = 0
        socket.subscribe(b"")
        socket.connect(arguments.endpoint)
        found = _receive(socket, arguments.expected)
    sys.stdout.buffer.write(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main()
