"""PausableScheduler: the ports through which control requests pause a scheduler and flush its cache."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_components.agreement import ParallelGroups
from scheduler_components.quiesce import (
    MemoryOccupation,
    NullMemoryOccupation,
    QuiesceController,
    QuiesceState,
    QuiesceStepper,
)
from scheduler_components.weight_updater import NullWeightStore, WeightStore
from scheduler_engine.engine.scheduler.scheduler import Scheduler


@dataclass(slots=True, kw_only=True)
class PausableScheduler:
    """The ``PausableRequests`` and ``FlushableCache`` of a scheduler."""

    scheduler: Scheduler  # noqa: SCH001 drives the scheduler from above, which does not know it

    @property
    def num_running(self) -> int:
        return len(self.scheduler.queues.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.queues.waiting)

    @property
    def num_operations(self) -> int:
        return self.scheduler.tiers.num_operations

    def abort_all(self) -> int:
        num_aborted = sum(self.scheduler.abort(rid) for rid in [request.rid for request in self.scheduler.queues])
        self.scheduler.sessions.release_all()  # afterwards, because the end of a turn locks its pages
        self.scheduler.kv_events.flush()  # their computed pages stay in the cache, so events are pending
        return num_aborted

    def retract_all(self) -> int:
        self.scheduler.sessions.release_all()
        return self.scheduler.retract_all()

    def clear(self, weight_version: str) -> None:
        self.scheduler.clear_cache(weight_version)

    def clear_storage_index(self) -> None:
        self.scheduler.clear_storage_index()


def make_quiesce_stepper(
    scheduler: Scheduler,
    state: QuiesceState,
    *,
    groups: ParallelGroups,
    weights: WeightStore = NullWeightStore(),
    memory: MemoryOccupation = NullMemoryOccupation(),
) -> QuiesceStepper:
    """Make the ``QuiesceStepper`` of one rank, which executes control requests.

    Args:
        scheduler: a scheduler that was composed with ``state``.
        state: what the scheduler may do now.
        groups: the ranks of the replica, which agree on when a request is executed.
        weights, memory: ports of the rank's device.
    """
    port = PausableScheduler(scheduler=scheduler)
    quiesce = QuiesceController(
        work=port, cache=port, weights=weights, memory=memory, state=state, decisions=scheduler.decisions
    )
    return QuiesceStepper(quiesce=quiesce, groups=groups, progress=scheduler.integrity.progress)
