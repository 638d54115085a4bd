"""The documented examples: a scheduler in eighty lines that passes a suite of thirty tests, and an engine with the kit
inside in a hundred lines (`tests/engines` runs it)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.mark.soak_only
def test_the_suite_of_the_example_passes(tmp_path: Path) -> None:
    environment = os.environ | {"HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "test_tiny_scheduler.py",
    ]
    ran = subprocess.run(
        command, cwd=EXAMPLES, check=False, capture_output=True, text=True, timeout=100, env=environment
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "8 passed" in ran.stdout


def test_the_examples_are_as_short_as_promised() -> None:
    assert code_lines("tiny_scheduler.py") <= 80
    assert code_lines("transformers_engine.py") <= 100
    assert code_lines("test_tiny_scheduler.py") <= 30


def code_lines(name: str) -> int:
    text = (EXAMPLES / name).read_text()
    lines = text.splitlines()
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            lines[statement.lineno - 1 : statement.end_lineno] = [""] * (statement.end_lineno - statement.lineno + 1)
    return sum(line != "" for line in lines)
