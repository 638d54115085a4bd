"""The checks and the watchdog of the reference engine, in real processes and in the configuration of a rank."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from scheduler_components import ConfigError
from scheduler_components.invariant_checker import CheckPolicy
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import (
    EngineConfig,
    IntegrityConfig,
    SchedulerConfig,
)
from scheduler_engine.engine.engine import open_engine
from scheduler_engine.engine.http_app import make_app
from scheduler_engine.engine.messages import pack_tokens
from scheduler_engine.frontend.frontend import GenerateReqInput

pytestmark = pytest.mark.processes

SLOW = EngineConfig(
    dp_size=1,
    attn_cp_size=1,
    attn_tp_size=1,
    scheduler=SchedulerConfig(page_size=4, kv_tokens=1024, integrity=IntegrityConfig(stall_after_s=0.2)),
    speed=0.0001,  # a step takes minutes
)


@pytest.fixture
def private_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the engine puts its sockets; short, since a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="sc-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def test_a_stalled_rank_is_reported_over_http_and_with_its_stacks(private_tmp: Path) -> None:
    lines: list[str] = []

    async def whole() -> None:
        async with open_engine(SLOW, show=lines.append) as engine:
            engine.frontend.heartbeats.timeout_s = 1.0
            app = make_app(engine, CollectorRegistry())
            request = GenerateReqInput(input_ids=pack_tokens(range(40)), limits=SamplingLimits(max_new_tokens=5))
            async with (
                httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
                engine.frontend.open_request(request),
            ):
                while "stuck" not in (problem := (await client.get("/health")).text):
                    await asyncio.sleep(0.05)
            assert "stuck in step 1, phase device, request " in problem
            while not any("device.py" in line for line in lines):
                await asyncio.sleep(0.05)
            os.kill(engine.ranks[0].process.pid, signal.SIGKILL)  # it would sleep on for minutes

    asyncio.run(asyncio.wait_for(whole(), timeout=60))
    assert any("has made no progress for" in line and "phase device" in line for line in lines)


def test_a_slow_device_has_a_longer_stall_timeout() -> None:
    assert IntegrityConfig().stall_timeout_s(speed=4.0) == 8.0
    assert IntegrityConfig().stall_timeout_s(speed=0.5) == 16.0
    assert IntegrityConfig(stall_after_s=0).stall_timeout_s(speed=0.5) == 0


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (IntegrityConfig, {"stall_after_s": -1.0}),
        (IntegrityConfig, {"owners_one_in": -1}),
        (IntegrityConfig, {"owners_one_in": 1.5}),
        (CheckPolicy, {"action": "kill"}),
        (CheckPolicy, {"count_every_steps": 0}),
        (CheckPolicy, {"full_check_every_steps": 0}),
    ],
)
def test_an_invalid_value_is_refused_by_name(settings: Callable[..., object], wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        settings(**wrong)
