"""Join a stream that never stops, several times, in a separate process.

``bench_late_readers`` starts it with ``LateReaders`` as JSON. It writes ``Arrivals`` as msgpack to standard output.
"""

from __future__ import annotations

import math
import sys
import time

import msgspec

from observability.kv_stream import StreamState, open_subscriber, static_address

__all__ = ["Arrivals", "LateReaders", "join"]

_POLL_S = 0.02


class LateReaders(msgspec.Struct, frozen=True, kw_only=True):
    """The readers to start, each after the previous one is LIVE.

    Attributes:
        endpoint, replay_endpoint: addresses of the publisher.
        joins: number of readers.
        timeout_s: seconds after which a reader stops trying.
    """

    endpoint: str
    replay_endpoint: str
    joins: int
    timeout_s: float


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """The arrival of each reader.

    Attributes:
        live_s: seconds from opening the subscriber until its stream is LIVE; infinite after the timeout.
        ages_s: age of the newest batch in the view at that time, in seconds; NaN without one.
    """

    live_s: list[float]
    ages_s: list[float]


def join(readers: LateReaders) -> tuple[float, float]:
    """Follow the stream until it is LIVE. Return the seconds, and the age of the newest batch in the view."""
    begun_s = time.monotonic()
    with open_subscriber([static_address(readers.endpoint, replay=readers.replay_endpoint)]) as subscriber:
        while (stats := subscriber.stats()[0]).state is not StreamState.LIVE:
            if time.monotonic() - begun_s >= readers.timeout_s:
                return math.inf, math.nan
            subscriber.poll(_POLL_S)
        live_s = time.monotonic() - begun_s
    return live_s, math.nan if stats.newest_batch_age_s is None else stats.newest_batch_age_s


def main() -> None:
    """Start the readers of the command line."""
    readers = msgspec.json.decode(sys.argv[1], type=LateReaders)
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.flush()
    found = [join(readers) for _ in range(readers.joins)]
    arrivals = Arrivals(live_s=[live_s for live_s, _ in found], ages_s=[age_s for _, age_s in found])
    sys.stdout.buffer.write(msgspec.msgpack.encode(arrivals))


if __name__ == "__main__":
    main()
