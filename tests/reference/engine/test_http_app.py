"""Without the option an engine has no route of its KV pool."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from prometheus_client import CollectorRegistry

from scheduler_components.reference.engine.config import EngineConfig, SchedulerConfig
from scheduler_components.reference.engine.engine import open_engine
from scheduler_components.reference.engine.http_app import make_app

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

CONFIG = EngineConfig(
    dp_size=1, attn_cp_size=1, attn_tp_size=1, scheduler=SchedulerConfig(page_size=4, kv_tokens=512), speed=20.0
)


def test_without_the_option_an_engine_has_no_such_route() -> None:
    async def asked() -> int:
        async with open_engine(CONFIG, show=lambda _: None) as engine:
            app = make_app(engine, CollectorRegistry())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                return (await client.get("/kv_pool")).status_code

    assert asyncio.run(asyncio.wait_for(asked(), timeout=60)) == 404
