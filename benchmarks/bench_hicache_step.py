"""Measure the agreement in a step of the hierarchical cache, by number of ranks and active transfers."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from math import prod
from pathlib import Path

import msgspec
import zmq

from benchmarks.measure import Goal, Measurement, Scale
from scheduler_components import ParallelState
from scheduler_components.agreement import BLOCK_INTS, ParallelGroups, SyncCall
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.hicache import HiCacheStepper, HiRadixCache
from scheduler_components.values.page_operations import Instruction, IoEvent
from scheduler_engine.device.hicache_sim import SimulatedHostPages
from scheduler_engine.engine.rank.zmq_sync import open_zmq_sync_hub

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
                command = [sys.executable, "-m", "benchmarks.bench_hicache_step", msgspec.json.encode(spec).decode()]
                processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, cwd=_ROOT))
            answers = [process.communicate(timeout=_PATIENCE_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    results = [msgspec.json.decode(answer.splitlines()[-1], type=StepResult) for answer in answers]
    return max(results, key=lambda result: result.us_a_step)


# --- the process of one loop ---


_WARM_UP_STEPS = 50


class StepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a rank: ``num_steps`` per turn, with ``num_operations`` active transfers."""

    rank: int
    attn_cp_size: int
    attn_tp_size: int
    pp_size: int
    transport: str
    folder: str
    num_operations: int
    num_turns: int
    num_steps: int


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds per step and of its bare reductions, one value per turn, and collectives per step."""

    us_a_step: list[float]
    us_bare: list[float]
    collectives_a_step: float


class StuckMover:
    """A ``PageMover`` that never completes an instruction."""

    has_storage = False
    load_back_budget_pages = 0

    def submit(self, instructions: Sequence[Instruction]) -> None:
        pass

    def poll(self) -> list[IoEvent]:
        return []

    def close(self) -> None:
        pass


def _wait(socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
    socket.poll(timeout_ms, event)
    return True


def _open_groups(spec: StepSpec) -> ParallelGroups:
    tp_size = spec.attn_cp_size * spec.attn_tp_size
    size = spec.pp_size * tp_size
    stages = ParallelState.from_tp_rank(0, tp_size=tp_size, attn_cp_size=spec.attn_cp_size, pp_size=spec.pp_size)
    world = world_rank_groups(stages)
    if spec.transport == "gloo":
        import torch.distributed as dist

        from scheduler_components.agreement.torch_sync import open_torch_groups

        dist.init_process_group(
            "gloo",
            init_method=f"file://{spec.folder}/rendezvous",
            rank=spec.rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        return open_torch_groups(world, ["scheduler"])["scheduler"]
    hub = open_zmq_sync_hub(
        zmq.Context(),
        rank=spec.rank,
        reduce_groups=world[spec.rank].reduce_groups,
        address_of=lambda rank: f"ipc://{spec.folder}/{rank}",
        wait_for=_wait,
        timeout_s=60,
    )
    return hub.parallel_groups(world[spec.rank].reduce_groups)


def _bare_us(groups: ParallelGroups, num_steps: int) -> float:
    """Time the reductions of an empty vector, without building a proposal or reading the answer."""
    nothing, call = [0] * BLOCK_INTS, SyncCall(groups.rank, 0, 0, "bare")
    begun = time.perf_counter()
    for _ in range(num_steps):
        for group in groups.groups:
            group.all_reduce_min(nothing, call)
    return (time.perf_counter() - begun) * 1e6 / num_steps


def main() -> None:
    """Run the turns."""
    spec = msgspec.json.decode(sys.argv[1], type=StepSpec)
    num_pages = spec.num_operations + 1
    cache = HiRadixCache(
        page_size=1,
        capacity_tokens=num_pages,
        host=SimulatedHostPages(num_pages, rng=random.Random(0), failure=0.0),
        num_host_pages=num_pages,
    )
    for token in range(spec.num_operations):
        cache.insert([token], cache.allocate(1))
    stepper = HiCacheStepper(cache=cache, groups=_open_groups(spec), mover=StuckMover())
    for _ in range(_WARM_UP_STEPS):
        stepper.step()
    us_a_step, us_bare, collectives = [], [], stepper.groups.num_collectives
    for _ in range(spec.num_turns):
        begun = time.perf_counter()
        for _ in range(spec.num_steps):
            stepper.step()
        us_a_step.append((time.perf_counter() - begun) * 1e6 / spec.num_steps)
        us_bare.append(_bare_us(stepper.groups, spec.num_steps))
    collectives = stepper.groups.num_collectives - collectives
    per_step = collectives / (spec.num_turns * spec.num_steps)
    result = StepResult(us_a_step=us_a_step, us_bare=us_bare, collectives_a_step=per_step)
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.stdout.flush()
    stepper.groups.barrier("end", step=0)
    stepper.close()


if __name__ == "__main__":
    main()
