"""Mistakes in the arguments of benchmarks that simulate a trace are one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.studies import dynamo_replay, simulation_cost

MAINS = [dynamo_replay.main, simulation_cost.main]


@pytest.mark.parametrize("main", MAINS)
@pytest.mark.parametrize(
    ("trace", "options", "problem"),
    [
        ("missing.jsonl", [], "No such file"),
        ("broken.jsonl", [], "broken.jsonl:1"),
        ("broken.jsonl", ["--replicas", "99999"], "broken.jsonl:1|num_replicas=99999"),
    ],
)
def test_bad_input_is_one_sentence(
    main: Callable[[], int],
    trace: str,
    options: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken.jsonl").write_text("{}\n")
    monkeypatch.setattr(sys, "argv", ["benchmark", str(tmp_path / trace), *options])
    assert main() == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert any(each in error for each in problem.split("|"))
    assert error.count("\n") == 1


@pytest.mark.parametrize("main", MAINS)
@pytest.mark.parametrize("name", ["--requests", "--replicas"])
@pytest.mark.parametrize("value", ["0", "-1", "some"])
def test_a_count_is_checked_by_the_parser(
    main: Callable[[], int], name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "trace.jsonl", name, value])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"argument {name}: invalid" in capsys.readouterr().err


def test_the_cost_of_a_run_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [0]}\n')
    for router in ("round-robin", "least-loaded", "kv"):
        monkeypatch.setattr(sys, "argv", ["benchmark", str(path), "--replicas", "2", "--router", router])
        assert simulation_cost.main() == 0
        assert '"num_finished":1' in capsys.readouterr().out


def test_the_peak_of_the_memory_is_that_of_the_run_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [0]}\n')
    larger = bytearray(b"x") * (1 << 28)  # as the process of all benchmarks
    cost = simulation_cost.measure_simulation(path, num_replicas=2, router="kv")
    assert 0 < cost.peak_bytes < len(larger)
