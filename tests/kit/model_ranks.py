"""Ranks that compute one model together. They are threads and communicate over gloo like processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scheduler_components import ParallelState
from scheduler_components.hicache import TorchDeviceMemory
from scheduler_engine.device.model_spec import ModelSpec
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.device.torch_device import TorchDevice
from scheduler_engine.device.torch_model import load_model
from scheduler_engine.device.torch_model_parallel import (
    ModelParallelGroup,
    NullModelParallelGroup,
    open_model_parallel_group,
)
from scheduler_engine.device.torch_tensor_parallel import shard_model
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

PAGE_SIZE, NUM_PAGES = 4, 96


class ModelRank:
    """One rank: its part of the model, its pool, its scheduler."""

    def __init__(
        self,
        spec: ModelSpec,
        shards: ModelParallelGroup,
        context: ModelParallelGroup | None = None,
        chunk_tokens: int = 7,
    ) -> None:
        self.shards, self.context = shards, context or NullModelParallelGroup()
        self.model = load_model(spec)
        self.parts = shard_model(self.model, shards)
        self.pool = TorchDeviceMemory.allocate(
            num_layers=spec.kv.num_layers,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            kv_heads=spec.kv.kv_heads // shards.size,
            head_dim=spec.kv.head_dim,
        )
        self.scheduler = Scheduler.compose(
            SchedulerConfig(page_size=PAGE_SIZE, kv_tokens=NUM_PAGES * PAGE_SIZE, chunk_tokens=chunk_tokens),
            ParallelState(),
            TorchDevice(model=self.model, pool=self.pool, context=self.context),
        )

    def serve(self, prompts: list[list[int]], *, num_new: int = 8) -> list[EngineRequest]:
        limits = SamplingLimits(max_new_tokens=num_new)
        requests = [EngineRequest(f"r{number}", prompt, limits) for number, prompt in enumerate(prompts)]
        for request in requests:
            self.scheduler.submit(request)
        for _ in self.scheduler.drain():
            pass
        return requests


RunRanks = Callable[..., list[Any]]
"""``run(tp_size, cp_size, work)`` calls ``work(shards, context)`` on a thread per rank. It returns the results, the TP
ranks of the first CP rank first."""


@contextmanager
def model_ranks(folder: Path) -> Iterator[RunRanks]:
    """Yield a ``RunRanks`` whose ranks find each other in ``folder``."""
    opened: list[ModelParallelGroup] = []

    def join(meeting: str, rank: int, size: int) -> ModelParallelGroup:
        opened.append(open_model_parallel_group(folder / meeting, rank=rank, names=range(size), timeout_s=30))
        return opened[-1]

    def run(tp_size: int, cp_size: int, work: Callable[[ModelParallelGroup, ModelParallelGroup], Any]) -> list[Any]:
        runs = len(opened)

        def rank(number: int) -> Any:
            cp_rank, tp_rank = divmod(number, tp_size)
            shards = join(f"{runs}-tp-{cp_rank}", tp_rank, tp_size)
            return work(shards, join(f"{runs}-cp-{tp_rank}", cp_rank, cp_size))

        with ThreadPoolExecutor(tp_size * cp_size) as threads:
            running = [threads.submit(rank, number) for number in range(tp_size * cp_size)]
        return [each.result() for each in running]

    yield run
    for each in opened:
        each.close()
        each.close()


def prompts_of_families(seed: int) -> list[list[int]]:
    """Some share prefixes."""
    draw = random.Random(seed)
    families = [draw.choices(range(6, 319), k=50) for _ in range(2)]
    return [families[number % 2][: draw.randint(1, 50)] for number in range(6)]
