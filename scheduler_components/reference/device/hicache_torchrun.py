"""One rank of a simulated replica as a process of its own, agreeing over gloo: for ``torchrun``.

    torchrun --standalone --nproc-per-node 4 -m scheduler_components.reference.device.hicache_torchrun --attn-cp-size 2

Every rank serves the same requests, with I/O of its own that is slow and fails at random, and prints what it holds
after each tenth of the run. All ranks print the same; one that does not ends all of them with an error.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from scheduler_components import ParallelState
from scheduler_components.hicache import TierStepper, open_torch_sync_domains, world_rank_sets
from scheduler_components.reference.device.hicache_sim import (
    SimulatedStorage,
    SimulatedWorkload,
    SimulationConfig,
    make_rank,
)

__all__ = [
    "main",
]

_LINES = 10


def main() -> None:
    """Run one rank of the world that the environment describes, as ``torchrun`` sets it."""
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments.timeout))
    try:
        _run(arguments)
    finally:
        dist.destroy_process_group()


def _run(arguments: argparse.Namespace) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = ParallelState.from_tp_rank(rank, tp_size=size, attn_cp_size=arguments.attn_cp_size)
    domain = open_torch_sync_domains(world_rank_sets(parallel), ["scheduler"], timeout_s=arguments.timeout)["scheduler"]
    config = SimulationConfig(attn_cp_size=parallel.attn_cp_size, attn_tp_size=parallel.attn_tp_size)
    simulated = make_rank(config, rank, SimulatedStorage(), arguments.seed)
    stepper = TierStepper(cache=simulated.cache, domain=domain, mover=simulated.mover)
    workload = SimulatedWorkload(seed=arguments.seed, page_size=config.page_size)
    try:
        for step, commands in enumerate(workload.steps(arguments.steps), start=1):
            stepper.step()
            simulated.scheduler.step(commands)
            simulated.cache.check_integrity()
            if step % max(1, arguments.steps // _LINES) == 0:
                sys.stdout.write(f"rank {rank} step {step} holds {simulated.cache.state_digest:016x}\n")
        domain.barrier("end", step=arguments.steps)
    finally:
        stepper.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A simulated replica's rank that agrees over gloo.")
    parser.add_argument("--attn-cp-size", type=int, default=1, help="ranks along attention context parallelism")
    parser.add_argument("--steps", type=int, default=200, help="steps to take")
    parser.add_argument("--seed", type=int, default=0, help="of workload and I/O")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for other ranks")
    return parser


if __name__ == "__main__":
    main()
