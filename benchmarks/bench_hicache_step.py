"""Measure the agreement in a step of the hierarchical cache, by number of ranks and active transfers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path

import msgspec

from benchmarks.hicache_step_process import StepResult, StepSpec
from benchmarks.measure import Goal, Measurement, Scale

NAME = "hicache_step"
_ROOT = Path(__file__).parent.parent
_PATIENCE_S = 120
_Grid = tuple[int, int, int]
"""Sizes along attention-CP, attention-TP and PP."""

_GRIDS: dict[str, _Grid] = {
    "1 rank (none)": (1, 1, 1),
    "2 ranks (CP2)": (2, 1, 1),
    "2 ranks (PP2)": (1, 1, 2),
    "4 ranks (CP2 x TP2)": (2, 2, 1),
    "4 ranks (TP2 x PP2)": (1, 2, 2),
}
_QUEUES = (0, 100, 1000)


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peers: theirs want a device's tensors
    """Step real processes over the reference engine's sockets, and over gloo if torch is installed."""
    transports = ["zmq", *(["gloo"] if importlib.util.find_spec("torch") is not None else [])]
    rows = []
    for transport in transports:
        for name, grid in _GRIDS.items():
            result = _measure(scale, transport, grid, 0)
            beside = {"bare reductions": result.us_bare} if prod(grid) > 1 else {}
            goal = None if beside else Goal(15.0)
            rows.append(Measurement(NAME, f"a step, {name}, {transport}", "us", result.us_a_step, beside, goal))
    grid = _GRIDS["4 ranks (CP2 x TP2)"]
    for num_operations in _QUEUES:
        result = _measure(scale, "zmq", grid, num_operations)
        what = f"{num_operations:,} operations in flight, 4 ranks"
        rows.append(Measurement(NAME, f"a step, {what}, zmq", "us", result.us_a_step))
        rows.append(Measurement(NAME, f"reductions per step, {what}", "1", [result.collectives_a_step]))
    return rows


def _measure(scale: Scale, transport: str, grid: _Grid, num_operations: int) -> StepResult:
    """Start one process per rank and return the figures of the slowest."""
    with tempfile.TemporaryDirectory(prefix="hicache-step-") as folder:
        processes = []
        try:
            for rank in range(prod(grid)):
                spec = StepSpec(
                    rank=rank,
                    attn_cp_size=grid[0],
                    attn_tp_size=grid[1],
                    pp_size=grid[2],
                    transport=transport,
                    folder=folder,
                    num_operations=num_operations,
                    num_turns=scale.turns,
                    num_steps=scale.of(500),
                )
                command = [sys.executable, "-m", "benchmarks.hicache_step_process", msgspec.json.encode(spec).decode()]
                processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, cwd=_ROOT))
            answers = [process.communicate(timeout=_PATIENCE_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    results = [msgspec.json.decode(answer.splitlines()[-1], type=StepResult) for answer in answers]
    return max(results, key=lambda result: result.us_a_step)
