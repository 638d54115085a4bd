"""Measure the radix cache over the prompts of a trace, by page size, with and without events, next to SGLang's.

Each request matches and locks its prefix, allocates the missing pages (evicting once the pool is full), inserts its
pages, unlocks, and takes the events. Pages are arrays here and tensors in SGLang. The prompts are generated, or those
of ``BENCH_TRACE=/path/to/trace.jsonl`` in Mooncake's format. SGLang's cache runs in a separate process if
``BENCH_SGLANG_PYTHON`` names a Python with SGLang.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Protocol

from benchmarks.measure import Goal, Measurement, Scale
from scheduler_components.cache import RadixCache
from scheduler_engine.device.workload import open_trace

NAME = "trace"
CAPACITY_TOKENS = 1 << 19
_BLOCK_TOKENS = 512
_NUM_REQUESTS = 60
_ROOT = Path(__file__).parent.parent
_GOALS = {(1, False): 0.7, (1, True): 0.4, (16, False): 1.0, (16, True): 0.3}


class Peer(Protocol):
    """SGLang's cache in a separate process, if it is available."""

    def us_per_request(self, page_size: int, events: bool) -> float | None: ...


class _Absent:
    def us_per_request(self, page_size: int, events: bool) -> float | None:
        return None


class _Process:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def us_per_request(self, page_size: int, events: bool) -> float | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{page_size} {int(events)}\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # the process has reported its error on standard error
            return None
        answer = self._process.stdout.readline()
        return float(answer) if answer else None


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # the peer is found by its own variable
    """Time a request at page sizes 1, 16 and 64, with and without events."""
    prompts = _prompts(scale.of(_NUM_REQUESTS))
    rows = []
    with _sglang(prompts) as peer:
        for page_size in (1, 16, 64):
            for events in (False, True):
                ours, theirs = [], []
                for _ in range(scale.turns):
                    ours.append(us_per_request(prompts, page_size, events=events))
                    found = peer.us_per_request(page_size, events)
                    theirs += [] if found is None else [found]
                what = f"a request of a trace, pages of {page_size}, {'events' if events else 'no events'}"
                goal = Goal(bound, "SGLang") if (bound := _GOALS.get((page_size, events))) else None
                beside = {"SGLang": theirs} if len(theirs) == len(ours) else {}
                rows.append(Measurement(NAME, what, "us", ours, beside, goal))
    return rows


def us_per_request(prompts: Sequence[array[int]], page_size: int, *, events: bool) -> float:
    """Match, allocate, cache and release each prompt; return microseconds of this thread's processor time."""
    cache = RadixCache(page_size=page_size, capacity_tokens=CAPACITY_TOKENS, record=events)
    gc.collect()
    begun = time.thread_time()
    for prompt in prompts:
        num_pages = len(prompt) // page_size
        match = cache.match_prefix(prompt)
        cache.lock(match.node)
        fresh = cache.allocate_array(num_pages - match.num_tokens // page_size)
        stored = cache.insert(prompt, array("I", match.page_array) + fresh)
        cache.lock(stored.node)
        cache.unlock(match.node)
        cache.unlock(stored.node)
        cache.take_events()
    return (time.thread_time() - begun) * 1e6 / len(prompts)


def _prompts(count: int) -> list[array[int]]:
    path = os.environ.get("BENCH_TRACE")
    hash_ids = _recorded(Path(path), count) if path else _generated(count)
    return [_tokens_of(ids) for ids in hash_ids]


def _recorded(path: Path, count: int) -> list[Sequence[int]]:
    short = (request for request in open_trace(path) if request.input_length < CAPACITY_TOKENS // 4)
    return [request.hash_ids for request, _ in zip(short, range(count), strict=False)]


def _generated(count: int) -> list[Sequence[int]]:
    """Make prompts of 12,000 tokens on average that share a prefix; every third continues another prompt."""
    random, prompts, next_id = Random(14), list[Sequence[int]](), 1
    for number in range(count):
        above: Sequence[int] = random.choice(prompts) if number % 3 == 2 else (0,)
        num_blocks = random.randint(2, 8) if number % 3 == 2 else random.randint(6, 42)
        prompts.append((*above, *range(next_id, next_id + num_blocks)))
        next_id += num_blocks
    return prompts


def _tokens_of(hash_ids: Sequence[int]) -> array[int]:
    tokens = array("I")
    for hash_id in hash_ids:
        tokens.extend(range(hash_id * _BLOCK_TOKENS, (hash_id + 1) * _BLOCK_TOKENS))
    return tokens


@contextmanager
def _sglang(prompts: Sequence[array[int]]) -> Iterator[Peer]:
    python = os.environ.get("BENCH_SGLANG_PYTHON")
    if not python:
        yield _Absent()
        return
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        path = Path(folder) / "prompts.json"
        path.write_text(json.dumps([prompt.tolist() for prompt in prompts]))
        command = [python, "-m", "benchmarks.radix_peer_process", str(path), str(CAPACITY_TOKENS)]
        process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield _Process(process)
        finally:
            process.kill()
            process.wait()
