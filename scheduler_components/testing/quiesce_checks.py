"""Checks of every scheduler that can be quiesced. Run each of ``QUIESCE_CHECKS`` on a scheduler of your own.

A check takes a function that opens a scheduler over two sinks, as ``SCHEDULER_CHECKS`` do. The scheduler has one method
more: ``execute`` carries out a control request (``interfaces.QuiescableScheduler``). Its weight store accepts any
parts, and its model answers ``next_token`` with all weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_components.ports import KvEventSink, OutputSink
from scheduler_components.testing.check_trace import checks_in
from scheduler_components.testing.event_ledger import EventLedger
from scheduler_components.testing.interfaces import QuiescableScheduler, Workload
from scheduler_components.testing.pool_verifier import PoolVerifier
from scheduler_components.testing.scheduler_checks import WORKLOAD
from scheduler_components.testing.scheduler_session import SchedulerSession
from scheduler_components.values import (
    BeginWeightUpdate,
    CheckWeights,
    ContinueGeneration,
    ControlReply,
    ControlRequest,
    EndWeightUpdate,
    FlushCache,
    KvPoolSnapshot,
    LoadWeights,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
    RollBackWeights,
    control_request_name,
)

__all__ = ["QUIESCE_CHECKS", "OpenQuiescableScheduler"]

OpenQuiescableScheduler = Callable[[KvEventSink, OutputSink], QuiescableScheduler]

_STEPS_BEFORE = 6  # Some requests run then, and some wait.
_STEPS_QUIESCED = 5
_DEADLINE_S = 3600.0  # No check waits for it.


@dataclass(slots=True, kw_only=True)
class _QuiesceSession:
    """A session with a reader of the events, which compares them with the pool after each control request."""

    session: SchedulerSession[QuiescableScheduler]  # noqa: SCH001 the scheduler under check
    reader: EventLedger = field(default_factory=EventLedger)
    verifier: PoolVerifier = field(default_factory=PoolVerifier)
    num_read: int = 0

    @classmethod
    def open(
        cls,
        title: str,
        open_scheduler: OpenQuiescableScheduler,  # noqa: SCH001 opens the scheduler under check
    ) -> _QuiesceSession:
        return cls(session=SchedulerSession.open(title, open_scheduler, is_strict=True))

    @property
    def scheduler(self) -> QuiescableScheduler:
        return self.session.scheduler

    def start(self, workload: Workload) -> None:
        """Submit everything and take a few steps."""
        for prompt, new_tokens in workload:
            self.session.submit(prompt, new_tokens)
        for _ in range(_STEPS_BEFORE):
            if self.scheduler.has_work:  # noqa: SCH001 the scheduler under check
                self.session.step()

    def execute(self, request: ControlRequest) -> ControlReply:
        """Carry out a control request. It must succeed, and its events must be published before ``execute`` returns."""
        trace, name = self.session.trace, control_request_name(request)
        reply = trace.call(f"carried out {name}: {request}", lambda: self.scheduler.execute(request))
        trace.expect("", reply.problem, "the problem of the reply")
        self.session.receive_outputs()
        self.read_events()
        return reply

    def read_events(self) -> None:
        """Apply the new events, and compare the result with the cache and, on each tier, with the pool."""
        trace, batches = self.session.trace, self.session.events.batches
        for number, batch in enumerate(batches[self.num_read :], start=self.num_read):
            trace.expect([], self.reader.apply_all(batch.events), "broken rules of the wire")
            self.verifier.apply(number, batch.events)
        self.num_read = len(batches)
        reading = KvPoolSnapshot(self.scheduler.held_blocks(), sequence=self.num_read - 1)
        blocks = sorted(set(self.scheduler.block_hashes()))
        trace.expect(blocks, sorted(self.reader.hashes()), "the cache's blocks, in a reader's view")
        trace.expect([], [str(each) for each in self.verifier.compare(reading)], "differences between pool and stream")

    def update_weights(self, version: str) -> None:
        self.execute(BeginWeightUpdate(version, _DEADLINE_S))
        self.execute(LoadWeights("part", version.encode()))
        checksum = self.execute(CheckWeights()).checksum
        self.execute(EndWeightUpdate(checksum, _DEADLINE_S))

    def expect_quiesced(self) -> None:
        """Fail if the next steps compute a token."""
        trace, before = self.session.trace, self._num_tokens()
        for _ in range(_STEPS_QUIESCED):
            self.session.step()
            trace.expect(before, self._num_tokens(), "tokens by request while the scheduler is quiesced")

    def _num_tokens(self) -> dict[str, int]:
        return {rid: len(request.token_ids) for rid, request in self.session.requests.items()}

    def finish(self) -> None:
        """Serve the remaining requests. Each must end, with all its tokens unless it was aborted."""
        self.read_events()
        for _ in self.session.serve(()):
            self.read_events()
        self.session.expect_all_finished()
        self.session.expect_nothing_held()


def check_paused_scheduler_computes_nothing(
    open_scheduler: OpenQuiescableScheduler, workload: Workload = WORKLOAD
) -> None:
    """Each pause mode stops all computation until generation continues, and then every other request is served."""
    for mode in PauseMode:
        quiesce = _QuiesceSession.open(f"A pause ({mode}) holds until generation continues", open_scheduler)
        session, trace = quiesce.session, quiesce.session.trace
        quiesce.start(workload)
        if mode is PauseMode.ABORT:
            for request in session.requests.values():
                request.aborted_at = session.num_steps
        quiesce.execute(PauseGeneration(mode, _DEADLINE_S))
        quiesce.expect_quiesced()
        load = quiesce.scheduler.get_loads()
        if mode is not PauseMode.IN_PLACE:
            trace.expect((0, 0), (load.num_running_reqs, load.num_used_tokens), "running requests, and their tokens")
        if mode is PauseMode.ABORT:
            trace.expect([], session.unfinished_rids, "requests without an end after the abort")
        session.submit(*workload[0])
        quiesce.expect_quiesced()
        quiesce.execute(ContinueGeneration())
        quiesce.finish()


def check_flush_of_an_idle_scheduler_is_published(
    open_scheduler: OpenQuiescableScheduler, workload: Workload = WORKLOAD
) -> None:
    """A flush empties the pool and publishes that without a further step or request."""
    quiesce = _QuiesceSession.open("A flush of an idle scheduler is published immediately", open_scheduler)
    quiesce.start(workload)
    quiesce.finish()
    quiesce.execute(FlushCache())
    quiesce.session.trace.expect([], sorted(quiesce.reader.hashes()), "blocks in a reader's view after the flush")
    left = [place for place, held in quiesce.scheduler.held_blocks().items() if held]
    quiesce.session.trace.expect([], left, "places of the pool that still hold blocks")
    quiesce.start(workload)
    quiesce.finish()


def check_new_weights_share_no_block_with_old_ones(
    open_scheduler: OpenQuiescableScheduler, workload: Workload = WORKLOAD
) -> None:
    """A weight update empties the cache and changes the hashes of equal prompts. A roll-back changes nothing."""
    quiesce = _QuiesceSession.open("Blocks that old weights computed are never reused", open_scheduler)
    trace = quiesce.session.trace
    quiesce.start(workload[:1])
    quiesce.finish()
    old = quiesce.reader.hashes()
    quiesce.execute(BeginWeightUpdate("never", _DEADLINE_S))
    quiesce.execute(RollBackWeights())
    trace.expect(old, quiesce.reader.hashes(), "the same blocks after an update that was rolled back")
    quiesce.start(workload)
    quiesce.execute(PauseGeneration(PauseMode.RETRACT))
    quiesce.update_weights("v2")
    trace.expect([], sorted(quiesce.reader.hashes()), "blocks in a reader's view after the update")
    quiesce.expect_quiesced()
    quiesce.execute(ContinueGeneration())
    quiesce.finish()
    quiesce.start(workload[:1])
    quiesce.finish()
    trace.expect([], sorted(old & quiesce.reader.hashes()), "hashes of blocks of old weights")
    trace.require(bool(quiesce.reader.hashes()), "blocks that the new weights computed", "none")


def check_released_memory_holds_nothing(open_scheduler: OpenQuiescableScheduler, workload: Workload = WORKLOAD) -> None:
    """A release empties the cache, and no request runs until all memory is resumed. Then every request is served."""
    quiesce = _QuiesceSession.open("Released memory holds no block and computes no token", open_scheduler)
    trace, tags = quiesce.session.trace, tuple(MemoryTag)
    quiesce.start(workload)
    quiesce.execute(PauseGeneration(PauseMode.RETRACT))
    quiesce.execute(ReleaseMemory(tags, deadline_s=_DEADLINE_S))
    trace.expect([], sorted(quiesce.reader.hashes()), "blocks in a reader's view after the release")
    quiesce.execute(ContinueGeneration())
    quiesce.expect_quiesced()
    for tag in tags:
        quiesce.expect_quiesced()
        quiesce.execute(ResumeMemory((tag,)))
    quiesce.finish()


QUIESCE_CHECKS: tuple[Callable[[OpenQuiescableScheduler, Workload], None], ...] = checks_in(globals())
"""All checks of a scheduler that carries out control requests."""
