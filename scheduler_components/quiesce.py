"""QuiesceController: quiesce an engine and change its weights, cache or memory, on all ranks in the same step.

**What must be agreed.** All ranks of a replica get the same control requests in the same order, but the outcome depends
on facts of each rank. One rank still copies pages, another rank's clock has passed the deadline, a third cannot
allocate memory or has read different bytes. So the facts of a rank only enter its proposal, and every decision depends
on the agreed values alone (see `agreement`).

**One agreement per step while a control request is pending.** Whether one is pending depends on the received requests
and the agreed values, so it is the same on all ranks. A rank that missed a request does not take part: the others raise
`SyncTimeoutError`, which names that rank and the request. A rank with a different request raises `SyncDivergenceError`,
a rank in a different state raises `QuiesceDivergenceError`. Without pending requests a step checks an empty queue.

**Quiesce, act, vote.** A request waits until all ranks are quiesced, or until one rank says that the deadline has
passed; then it is given up on all ranks. Next each rank does the part that may fail (load a tensor, allocate memory)
without replacing anything. If it failed on any rank, all ranks undo it; otherwise all ranks carry the request out in
the step that agreed. A rank that dies in between is missing in the next agreement.

**A pause overtakes.** Requests are carried out in order, except that a pause which needs no waiting goes before the
requests that only wait, for example a flush under load. Otherwise the engine would continue to compute until the flush
gives up. The position depends on the queue alone, which is equal on all ranks. A pause never overtakes a continue,
another pause that acts immediately, or a request that has begun to act.

**Confirm.** Clearing a cache, switching weights and releasing memory must not fail. If one of them does on some rank,
the next agreement finds it: every rank replies which rank failed, and after a failed switch no rank computes until new
weights are loaded.

**A cleared cache is published immediately.** An idle engine takes no step, and routers would keep the removed blocks.

The invariant: after the n-th agreement all ranks have the same state and the same pending requests.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol
from zlib import crc32

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal, Slots
from scheduler_components.cache.block_hash import weight_namespace
from scheduler_components.errors import QuiesceDivergenceError
from scheduler_components.ports import DecisionSink, NullDecisionLog
from scheduler_components.values import (
    DEFAULT_WEIGHT_VERSION,
    BeginWeightUpdate,
    CheckWeights,
    ClearStorageIndex,
    ContinueGeneration,
    ControlReply,
    ControlRequest,
    EndWeightUpdate,
    FlushCache,
    IdleControlRequest,
    LoadWeights,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    QuiesceStats,
    ReleaseMemory,
    ResumeMemory,
    RollBackWeights,
    control_request_name,
)
from scheduler_components.watchdog import CONTROL_PHASE, IDLE_PHASE, StepProgress
from scheduler_components.weight_updater import NullWeightStore, WeightStore

__all__ = [
    "FlushableCache",
    "MemoryOccupation",
    "NullMemoryOccupation",
    "PausableRequests",
    "PauseState",
    "QuiesceController",
    "QuiesceState",
    "QuiesceStepper",
    "weight_namespace",
]

logger = logging.getLogger(__name__)

_NO_RANK = 2**62
_ROLLING_BACK = "rolling back weights"
_SLOTS = Slots(("equal", "state"), ("all", "quiesced"), ("any", "late"), ("min", "failed_rank"), ("equal", "checksum"))
_ACT_WITHOUT_WAITING = (LoadWeights, CheckWeights, EndWeightUpdate, ResumeMemory)
_WEIGHT_UPDATE_REQUESTS = (BeginWeightUpdate, LoadWeights, CheckWeights, EndWeightUpdate)
_CONFIRMED = (FlushCache, ClearStorageIndex, EndWeightUpdate, RollBackWeights, ReleaseMemory)


class PausableRequests(Protocol):
    """The requests of a scheduler, as a pause sees them: the scheduler itself. Called between two steps."""

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that hold no pages."""
        ...

    def abort_all(self) -> int:
        """End every running and waiting request and notify its client; return their number."""
        ...

    def retract_all(self) -> int:
        """Return every running request to the queue, without its pages and with its output; return their number."""
        ...


