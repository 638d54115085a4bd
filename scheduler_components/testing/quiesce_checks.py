"""What a scheduler that can be brought to rest must do: run each of ``QUIESCE_CHECKS`` on a scheduler of your own.

A check takes a function that opens a scheduler over the sinks that it is given, as ``SCHEDULER_CHECKS`` do, with one
method more: ``order`` carries an order out (``interfaces.QuiescableScheduler``). Its ``WeightStore`` takes any parts,
and its
model answers ``interfaces.next_token`` with all weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_components import KvEventSink, OutputSink
from scheduler_components.control_requests import (
    BeginWeightUpdate,
    CheckWeights,
    ContinueGeneration,
    ControlReply,
    ControlRequest,
    EndWeightUpdate,
    FlushCache,
    LoadWeights,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
    RollBackWeights,
    control_request_name,
)
from scheduler_components.testing.event_ledger import EventLedger
from scheduler_components.testing.interfaces import QuiescableScheduler, Workload
from scheduler_components.testing.pool_verifier import PoolVerifier
from scheduler_components.testing.scheduler_checks import WORKLOAD, _Session
from scheduler_components.values import KvPoolSnapshot

__all__ = ["QUIESCE_CHECKS", "OpenQuiescableScheduler"]

OpenQuiescableScheduler = Callable[[KvEventSink, OutputSink], QuiescableScheduler]

_STEPS_BEFORE = 6  # some run, some wait
_STEPS_AT_REST = 5
_DEADLINE_S = 3600.0  # no check waits for it


@dataclass(slots=True, kw_only=True)
class _Rest:
    """A session, its scheduler as one that takes orders, and what a reader of its events knows."""

    session: _Session
    scheduler: QuiescableScheduler  # noqa: SCH001 the part under check, driven from outside
    reader: EventLedger
    judge: PoolVerifier
    num_read: int = 0

    @classmethod
    def open(cls, title: str, open_scheduler: OpenQuiescableScheduler) -> _Rest:  # noqa: SCH001 the part under check
        opened: list[QuiescableScheduler] = []

        def open_and_keep(events: KvEventSink, outputs: OutputSink) -> QuiescableScheduler:
            opened.append(open_scheduler(events, outputs))
            return opened[0]

        session = _Session.open(title, open_and_keep, is_strict=True)
        return cls(session=session, scheduler=opened[0], reader=EventLedger(), judge=PoolVerifier())

    def begin(self, workload: Workload) -> None:
        """Submit everything and take a few steps."""
        for prompt, new_tokens in workload:
            self.session.submit(prompt, new_tokens)
        for _ in range(_STEPS_BEFORE):
            if self.scheduler.has_work:
                self.session.step()

    def order(self, order: ControlRequest) -> ControlReply:
        """Have an order carried out. It must be, and what it changes is told before ``order`` returns."""
        trace = self.session.trace
        answer = trace.call(f"ordered to {control_request_name(order)}: {order}", lambda: self.scheduler.order(order))
        trace.expect("", answer.problem, "why it was not carried out")
        self.session.take_news()
        self.read()
        return answer

    def read(self) -> None:
        """Apply what was told, and compare it with the pool, on each tier."""
        trace, batches = self.session.trace, self.session.events.batches
        for number, batch in enumerate(batches[self.num_read :], start=self.num_read):
            trace.expect([], self.reader.apply_all(batch.events), "broken rules of the wire")
            self.judge.apply(number, batch.events)
        self.num_read = len(batches)
        reading = KvPoolSnapshot(self.scheduler.held_blocks(), sequence=self.num_read - 1)
        blocks = sorted(set(self.scheduler.block_hashes()))
        trace.expect(blocks, sorted(self.reader.hashes()), "the cache's blocks, in a reader's view")
        trace.expect([], [str(each) for each in self.judge.compare(reading)], "differences between pool and stream")

    def update_weights(self, version: str) -> None:
        self.order(BeginWeightUpdate(version, _DEADLINE_S))
        self.order(LoadWeights("part", version.encode()))
        checksum = self.order(CheckWeights()).checksum
        self.order(EndWeightUpdate(checksum, _DEADLINE_S))

    def expect_rest(self) -> None:
        """Fail when anything is computed or told in the next steps."""
        trace, before = self.session.trace, {rid: len(each.token_ids) for rid, each in self.session.requests.items()}
        for _ in range(_STEPS_AT_REST):
            self.session.step()
            after = {rid: len(each.token_ids) for rid, each in self.session.requests.items()}
            trace.expect(before, after, "tokens by request, while nothing may be computed")

    def finish(self) -> None:
        """Serve what is left; everybody must get an end, and all tokens if it was not aborted."""
        self.read()
        for _ in self.session.serve(()):
            self.read()
        self.session.expect_all_ended()
        self.session.expect_nothing_held()


def check_a_paused_scheduler_computes_nothing(
    open_scheduler: OpenQuiescableScheduler, workload: Workload = WORKLOAD
) -> None:
    """Nothing is computed from the pause on, whatever came of those that ran, and all else goes on after it."""
    for mode in PauseMode:
        rest = _Rest.open(f"A pause ({mode}) holds until generation is continued", open_scheduler)
        session, trace = rest.session, rest.session.trace
        rest.begin(workload)
        if mode is PauseMode.ABORT:
            for request in session.requests.values():
                request.aborted_at = session.num_steps
        rest.order(PauseGeneration(mode, _DEADLINE_S))
        rest.expect_rest()
        load = rest.scheduler.get_loads()
        if mode is not PauseMode.IN_PLACE:
            trace.expect((0, 0), (load.num_running_reqs, load.num_used_tokens), "running requests, and their tokens")
        if mode is PauseMode.ABORT:
            trace.expect([], session.unended_rids, "requests that were not told their abort")
        session.submit(*workload[0])
        rest.expect_rest()
        rest.order(ContinueGeneration())
        rest.finish()


def check_flush_of_an_idle_scheduler_is_published(
    open_scheduler: OpenQuiescableScheduler, workload: Workload = WORKLOAD
) -> None:
    """A flush empties the pool and says so at once: no request comes, and no step is needed."""
    rest = _Rest.open("A flush of an idle scheduler is told at once", open_scheduler)
    rest.begin(workload)
    rest.finish()
    rest.order(FlushCache())
    rest.session.trace.expect([], sorted(rest.reader.hashes()), "blocks in a reader's view after the flush")
    left = [place for place, held in rest.scheduler.held_blocks().items() if held]
    rest.session.trace.expect([], left, "places of the pool that still hold blocks")
    rest.begin(workload)
    rest.finish()


def check_new_weights_share_no_block_with_old_ones(
    open_scheduler: OpenQuiescableScheduler, workload: Workload = WORKLOAD
) -> None:
    """After an update the cache is empty, and the same prompts have other hashes; after a roll-back nothing changed."""
    rest = _Rest.open("What old weights computed is never found again", open_scheduler)
    trace = rest.session.trace
    rest.begin(workload[:1])
    rest.finish()
    old = rest.reader.hashes()
    rest.order(BeginWeightUpdate("never", _DEADLINE_S))
    rest.order(RollBackWeights())
    trace.expect(old, rest.reader.hashes(), "the same blocks after a session that was rolled back")
    rest.begin(workload)
    rest.order(PauseGeneration(PauseMode.RETRACT))
    rest.update_weights("v2")
    trace.expect([], sorted(rest.reader.hashes()), "blocks in a reader's view after the update")
    rest.expect_rest()
    rest.order(ContinueGeneration())
    rest.finish()
    rest.begin(workload[:1])
    rest.finish()
    trace.expect([], sorted(old & rest.reader.hashes()), "hashes of blocks of old weights")
    trace.require(bool(rest.reader.hashes()), "blocks that the new weights computed", "none")


def check_released_memory_holds_nothing(open_scheduler: OpenQuiescableScheduler, workload: Workload = WORKLOAD) -> None:
    """A release empties the cache, nothing runs until all is resumed, and then everybody is served."""
    rest = _Rest.open("Nothing is computed or kept in released memory", open_scheduler)
    trace, tags = rest.session.trace, tuple(MemoryTag)
    rest.begin(workload)
    rest.order(PauseGeneration(PauseMode.RETRACT))
    rest.order(ReleaseMemory(tags, deadline_s=_DEADLINE_S))
    trace.expect([], sorted(rest.reader.hashes()), "blocks in a reader's view after the release")
    rest.order(ContinueGeneration())
    rest.expect_rest()
    for tag in tags:
        rest.expect_rest()
        rest.order(ResumeMemory((tag,)))
    rest.finish()


QUIESCE_CHECKS: tuple[Callable[[OpenQuiescableScheduler, Workload], None], ...] = (
    check_a_paused_scheduler_computes_nothing,
    check_flush_of_an_idle_scheduler_is_published,
    check_new_weights_share_no_block_with_old_ones,
    check_released_memory_holds_nothing,
)
"""All of them, for a scheduler that takes orders."""
