"""QuiesceController: bring an engine to rest, do what needs rest, and let it go on; on all ranks in the same step.

**What must be agreed.** All ranks of a replica get the same orders in the same order; what comes of one depends on
what is each rank's own. A copy may still be on its way here, a clock has passed the deadline there, one rank has no
memory, another has read other bytes. So a rank's own facts go into a proposal and nowhere else, and every decision
follows from the agreed values.

**One question per step, while an order stands.** Whether one stands follows from the orders that came and from the
agreed values alone, so it is the same on all ranks, as HiCache's operations are. A rank that missed an order does not
come to the question: the others end with a ``SyncTimeoutError`` that names it and what was ordered. One that has
another order first ends with a ``SyncDivergenceError``; one whose state differs, with a ``QuiesceDivergenceError``.
An engine without orders pays the look at an empty queue.

**Rest, act, vote.** An order waits until all ranks say that they rest, or one says that the deadline has passed: then
it is given up on all of them. What may fail on a rank (to load a part, to take memory) is done next, beside what is
there. If it failed on any rank it is undone on all; otherwise all carry it out in the step that heard so. A rank that
dies in between is missed in the next question.

**A clear goes out.** Whatever empties the cache tells so on the stream at once, whether or not a step follows: an
engine that is idle takes none, and routers would keep what is gone.

The invariant: after the n-th question all ranks have the same state and the same orders left.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal, Slots
from scheduler_components.control_requests import (
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
    ReleaseMemory,
    ResumeMemory,
    RollBackWeights,
    control_request_name,
)
from scheduler_components.errors import QuiesceDivergenceError
from scheduler_components.failure_log import FailureLog
from scheduler_components.ports import (
    FlushableCache,
    MemoryOccupation,
    NullMemoryOccupation,
    NullWeightStore,
    PausableRequests,
    WeightStore,
)
from scheduler_components.quiesce_state import PauseState, QuiesceState

__all__ = ["QuiesceController", "QuiesceStepper"]

logger = logging.getLogger(__name__)

_NOBODY = 2**62
_SLOTS = Slots(("equal", "state"), ("all", "rest"), ("any", "late"), ("min", "failed_rank"), ("equal", "checksum"))
_ACT_AT_ONCE = (LoadWeights, CheckWeights, EndWeightUpdate, ResumeMemory)
_OF_SESSION = (BeginWeightUpdate, LoadWeights, CheckWeights, EndWeightUpdate)


@dataclass(slots=True, kw_only=True)
class _Standing:
    """An order that is not answered yet.

    Attributes:
        order_id, order: as they came.
        late_s: this rank's clock when it is given up.
        refusal: why it cannot be carried out.
        is_acting: it is time for each rank's part: the next question asks how that went.
        has_acted: this rank has done its part, or could not.
        failure: what went wrong with this rank's part.
        checksum: what came of it.
        phase_before: of the engine, for a pause that is given up.
    """

    order_id: int
    order: ControlRequest
    late_s: float
    refusal: str = ""
    is_acting: bool = False
    has_acted: bool = False
    failure: str = ""
    checksum: int = 0
    phase_before: PauseState = PauseState.RUNNING


@dataclass(slots=True, kw_only=True)
class QuiesceController:
    """Carries orders out, one after the other. Pure: ``propose`` what this rank knows, ``settle`` what all agreed.

    Attributes:
        work: requests that run and wait.
        cache: what flushes empty.
        weights: what updates change.
        memory: what is released and resumed.
        state: what the engine may do now; its scheduler reads it.
        failures: what went wrong with this rank's part of an order.
    """

    work: PausableRequests
    cache: FlushableCache
    weights: WeightStore = field(default_factory=NullWeightStore)
    memory: MemoryOccupation = field(default_factory=NullMemoryOccupation)
    state: QuiesceState = field(default_factory=QuiesceState)
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _orders: deque[_Standing] = field(default_factory=deque, init=False, repr=False)

    @property
    def has_pending(self) -> bool:
        """An order stands: ask all ranks in this step. The same on each of them."""
        return bool(self._orders)

    def enqueue(self, order_id: int, order: ControlRequest, *, now_s: float) -> None:
        """An order has come; every rank is given the same ones in the same order.

        Args:
            order_id: tells its answer from others.
            order: what is wanted.
            now_s: this rank's monotonic clock, from which on a deadline runs.
        """
        deadline_s = order.deadline_s if isinstance(order, PauseGeneration | IdleControlRequest) else 0.0
        self._orders.append(_Standing(order_id=order_id, order=order, late_s=now_s + deadline_s))

    def propose(self, step: int, *, rank: int, now_s: float) -> Proposal:
        """Return what this rank brings to the step's question; ask ``has_pending`` first.

        Args:
            step: the same number on all ranks.
            rank: this one, which is named where its part fails.
            now_s: this rank's monotonic clock; only ever compared with itself.
        """
        standing = self._orders[0]
        order = standing.order
        if not standing.is_acting:
            standing.refusal = self.state.refusal(order, self.work.num_running)
            standing.is_acting = isinstance(order, _ACT_AT_ONCE)
        failed_rank = _NOBODY
        if standing.is_acting and not (standing.has_acted or standing.refusal):
            standing.has_acted = True
            try:
                standing.checksum = self._act(order)
            except Exception as error:  # noqa: BLE001 - one rank's trouble is all ranks' decision; counted and logged
                self.failures.failed(control_request_name(order), error)
                standing.failure, failed_rank = str(error) or type(error).__name__, rank
            else:
                self.failures.succeeded(control_request_name(order))
        proposal = Proposal(f"quiesce: {control_request_name(order)}", step=step)
        state = self.state.digest(standing.order_id, standing.refusal, standing.is_acting)
        is_late = now_s >= standing.late_s
        proposal.fill(_SLOTS, (state, self._is_at_rest(order), is_late, failed_rank, standing.checksum))
        return proposal

    def settle(self, step: int, agreed: AgreedValues) -> ControlReply | None:
        """Carry out what all ranks agreed; returns the answer of an order that is over.

        Raises:
            QuiesceDivergenceError: ranks are in different states; nothing is carried out.
        """
        standing = self._orders[0]
        if not agreed.flags["state"]:
            raise QuiesceDivergenceError(step, control_request_name(standing.order), self.state.phase.value)
        answer = self._decide(standing, agreed)
        if answer is not None:
            self._orders.popleft()
            if answer.problem:
                self.state.counts["num_orders_refused"] += 1
        return answer

    # --- what only this rank knows ---

    def _is_at_rest(self, order: ControlRequest) -> bool:
        if self.work.num_running:
            return False
        if isinstance(order, PauseGeneration):
            return True
        return not self.cache.num_operations and not (self.work.num_waiting and self.state.can_admit)

    def _act(self, order: ControlRequest) -> int:
        """Do this rank's part, which can be undone; returns what all ranks must have in common."""
        if isinstance(order, BeginWeightUpdate):
            self.weights.begin(order.weight_version)
        elif isinstance(order, LoadWeights):
            self.weights.load(order.name, order.content)
        elif isinstance(order, ResumeMemory):
            self.memory.resume(order.tags)
        elif isinstance(order, CheckWeights | EndWeightUpdate):
            checksum = self.weights.checksum()
            if isinstance(order, EndWeightUpdate) and checksum != order.checksum:
                raise ValueError(f"the weights have checksum {checksum:016x}, not {order.checksum:016x}")
            return checksum
        return 0

    # --- what follows from the agreed values alone ---

    def _decide(self, standing: _Standing, agreed: AgreedValues) -> ControlReply | None:
        order = standing.order
        if standing.refusal:
            return ControlReply(standing.order_id, standing.refusal)
        if isinstance(order, PauseGeneration):
            return self._pause(standing, order, agreed)
        if standing.is_acting:
            problem = self._problem_of_parts(standing, agreed)
            if problem:
                self._undo(order)
                return ControlReply(standing.order_id, problem)
        is_begun = isinstance(order, BeginWeightUpdate) and standing.is_acting
        if isinstance(order, IdleControlRequest) and not is_begun and not agreed.flags["rest"]:
            return self._busy(standing) if agreed.flags["late"] else None
        if isinstance(order, BeginWeightUpdate) and not is_begun:
            # From this step on nothing is computed, so that all ranks still rest when they have made room.
            self.state.updating_to, self.state.num_parts, standing.is_acting = order.weight_version, 0, True
            return None
        return self._carry_out(standing)

    def _pause(self, standing: _Standing, order: PauseGeneration, agreed: AgreedValues) -> ControlReply | None:
        state, num_requests = self.state, 0
        if order.mode is PauseMode.IN_PLACE:
            state.phase = PauseState.FROZEN
        elif order.mode is not PauseMode.FINISH:
            num_requests = self.work.abort_all() if order.mode is PauseMode.ABORT else self.work.retract_all()
            state.phase = PauseState.PAUSED
        elif agreed.flags["rest"]:
            state.phase = PauseState.PAUSED
        else:
            if state.phase is not PauseState.FINISHING:
                standing.phase_before, state.phase = state.phase, PauseState.FINISHING
            if not agreed.flags["late"]:
                return None
            state.phase = standing.phase_before
            return self._busy(standing)
        state.counts["num_pauses"] += 1
        return ControlReply(standing.order_id, num_requests=num_requests)

    def _busy(self, standing: _Standing) -> ControlReply:
        work = self.work
        under_way = f"{work.num_running} requests run, {work.num_waiting} wait"
        problem = f"given up at its deadline: {under_way}, {self.cache.num_operations} transfers of pages are under way"
        return ControlReply(standing.order_id, problem)

    def _problem_of_parts(self, standing: _Standing, agreed: AgreedValues) -> str:
        """Say which rank could not do its part, and why if it was this one; empty where all could, alike."""
        failed_rank = agreed.numbers["failed_rank"]
        if failed_rank != _NOBODY:
            problem = f"rank {failed_rank} could not {control_request_name(standing.order)}"
            return f"{problem}: {standing.failure}" if standing.failure else problem
        return "" if agreed.flags["checksum"] else "ranks have loaded different weights"

    def _undo(self, order: ControlRequest) -> None:
        if isinstance(order, _OF_SESSION):
            self._roll_back()
        elif isinstance(order, ResumeMemory):
            self.memory.release(order.tags, keep_weights=self.state.has_weights)

    def _carry_out(self, standing: _Standing) -> ControlReply:
        order, state = standing.order, self.state
        if isinstance(order, ContinueGeneration):
            state.phase = PauseState.RUNNING
        elif isinstance(order, FlushCache):
            self.cache.clear(state.weight_version)
            state.counts["num_flushes"] += 1
        elif isinstance(order, ClearStorageIndex):
            self.cache.clear_storage_index()
        elif isinstance(order, LoadWeights):
            state.num_parts += 1
        elif isinstance(order, EndWeightUpdate):
            self._commit_weights()
        elif isinstance(order, RollBackWeights):
            self._roll_back()
        elif isinstance(order, ReleaseMemory):
            self._release(order)
        elif isinstance(order, ResumeMemory):
            state.released -= frozenset(order.tags)
        return ControlReply(standing.order_id, checksum=standing.checksum)

    def _commit_weights(self) -> None:
        """From here on the new weights compute; nothing that the old ones computed may be found any more."""
        state = self.state
        assert state.updating_to is not None, "an update was ended that was refused"
        self.weights.commit()
        state.weight_version, state.updating_to, state.has_weights = state.updating_to, None, True
        state.counts["num_weight_updates"] += 1
        self.cache.clear(state.weight_version)

    def _roll_back(self) -> None:
        self.weights.roll_back()
        self.state.updating_to, self.state.num_parts = None, 0
        self.state.counts["num_weight_rollbacks"] += 1

    def _release(self, order: ReleaseMemory) -> None:
        state = self.state
        if MemoryTag.KV_CACHE in order.tags:
            self.cache.clear(state.weight_version)
        self.memory.release(order.tags, keep_weights=order.keep_weights)
        state.released |= frozenset(order.tags)
        state.has_weights = state.has_weights and (order.keep_weights or MemoryTag.WEIGHTS not in order.tags)


