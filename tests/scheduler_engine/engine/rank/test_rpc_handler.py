"""What a person reads, sets and records in a running engine: the same on every rank, or refused and not done."""

from __future__ import annotations

import pytest

from scheduler_components import ConfigError, ParallelState
from scheduler_components.internal_state import InternalState
from scheduler_components.profiler_manager import ProfilerManager
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.rank.rpc_handler import RpcHandler
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

CONFIG = SchedulerConfig(page_size=4, kv_tokens=1024, max_running_requests=4)


@pytest.fixture
def scheduler() -> Scheduler:
    device = SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None)
    return Scheduler.compose(CONFIG, ParallelState.trivial(), device)


@pytest.fixture
def control(scheduler: Scheduler) -> RpcHandler:
    profiles = ProfilerManager()
    return RpcHandler(
        state=InternalState(providers=(scheduler.settings, profiles)), profiles=profiles, sessions=scheduler.sessions
    )


def test_sizes_can_be_changed_while_requests_run(scheduler: Scheduler, control: RpcHandler) -> None:
    for number in range(4):
        scheduler.submit(EngineRequest(f"r{number}", range(number, number + 100), SamplingLimits(max_new_tokens=4)))
    assert scheduler.step().num_prefill_tokens == 400
    assert control.answer("set_internal_state", b'{"chunk_tokens": 16, "max_running_requests": 2}') == {
        "chunk_tokens": 16,
        "max_running_requests": 2,
    }
    scheduler.submit(EngineRequest("late", range(500, 600), SamplingLimits(max_new_tokens=1)))
    results = list(scheduler.drain())
    assert max(result.num_prefill_tokens for result in results) == 16
    assert sum(result.num_prefill_tokens for result in results) == 100
    first_admission = next(number for number, result in enumerate(results) if result.num_admitted)
    assert first_admission == 3, "four run: no request is admitted until all but one have ended, after three steps"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"chunk_tokens": 0}', "chunk_tokens"),
        (b'{"chunk_tokens": 16, "max_running_requests": "many"}', "max_running_requests"),
        (b'{"chunk_tokens": true}', "chunk_tokens"),
        (b'{"new_token_ratio": "0.5"}', "new_token_ratio"),
        (b'{"min_new_token_ratio": 0.9}', "min_new_token_ratio"),
        (b'{"kv_tokens": 64}', "kv_tokens"),
        (b'{"config": 1}', "config"),
        (b'{"chunk_tokens": {"a": 1}}', "body"),
        (b"[]", "body"),
        (b"\xff", "body"),
        (b"[" * 5_000, "body"),
    ],
)
def test_a_read_only_value_is_refused_by_name_and_changes_nothing(control: RpcHandler, body: bytes, field: str) -> None:
    before = control.answer("get_internal_state", b"")
    with pytest.raises(ConfigError) as refusal:
        control.answer("set_internal_state", body)
    assert refusal.value.field == field
    assert control.answer("get_internal_state", b"") == before


def test_a_new_ratio_takes_effect_immediately_and_other_changes_keep_it(
    scheduler: Scheduler, control: RpcHandler
) -> None:
    scheduler.submit(EngineRequest("r", range(8), SamplingLimits(max_new_tokens=20)))
    for _ in range(5):
        scheduler.step()
    decayed = scheduler.batcher.conditions.new_token_ratio.current
    assert decayed < CONFIG.new_token_ratio
    control.answer("set_internal_state", b'{"chunk_tokens": 64}')
    assert scheduler.batcher.conditions.new_token_ratio.current == decayed
    control.answer("set_internal_state", b'{"new_token_ratio": 0.5}')
    assert control.answer("get_internal_state", b"")["new_token_ratio_now"] == 0.5
