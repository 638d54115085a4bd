"""The observer's view: applying events, and asking who holds a prompt's prefix."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.measure import Goal, Measurement, Samples, Scale, measure_in_turns
from observability.kv_stream import BlockView
from scheduler_components import BlockRemoved, BlockStored

NAME = "view"
_DEPTH = 128
_RUN = 64


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # noqa: ARG001 - the peers have no view
    """Time storing and removing, beside one dict store a block; then queries over 1, 8 and 64 ranks."""
    return [*_apply_rows(scale), *(_query_row(ranks, scale) for ranks in (1, 8, 64))]


def make_events(num_blocks: int, blocks_per_event: int) -> tuple[list[BlockStored], list[BlockRemoved]]:
    hashes = [(index * 0x9E3779B97F4A7C15) % (1 << 64) - (1 << 63) for index in range(1, num_blocks + 1)]
    runs = [tuple(hashes[first : first + blocks_per_event]) for first in range(0, num_blocks, blocks_per_event)]
    tokens = (0,) * blocks_per_event
    stored = [BlockStored(run, None, tokens[: len(run)], 1, None) for run in runs]
    return stored, [BlockRemoved(run) for run in runs]


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
    """One dict store a block: the least that a view can do."""
    held: dict[int, int] = {}
    begun = time.perf_counter()
    for event in events:
        for block_hash in event.block_hashes:
            held[block_hash] = 1
    return time.perf_counter() - begun


def _query_row(num_ranks: int, scale: Scale) -> Measurement:
    """Every rank holds another depth of one prompt of 128 blocks; the first rank holds all."""
    view = BlockView()
    stored, _ = make_events(_DEPTH, 1)
    prompt = [event.block_hashes[0] for event in stored]
    for rank in range(num_ranks):
        view.apply(rank, stored[: _DEPTH - rank * _DEPTH // num_ranks])
    table = dict.fromkeys(prompt, 1)

    def lookups() -> None:
        for block_hash in prompt:
            table.get(block_hash)

    calls = {"ours": lambda: view.deepest_prefix(prompt), "limit": lookups}
    found = measure_in_turns(calls, turns=2 * scale.turns, number=scale.of(3_000))
    us = {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
    what = f"deepest prefix of {_DEPTH} blocks, {num_ranks} rank{'s' * (num_ranks > 1)}"
    return Measurement(NAME, what, "us", us["ours"], {"limit": us["limit"]}, Goal(25.0))
