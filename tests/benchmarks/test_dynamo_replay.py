"""The statements of docs/explanation/next-to-dynamo.md, where Dynamo's replay is installed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.dynamo_replay import (
    KIT_ROUTERS,
    RULES,
    Row,
    Setup,
    as_table,
    engine_args,
    figures_of,
    figures_of_dynamo,
    follow_dynamo,
    replay_in_dynamo,
    replica_config,
    serve_in_kit,
    write_arrivals,
)
from scheduler_engine.simulation import ConversationWorkload, TraceRequest, generate_conversations

core: Any = pytest.importorskip("dynamo._core", reason="needs ai-dynamo-runtime: pip install ai-dynamo-runtime==1.6.1")

CONFIG = replica_config(page_size=64, kv_tokens=1 << 17)
WORKLOAD = ConversationWorkload(
    num_requests=80,
    seed=5,
    conversations_per_s=6.0,
    mean_think_s=1.5,
    mean_message_tokens=2_000.0,
    mean_output_tokens=60.0,
    num_system_prompts=3,
)


@pytest.fixture(scope="module")
def arrivals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[TraceRequest]]:
    path = tmp_path_factory.mktemp("trace") / "arrivals.jsonl"
    return path, write_arrivals(list(generate_conversations(WORKLOAD)), path)


def assert_equal_figures(ours: dict[str, float], theirs: dict[str, float], *, rel: float) -> None:
    """Compare all figures but percentiles, between whose ranks the two round differently."""
    names = [name for name in ours if "p50" not in name and "p99" not in name]
    assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=rel)
    assert ours["finished"] == theirs["finished"]


def test_both_serve_in_turns_alike(arrivals: tuple[Path, list[TraceRequest]]) -> None:
    path, requests = arrivals
    ours = figures_of(serve_in_kit(requests, CONFIG, 3))
    theirs = figures_of_dynamo(replay_in_dynamo(path, engine_args(CONFIG), 3))
    assert ours["hit_rate"] > 0.05
    assert_equal_figures(ours, theirs, rel=1e-6)


@pytest.mark.parametrize("event_lag_ms", [0.0, 300.0])
@pytest.mark.parametrize("rules", RULES)
def test_every_choice_of_its_router_follows_from_the_rules(
    arrivals: tuple[Path, list[TraceRequest]], rules: str, event_lag_ms: float
) -> None:
    """Each choice costs least by the rules, and then the figures differ by three per mille at most."""
    path, requests = arrivals
    setup = Setup(requests=requests, trace=path, config=CONFIG, num_replicas=3)
    row = follow_dynamo(setup, rules, event_lag_ms)
    assert row.num_foreign_choices == 0
    assert_equal_figures(row.ours, row.theirs, rel=3e-3)
    assert row.num_decisions == len(requests)
    if rules == "all rules":
        assert row.num_ties < len(requests) / 2


@pytest.mark.parametrize("rules", ["no overlap", "no queued tokens", "no decode blocks"])
def test_a_rule_that_is_missing_is_noticed(
    arrivals: tuple[Path, list[TraceRequest]], rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, requests = arrivals
    monkeypatch.setitem(RULES, "broken", ({}, RULES[rules][1]))
    setup = Setup(requests=requests, trace=path, config=CONFIG, num_replicas=3)
    assert follow_dynamo(setup, "broken", 0.0).num_foreign_choices > 5


def test_it_decides_equal_costs_by_chance(tmp_path: Path) -> None:
    """Two prompts without a common block, the second one when all workers are idle again: it goes anywhere."""
    path = tmp_path / "two.jsonl"
    lines = [
        {"timestamp": at_ms, "input_length": 512, "output_length": 1, "hash_ids": [each]}
        for each, at_ms in enumerate([0, 10_000])
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    together = set()
    for _ in range(100):
        found = core.run_mocker_trace_replay(
            [str(path)],
            extra_engine_args=engine_args(CONFIG),
            num_workers=2,
            router_mode="kv_router",
            trace_block_size=512,
            capture_per_request=True,
        )
        first, second = (each["decode_worker_idx"] for each in found.per_request)
        together.add(first == second)
    assert together == {True, False}, "by chance in one of 2**99 runs of this test"


def rows_of(names: Sequence[str]) -> list[Row]:
    return [Row(name, 0.0, 1 << 20, {"hit_rate": [0.1, 0.2]}, [1.5]) for name in names]


def test_a_cell_shows_the_range_of_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.studies.dynamo_replay.COLUMNS", {"hit_rate": ("hit rate", 100.0, "%")})
    lines = as_table(rows_of(KIT_ROUTERS)).splitlines()
    assert lines[0] == "| router | lag | pool | hit rate (%) | run (s) |"
    assert lines[2] == "| Dynamo's rules | 0 ms | 1,048,576 | 10.000 to 20.000 | 1.500 |"
