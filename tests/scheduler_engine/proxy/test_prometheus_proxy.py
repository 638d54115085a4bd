"""Every metric of a proxy is exported, with the values of its counters."""

from __future__ import annotations

import asyncio

import pytest
from kit.fake_engine import FakeEngine
from kit.proxied import proxied
from prometheus_client import CollectorRegistry

from observability.catalog import PROXY_METRICS, REPLICA_METRICS
from scheduler_components import ConfigError
from scheduler_engine.proxy.prometheus_proxy import ProxyCollector

pytestmark = pytest.mark.sockets


def test_requests_and_replicas_are_counted() -> None:
    async def scenario() -> None:
        async with proxied(FakeEngine()) as running:
            for _ in range(2):
                await running.client.post("/generate", json={"prompt": list(range(9))})
            page = (await running.client.get("/metrics")).text
            registry = CollectorRegistry()
            ProxyCollector(registry, running.endpoint)
            with pytest.raises(ConfigError):
                ProxyCollector(registry, running.endpoint)
        assert all(metric.name in page for metric in (*PROXY_METRICS, *REPLICA_METRICS))
        labels = '{engine="0",rank="0"}'
        values = {"is_up": 1, "picks_total": 2, "prompt_blocks_total": 4, "cached_blocks_total": 2}
        for name, value in values.items():
            assert f"kv_proxy_replica_{name}{labels} {value}.0" in page
        assert "kv_proxy_requests_total 2.0" in page
        assert "kv_proxy_requests_open 0.0" in page

    asyncio.run(asyncio.wait_for(scenario(), 60))
