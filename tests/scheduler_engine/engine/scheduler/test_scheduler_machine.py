"""The reference scheduler as a state machine: any workload, any small pool, aborts anywhere.

After every step: the cache's arithmetic holds; pages in use are exactly those that running requests hold; order of
arrival is kept; the oldest request moved on; load counts equal a naive recount; replaying the events gives the cache's
blocks. At the end every request has exactly the tokens that the device foretells, and nothing is held.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kit.ledger_sink import LedgerSink
from kit.rid_model import RidModel
from kit.searches import num_examples

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.quiesce import QuiesceState
from scheduler_components.scheduling.composition import SchedulerSinks
from scheduler_components.scheduling.request_kv_cache import pages_for
from scheduler_components.testing import ListOutputSink
from scheduler_components.values import (
    BeginWeightUpdate,
    CheckWeights,
    ContinueGeneration,
    ControlRequest,
    EndWeightUpdate,
    FinishReason,
    FlushCache,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    RequestState,
    ResumeMemory,
    RollBackWeights,
)
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.model_spec import TokenSpec
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.rank.quiescable_scheduler import make_quiesce_stepper
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler, StepResult

EOS = 3
MODEL = RidModel(vocab_size=3, eos_token_id=EOS, mean_output_tokens=20)  # few words: outputs and prompts share


def foretold(request: EngineRequest) -> tuple[tuple[int, ...], FinishReason]:
    """The tokens that a request generates if it is not aborted."""
    limits, tokens = request.limits, []
    for position in range(request.num_prompt_tokens, request.num_prompt_tokens + limits.max_new_tokens):
        tokens.append(MODEL.next_token(request.rid, position))
        if tokens[-1] in limits.stop_token_ids or (tokens[-1] == EOS and not limits.ignore_eos):
            return tuple(tokens), FinishReason.STOP
    return tuple(tokens), FinishReason.LENGTH


class SomeWeights:
    """A ``WeightStore`` of a model that stays as it is: what is foretold stays true."""

    def begin(self, weight_version: str) -> None:
        pass

    def load(self, name: str, content: bytes) -> None:
        pass

    def checksum(self) -> int:
        return 7

    def commit(self) -> None:
        pass

    def roll_back(self) -> None:
        pass


tags = st.lists(st.sampled_from(MemoryTag), min_size=1, max_size=2, unique=True).map(tuple)
control_requests = st.one_of(
    st.builds(PauseGeneration, st.sampled_from(PauseMode)),
    st.just(ContinueGeneration()),
    st.just(FlushCache()),
    st.builds(BeginWeightUpdate, st.sampled_from(["v1", "v2"])),
    st.sampled_from([CheckWeights(), EndWeightUpdate(7, 0.0), EndWeightUpdate(8), RollBackWeights()]),
    st.builds(ReleaseMemory, tags),
    st.builds(ResumeMemory, tags),
)


def progress(request: EngineRequest) -> tuple[int, int]:
    return len(request.token_ids), request.num_computed_tokens


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.integers(1, 4),
        num_pages=st.sampled_from([8, 12, 16, 4, 1]),
        slots=st.sampled_from([3, 4, 6, 1]),
        prefill=st.sampled_from([7, 20, 40, 1]),
        chunk=st.sampled_from([3, 8, 50, 1]),
        ratios=st.sampled_from([(0.0, 0.0), (0.7, 0.1), (1.0, 0.0), (1.0, 1.0)]),
    )
    def start(
        self, page_size: int, num_pages: int, slots: int, prefill: int, chunk: int, ratios: tuple[float, float]
    ) -> None:
        self.config = SchedulerConfig(
            page_size=page_size,
            kv_tokens=page_size * num_pages,
            max_running_requests=slots,
            max_prefill_tokens=prefill,
            chunk_tokens=chunk,
            new_token_ratio=ratios[0],
            min_new_token_ratio=ratios[1],
            tokens=TokenSpec(eos_token_ids=(EOS,)),
        )
        self.view = LedgerSink(page_size)
        self.outputs = ListOutputSink()
        self.scheduler = Scheduler.compose(
            self.config,
            ParallelState.trivial(),
            SimulatedDevice(model=MODEL, clock=lambda: 0.0, sleep=lambda _: None),
            sinks=SchedulerSinks(events=self.view, outputs=self.outputs),
            quiesce=(state := QuiesceState()),
        )
        self.quiesce = make_quiesce_stepper(self.scheduler, state, groups=ParallelGroups(), weights=SomeWeights())
        self.num_put_back = 0  # by pauses
        self.requests: dict[str, EngineRequest] = {}
        self.streamed: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}

    @rule(
        prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=4),
        max_new=st.integers(1, 14),
        stop=st.sampled_from([(), (), (0,), (1, 2)]),
        ignore_eos=st.booleans(),
    )
    def submit(self, prompts: list[list[int]], max_new: int, stop: tuple[int, ...], ignore_eos: bool) -> None:
        room = self.config.kv_tokens
        limits = SamplingLimits(max_new_tokens=min(max_new, room), stop_token_ids=stop, ignore_eos=ignore_eos)
        for prompt in prompts:
            request = EngineRequest(f"r{len(self.requests)}", prompt[: room - limits.max_new_tokens + 1], limits)
            self.scheduler.submit(request)
            self.requests[request.rid] = request
            self.streamed[request.rid] = []

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests[rid]
        was_in_flight = request.state is not RequestState.FINISHED
        assert self.scheduler.abort(rid) is was_in_flight
        assert request.state is RequestState.FINISHED
        assert not request.pages
        assert not self.scheduler.abort(rid)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            oldest = min(self.scheduler.queues, key=lambda request: request.arrival, default=None)
            before = progress(oldest) if oldest is not None else (0, 0)
            was_running = bool(self.scheduler.queues.running)
            ratio_before = self.scheduler.batcher.conditions.new_token_ratio.current
            result = self.scheduler.step()
            self.read(result)
            ratio = self.scheduler.batcher.conditions.new_token_ratio.current
            assert self.config.min_new_token_ratio <= ratio <= 1.0
            highest = ratio_before if was_running else self.config.new_token_ratio
            may_move = self.scheduler.batcher.conditions.gate.can_admit
            assert result.num_retracted or not may_move or ratio <= highest
            assert oldest is None or not may_move or progress(oldest) > before or oldest.state is RequestState.FINISHED
            assert self.view.blocks == set(self.scheduler.cache.block_hashes())

    @rule(control_request=control_requests)
    def control_request(self, control_request: ControlRequest) -> None:
        """A control request ends in a bounded number of steps, and the events of a cleared cache follow immediately."""
        self.quiesce.enqueue(0, control_request)
        for _ in range(3):
            answer = self.quiesce.step()
            if answer is not None:
                break
            self.read(self.scheduler.step())
        assert answer is not None, "a control request without a deadline took more than three steps"
        if isinstance(control_request, FlushCache) and not answer.problem:
            assert not self.view.blocks
            assert self.scheduler.cache.free_tokens == self.config.kv_tokens
        if control_request == PauseGeneration(PauseMode.RETRACT):
            self.num_put_back += answer.num_requests
        if (
            isinstance(control_request, PauseGeneration)
            and not answer.problem
            and control_request.mode is not PauseMode.IN_PLACE
        ):
            assert not self.scheduler.queues.running
        self.read(self.scheduler.step())
        assert self.view.blocks == set(self.scheduler.cache.block_hashes())

    def read(self, result: StepResult) -> None:
        for delta in self.outputs.deltas:
            assert delta.rid not in self.ended
            assert delta.start == len(self.streamed[delta.rid])
            self.streamed[delta.rid] += delta.output.token_ids
            request = self.requests[delta.rid]
            assert delta.output.num_prompt_tokens == request.num_prompt_tokens
            assert delta.num_output_tokens == len(self.streamed[delta.rid])
            assert 0 <= delta.output.num_cached_tokens < delta.output.num_prompt_tokens
            if delta.finish_reason is not None:
                self.ended[delta.rid] = FinishReason(delta.finish_reason)
        assert len(self.outputs.deltas) <= result.num_updated_requests
        self.outputs.batches.clear()
        assert not (result.num_admitted and result.num_retracted), "what was taken was given back in the same step"
        assert result.num_prefill_tokens <= self.config.max_prefill_tokens
        assert result.digest == self.scheduler.state_digest

    @invariant()
    def pages_add_up(self) -> None:
        cache, page_size = self.scheduler.cache, self.config.page_size
        cache.check_integrity()
        held = {page for request in self.scheduler.queues.running for page in request.pages}
        assert cache.used_tokens == len(held) * page_size
        for request in self.scheduler.queues.running:
            assert len(request.pages) == pages_for(request.num_computed_tokens, page_size)
        assert not any(request.pages for request in self.scheduler.queues.waiting)

    @invariant()
    def order_of_arrival_is_kept(self) -> None:
        arrivals = [request.arrival for request in self.scheduler.queues]
        assert arrivals == sorted(arrivals)
        assert len(self.scheduler.queues) == len(arrivals)
        assert len(self.scheduler.queues.running) <= self.config.max_running_requests

    @invariant()
    def load_equals_a_recount(self) -> None:
        queues = self.scheduler.queues
        load = self.scheduler.load.get_loads()
        left = sum(max(0, request.prefill_end - request.num_computed_tokens) for request in queues.running)
        cached = sum(request.num_cached_tokens for request in queues.waiting)
        pending = left + sum(len(request.token_ids) for request in queues.waiting)
        assert (load.num_running_reqs, load.num_waiting_reqs) == (len(queues.running), len(queues.waiting))
        assert load.num_pending_tokens == pending
        assert load.num_waiting_uncached_tokens == pending - cached >= 0
        assert load.num_used_tokens == self.scheduler.cache.used_tokens

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        state = self.quiesce.quiesce.state
        for control_request in (RollBackWeights(), ResumeMemory(tuple(sorted(state.released))), ContinueGeneration()):
            self.quiesce.enqueue(0, control_request)
            while self.quiesce.quiesce.has_pending:
                self.quiesce.step()
        tokens = sum(len(request.token_ids) + request.limits.max_new_tokens for request in self.requests.values())
        bound = 1 + tokens * (1 + self.num_put_back)
        for result in self.scheduler.drain():
            self.read(result)
            self.pages_add_up()
            assert self.view.blocks == set(self.scheduler.cache.block_hashes())
            bound -= 1
            assert bound, "the scheduler does not come to an end"
        self.every_request_ended_as_foretold()
        self.nothing_is_held()

    def every_request_ended_as_foretold(self) -> None:
        assert self.ended.keys() == self.requests.keys()
        for rid, request in self.requests.items():
            tokens, reason = foretold(request)
            if self.ended[rid] is FinishReason.ABORT:
                assert self.streamed[rid] == list(tokens[: len(self.streamed[rid])])
            else:
                assert (tuple(self.streamed[rid]), self.ended[rid]) == (tokens, reason)

    def nothing_is_held(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.has_work
        assert scheduler.cache.used_tokens == 0
        load = scheduler.load.get_loads()
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_tokens) == (0, 0, 0)
        totals = scheduler.request_metrics.stats()
        if self.config.min_new_token_ratio == 1.0:  # all output is reserved, so no request is retracted
            assert totals.num_retractions_total == self.num_put_back
        assert totals.num_requests_total == len(self.requests)
        assert totals.num_aborted_requests_total == list(self.ended.values()).count(FinishReason.ABORT)
        assert totals.generation_tokens_total == sum(map(len, self.streamed.values()))
        assert totals.num_retractions_total == sum(request.num_retractions for request in self.requests.values())
        if not scheduler.cache.num_event_collapses:  # a collapse publishes the content instead of each removal
            assert totals.evicted_tokens_total == self.view.num_removed * self.config.page_size
        assert 0 <= totals.cached_tokens_total <= totals.prompt_tokens_total


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=num_examples(1), stateful_step_count=50)
TestSchedulerMachine = pytest.mark.soak(pytest.mark.timeout(600)(TestSchedulerMachine))
