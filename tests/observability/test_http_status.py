"""The status answers are what gateways poll and people read; a client's mistake gets 400 and one clear sentence."""

from __future__ import annotations

import pytest
from kit.status_engine import NOW, StatusEngine, ask, make_load
from prometheus_client import CollectorRegistry

from observability import PrometheusSink
from scheduler_components import ParallelState
from scheduler_components.values import (
    DisaggregationLoad,
    LoadSnapshot,
    LoraLoad,
    MemoryLoad,
    QueueLoad,
    SchedulerStats,
    SpeculativeLoad,
)


def whole_load() -> LoadSnapshot:
    return make_load(
        0,
        queues=QueueLoad(grammar=1),
        disaggregation=DisaggregationLoad(mode="decode"),
        lora=LoraLoad(1, 2, 0.5),
        speculative=SpeculativeLoad(2.0, 0.5),
        memory=MemoryLoad(1.0, 2.0, 3.0, 4),
    )


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/ready",
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/get_model_info",
        "/v1/models",
        "/v1/models/tiny",
        "/v1/loads",
        "/metrics",
    ],
)
def test_every_path_answers_get_and_head_and_nothing_else(path: str) -> None:
    answer = ask(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(
        {"/": "text/html", "/metrics": "text/plain"}.get(path, "application/json")
    )
    head = ask(path, method="HEAD")
    assert (head.status_code, head.content) == (200, b"")
    assert ask(path, method="POST").status_code == 405


def test_health_follows_the_engine() -> None:
    engine = StatusEngine()
    assert ask("/health", engine).status_code == 200
    engine.problem = "rank 3 has said nothing for 12 s"
    answer = ask("/health", engine)
    assert answer.status_code == 503
    assert answer.json() == {"status": "unhealthy", "problem": "rank 3 has said nothing for 12 s"}


def test_info_is_the_engines_own() -> None:
    assert ask("/server_info").json() == ask("/get_server_info").json() == {"version": "1", "kv_events": None}
    assert ask("/model_info").json()["model_path"] == "simulated"
    [model] = ask("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["root"], model["created"]) == ("tiny", "model", "simulated", int(NOW))


def test_loads_have_the_core_of_each_rank_in_order_and_their_sum() -> None:
    first = make_load(
        0, num_running_reqs=2, num_waiting_reqs=1, num_total_tokens=300, token_usage=0.5, gen_throughput=10.0
    )
    second = make_load(1, num_running_reqs=4, num_total_tokens=100, token_usage=0.25, gen_throughput=30.0)
    answer = ask("/v1/loads", StatusEngine(second, first)).json()
    assert answer["dp_rank_count"] == 2
    assert answer["timestamp"] == "2023-11-14T22:13:20+00:00"
    assert [load["dp_rank"] for load in answer["loads"]] == [0, 1]
    assert answer["loads"][0] == {
        "dp_rank": 0,
        "sequence": 5,
        "timestamp": NOW - 1.5,
        "age_s": 1.5,
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "num_pending_tokens": 0,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": 0,
        "num_total_tokens": 300,
        "max_total_num_tokens": 0,
        "max_running_requests": 0,
        "token_usage": 0.5,
        "gen_throughput": 10.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
    }
    assert answer["aggregate"] == {
        "total_running_reqs": 6,
        "total_waiting_reqs": 1,
        "total_reqs": 7,
        "total_used_tokens": 0,
        "total_tokens": 400,
        "avg_token_usage": 0.375,
        "avg_throughput": 20.0,
        "avg_utilization": 0.0,
    }


SECTIONS = {"queues", "disaggregation", "lora", "speculative", "memory"}


@pytest.mark.parametrize(
    ("query", "sections"),
    [
        ("", SECTIONS),
        ("?include=all", SECTIONS),
        ("?include=core", set()),
        ("?include=core,disagg,queues,memory", {"disaggregation", "queues", "memory"}),
        ("?include=spec&include=lora", {"speculative", "lora"}),
        ("?include=%20spec%20,", {"speculative"}),
        ("?include=", SECTIONS),
    ],
)
def test_include_chooses_sections(query: str, sections: set[str]) -> None:
    [load] = ask(f"/v1/loads{query}", StatusEngine(whole_load())).json()["loads"]
    assert SECTIONS & load.keys() == sections


def test_sections_that_an_engine_has_not_are_left_out() -> None:
    [load] = ask("/v1/loads?include=all", StatusEngine(make_load(0))).json()["loads"]
    assert SECTIONS & load.keys() == set()


def test_one_rank_can_be_asked_for() -> None:
    engine = StatusEngine(make_load(0), make_load(1))
    assert [load["dp_rank"] for load in ask("/v1/loads?dp_rank=1", engine).json()["loads"]] == [1]


def test_no_report_yet_is_an_empty_answer() -> None:
    answer = ask("/v1/loads").json()
    assert (answer["loads"], answer["dp_rank_count"], answer["aggregate"]["avg_token_usage"]) == ([], 0, 0.0)


@pytest.mark.parametrize(
    ("query", "param", "said"),
    [
        ("include=cores", "include", "choose from core, memory, spec, lora, disagg, queues, all"),
        ("include=core,,Spec", "include", "'Spec'"),
        ("dp_rank=x", "dp_rank", "not a rank"),
        ("dp_rank=-1", "dp_rank", "not a rank"),
        ("dp_rank=%C2%B2", "dp_rank", "not a rank"),
        ("dp_rank=7", "dp_rank", "ranks that have: 0"),
        ("format=prometheus", "format", "/metrics"),
    ],
)
def test_a_bad_query_gets_400_and_what_is_valid(query: str, param: str, said: str) -> None:
    answer = ask(f"/v1/loads?{query}", StatusEngine(make_load(0)))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, 400, "invalid_request_error")
    assert said in error["message"]


def test_metrics_are_those_of_the_injected_registry() -> None:
    registry = CollectorRegistry()
    stats = SchedulerStats(labels=ParallelState().metric_labels, load=LoadSnapshot(num_running_reqs=3))
    PrometheusSink(registry).record(stats)
    answer = ask("/metrics", registry=registry)
    assert 'sglang:num_running_reqs{dp_rank="0",pp_rank="0",tp_rank="0"} 3.0' in answer.text
    assert "python_info" not in answer.text
    accepted = ask("/metrics", registry=registry, accept="application/openmetrics-text; version=1.0.0")
    assert accepted.headers["content-type"].startswith("application/openmetrics-text")
    assert accepted.headers["vary"] == "accept"  # a cache must not give one reader's form to another
    assert '\nsglang:num_running_reqs{dp_rank="0",pp_rank="0",tp_rank="0"} 3.0\n' in accepted.text
    assert accepted.text.endswith("# EOF\n")


@pytest.mark.parametrize("path", ["/", "/health", "/server_info", "/v1/models", "/v1/loads"])
def test_an_engine_that_raises_shows_no_traceback(path: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(StatusEngine):
        def health_problem(self) -> str | None:
            raise RuntimeError("secret detail")

        server_info = model_info = load_snapshots = health_problem  # type: ignore[assignment]

    answer = ask(path, Broken())
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret detail" in caplog.text


def test_readiness_is_another_question_than_liveness() -> None:
    engine, reasons = StatusEngine(), ["the engine is asleep"]

    def readiness() -> str | None:
        return reasons[0] if reasons else None

    asleep = ask("/ready", engine, readiness=readiness)
    assert (asleep.status_code, asleep.json()) == (503, {"status": "not ready", "problem": "the engine is asleep"})
    assert ask("/health", engine, readiness=readiness).status_code == 200
    reasons.clear()
    assert ask("/ready", engine, readiness=readiness).json() == {"status": "ready"}


def test_without_a_readiness_of_its_own_an_engine_that_is_alive_is_ready() -> None:
    engine = StatusEngine()
    assert ask("/ready", engine).status_code == 200
    engine.problem = "rank 1 is silent"
    assert ask("/ready", engine).json()["problem"] == "rank 1 is silent"


def test_one_model_is_described_by_its_name_and_others_are_unknown() -> None:
    listed = ask("/v1/models").json()["data"]
    assert ask("/v1/models/tiny").json() == listed[0]
    unknown = ask("/v1/models/other/model")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["param"] == "model" and "'tiny' is" in unknown.json()["error"]["message"]
