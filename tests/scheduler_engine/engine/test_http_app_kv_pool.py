"""``/kv_pool`` of the reference engine: its streams match its pools on every tier while it serves."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

import attrs
import pytest
from prometheus_client import CollectorRegistry

from observability import check_conformance, fetch_kv_pool
from observability.conformance import ConformanceReport
from scheduler_components.testing.zmq_stream_probe import ProbeOptions
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import EngineConfig, HiCacheConfig, SchedulerConfig
from scheduler_engine.engine.engine import Engine, open_engine
from scheduler_engine.engine.free_ports import default_kv_events
from scheduler_engine.engine.http_app import make_app
from scheduler_engine.engine.messages import pack_tokens
from scheduler_engine.frontend.frontend import GenerateReqInput
from scheduler_engine.frontend.http_server import bind_http, open_http_server

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

CONFIG = EngineConfig(
    dp_size=2, attn_cp_size=1, attn_tp_size=1, scheduler=SchedulerConfig(page_size=4, kv_tokens=512), speed=20.0
)
OPTIONS = ProbeOptions(listen_s=20.0, enough_batches=80, answer_s=5.0)


async def examined(config: EngineConfig) -> tuple[ConformanceReport, set[str]]:
    """The report on an engine that serves all the while, and the media that its pools were on."""
    config = attrs.evolve(config, kv_events=default_kv_events(config))
    async with open_engine(config, show=lambda _: None) as engine:
        with bind_http("127.0.0.1", 0) as listener:
            async with open_http_server(make_app(engine, CollectorRegistry(), kv_pool=True), listener) as server:
                clients = asyncio.gather(*(serve(engine, first) for first in range(4)))
                report = await asyncio.to_thread(check_conformance, server.url, OPTIONS, oracle=server.url)
                clients.cancel()
                reading = await asyncio.to_thread(fetch_kv_pool, server.url, 1)
                await asyncio.gather(clients, return_exceptions=True)
                return report, {medium for medium, _ in reading.blocks}


async def serve(engine: Engine, number: int) -> None:
    """One request after the other: half of its tokens are those of the request before."""
    while True:
        tokens = range(number * 100, number * 100 + 96)
        request = GenerateReqInput(input_ids=pack_tokens(tokens), limits=SamplingLimits(max_new_tokens=9))
        async with engine.frontend.open_request(request) as stream:
            async for _ in stream:
                pass
        number = number * 7 % 1001 + 1


@pytest.mark.parametrize("has_host_tier", [pytest.param(False, marks=pytest.mark.soak_only), True])
def test_the_streams_of_a_serving_engine_match_its_pools(has_host_tier: bool) -> None:
    if has_host_tier and find_spec("numpy") is None:
        pytest.skip("needs numpy: pip install scheduler-components[hicache]")
    config = attrs.evolve(CONFIG, hicache=HiCacheConfig(host_tokens=1024) if has_host_tier else None)
    report, media = asyncio.run(asyncio.wait_for(examined(config), timeout=120))
    assert report.exit_code == 0, "\n".join(report.lines())
    for stream in report.streams:
        assert stream.facts.pool_readings > 1
        assert stream.facts.pool_blocks > 0
    assert media == ({"GPU", "CPU", "STORAGE"} if has_host_tier else {"GPU"})
