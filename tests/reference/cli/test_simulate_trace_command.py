"""`simulate trace`: reports on standard output and as a page, and mistakes in one sentence before anything starts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from scheduler_components.reference.cli.commands import run_command
from scheduler_components.reference.cli.simulate_trace_command import SimulationProgress, parse_outage, parse_seconds
from scheduler_components.simulation import Outage, Progress


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500 * index, "input_length": 600, "output_length": 5, "hash_ids": [0, index]}
        for index in range(6)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def simulate(*arguments: object) -> tuple[int, str]:
    return run_command(["simulate", "trace", *map(str, arguments)])


def test_the_json_of_equal_commands_is_equal(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        assert simulate(trace, "--replicas", 2, "--json", "--requests", 5, "--event-lag", "50ms") == (0, "")
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    report = json.loads(outputs[0])
    assert (report["num_requests"], report["num_finished"]) == (5, 5)
    assert report["settings"]["event_lag_s"] == 0.05


def test_runs_are_compared_on_one_page(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "out.html"
    names = ("--policy", "fcfs", "--policy", "lpm", "--router", "round-robin", "--router", "least-loaded")
    assert simulate(trace, *names, "--report", page) == (0, "")
    text, out = page.read_text(), capsys.readouterr().out
    for title in ("fcfs, round-robin", "fcfs, least-loaded", "lpm, round-robin", "lpm, least-loaded"):
        assert title in text
        assert f"{title}: 6 of 6 requests" in out


def test_unfinished_requests_are_an_exit_code(trace: Path) -> None:
    assert simulate(trace, "--replicas", 1, "--outage", "0@1s")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--event-lag", "5x"), "'5x' is no time span"),
        (("--policy", "nope"), "'nope': is not a scheduling policy"),
        (("--outage", "7@1s"), "outage=7: is not one of 4 replicas"),
        (("--outage", "first"), "outage='first': is no outage"),
        (("--kv-tokens", 3), "kv_tokens=3: does not hold one page"),
        (("--speed", 0), "speed=0.0: is not a speed"),
        (("--preemption", "none"), "preemption_policy='none'"),
    ],
)
def test_a_mistake_is_one_sentence(trace: Path, arguments: tuple[object, ...], problem: str) -> None:
    status, sentence = simulate(trace, *arguments)
    assert status == 2
    assert problem in sentence
    assert "\n" not in sentence.strip()


def test_a_broken_line_is_named_before_anything_starts(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trace.open("a") as file:
        file.write("{}\n")
    status, sentence = simulate(trace)
    assert (status, capsys.readouterr().out) == (2, "")
    assert "trace.jsonl:7" in sentence


def test_a_page_that_cannot_be_written_is_refused(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    for path in (tmp_path / "missing" / "out.html", tmp_path):
        status, sentence = simulate(trace, "--report", path)
        assert (status, capsys.readouterr().out) == (2, "")
        assert "cannot be written" in sentence


@pytest.mark.parametrize(("text", "seconds"), [("50ms", 0.05), ("1.5s", 1.5), ("2min", 120), ("3", 3), ("20us", 2e-5)])
def test_time_spans(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


def test_outages() -> None:
    assert parse_outage("2@60s+30s") == Outage(replica=2, at_s=60, down_s=30)
    assert parse_outage("0@1") == Outage(replica=0, at_s=1)


def test_progress_is_shown_every_ten_seconds_without_a_terminal() -> None:
    times = iter([0.0, 1.0, 10.0, 11.0])
    out = io.StringIO()
    progress = SimulationProgress(out=out, title="run", num_requests=9, clock=lambda: next(times))
    for number in range(3):
        progress.show(Progress(now_s=number, num_arrived=number, num_finished=number))
    progress.clear()
    assert out.getvalue() == "run: 1 of 9 requests, at 1 s\n"
