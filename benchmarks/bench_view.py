"""Measure the observer's view: applying events, prefix queries, clearing a rank, and memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.measure import Goal, Measurement, Samples, Scale, measure_interleaved
from benchmarks.studies.dynamo_tree import DynamoTree, has_dynamo
from observability.kv_stream import BlockView
from scheduler_components import BlockRemoved, BlockStored

NAME = "view"
_ROOT = Path(__file__).parent.parent
_DEPTH = 128
_RUN = 64
_EQUAL_GOALS = {64: 12.0, 256: 20.0, 1_000: 45.0}
_CLEARED_BLOCKS = 1_000_000
_MEMORY = {"distinct": ("blocks of one rank", 105.0), "shared": ("blocks that 64 ranks share", 6.0)}


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:
    """Time stores and removals next to one dict store per block, queries next to Dynamo's tree, a clear, and memory."""
    unequal = [_unequal_row(ranks, scale) for ranks in (1, 8, 64, 256, 1_000)]
    equal = [row for ranks in _EQUAL_GOALS for row in _equal_rows(ranks, scale)]
    return [*_apply_rows(scale), *unequal, *equal, _clear_row(scale), *_memory_rows(scale)]


def make_events(num_blocks: int, blocks_per_event: int) -> tuple[list[BlockStored], list[BlockRemoved]]:
    hashes = [(index * 0x9E3779B97F4A7C15) % (1 << 64) - (1 << 63) for index in range(1, num_blocks + 1)]
    runs = [tuple(hashes[first : first + blocks_per_event]) for first in range(0, num_blocks, blocks_per_event)]
    tokens = (0,) * blocks_per_event
    stored = [BlockStored(run, None, tokens[: len(run)], 1, None, "GPU") for run in runs]
    return stored, [BlockRemoved(run, "GPU") for run in runs]


def _apply_rows(scale: Scale) -> list[Measurement]:
    rows = []
    num_blocks = scale.of(200_000)
    for blocks_per_event in (_RUN, 1):
        stored, removed = make_events(num_blocks, blocks_per_event)
        found: dict[str, list[float]] = {"store": [], "remove": [], "limit": []}
        for _ in range(scale.turns):
            view = BlockView()
            found["store"].append(num_blocks / _seconds(view, stored) / 1e6)
            found["remove"].append(num_blocks / _seconds(view, removed) / 1e6)
            found["limit"].append(num_blocks / _store_seconds(stored) / 1e6)
        limit: dict[str, Samples] = {"limit": found["limit"]}
        case = f"events of {blocks_per_event} block{'s' * (blocks_per_event > 1)}"
        goal = Goal(1.0, at_least=True)
        rows.append(Measurement(NAME, f"apply stored, {case}", "M blocks/s", found["store"], limit, goal))
        rows.append(Measurement(NAME, f"apply removed, {case}", "M blocks/s", found["remove"], limit, goal))
    return rows


def _seconds(view: BlockView, events: Sequence[BlockStored | BlockRemoved]) -> float:
    begun = time.perf_counter()
    for event in events:
        view.apply(0, (event,))
    return time.perf_counter() - begun


def _store_seconds(events: Sequence[BlockStored]) -> float:
    """Store each block in a dict: the least that a view can do."""
    held: dict[int, int] = {}
    begun = time.perf_counter()
    for event in events:
        for block_hash in event.block_hashes:
            held[block_hash] = 1
    return time.perf_counter() - begun


def _prompt() -> tuple[int, ...]:
    stored, _ = make_events(_DEPTH, 1)
    return tuple(event.block_hashes[0] for event in stored)


def _timed_us(calls: Mapping[str, Callable[[], object]], scale: Scale) -> dict[str, list[float]]:
    found = measure_interleaved(calls, turns=2 * scale.turns, number=scale.of(2_000))
    return {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}


def _lookups(prompt: Sequence[int]) -> Callable[[], None]:
    """Look up each block in a dict: the least that a query can do."""
    table = dict.fromkeys(prompt, 1)

    def look_up() -> None:
        for block_hash in prompt:
            table.get(block_hash)

    return look_up


