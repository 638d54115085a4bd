"""Any history over a real model, with submitted, aborted and retracted requests, flushes and restarts.

Each request's text is what ``generate`` gives, each cached page holds what transformers computes, and the blocks of the
stream are those of the cache.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from kit.model_bench import PAGE_SIZE, PROMPTS, LastMomentMover, ModelBench, Tiers
from transformers import PreTrainedModel

from scheduler_components import CacheIntegrityError
from scheduler_components.hicache import HiCachePolicy, MemoryPageStore
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_components.values import FinishReason, RequestState
from scheduler_engine.engine.scheduler.request import EngineRequest

pytestmark = pytest.mark.model

_LONGEST = 9 * PAGE_SIZE  # positions of a request: the smallest pool holds one
_EXAMPLES_IN = 4  # one of so many: an example computes some forty forwards


class KeptStore(MemoryPageStore):
    """Outlives the engine, as files do."""

    def close(self) -> None:
        pass


class ModelMachine(RuleBasedStateMachine):
    def __init__(self, model: PreTrainedModel, judge: GreedyTextVerifier, reached: Counter[str]) -> None:
        super().__init__()
        self.model, self.judge, self.reached = model, judge, reached

    @initialize(
        num_pages=st.sampled_from([9, 12, 16]),
        chunk=st.sampled_from([1, 3, 4, 7, 40]),
        slots=st.sampled_from([1, 3, 4]),
        new_token_ratio=st.sampled_from([0.0, 0.7]),
        host_pages=st.sampled_from([60, 24, 8, 0]),
        has_store=st.booleans(),
        late_steps=st.lists(st.integers(0, 3), min_size=1, max_size=4),
        policy=st.builds(
            HiCachePolicy,
            write=st.sampled_from(["write_through", "write_back"]),
            clean_ahead_pages=st.sampled_from([4, 16]),
            prefetch=st.sampled_from(["wait_complete", "best_effort"]),
            prefetch_threshold_pages=st.just(1),
            load=st.sampled_from(["whole", "by_layer"]),
        ),
    )
    def start(
        self,
        num_pages: int,
        chunk: int,
        slots: int,
        new_token_ratio: float,
        host_pages: int,
        has_store: bool,
        late_steps: list[int],
        policy: HiCachePolicy,
    ) -> None:
        self.store = KeptStore(1 << 24) if has_store else None
        self.late_steps, self.num_asked = late_steps, 0
        self.host_pages, self.policy = host_pages, policy
        self.sizes = {
            "kv_tokens": num_pages * PAGE_SIZE,
            "chunk_tokens": chunk,
            "max_prefill_tokens": 2 * chunk,
            "max_running_requests": slots,
            "new_token_ratio": new_token_ratio,
            "min_new_token_ratio": 0.0,
        }
        self.open()

    def open(self) -> None:
        make_mover = partial(LastMomentMover, late_steps=self.next_delay)
        tiers = Tiers(host_pages=self.host_pages, store=self.store, policy=self.policy, make_mover=make_mover)
        self.bench = ModelBench(self.model, self.judge, tiers=tiers if self.host_pages else None, **self.sizes)

    def next_delay(self) -> int:
        self.num_asked += 1
        return self.late_steps[self.num_asked % len(self.late_steps)]

    def request_of(self, data: st.DataObject) -> EngineRequest:
        place = data.draw(st.integers(0, len(self.bench.requests) - 1))
        return self.bench.requests[place]

    @rule(
        places=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=4),
        cut=st.sampled_from([None, -1, 16, 12, 1]),
        max_new=st.integers(1, 8),
    )
    def submit(self, places: list[int], cut: int | None, max_new: int) -> None:
        for place in places:
            prompt = PROMPTS[place][:cut]
            self.bench.submit(prompt, min(max_new, _LONGEST - len(prompt)))

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data(), more=st.sampled_from([(40,), (40, 41)]), max_new=st.integers(1, 3))
    def follow_up(self, data: st.DataObject, more: tuple[int, ...], max_new: int) -> None:
        """What a chat's next turn is: the prompt, the answer, and something new."""
        before = self.request_of(data)
        prompt = (*before.input_ids, *before.output_ids, *more)
        if before.state is RequestState.FINISHED and len(prompt) + max_new <= _LONGEST:
            self.bench.submit(prompt, max_new)

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """The pages of an old prompt may be on the host by now. All earlier requests have ended."""
        self.bench.drain()
        prompt = self.request_of(data).input_ids
        self.bench.submit(prompt, min(4, _LONGEST - len(prompt)))
        self.bench.drain()

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.bench.abort(self.request_of(data))

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.bench.step()

    @rule()
    def retract_all(self) -> None:
        self.bench.scheduler.retract_all()

    @rule()
    def flush(self) -> None:
        """Refused while anything runs or is on its way, and then nothing has changed."""
        try:
            self.bench.scheduler.clear_cache()
        except CacheIntegrityError:
            assert self.bench.scheduler.queues.running or self.bench.scheduler.tiers.num_operations

    @rule()
    def restart(self) -> None:
        """The engine is gone in the middle of whatever it did; storage alone is left."""
        self.bench.verify_texts()
        self.bench.judge_pages()
        self.count()
        self.open()

    def count(self) -> None:
        """Count what the histories have reached, because a search that reaches nothing finds nothing."""
        scheduler, requests = self.bench.scheduler, self.bench.requests
        tiers = scheduler.tiers.stats()
        self.reached["preemptions"] += sum(request.num_retractions for request in requests)
        self.reached["evictions"] += scheduler.request_metrics.counters.evicted_tokens_total
        self.reached["reloads"] += 0 if tiers is None else tiers.pages_loaded
        self.reached["reads from storage"] += 0 if tiers is None else tiers.pages_prefetched
        self.reached["aborts"] += sum(request.finish_reason is FinishReason.ABORT for request in requests)

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.drain()
            self.bench.verify_texts()
            self.bench.judge_pages()
            self.bench.scheduler.cache.check_integrity()
            assert self.bench.scheduler.cache.used_tokens == 0
            self.count()
            self.bench.close()


@pytest.mark.soak
def test_any_history_gives_the_text_of_generate(
    paged_model: PreTrainedModel, judge: GreedyTextVerifier, soaking: bool
) -> None:
    """In make test the histories are the same in each run, because a few new ones may all be without preemption."""
    num_examples = settings().max_examples // _EXAMPLES_IN
    searched: Any = settings(max_examples=num_examples, stateful_step_count=20, derandomize=not soaking, database=None)
    reached: Counter[str] = Counter()
    run_state_machine_as_test(partial(ModelMachine, paged_model, judge, reached), settings=searched)
    unreached = [what for what in ("preemptions", "evictions", "reloads", "aborts") if not reached[what]]
    assert not unreached, f"no history has {' or '.join(unreached)}: {dict(reached)}"
