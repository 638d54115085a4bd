"""The documented example is what it says: a scheduler in about sixty lines whose suite of thirty passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


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
    assert "5 passed" in ran.stdout


def test_the_example_is_as_short_as_promised() -> None:
    def code_lines(name: str) -> int:
        return sum(
            1 for line in (EXAMPLES / name).read_text().splitlines() if line and not line.startswith(("from", "import"))
        )

    assert code_lines("tiny_scheduler.py") <= 60
    assert code_lines("test_tiny_scheduler.py") <= 30
