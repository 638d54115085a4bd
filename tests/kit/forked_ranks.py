"""Processes of one gloo world, forked from one process that has imported torch, which takes each of them two seconds.

All tests of a worker share the process from which they are forked.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

__all__ = ["ForkedRanks"]

PATIENCE_S = 90
PRELOADED = ["pytest", "torch.distributed", "scheduler_engine.device.hicache_torchrun"]


class ForkedRanks:
    """Ranks that run ``target(rank, *arguments)``, a function of a module that the fork server may import.

    They start in a ``with`` block, and none survives it. A rank that fails writes why to ``{rank}.txt`` in ``folder``.
    """

    def __init__(self, folder: Path, size: int, target: Callable[..., object], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.folder = folder
        self.processes = [context.Process(target=target, args=(rank, *arguments)) for rank in range(size)]

    def __enter__(self) -> Self:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()

    def wait(self, rank: int) -> None:
        """Wait until a rank has ended, and check that it ended well."""
        self.processes[rank].join(PATIENCE_S)
        problem = self.folder / f"{rank}.txt"
        assert self.processes[rank].exitcode == 0, problem.read_text() if problem.exists() else "still running"
