"""The package runs as a module, ends as shells expect, and reports a broken installation with a remedy."""

from __future__ import annotations

import os
import signal
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
        [*COMMAND, "--help"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{KIT}:{path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert str(stranger) in ran.stderr
    assert "python -m: add -P" in ran.stderr


VERSION = """
import sys
from scheduler_engine.cli.main import main
sys.argv = ["scheduler-components", "--version"]
try:
    main()
finally:
    print(*sys.modules)
"""
HEAVY = {"zmq", "pydantic", "msgspec", "attrs", "attr", "asyncio", "rich", "cyclopts", "httpx", "prometheus_client"}


def test_the_version_is_shown_without_importing_a_library() -> None:
    """Imports take a second on a busy machine. The modules are counted, because a time would measure the machine."""
    ran = subprocess.run([sys.executable, "-c", VERSION], capture_output=True, text=True, check=True)
    version, modules = ran.stdout.splitlines()
    assert version == __version__
    assert HEAVY.isdisjoint(modules.split())


INTERRUPTED_IMPORT = """
import os, signal, sys
class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupter())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
from scheduler_engine.cli.main import main
main()
"""


@pytest.mark.parametrize("module", ["attrs", "cyclopts", "uvicorn"])
def test_ctrl_c_during_the_imports_ends_the_command_silently(module: str) -> None:
    """Killed by the signal itself, which a shell shows as 130."""
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_works_as_before_after_the_imports(command_line: Callable) -> None:
    before = signal.getsignal(signal.SIGINT)
    command_line("--help")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("arguments", [["--version"], ["hicache-sim", "--seeds", "1", "--steps", "100"]])
def test_a_reader_that_is_gone_ends_the_command_silently(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = subprocess.run([*COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGPIPE, "")
