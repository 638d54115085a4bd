"""Run a replay client in a separate process, with the plain request that every publisher answers.

``prompt`` reads as fast as it can. ``slow`` reads nothing for 1.5 s after its request. ``loop`` requests everything
repeatedly until its input ends. ``last`` requests the last batch repeatedly.
"""

from __future__ import annotations

import select
import sys
import time

import msgspec
import zmq

from benchmarks.processes import Replays

_END_SEQ = (-1).to_bytes(8, "big", signed=True)
_STALL_S = 1.5
_TIMEOUT_MS = 6_000
_LAST_ASKS = 100
_BETWEEN_ASKS_S = 0.02


class _Arguments(msgspec.Struct, frozen=True):
    endpoint: str
    asks: str
    kept: int


def _ask(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int, stall_s: float, found: Replays) -> None:
    """Request everything from ``start`` on a new connection, and record the answer."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvhwm = 1_000
        dealer.connect(endpoint)
        # An empty request first, so that connecting is not part of the measurement.
        dealer.send_multipart((b"", (1 << 62).to_bytes(8, "big")))
        if dealer.poll(_TIMEOUT_MS):
            dealer.recv_multipart()
        asked_s = time.perf_counter()
        dealer.send_multipart((b"", start.to_bytes(8, "big")))
        first_s, batches, ended = 0.0, 0, False
        time.sleep(stall_s)
        while not ended and dealer.poll(_TIMEOUT_MS):
            sequence, _ = dealer.recv_multipart()[-2:]
            first_s = first_s or time.perf_counter() - asked_s
            ended = sequence == _END_SEQ
            batches += not ended
        found.first_s.append(first_s)
        found.whole_s.append(time.perf_counter() - asked_s)
        found.batches.append(batches)
        found.ended.append(ended)


def main() -> None:
    """Send the requests of the command line."""
    arguments = msgspec.json.decode(sys.argv[1], type=_Arguments)
    found = Replays(batches=[], ended=[], first_s=[], whole_s=[])
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.flush()
    with zmq.Context() as context:
        if arguments.asks == "last":
            for _ in range(_LAST_ASKS):
                _ask(context, arguments.endpoint, arguments.kept - 1, 0.0, found)
                time.sleep(_BETWEEN_ASKS_S)
        elif arguments.asks == "loop":
            while not select.select([sys.stdin], [], [], 0)[0]:
                _ask(context, arguments.endpoint, 0, 0.0, found)
        else:
            _ask(context, arguments.endpoint, 0, _STALL_S if arguments.asks == "slow" else 0.0, found)
    sys.stdout.buffer.write(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main()
