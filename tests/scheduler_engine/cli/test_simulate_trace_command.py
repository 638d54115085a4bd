"""`simulate trace`: reports on standard output and as a page, and mistakes in one sentence before anything starts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import get_args

import pytest

from observability.routing import PickerName
from scheduler_engine.cli.commands import run_command
from scheduler_engine.cli.simulate_trace_command import parse_outage, parse_scaling, parse_seconds
from scheduler_engine.simulation import Outage, Scaling


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


def test_sizes_of_the_host_tier_are_compared(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--kv-tokens", 800, "--replicas", 1, "--host-tokens", 0, "--host-tokens", 8000, "--storage-latency", "2ms")
    assert simulate(trace, *sizes, "--json") == (0, "")
    without, with_host = (json.loads(each) for each in capsys.readouterr().out.splitlines())
    assert (without["title"], with_host["title"]) == ("fcfs, round-robin, no host", "fcfs, round-robin, host 8,000")
    assert set(without["hit_rate"]) == {"device"}
    assert set(with_host["hit_rate"]) == {"device", "host"}
    assert with_host["settings"]["host_tokens"] == 8000


def test_storage_and_policies_of_the_tiers_are_settings(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = ("--host-tokens", 4096, "--host-gb-per-s", 50, "--storage-tokens", 99_000, "--storage-gb-per-s", 3)
    assert simulate(trace, *tiers, "--hicache-prefetch", "wait_complete", "--json") == (0, "")
    report = json.loads(capsys.readouterr().out)
    found = report["settings"]
    assert (found["load_gb_per_s"], found["write_gb_per_s"], found["storage_read_gb_per_s"]) == (50, 50, 3)
    assert (found["storage_tokens"], found["hicache_prefetch"]) == (99_000, "wait_complete")
    assert set(report["hit_rate"]) == {"device", "host", "storage"}


def test_replicas_are_scaled(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace, "--replicas", 1, "--scale", "3@1s", "--scale", "2@2s", "--json") == (0, "")
    report = json.loads(capsys.readouterr().out)
    assert len(report["replicas"]) == 3
    assert all(each["num_requests"] for each in report["replicas"])


def test_conversations_are_generated(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--requests", 20, "--output-tokens", 5, "--message-tokens", 50, "--system-prompt-tokens", 100)
    outputs = []
    for seed in (1, 1, 2):
        command = ["simulate", "conversations", *sizes, "--tenants", 2, "--rate", 5, "--json", "--seed", seed]
        assert run_command(list(map(str, command))) == (0, "")
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    report = json.loads(outputs[0])
    assert report["num_finished"] == 20
    assert [each["name"] for each in report["tenants"]] == ["tenant-1", "tenant-2"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--turns", 0.5), "mean_turns=0.5: is less than one turn"),
        (("--rate", 0), "conversations_per_s=0.0: is not a rate"),
        (("--think", "soon"), "'soon' is no time span"),
    ],
)
def test_a_mistake_in_conversations_is_one_sentence(arguments: tuple[object, ...], problem: str) -> None:
    status, sentence = run_command(["simulate", "conversations", *map(str, arguments)])
    assert status == 2
    assert problem in sentence
    assert "\n" not in sentence.strip()


def test_pickers_are_compared_and_repeat_their_choices(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pickers = [part for name in get_args(PickerName) for part in ("--picker", name)]
    routers = ("--router", "round-robin", "--router", "kv")
    outputs = []
    for _ in range(2):
        assert simulate(trace, *routers, *pickers, "--json") == (0, "")
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    reports = [json.loads(line) for line in outputs[0].splitlines()]
    assert len({str(report["replicas"]) for report in reports[1:]}) > 2, "they choose different replicas"
    titles = [report["title"] for report in reports]
    assert titles == ["fcfs, round-robin", *(f"fcfs, kv {name}" for name in get_args(PickerName))]


def test_unfinished_requests_are_an_exit_code(trace: Path) -> None:
    assert simulate(trace, "--replicas", 1, "--outage", "0@1s")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--event-lag", "5x"), "'5x' is no time span"),
        (("--policy", "nope"), "'nope': is not a scheduling policy"),
        (("--outage", "7@1s"), "outage=7: is not one of 4 replicas"),
        (("--outage", "first"), "outage='first': is no outage"),
        (("--outage", "0@-1s"), "at_s=-1.0: is not a time span"),
        (("--outage", "0@1s+5s", "--outage", "0@2s+5s"), "outage=0: fails at 2 s, and is away then"),
        (("--speed", "1e-300"), "speed=1e-300: is not a speed"),
        (("--kv-tokens", 3), "kv_tokens=3: does not hold one page"),
        (("--speed", 0), "speed=0.0: is not a speed"),
        (("--preemption", "none"), "preemption_policy='none'"),
        (("--scale", "8"), "scale='8': is no number of replicas and time"),
        (("--scale", "0@5s"), "num_replicas=0"),
        (("--host-tokens", 3), "host_tokens=3: does not hold one page"),
        (("--host-tokens", -3), "host_tokens=-3: is not a size"),
        (("--host-tokens", 64, "--host-gb-per-s", 0), "write_gb_per_s=0.0: is not a bandwidth"),
        (("--storage-tokens", 640), "storage_tokens=640: needs a host tier"),
        (("--host-tokens", 64, "--storage-tokens", 3), "storage_tokens=3: does not hold one page"),
        (("--router", "magic"), "magic"),
        (("--picker", "sticky"), "picker='sticky': needs the router that has pickers"),
        (("--router", "kv", "--picker", "best"), "best"),
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
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    for path in (tmp_path / "missing" / "out.html", tmp_path, tmp_path / ("a" * 300), closed / "in" / "out.html"):
        status, sentence = simulate(trace, "--report", path)
        assert (status, capsys.readouterr().out) == (2, "")
        assert "cannot be written" in sentence


@pytest.mark.parametrize(("text", "seconds"), [("50ms", 0.05), ("1.5s", 1.5), ("2min", 120), ("3", 3), ("20us", 2e-5)])
def test_time_spans(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


def test_outages() -> None:
    assert parse_outage("2@60s+30s") == Outage(replica=2, at_s=60, down_s=30)
    assert parse_outage("0@1") == Outage(replica=0, at_s=1)


def test_scalings() -> None:
    assert parse_scaling("8@2min") == Scaling(num_replicas=8, at_s=120)


def test_progress_is_a_line_of_a_terminal(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setattr("scheduler_engine.cli.progress_line._TERMINAL_S", 0.0)
    assert simulate(trace)[0] == 0
    assert "fcfs, round-robin: 6 of 6 requests, at " in out.getvalue()
