"""What a person reads, sets and records in a running engine: the same on every rank, or refused and not done."""

from __future__ import annotations

import asyncio
from pathlib import Path

import attrs
import httpx
import pytest
from prometheus_client import CollectorRegistry

from scheduler_components import ConfigError, ParallelState
from scheduler_components.internal_state import InternalState
from scheduler_components.profiler_manager import ProfilerManager
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import EngineConfig, SchedulerConfig
from scheduler_engine.engine.engine import open_engine
from scheduler_engine.engine.http_app import make_app
from scheduler_engine.engine.messages import pack_tokens
from scheduler_engine.engine.rank.rpc_handler import RpcHandler
from scheduler_engine.engine.scheduler.request import Request
from scheduler_engine.engine.scheduler.scheduler import Scheduler
from scheduler_engine.frontend.frontend import GenerateReqInput

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

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
        scheduler.submit(Request(f"r{number}", range(number, number + 100), SamplingLimits(max_new_tokens=4)))
    assert scheduler.step().num_prefill_tokens == 400
    assert control.answer("set_internal_state", b'{"chunk_tokens": 16, "max_running_requests": 2}') == {
        "chunk_tokens": 16,
        "max_running_requests": 2,
    }
    scheduler.submit(Request("late", range(500, 600), SamplingLimits(max_new_tokens=1)))
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
    scheduler.submit(Request("r", range(8), SamplingLimits(max_new_tokens=20)))
    for _ in range(5):
        scheduler.step()
    decayed = scheduler.batcher.conditions.new_token_ratio.current
    assert decayed < CONFIG.new_token_ratio
    control.answer("set_internal_state", b'{"chunk_tokens": 64}')
    assert scheduler.batcher.conditions.new_token_ratio.current == decayed
    control.answer("set_internal_state", b'{"new_token_ratio": 0.5}')
    assert control.answer("get_internal_state", b"")["new_token_ratio_now"] == 0.5


def test_every_rank_of_a_running_engine_reads_sets_and_records(tmp_path: Path) -> None:
    config = EngineConfig(dp_size=2, attn_cp_size=1, attn_tp_size=2, scheduler=CONFIG, speed=20.0)

    async def scenario() -> None:
        async with open_engine(attrs.evolve(config, profile_directory=str(tmp_path)), show=print) as engine:
            app = httpx.ASGITransport(app=make_app(engine, CollectorRegistry()))
            async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
                response = await client.post("/set_internal_state", json={"server_args": {"chunk_tokens": 8}})
                assert response.json() == {"updated": True, "server_args": {"chunk_tokens": 8}}
                states = (await client.get("/get_internal_state")).json()["internal_states"]
                assert [state["chunk_tokens"] for state in states] == [8, 8]
                for body in ({"server_args": {"page_size": 8}}, {"chunk_tokens": 8}, []):
                    refused = await client.post("/set_internal_state", json=body)
                    assert refused.status_code == 400, refused.text
                assert (
                    "can be read but not set"
                    in (await client.put("/set_internal_state", json={"server_args": {"page_size": 8}})).text
                )
                assert (await client.post("/start_profile", json={"num_steps": 0})).status_code == 400
                started = await client.post("/start_profile", json={"profile_id": "p", "num_steps": 2})
                assert started.status_code == 200, started.text
                request = GenerateReqInput(input_ids=pack_tokens(range(40)), limits=SamplingLimits(max_new_tokens=4))
                async with engine.frontend.open_request(request) as stream:
                    assert sum([len(delta.output.token_ids) async for delta in stream]) == 4
                traces = (await client.post("/stop_profile")).json()["traces"]
        assert [Path(trace).name for trace in traces] == ["p-rank0.folded", "p-rank1.folded"]
        assert all("run_rank (process.py:" in Path(trace).read_text() for trace in traces)

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))