@dataclass(slots=True, kw_only=True)
class QuiesceStepper:
    """Lets orders and the ranks of a replica meet, once per step. On the scheduler's thread.

    Attributes:
        quiesce: decides.
        groups: agrees. Who shares it asks on the same thread, in one order on all ranks.
        clock: monotonic seconds of this rank.
        num_rounds: asked so far.
    """

    quiesce: QuiesceController
    groups: ParallelGroups
    clock: Callable[[], float] = time.monotonic
    num_rounds: int = field(default=0, init=False)

    def enqueue(self, order_id: int, order: ControlRequest) -> None:
        """An order has come; every rank is given the same ones in the same order, between the same two steps."""
        self.quiesce.enqueue(order_id, order, now_s=self.clock())

    def step(self) -> ControlReply | None:
        """Ask all ranks about the order that stands, before anything is computed; returns its answer when it is over.

        Raises:
            SyncTimeoutError: ranks did not come in time: they died, hang, or missed the order. The error names them.
            SyncDivergenceError: ranks have different orders.
            QuiesceDivergenceError: ranks are in different states.
        """
        quiesce = self.quiesce
        if not quiesce.has_pending:
            return None
        self.num_rounds += 1
        proposal = quiesce.propose(self.num_rounds, rank=self.groups.rank, now_s=self.clock())
        return quiesce.settle(self.num_rounds, self.groups.reduce(proposal))
