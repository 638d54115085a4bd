"""Read a JetStream stream in a separate process and print when each batch was in the view."""

from __future__ import annotations

import sys
import time

import msgspec

from observability.jetstream import JetStreamConfig, LogAddress, open_jetstream_subscriber
from observability.kv_stream import NullStreamListener, StreamState
from scheduler_components.kv_events import DecodedBatch

_DEADLINE_S = 60.0


class _Arguments(msgspec.Struct, frozen=True):
    url: str
    worker: str
    expected: int


class _Delays(NullStreamListener):
    """Collects the milliseconds since each batch's timestamp."""

    def __init__(self) -> None:
        self.ms: list[float] = []

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        """Record the delay."""
        self.ms.append(1e3 * (time.time() - batch.ts))


def main() -> None:
    """Follow the stream of the command line until all batches have arrived."""
    arguments = msgspec.json.decode(sys.argv[1], type=_Arguments)
    delays = _Delays()
    config = JetStreamConfig(servers=arguments.url)
    with open_jetstream_subscriber(config, [LogAddress(arguments.worker)], listener=delays) as reader:
        until_s = time.monotonic() + _DEADLINE_S
        while reader.stats()[0].state is not StreamState.LIVE and time.monotonic() < until_s:
            reader.poll(0.05)
        sys.stdout.buffer.write(b"ready\n")
        sys.stdout.flush()
        while len(delays.ms) < arguments.expected and time.monotonic() < until_s:
            reader.poll(0.05)
    sys.stdout.buffer.write(msgspec.msgpack.encode(delays.ms))


if __name__ == "__main__":
    main()