class FlushableCache(Protocol):
    """The cache, its tiers and its stream, as a flush sees them. Called while no request holds a page."""

    @property
    def num_operations(self) -> int:
        """Running transfers of pages on this rank."""
        ...

    def clear(self, weight_version: str) -> None:
        """Discard every cached prefix on device and host, and publish that immediately.

        Blocks cached from now on belong to the weights of this version, and never match blocks of other versions.
        """
        ...

    def clear_storage_index(self) -> None:
        """Treat no page as stored any more, and publish that immediately."""
        ...


class MemoryOccupation(Protocol):
    """One rank's device memory by region: ``weights`` and ``kv_cache``, SGLang's tags."""

    def release(self, tags: Sequence[str], *, keep_weights: bool) -> None:
        """Release regions, also those already released. Weights move to the host or are discarded. Must not fail."""
        ...

    def resume(self, tags: Sequence[str]) -> None:
        """Allocate regions again and restore weights that were kept. An exception undoes it on all ranks."""
        ...


class NullMemoryOccupation:
    """The memory of a scheduler that releases none: a release request only stops the scheduler."""

    def release(self, tags: Sequence[str], *, keep_weights: bool) -> None:
        pass

    def resume(self, tags: Sequence[str]) -> None:
        pass


class PauseState(enum.Enum):
    """What an engine computes: all requests, running ones only, none, or none with requests left in place."""

    RUNNING = "running"
    FINISHING = "finishing"
    PAUSED = "paused"
    FROZEN = "paused in place"


@dataclass(slots=True, kw_only=True)
class QuiesceState:
    """What the engine may do now: a `ComputeGate` and a `StatsSource` of `QuiesceStats`.

    `QuiesceController` changes it; the scheduler reads it when it builds a batch. It is equal on all ranks.

    Attributes:
        phase: effect of the pauses.
        released: released regions of device memory.
        has_weights: False after a release that discarded the weights, until a weight update ends.
        weight_version: version of the weights in use.
        updating_to: version of the open weight update; None without one.
        num_loaded: tensors loaded in that update.
        is_confirming: a request was carried out, and the ranks have not confirmed it. Nothing is computed.
        counts: counters by their field in `QuiesceStats`.
    """

    phase: PauseState = PauseState.RUNNING
    released: frozenset[MemoryTag] = frozenset()
    has_weights: bool = True
    weight_version: str = DEFAULT_WEIGHT_VERSION
    updating_to: str | None = None
    num_loaded: int = 0
    is_confirming: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def can_admit(self) -> bool:
        """Whether waiting requests may start to run."""
        return self.phase is PauseState.RUNNING and self._is_complete

    @property
    def can_compute(self) -> bool:
        """Whether running requests may continue."""
        return self.phase in (PauseState.RUNNING, PauseState.FINISHING) and self._is_complete

    @property
    def _is_complete(self) -> bool:
        return not self.released and self.has_weights and self.updating_to is None and not self.is_confirming

    def digest(self, *facts: object) -> int:
        """Return 32 bits over the state and `facts`."""
        parts = (self.phase, sorted(self.released), self.has_weights, self.weight_version, self.updating_to)
        return crc32(repr((*parts, self.num_loaded, self.is_confirming, facts)).encode())

    def rejection(self, request: ControlRequest, num_running: int) -> str:
        """Return why a control request cannot be carried out in this state; empty if it can, now or later."""
        if isinstance(request, IdleControlRequest) and self.phase is PauseState.FROZEN and num_running:
            return f"{num_running} requests are paused in place; continue, or pause with retract or abort"
        if isinstance(request, LoadWeights | CheckWeights | EndWeightUpdate | RollBackWeights):
            return "" if self.updating_to is not None else "no weight update is open; begin one"
        if isinstance(request, BeginWeightUpdate):
            return self._rejection_of_update()
        if isinstance(request, ReleaseMemory | ResumeMemory):
            return self._rejection_of_memory(request)
        return ""

    def _rejection_of_update(self) -> str:
        if self.updating_to is not None:
            return f"an update to {self.updating_to!r} is open; end it or roll it back"
        if MemoryTag.WEIGHTS in self.released:
            return "the memory of the weights is released; resume it"
        return ""

    def _rejection_of_memory(self, request: ReleaseMemory | ResumeMemory) -> str:
        tags = frozenset(request.tags)
        if not tags:
            return f"no memory is named; give tags of {', '.join(MemoryTag)}"
        if isinstance(request, ResumeMemory):
            missing = sorted(tags - self.released)
            return f"{', '.join(missing)}: not released" if missing else ""
        if self.updating_to is not None:
            return f"an update to {self.updating_to!r} is open; end it or roll it back"
        twice = sorted(tags & self.released)
        return f"{', '.join(twice)}: released already" if twice else ""

    def stats(self) -> QuiesceStats:
        """Return the current state as flags, and the counters."""
        is_resident = MemoryTag.WEIGHTS not in self.released
        return QuiesceStats(
            is_paused=int(self.phase in (PauseState.PAUSED, PauseState.FROZEN)),
            is_awake=int(not self.released and self.has_weights),
            has_weights_offloaded=int(self.has_weights and not is_resident),
            has_discarded_all=int(not self.has_weights),
            **self.counts,
        )


