"""One rank of a simulated replica in its own process, agreeing over gloo. Run it with ``torchrun``.

    torchrun --standalone --nproc-per-node 4 -m scheduler_engine.device.hicache_torchrun --attn-cp-size 2

Rank 0 generates the requests and a ``RequestReceiver`` broadcasts them to all ranks. Each rank has its own I/O that is
slow and fails at random. Each rank prints a digest of its pages ten times, and finally how many pages it has read. All
ranks print the same; if one rank diverges, all ranks end with an error.

The ranks share one directory of pages as they would share a store: each rank reads what its peers have written. Give
ranks on several machines a directory that all of them can reach.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
import torch.distributed as dist

from scheduler_components import ParallelState
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.agreement.torch_sync import open_torch_groups
from scheduler_components.hicache import HiCachePolicy, HiCacheStepper, open_file_page_store
from scheduler_components.receiving.sync_input_relay import SyncGroupRelay
from scheduler_components.request_receiver import NullInputSource, RequestReceiver
from scheduler_components.values import ForwardMode, InputKind, InputMessage
from scheduler_engine.device.hicache_sim import (
    FaultRates,
    HiCacheSimulationConfig,
    SimulatedWorkload,
    StepCommands,
    make_rank,
)

__all__ = [
    "main",
]

_NUM_REPORTS = 10
_STORE_BYTES = 1 << 24
_HOST_PAGES = 40  # fewer than on the device, so that pages leave both tiers and are read from storage
_MAX_PATH_BYTES = 4096


@dataclass(slots=True)
class _Workload:
    """An ``InputSource`` that returns the commands of the next step on each poll."""

    steps: Iterator[StepCommands]

    def poll(self, most: int) -> Sequence[bytes]:  # always one message
        return [msgspec.msgpack.encode(next(self.steps))]


class _CommandsReader:
    """The ``MessageDecoder`` of ``StepCommands``."""

    def read(self, frame: bytes) -> InputMessage[StepCommands]:
        return InputMessage(InputKind.COMMAND, msgspec.msgpack.decode(frame, type=StepCommands))


def main() -> None:
    """Run one rank of the world that ``torchrun`` describes in the environment."""
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments.timeout))
    try:
        with _shared_folder(arguments.store) as folder:
            _run(arguments, folder)
            dist.barrier()  # before the directory goes away
    finally:
        dist.destroy_process_group()


@contextmanager
def _shared_folder(given: str | None) -> Iterator[Path]:
    """Yield the given directory, or a temporary one that rank 0 creates for the run."""
    if given is not None:
        yield Path(given)
    elif dist.get_rank() == 0:
        with TemporaryDirectory(prefix="hicache-") as made:
            yield _broadcast_path(made)
    else:
        yield _broadcast_path("")


def _broadcast_path(path: str) -> Path:
    encoded = torch.tensor(list(path.encode().ljust(_MAX_PATH_BYTES, b"\0")), dtype=torch.uint8)
    dist.broadcast(encoded, 0)
    return Path(bytes(encoded.tolist()).rstrip(b"\0").decode())


def _run(arguments: argparse.Namespace, folder: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = ParallelState.from_tp_rank(
        rank % (size // arguments.pp_size),
        tp_size=size // arguments.pp_size,
        attn_cp_size=arguments.attn_cp_size,
        pp_rank=rank // (size // arguments.pp_size),
        pp_size=arguments.pp_size,
    )
    all_groups = open_torch_groups(world_rank_groups(parallel), ["scheduler", "input"], timeout_s=arguments.timeout)
    groups = all_groups["scheduler"]
    config = HiCacheSimulationConfig(
        attn_cp_size=parallel.attn_cp_size,
        attn_tp_size=parallel.attn_tp_size,
        pp_size=parallel.pp_size,
        policy=HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=2),
        rates=FaultRates(no_host_page=0.05),
        host_pages=_HOST_PAGES,
    )
    store = open_file_page_store(folder, capacity_bytes=_STORE_BYTES)
    simulated = make_rank(config, rank, store, arguments.seed)
    stepper = HiCacheStepper(cache=simulated.cache, groups=groups, mover=simulated.mover)
    source = _Workload(SimulatedWorkload(seed=arguments.seed, page_size=config.page_size).steps(arguments.steps))
    intake = RequestReceiver(
        rank=str(parallel),
        reader=_CommandsReader(),
        source=NullInputSource() if rank else source,
        relay=SyncGroupRelay(rank=rank, leads=not rank, groups=all_groups["input"].groups),
    )
    try:
        for step in range(1, arguments.steps + 1):
            [commands] = intake.receive(step, simulated.cache.state_digest % 2**32, ForwardMode.DECODE)
            stepper.step()
            simulated.scheduler.step(commands)
            simulated.cache.check_integrity()
            if step % max(1, arguments.steps // _NUM_REPORTS) == 0:
                sys.stdout.write(f"rank {rank} step {step} holds {simulated.cache.state_digest:016x}\n")
        stats = simulated.cache.stats()
        sys.stdout.write(
            f"rank {rank} read {stats.pages_prefetched} pages, revoked {stats.pages_revoked} pages, "
            f"backed up {stats.pages_backed_up} pages\n"
        )
        groups.barrier("end", step=arguments.steps)
    finally:
        stepper.close()
        intake.close()
        store.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A simulated replica's rank that agrees over gloo.")
    parser.add_argument("--attn-cp-size", type=int, default=1, help="ranks along attention context parallelism")
    parser.add_argument("--pp-size", type=int, default=1, help="pipeline stages; they divide the world")
    parser.add_argument("--steps", type=int, default=300, help="steps to take")
    parser.add_argument("--seed", type=int, default=0, help="of workload and I/O")
    parser.add_argument("--store", help="directory that all ranks share; by default one that rank 0 makes and removes")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for other ranks")
    return parser


if __name__ == "__main__":
    main()
