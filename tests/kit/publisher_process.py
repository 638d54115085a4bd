"""A publisher process driven over standard input: one JSON command per line, one JSON reply each."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from pathlib import Path

import msgspec

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from scheduler_components.kv_events import KVEventsConfig, ZmqEventPublisher


def sized_batch(block_hash: int, size_bytes: int) -> KVEventBatch:
    """One block whose batch takes about ``size_bytes`` on the wire."""
    tokens = tuple(range(2**31, 2**31 + max(1, size_bytes // 5)))
    return KVEventBatch(ts=1.0, events=(BlockStored((block_hash,), None, tokens, len(tokens), None),))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tick_for_a_second(publisher: ZmqEventPublisher, first: int, count: int, standing: int) -> None:
    """Store ``count`` blocks, each with the removal of the one ``standing`` before it, in even steps."""
    pause, began_s = threading.Event(), time.monotonic()
    for block_hash in range(first, first + count):
        new = sized_batch(block_hash, 200)
        gone = (BlockRemoved((block_hash - standing,)),) if block_hash >= standing else ()
        publisher.publish(KVEventBatch(ts=time.time(), events=(*new.events, *gone)))
        due_in_s = began_s + (block_hash - first) / count - time.monotonic()
        if due_in_s > 0.001:
            publisher.idle()
            pause.wait(due_in_s)


def pace(publisher: ZmqEventPublisher, first: int, rate: int, standing: int) -> int:
    """Store ``rate`` blocks per second until the next line, each with the removal of the one ``standing`` before it.

    The loop never calls ``idle()``.

    Returns:
        The number of the next block.
    """
    pause, began_s = threading.Event(), time.monotonic()
    block_hash = first
    while not select.select([sys.stdin], [], [], 0)[0]:
        new = sized_batch(block_hash, 20)
        gone = (BlockRemoved((block_hash - standing,)),) if block_hash >= standing else ()
        publisher.publish(KVEventBatch(ts=time.time(), events=(*new.events, *gone)))
        block_hash += 1
        due_in_s = began_s + (block_hash - first) / rate - time.monotonic()
        if due_in_s > 0:
            pause.wait(due_in_s)
    sys.stdin.readline()
    return block_hash


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    publisher = ZmqEventPublisher(0, config=KVEventsConfig(**json.loads(sys.argv[1])))
    say(json.dumps({"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}))
    for line in sys.stdin:
        verb, *numbers = json.loads(line)
        answer: object = None
        if verb == "publish":
            first, stop, size_bytes = numbers
            for block_hash in range(first, stop):
                publisher.publish(sized_batch(block_hash, size_bytes))
                if block_hash % 4 == 0:
                    publisher.idle()
        elif verb == "remove":
            publisher.publish(KVEventBatch(time.time(), (BlockRemoved(tuple(range(*numbers))),)))
        elif verb == "clear":
            publisher.publish(KVEventBatch(time.time(), (AllBlocksCleared(),)))
        elif verb == "stats":
            answer = msgspec.to_builtins(publisher.stats())
        elif verb == "tick":
            tick_for_a_second(publisher, *numbers)
        elif verb == "pace":
            answer = pace(publisher, *numbers)
        elif verb == "memory":
            answer = resident_bytes()
        elif verb == "resources":
            answer = [resident_bytes(), len(list(Path("/proc/self/fd").iterdir())), threading.active_count()]
        elif verb == "close":
            answer = msgspec.to_builtins(publisher.close(numbers[0]))
        say(json.dumps(answer))
    # Falls off its end without shutdown(): interpreter exit must do what is needed.


main()
