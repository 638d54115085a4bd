"""Planners and collectors receive what the ranks of an engine did: each pass and each request once."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import attrs
import httpx
import pytest
from kit.waiting import DEADLINE_S
from prometheus_client import CollectorRegistry

from observability import MetricsBoardCollector
from scheduler_components.metrics import open_zmq_forward_pass_reader
from scheduler_components.values import ForwardPassMetrics
from scheduler_engine.engine.config import EngineConfig, SchedulerConfig, TelemetryConfig
from scheduler_engine.engine.engine import Engine, open_engine
from scheduler_engine.engine.http_app import make_app

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` installs it")

from kit.otlp_collector import open_collector

pytestmark = [pytest.mark.processes, pytest.mark.sockets]

CONFIG = EngineConfig(
    dp_size=2, attn_cp_size=1, attn_tp_size=1, scheduler=SchedulerConfig(page_size=4, kv_tokens=1024), speed=20.0
)
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
NUM_REQUESTS = 6


def test_planners_and_collectors_receive_each_pass_and_each_request_once(stack: ExitStack) -> None:
    url, found = stack.enter_context(open_collector())
    telemetry = TelemetryConfig(
        forward_pass_endpoint="tcp://127.0.0.1:0", forward_pass_worker_id="w7", otlp_traces_endpoint=url
    )

    async def scenario(engine: Engine) -> tuple[list[ForwardPassMetrics], str]:
        registry = CollectorRegistry()
        MetricsBoardCollector(registry, board=engine.stats, model_name="m")
        transport = httpx.ASGITransport(make_app(engine, registry))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            info = (await client.get("/server_info")).json()["forward_pass_metrics"]
            assert (info["version"], info["worker_id"]) == (1, "w7")
            assert [each["dp_rank"] for each in info["publishers"]] == [0, 1]
            reader = open_zmq_forward_pass_reader([each["endpoint"] for each in info["publishers"]])
            stack.callback(reader.close)
            metrics: list[ForwardPassMetrics] = []
            async with asyncio.timeout(DEADLINE_S):
                while {each.dp_rank for each in metrics} != {0, 1}:  # heartbeats of the idle engine
                    metrics += await asyncio.to_thread(reader.receive, 0.05)
                assert all(each == ForwardPassMetrics(1, "w7", each.dp_rank, each.counter_id) for each in metrics)
                for number in range(NUM_REQUESTS):
                    body = {"prompt": [number] * 40, "max_tokens": 4, "data_parallel_rank": number % 2}
                    assert (await client.post("/v1/completions", json=body, headers=HEADERS)).status_code == 200
                while sum(each.scheduled_requests.num_decode_requests for each in metrics) < 3 * NUM_REQUESTS:
                    metrics += await asyncio.to_thread(reader.receive, 0.05)
                assert (reader.missed, reader.bad) == (0, 0)
                while "request_spans_exported_total" not in (text := (await client.get("/metrics")).text):
                    await asyncio.sleep(0.01)
            return metrics, text

    async def whole() -> tuple[list[ForwardPassMetrics], str]:
        async with open_engine(attrs.evolve(CONFIG, telemetry=telemetry), show=lambda _: None) as engine:
            return await scenario(engine)

    metrics, text = asyncio.run(asyncio.wait_for(whole(), timeout=60))
    for dp_rank in (0, 1):
        passes = [each for each in metrics if each.dp_rank == dp_rank and each.wall_time]
        scheduled = [each.scheduled_requests for each in passes]
        assert sum(each.sum_prefill_tokens for each in scheduled) == 40 * NUM_REQUESTS / 2
        assert sum(each.num_decode_requests for each in scheduled) == 3 * NUM_REQUESTS / 2
        assert all(0 < each.wall_time < DEADLINE_S for each in passes)
    assert "forward_passes_sent_total" in text
    # The ranks have closed their sinks, so every span has arrived.
    spans = [span for resource in found for scope in resource.scope_spans for span in scope.spans]
    assert [span.trace_id.hex() for span in spans] == [TRACE_ID] * NUM_REQUESTS
    assert len({span.span_id for span in spans}) == NUM_REQUESTS
    values = {each.key: each.value for each in spans[0].attributes}
    assert values["gen_ai.response.model"].string_value == CONFIG.model_name
    assert values["gen_ai.usage.completion_tokens"].int_value == 4
