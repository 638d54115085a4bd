"""A subscriber process that prints its state and blocks as one JSON line per request."""

from __future__ import annotations

import json
import os
import sys

from observability.kv_stream import FollowPolicy, open_subscriber, static_address


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    events, replay = sys.argv[1:3]
    os.set_blocking(sys.stdin.fileno(), False)
    with open_subscriber([static_address(events, replay=replay)], policy=FollowPolicy(probe_interval_s=0.1)) as sub:
        while True:
            sub.poll(0.01)
            asked = sys.stdin.buffer.raw.read(1)  # type: ignore[union-attr]
            if asked == b"":
                return
            if asked is not None:
                answer = {"state": sub.stats()[0].state.value, "blocks": sorted(sub.blocks(0))}
                say(json.dumps(answer))


main()