@dataclass(slots=True, kw_only=True)
class _PendingRequest:
    """A control request without a reply.

    Attributes:
        request_id, request: as received.
        deadline_s: when this rank's clock gives it up.
        rejection: why it cannot be carried out.
        is_acting: each rank does its part now; the next agreement compares the outcomes.
        has_acted: this rank has done its part, or failed to.
        failure: why this rank's part failed.
        checksum: result of this rank's part.
        is_carried_out: every rank has carried it out, or failed to; the next agreement compares the outcomes.
        phase_before: the engine's phase, restored if a pause is given up.
    """

    request_id: int
    request: ControlRequest
    deadline_s: float
    rejection: str = ""
    is_acting: bool = False
    has_acted: bool = False
    failure: str = ""
    checksum: int = 0
    is_carried_out: bool = False
    phase_before: PauseState = PauseState.RUNNING


def _yields_to(pending: _PendingRequest, pause: PauseGeneration) -> bool:
    """Return whether a pause that arrives later is carried out before a pending request."""
    if pause.mode is PauseMode.FINISH or pending.is_acting or pending.is_carried_out:
        return False
    if isinstance(pending.request, PauseGeneration):
        # Aborted or retracted requests do not run any more, so that the other pause ends, too.
        return pending.request.mode is PauseMode.FINISH and pause.mode is not PauseMode.IN_PLACE
    return not isinstance(pending.request, ContinueGeneration)


