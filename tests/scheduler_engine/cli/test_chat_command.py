"""The command ``chat`` with a tiny model: two questions, of which the second reuses the cache of the first."""

from __future__ import annotations

import re
import sys
from io import StringIO
from pathlib import Path

import pytest

from scheduler_engine.cli.commands import run_command

pytestmark = [pytest.mark.model, pytest.mark.processes]


@pytest.mark.soak_only
def test_a_conversation_with_a_tiny_model(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "Of what is a page made, and who reads it while it is under way?"
    monkeypatch.setattr(sys, "stdin", StringIO(f"{said}\n{said}\n"))
    assert run_command(["chat", "--model", str(model_folder), "--dp-size", "1", "--max-tokens", "12"]) == (0, "")
    shown = capsys.readouterr().out
    assert shown.startswith(f"inspecting {model_folder.name} ...\n")
    assert [line for line in shown.splitlines() if line.startswith("> ")] == [f"> {said}"] * 2
    costs = [[int(each) for each in re.findall(r"\d+", line)] for line in re.findall(r"prompt of .* computed", shown)]
    (prompt, *tiers, computed), (next_prompt, *next_tiers, next_computed) = costs
    assert (tiers, computed) == ([0, 0, 0], prompt)
    assert next_tiers[0] >= prompt // 16 * 16 and next_tiers[1:] == [0, 0]
    assert next_computed == next_prompt - next_tiers[0]


def test_an_invalid_model_is_one_sentence_and_starts_no_engine(tmp_path: Path) -> None:
    code, complaint = run_command(["chat", "--model", str(tmp_path / "nowhere")])
    assert code == 2
    assert "is not there" in complaint and "\n" not in complaint
