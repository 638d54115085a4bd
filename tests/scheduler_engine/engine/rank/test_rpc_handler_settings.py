"""No accepted setting makes a later step raise, and no setting larger than the pool is accepted."""

from __future__ import annotations

import json
from dataclasses import dataclass

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.reference_scheduler import drain

from scheduler_components import ConfigError, ParallelState
from scheduler_components.internal_state import InternalState, StateValue
from scheduler_components.invariant_checker import CheckPolicy
from scheduler_components.profiler_manager import ProfilerManager
from scheduler_components.scheduling.composition import SchedulerSinks
from scheduler_components.values import KvMetrics
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import IntegrityConfig, SchedulerConfig
from scheduler_engine.engine.rank.rpc_handler import RpcHandler
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

RAISE = CheckPolicy(action="raise", count_every_steps=1, full_check_every_steps=1, is_full_check_in_steps=True)
CONFIG = SchedulerConfig(
    page_size=4,
    kv_tokens=256,
    max_running_requests=8,
    chunk_tokens=16,
    max_prefill_tokens=48,
    integrity=IntegrityConfig(checks=RAISE),
)
MODEL = ("chunk_base_us", "chunk_token_us", "chunk_million_pairs_us")


@dataclass
class EncodingSink:
    """Encodes each ``KvMetrics`` as the wire does."""

    wants_reports: bool = True
    num_sent: int = 0

    def send(self, metrics: KvMetrics) -> None:
        self.num_sent += bool(msgspec.msgpack.encode(metrics))

    def close(self) -> None:
        pass


@dataclass
class SettableRank:
    """A scheduler of one rank behind the RPC methods of an operator."""

    scheduler: Scheduler
    rpc: RpcHandler
    num_requests: int = 0

    def set(self, changes: dict[str, StateValue]) -> bool:
        """Send a change as its JSON text; return whether it was accepted."""
        try:
            answer = self.rpc.answer("set_internal_state", json.dumps(changes).encode())
        except ConfigError:
            return False
        msgspec.json.encode(answer)
        msgspec.json.encode(self.rpc.answer("get_internal_state", b""))
        return True

    def serve(self, num_requests: int, num_steps: int) -> None:
        for _ in range(num_requests):
            self.num_requests += 1
            prompt = range(self.num_requests, self.num_requests + 60)
            limits = SamplingLimits(max_new_tokens=3, ignore_eos=True)
            self.scheduler.submit(EngineRequest(f"r{self.num_requests}", prompt, limits))
        for _ in range(num_steps):
            self.scheduler.step()


def settable_rank(config: SchedulerConfig = CONFIG) -> SettableRank:
    device = SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None)
    sinks = SchedulerSinks(kv_metrics=EncodingSink())
    scheduler = Scheduler.compose(config, ParallelState.trivial(), device, sinks=sinks)
    profiles = ProfilerManager()
    state = InternalState(providers=(scheduler.settings, scheduler.batcher.conditions.chunk_sizer, profiles))
    return SettableRank(scheduler, RpcHandler(state=state, profiles=profiles, sessions=scheduler.sessions))


SETTABLE = settable_rank().rpc.state.settable
LARGEST = 2**31 - 1
integers = st.integers(1, 80) | st.sampled_from([0, -1, LARGEST, LARGEST + 1, 2**63 - 1, 2**63, 10**30, 10**400])
times = st.sampled_from([0.0, 5e-324, 1e-300, 1e-6, 40.0, 1e100, 1e154, 1e200, 1e305, 1.7e308, float("inf"), -1.0])
values = integers | times | st.floats(0, 1) | st.sampled_from([None, True, "7", ""])
models = st.fixed_dictionaries(dict.fromkeys(MODEL, times | integers)) | st.just(dict.fromkeys(MODEL))
sizes = st.dictionaries(st.sampled_from([name for name in SETTABLE if name not in MODEL]), values, max_size=3)
changes = st.one_of(sizes, models, st.builds(lambda some, model: some | model, sizes, models))


@settings(deadline=None, max_examples=settings().max_examples // 2)
@given(st.lists(st.tuples(changes, st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=4))
def test_no_accepted_setting_makes_a_step_raise(trace: list[tuple[dict[str, StateValue], int, int]]) -> None:
    rank = settable_rank()
    for change, num_requests, num_steps in trace:
        before = rank.rpc.answer("get_internal_state", b"")
        if not rank.set(change):
            assert rank.rpc.answer("get_internal_state", b"") == before
        rank.serve(num_requests, num_steps)
    rank.set({"max_prefill_tokens": 64})  # a single token per step would take long
    drain(rank.scheduler)
    checks = rank.scheduler.integrity.checker.stats()
    assert (checks.problems, checks.checks_failed) == (0, 0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"chunk_base_us": 0, "chunk_token_us": 1e305, "chunk_million_pairs_us": 0}, "chunk_token_us"),
        ({"chunk_base_us": 0, "chunk_token_us": 1.0, "chunk_million_pairs_us": 1e308}, "chunk_million_pairs_us"),
        ({"chunk_base_us": 10**400, "chunk_token_us": 1.0, "chunk_million_pairs_us": 0}, "chunk_base_us"),
        ({"max_running_requests": 2**31}, "max_running_requests"),
        ({"max_running_requests": 65}, "max_running_requests"),
        ({"chunk_tokens": 2**31}, "chunk_tokens"),
        ({"kv_metrics_every_steps": 2**63}, "kv_metrics_every_steps"),
    ],
)
def test_a_value_that_a_step_cannot_use_is_refused_by_name(change: dict[str, StateValue], field: str) -> None:
    rank = settable_rank()
    with pytest.raises(ConfigError) as refusal:
        rank.rpc.answer("set_internal_state", json.dumps(change).encode())
    assert refusal.value.field == field


def test_no_more_requests_run_than_the_pool_has_pages() -> None:
    rank = settable_rank(attrs.evolve(CONFIG, kv_tokens=64, max_running_requests=2**31))
    assert rank.rpc.state.get()["max_running_requests"] == 16
    assert rank.scheduler.load.get_loads().max_running_requests == 16
    assert rank.set({"chunk_tokens": 8}), "a change of another size does not repeat the start's value"
    assert rank.set({"max_running_requests": 16})


def test_a_lowered_number_of_slots_is_no_violation_while_more_requests_run() -> None:
    rank = settable_rank()
    rank.serve(num_requests=3, num_steps=4)
    assert len(rank.scheduler.queues.running) == 3
    assert rank.set({"max_running_requests": 1})
    rank.serve(num_requests=1, num_steps=2)
    drain(rank.scheduler)