@dataclass(slots=True, kw_only=True)
class QuiesceController:
    """Carries control requests out, one after the other. Pure: `propose` this rank's facts, `apply` the agreed values.

    `QuiesceStepper` calls both in every step with a pending request.

    Attributes:
        work: running and waiting requests.
        cache: the cache that a flush empties.
        weights: the weights that an update changes.
        memory: the memory that is released and resumed.
        state: what the engine may do now; the scheduler reads it.
        failures: exceptions of this rank's parts, by request.
        decisions: where it notes what became of the pending request in each agreement.
    """

    work: PausableRequests
    cache: FlushableCache
    weights: WeightStore = field(default_factory=NullWeightStore)
    memory: MemoryOccupation = field(default_factory=NullMemoryOccupation)
    state: QuiesceState = field(default_factory=QuiesceState)
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    decisions: DecisionSink = field(default_factory=NullDecisionLog)
    _pending: deque[_PendingRequest] = field(default_factory=deque, init=False, repr=False)

    @property
    def has_pending(self) -> bool:
        """Whether a control request is pending, so that this step needs an agreement. Equal on all ranks."""
        return bool(self._pending)

    @property
    def next_request(self) -> str:
        """Name of the request that the next agreement is about; empty without one."""
        return control_request_name(self._pending[0].request) if self._pending else ""

    def enqueue(self, request_id: int, request: ControlRequest, *, now_s: float) -> None:
        """Add a control request. Every rank gets the same requests in the same order, between the same two steps.

        Args:
            request_id: identifies the reply.
            request: what to do.
            now_s: this rank's monotonic clock, the start of the deadline.
        """
        timeout_s = request.deadline_s if isinstance(request, PauseGeneration | IdleControlRequest) else 0.0
        pending = _PendingRequest(request_id=request_id, request=request, deadline_s=now_s + timeout_s)
        position = len(self._pending)
        if isinstance(request, PauseGeneration):
            while position and _yields_to(self._pending[position - 1], request):
                position -= 1
        self._pending.insert(position, pending)

    def propose(self, step: int, *, rank: int, now_s: float) -> Proposal:
        """Return this rank's facts for the agreement of this step. Call it only if `has_pending`.

        Args:
            step: the same number on all ranks.
            rank: this rank; the reply names it if its part fails.
            now_s: this rank's monotonic clock, which is only compared with itself.
        """
        pending = self._pending[0]
        request = pending.request
        if not (pending.is_acting or pending.is_carried_out):
            pending.rejection = self.state.rejection(request, self.work.num_running)
            pending.is_acting = isinstance(request, _ACT_WITHOUT_WAITING)
        if pending.is_acting and not (pending.has_acted or pending.rejection):
            pending.has_acted = True
            with self._failing(pending):
                pending.checksum = self._act(request)
        failed_rank = rank if pending.failure else _NO_RANK
        proposal = Proposal(f"quiesce: {control_request_name(request)}", step=step)
        state = self.state.digest(pending.request_id, pending.rejection, pending.is_acting, pending.is_carried_out)
        is_late = now_s >= pending.deadline_s
        proposal.fill(_SLOTS, (state, self._is_quiesced(request), is_late, failed_rank, pending.checksum))
        return proposal

    def apply(self, step: int, agreed: AgreedValues) -> ControlReply | None:
        """Carry out what all ranks agreed; return the reply to a request that is complete.

        Raises:
            QuiesceDivergenceError: the ranks are in different states. Nothing is carried out.
        """
        pending = self._pending[0]
        if not agreed.flags["state"]:
            raise QuiesceDivergenceError(step, control_request_name(pending.request), self.state.phase.value)
        reply = self._decide(pending, agreed)
        outcome = "pending" if reply is None else "refused" if reply.problem else "done"
        state = self.state.digest(pending.is_acting, pending.is_carried_out)
        checksum = reply.checksum if reply is not None and not reply.problem else 0
        self.decisions.note("apply", "quiesce", outcome, pending.request_id, state, checksum)
        if reply is not None:
            self._pending.popleft()
            if reply.problem:
                self.state.counts["num_orders_refused"] += 1
        return reply

    @contextmanager
    def _failing(self, pending: _PendingRequest) -> Iterator[None]:
        """Record an exception of this rank's part. The next agreement decides for all ranks."""
        name = control_request_name(pending.request)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - counted and logged; the agreement decides for all ranks
            self.failures.failed(name, error)
            pending.failure = str(error) or type(error).__name__
        else:
            self.failures.succeeded(name)

    # --- facts of this rank ---

    def _is_quiesced(self, request: ControlRequest) -> bool:
        if self.work.num_running:
            return False
        if isinstance(request, PauseGeneration):
            return True
        return not self.cache.num_operations and not (self.work.num_waiting and self.state.can_admit)

    def _act(self, request: ControlRequest) -> int:
        """Do this rank's part, which can be undone; return a checksum that must be equal on all ranks."""
        if isinstance(request, BeginWeightUpdate):
            self.weights.begin(request.weight_version)
        elif isinstance(request, LoadWeights):
            self.weights.load(request.name, request.content)
        elif isinstance(request, ResumeMemory):
            self.memory.resume(request.tags)
        elif isinstance(request, CheckWeights | EndWeightUpdate):
            checksum = self.weights.checksum()
            if isinstance(request, EndWeightUpdate) and checksum != request.checksum:
                raise ValueError(f"the weights have checksum {checksum:016x}, not {request.checksum:016x}")
            return checksum
        return 0

    # --- decisions that depend on the agreed values alone ---

    def _decide(self, pending: _PendingRequest, agreed: AgreedValues) -> ControlReply | None:
        request = pending.request
        if pending.rejection:
            return ControlReply(pending.request_id, pending.rejection)
        if isinstance(request, PauseGeneration):
            return self._pause(pending, request, agreed)
        if pending.is_carried_out:
            return self._confirm(pending, agreed)
        if pending.is_acting:
            problem = self._describe_failure(pending, agreed)
            if problem:
                self._undo(request)
                return ControlReply(pending.request_id, problem)
        has_begun = isinstance(request, BeginWeightUpdate) and pending.is_acting
        if isinstance(request, IdleControlRequest) and not has_begun and not agreed.flags["quiesced"]:
            return self._give_up(pending) if agreed.flags["late"] else None
        if isinstance(request, BeginWeightUpdate) and not has_begun:
            # Nothing is computed from this step on, so all ranks are still quiesced when they have allocated memory.
            self.state.updating_to, self.state.num_loaded, pending.is_acting = request.weight_version, 0, True
            return None
        return self._carry_out(pending)

    def _pause(self, pending: _PendingRequest, request: PauseGeneration, agreed: AgreedValues) -> ControlReply | None:
        state, num_requests = self.state, 0
        if request.mode is PauseMode.IN_PLACE:
            state.phase = PauseState.FROZEN
        elif request.mode is not PauseMode.FINISH:
            num_requests = self.work.abort_all() if request.mode is PauseMode.ABORT else self.work.retract_all()
            state.phase = PauseState.PAUSED
        elif agreed.flags["quiesced"]:
            state.phase = PauseState.PAUSED
        else:
            if state.phase is not PauseState.FINISHING:
                pending.phase_before, state.phase = state.phase, PauseState.FINISHING
            if not agreed.flags["late"]:
                return None
            state.phase = pending.phase_before
            return self._give_up(pending)
        state.counts["num_pauses"] += 1
        return ControlReply(pending.request_id, num_requests=num_requests)

    def _give_up(self, pending: _PendingRequest) -> ControlReply:
        work = self.work
        problem = (
            f"given up at its deadline: {work.num_running} requests run, {work.num_waiting} wait, "
            f"{self.cache.num_operations} transfers of pages are running"
        )
        return ControlReply(pending.request_id, problem)

    def _describe_failure(self, pending: _PendingRequest, agreed: AgreedValues) -> str:
        """Return which rank failed in its part, and why if it was this one; empty if all ranks agree."""
        failed_rank = agreed.numbers["failed_rank"]
        if failed_rank != _NO_RANK:
            problem = f"rank {failed_rank} could not {control_request_name(pending.request)}"
            return f"{problem}: {pending.failure}" if pending.failure else problem
        return "" if agreed.flags["checksum"] else "ranks have loaded different weights"

    def _undo(self, request: ControlRequest) -> None:
        if isinstance(request, _WEIGHT_UPDATE_REQUESTS):
            with self.failures.guard(_ROLLING_BACK):
                self.weights.roll_back()
            self._end_update()
        elif isinstance(request, ResumeMemory):
            self.memory.release(request.tags, keep_weights=self.state.has_weights)

    def _carry_out(self, pending: _PendingRequest) -> ControlReply | None:
        """Carry a request out; return its reply, or None if the ranks have still to confirm that it worked."""
        request, state = pending.request, self.state
        if isinstance(request, _CONFIRMED):
            pending.is_carried_out = state.is_confirming = True
            with self._failing(pending):
                self._call_collaborators(request)
            return None
        if isinstance(request, ContinueGeneration):
            state.phase = PauseState.RUNNING
        elif isinstance(request, LoadWeights):
            state.num_loaded += 1
        elif isinstance(request, ResumeMemory):
            state.released -= frozenset(request.tags)
        return ControlReply(pending.request_id, checksum=pending.checksum)

    def _call_collaborators(self, request: ControlRequest) -> None:
        """Carry out the part of a request that its ports do. The state changes when all ranks have confirmed it."""
        state = self.state
        if isinstance(request, FlushCache):
            self.cache.clear(state.weight_version)
        elif isinstance(request, ClearStorageIndex):
            self.cache.clear_storage_index()
        elif isinstance(request, EndWeightUpdate):
            assert state.updating_to is not None, "a rejected update was committed"
            self.weights.commit()
            self.cache.clear(state.updating_to)  # the old weights computed its content
        elif isinstance(request, RollBackWeights):
            self.weights.roll_back()
        elif isinstance(request, ReleaseMemory):
            if MemoryTag.KV_CACHE in request.tags:
                self.cache.clear(state.weight_version)
            self.memory.release(request.tags, keep_weights=request.keep_weights)

    def _confirm(self, pending: _PendingRequest, agreed: AgreedValues) -> ControlReply:
        """Change the state as the outcome of all ranks requires, and return the reply."""
        request, state = pending.request, self.state
        problem = self._describe_failure(pending, agreed)
        state.is_confirming = False
        if isinstance(request, FlushCache):
            state.counts["num_flushes"] += not problem
        elif isinstance(request, EndWeightUpdate):
            if not problem:
                assert state.updating_to is not None, "a rejected update was committed"
                state.weight_version = state.updating_to
                state.counts["num_weight_updates"] += 1
            state.updating_to, state.num_loaded, state.has_weights = None, 0, not problem
        elif isinstance(request, RollBackWeights):
            self._end_update()
        elif isinstance(request, ReleaseMemory) and not problem:
            state.released |= frozenset(request.tags)
            state.has_weights = state.has_weights and (request.keep_weights or MemoryTag.WEIGHTS not in request.tags)
        return ControlReply(pending.request_id, problem, checksum=pending.checksum)

    def _end_update(self) -> None:
        self.state.updating_to, self.state.num_loaded = None, 0
        self.state.counts["num_weight_rollbacks"] += 1