def _unequal_row(num_ranks: int, scale: Scale) -> Measurement:
    """Query a prompt that each rank holds to a different depth; the first rank holds all of it."""
    prompt = _prompt()
    held = [prompt[: _DEPTH - rank * _DEPTH // num_ranks] for rank in range(num_ranks)]
    view = BlockView()
    for rank, run in enumerate(held):
        view.apply(rank, [_stored(run)])
    calls: dict[str, Callable[[], object]] = {"ours": lambda: view.match_lengths(prompt), "limit": _lookups(prompt)}
    if has_dynamo():
        calls |= _dynamo_calls(held)
    us = _timed_us(calls, scale)
    what = f"match lengths of {_DEPTH} blocks, {num_ranks:,} rank{'s' * (num_ranks > 1)} of many depths"
    goal = Goal(25.0) if num_ranks <= 64 else Goal(0.5, "Dynamo")
    return Measurement(NAME, what, "us", us.pop("ours"), us, goal)


def _dynamo_calls(held: Sequence[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    """Return the queries of Dynamo's tree for the longest prompt, if rank i holds ``held[i]``."""
    tree, unsigned = DynamoTree(), [each % (1 << 64) for each in max(held, key=len)]
    for rank, run in enumerate(held):
        tree.store(rank, run)
    if len(tree.match_lengths(unsigned)) != len([run for run in held if run]):
        raise AssertionError("Dynamo's tree does not hold the events that it received: they have another form now")
    return {"Dynamo": lambda: tree.match_lengths(unsigned), "Dynamo, no dict": lambda: tree.find(unsigned)}


def _equal_rows(num_ranks: int, scale: Scale) -> list[Measurement]:
    """Query a prompt that every rank holds entirely, such as a system prompt: the largest answer."""
    view, prompt = BlockView(), _prompt()
    for rank in range(num_ranks):
        view.apply(rank, [_stored(prompt)])
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: view.match_lengths(prompt),
        "best": lambda: view.best_ranks(prompt),
        "limit": _lookups(prompt),
    }
    if has_dynamo():
        calls |= _dynamo_calls([prompt] * num_ranks)
    us = _timed_us(calls, scale)
    ours, best = us.pop("ours"), us.pop("best")
    what = f"of {_DEPTH} blocks, {num_ranks:,} ranks of one depth"
    return [
        Measurement(NAME, f"match lengths {what}", "us", ours, us, Goal(_EQUAL_GOALS[num_ranks])),
        Measurement(NAME, f"best ranks only, {what}", "us", best, us, Goal(10.0)),
    ]


def _stored(hashes: tuple[int, ...]) -> BlockStored:
    return BlockStored(hashes, None, (0,) * len(hashes), 1, None, "GPU")


def _clear_row(scale: Scale) -> Measurement:
    """Clear a rank with a million blocks while batches arrive: the longest exclusive use of the view.

    The figure is the processor time of this thread, without time given to other processes.
    """
    num_blocks = scale.of(_CLEARED_BLOCKS)
    stored, _ = make_events(num_blocks, _RUN)
    longest_ms, whole_ms = [], []
    for _ in range(scale.turns):
        view = BlockView()
        for event in stored:
            view.apply(0, (event,))
            view.apply(1, (event,))
        spans = [_thread_ms(lambda: view.clear(0))]  # noqa: B023 - called here
        while not view.is_swept:
            spans.append(_thread_ms(lambda: view.apply(2, stored[:1])))  # noqa: B023
            spans.append(_thread_ms(view.sweep))
        longest_ms.append(max(spans))
        whole_ms.append(sum(spans))
    what = f"longest wait for a clear of {num_blocks:,} blocks"
    return Measurement(NAME, what, "ms", longest_ms, {"all of its slices": whole_ms}, Goal(2.0))


def _thread_ms(call: Callable[[], object]) -> float:
    begun = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begun) / 1e6


def _memory_rows(scale: Scale) -> list[Measurement]:
    if not Path("/proc/self/statm").is_file():
        return []
    rows = []
    for thing, (what, goal) in _MEMORY.items():
        turns = range(max(1, scale.turns // 2))
        ours = [_bytes_each(f"view, {thing}") for _ in turns]
        dynamo = {"Dynamo": [_bytes_each(f"Dynamo, {thing}") for _ in turns]} if has_dynamo() else {}
        rows.append(Measurement(NAME, f"memory of {what}", "bytes a block and rank", ours, dynamo, Goal(goal)))
    return rows


def _bytes_each(thing: str) -> float:
    command = [sys.executable, "-m", "benchmarks.bench_view", thing]
    return float(subprocess.run(command, cwd=_ROOT, check=True, capture_output=True).stdout)


# --- the process that prints the resident bytes per (rank, block) ---


_NUM_BLOCKS = 200_000
_NUM_SHARED = 40_000
_NUM_RANKS = 64
_RUN = 64


def _runs(num_blocks: int) -> Iterator[tuple[int, ...]]:
    for first in range(0, num_blocks, _RUN):
        yield tuple((index * 0x9E3779B97F4A7C15) % (1 << 64) - (1 << 63) for index in range(first, first + _RUN))


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _bytes_each(store: Callable[[int, tuple[int, ...], int | None], None], num_ranks: int, num_blocks: int) -> float:
    """Store every block on each rank, run below run. A first run allocates everything that is not per block."""
    store(0, (1,), None)
    before = _resident_bytes()
    for rank in range(num_ranks):
        parent = None
        for run in _runs(num_blocks):
            store(rank, run, parent)
            parent = run[-1]
    return (_resident_bytes() - before) / (num_ranks * num_blocks)


def main() -> None:
    """Print the bytes of the subject of the command line."""
    subject, _, thing = sys.argv[1].partition(", ")
    num_ranks, num_blocks = (1, _NUM_BLOCKS) if thing == "distinct" else (_NUM_RANKS, _NUM_SHARED)
    if subject == "view":
        view = BlockView()

        def store(rank: int, hashes: tuple[int, ...], parent: int | None) -> None:
            view.apply(rank, (BlockStored(hashes, parent, (), 1, None, "GPU"),))

        print(_bytes_each(store, num_ranks, num_blocks))
    else:
        print(_bytes_each(DynamoTree().store, num_ranks, num_blocks))


if __name__ == "__main__":
    main()
