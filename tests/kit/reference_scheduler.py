"""The reference scheduler behind the interface by which the checks drive a user's scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from scheduler_components import ParallelState
from scheduler_components.ports import KvEventSink, OutputSink
from scheduler_components.scheduling.composition import SchedulerSinks
from scheduler_components.testing import PagedModel, interfaces
from scheduler_components.testing.fake_device import InstantDevice
from scheduler_components.values import LoadSnapshot
from scheduler_engine.device.device import DeviceOutput, DeviceRequest, ScheduledBatch
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

PAGE_SIZE = 4


def drain(scheduler: Scheduler, *requests: EngineRequest) -> None:
    """Submit requests, and step until nothing is left to do."""
    for request in requests:
        scheduler.submit(request)
    for _ in scheduler.drain():
        pass


class DrivenScheduler:
    """A reference scheduler with the methods that the checks call.

    Args:
        ignore_eos: requests run to their last token.
    """

    def __init__(self, scheduler: Scheduler, *, ignore_eos: bool = False) -> None:
        self.scheduler, self.ignore_eos = scheduler, ignore_eos

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, rid: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        self.scheduler.submit(
            EngineRequest(rid, prompt, SamplingLimits(max_new_tokens=max_new_tokens, ignore_eos=self.ignore_eos))
        )

    def abort(self, rid: str) -> object:
        return self.scheduler.abort(rid)

    def step(self) -> object:
        return self.scheduler.step()

    def get_loads(self) -> LoadSnapshot:
        return self.scheduler.load.get_loads()

    def block_hashes(self) -> Iterable[int]:
        return self.scheduler.cache.block_hashes()


class ReferenceScheduler(DrivenScheduler):
    """Over a model that reads its KV from pages, with small chunks and a full pool; with a host tier where asked."""

    def __init__(self, events: KvEventSink, outputs: OutputSink, tiers: CacheTiers | None = None) -> None:
        self.model = PagedModel(PAGE_SIZE)
        config = SchedulerConfig(
            page_size=PAGE_SIZE,
            kv_tokens=interfaces.MIN_POOL_TOKENS,
            max_running_requests=3,
            chunk_tokens=16,
            max_prefill_tokens=32,
            new_token_ratio=0.1,
        )
        self.events, self.outputs = events, outputs
        scheduler = Scheduler.compose(
            config,
            ParallelState.trivial(),
            InstantDevice(lambda batch: DeviceOutput(self.compute(batch))),
            tiers=tiers,
            sinks=SchedulerSinks(events=events, outputs=outputs),
        )
        super().__init__(scheduler)

    def compute(self, batch: ScheduledBatch[DeviceRequest]) -> tuple[int, ...]:
        return tuple(
            self.model.forward(chunk.request.token_ids[: chunk.end], chunk.request.pages, chunk.start)
            for chunk in batch.chunks
        )


def with_part(path: str, broken: type, scheduler: type[ReferenceScheduler] = ReferenceScheduler) -> type:
    """Return a scheduler of which one part, such as ``batcher.kv_cache``, is of a broken class."""

    class WithBrokenPart(scheduler):  # type: ignore[valid-type, misc]
        def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
            super().__init__(events, outputs)
            part = attrgetter(path)(self.scheduler) if path else self.scheduler
            part.__class__ = broken

    return WithBrokenPart