@dataclass(slots=True, kw_only=True)
class QuiesceStepper:
    """Runs the agreement about the pending control request, once per step, on the scheduler's thread.

    Attributes:
        quiesce: proposes and decides.
        groups: reduces the proposals. Other users of the same groups call it on the same thread, in the same order on
            all ranks.
        clock: monotonic seconds of this rank.
        progress: where a watchdog reads that a control request is being carried out.
        num_rounds: agreements so far.
    """

    quiesce: QuiesceController
    groups: ParallelGroups
    clock: Callable[[], float] = time.monotonic
    progress: StepProgress = field(default_factory=StepProgress)
    num_rounds: int = field(default=0, init=False)

    def enqueue(self, request_id: int, request: ControlRequest) -> None:
        """Append a control request. Every rank gets the same ones in the same order, between the same two steps."""
        self.quiesce.enqueue(request_id, request, now_s=self.clock())

    def step(self) -> ControlReply | None:
        """Agree on the pending request before anything is computed; return its reply when it is complete.

        Raises:
            SyncTimeoutError: some ranks did not take part in time: they died, hang, or missed the request. Names them.
            SyncDivergenceError: the ranks have different requests.
            QuiesceDivergenceError: the ranks are in different states.
        """
        quiesce = self.quiesce
        if not quiesce.has_pending:
            return None
        self.num_rounds += 1
        self.progress.enter_phase(CONTROL_PHASE, quiesce.next_request)
        proposal = quiesce.propose(self.num_rounds, rank=self.groups.rank, now_s=self.clock())
        reply = quiesce.apply(self.num_rounds, self.groups.reduce(proposal))
        self.progress.enter_phase(IDLE_PHASE)
        return reply
