"""The package runs as a module, and a broken installation is reported with a remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import scheduler_components
from scheduler_components import __version__

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

KIT = Path(scheduler_components.__file__).parent.parent


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("serve", ["--port", "0", "--duration", "0"]), ("demo", ["--requests", "1"])],
    ids=["serve", "demo"],
)
def test_without_numpy_the_hierarchical_cache_names_its_extra_before_the_start(
    command_line: Callable, monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    ran = command_line(command, *arguments, "--hicache")
    assert (ran.code, ran.out) == (1, "")
    assert "scheduler-components[hicache]" in ran.complaint


COMMAND = [sys.executable, "-m", "scheduler_components"]


def test_the_package_runs_as_a_module() -> None:
    ran = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("text", ["", "from gone import nothing\n"])
@pytest.mark.parametrize("name", ["observability.py", "observability/__init__.py"])
def test_another_package_with_the_same_name_is_reported_with_a_remedy(tmp_path: Path, name: str, text: str) -> None:
    stranger = tmp_path / name
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text(text)
    path = os.pathsep.join(sys.path[1:])
    ran = subprocess.run(
        [*COMMAND, "--version"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{KIT}:{path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert str(stranger) in ran.stderr
    assert "python -m: add -P" in ran.stderr
