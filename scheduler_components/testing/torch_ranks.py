"""Run ranks as processes that agree over gloo, as ``TorchRanks`` for the checks of agreement."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from scheduler_components import ParallelState
from scheduler_components._internal.extras import naming_extras
from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.agreement.torch_sync import open_torch_groups
from scheduler_components.errors import StartError

with naming_extras:
    import torch
    import torch.distributed as dist

__all__ = ["TorchRanks"]

T = TypeVar("T")

_START_TIMEOUT_S = 120.0  # an interpreter that imports torch on a busy machine


@dataclass(frozen=True, kw_only=True)
class TorchRanks:
    """A ``RankRunner`` of processes, forked from one that has imported torch. None of them outlives ``run``.

    Attributes:
        worlds: the replicas to run.
        timeout_s: longest wait of a rank for the others in a collective.
        short_timeout_s: the same, in a check that waits for it.
    """

    worlds: Sequence[ParallelState] = (ParallelState.from_tp_rank(0, tp_size=2),)
    timeout_s: float = 30.0
    short_timeout_s: float = 2.0

    def run(
        self, world: ParallelState, work: Callable[[ParallelGroups], T], *, timeout_s: float | None = None
    ) -> dict[int, T]:
        """Run ``work`` in one process per rank. It must be picklable: functions of modules that can be imported.

        Raises:
            StartError: ``work`` or the start of a rank raised an error, which it contains.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])
        job = pickle.dumps((world, work, limit_s))
        processes, results = [], dict[Connection, int]()
        with TemporaryDirectory(prefix="ranks-") as folder:
            try:
                for rank in range(world.tp_size * world.pp_size):
                    reader, writer = context.Pipe(duplex=False)
                    results[reader] = rank
                    processes.append(context.Process(target=_run_rank, args=(rank, folder, job, writer), daemon=True))
                    processes[-1].start()
                    writer.close()
                return _received(results, _START_TIMEOUT_S + 3 * limit_s)
            finally:
                for process in processes:
                    process.kill()
                    process.join()
                    process.close()
                for reader in results:
                    reader.close()


def _received(results: dict[Connection, int], limit_s: float) -> dict[int, Any]:
    """Return what the ranks send before they end. A rank that ends without a word is left out."""
    found, left, deadline_s = dict[int, Any](), dict(results), time.monotonic() + limit_s
    while left and (ready := wait(list(left), deadline_s - time.monotonic())):
        for reader in [each for each in left if each in ready]:
            rank = left.pop(reader)
            try:
                error, result = reader.recv()
            except EOFError:
                continue
            if error:
                raise StartError(f"rank {rank}", error, "see the error of the rank")
            found[rank] = result
    return found


def _run_rank(rank: int, folder: str, job: bytes, results: Connection) -> None:
    """Run one rank, send what it returns, and leave without waiting for groups that a dead rank has left."""
    torch.set_num_threads(1)
    try:
        world, work, limit_s = pickle.loads(job)  # noqa: S301 - written by the parent process
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'rendezvous'}",
            rank=rank,
            world_size=world.tp_size * world.pp_size,
            timeout=timedelta(seconds=_START_TIMEOUT_S),
        )
        groups = open_torch_groups(world_rank_groups(world), ["scheduler"], timeout_s=limit_s)["scheduler"]
        dist.barrier()  # a rank that has connected would otherwise leave while another still connects to it
        results.send(("", work(groups)))
    except Exception:  # noqa: BLE001 - the parent process raises it
        results.send((traceback.format_exc(), None))
    finally:
        results.close()
        os._exit(0)
