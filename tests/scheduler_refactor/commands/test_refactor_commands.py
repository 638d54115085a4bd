"""``refactor measure`` prints a measurement as text, JSON, a graph and a picture."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_refactor.commands.refactor_commands import REFACTOR_COMMANDS

SHARED = {"attribute", "commit", "component", "host", "mixin", "paths", "plan", "recipe"}
OPTIONS = {
    "measure": {"format", "host", "part"},
    "prepare": SHARED | {"doc", "port"},
    "move": SHARED | {"accept", "delegate", "delegate-note", "receiver"},
}

SCHEDULER = """
from mixins.load import LoadMixin

class Scheduler(LoadMixin):
    def __init__(self):
        self.running = []

    def step(self):
        self.emit_load()
"""
LOAD = """
class LoadMixin:
    def emit_load(self):
        self.last = len(self.running)
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    (tmp_path / "mixins").mkdir()
    (tmp_path / "scheduler.py").write_text(SCHEDULER)
    (tmp_path / "mixins" / "load.py").write_text(LOAD)
    return tmp_path


@pytest.mark.parametrize("command", REFACTOR_COMMANDS)
def test_the_help_names_each_option_of_a_command(command_line: Callable, command: str) -> None:
    ran = command_line("refactor", command, "--help")
    assert ran.code == 0
    assert f"refactor {command}" in ran.out
    assert all(f"--{option}" in ran.out for option in OPTIONS.get(command, set()))


def test_the_text_finds_the_file_of_a_base(command_line: Callable, engine: Path) -> None:
    ran = command_line("refactor", "measure", str(engine / "scheduler.py"))
    assert ran.code == 0
    assert "emit_load: reads running; rebinds last" in ran.out
    assert "step: calls emit_load" in ran.out
    assert "1. LoadMixin: cost 1, 1 methods, 3 lines" in ran.out
    only = command_line("refactor", "measure", str(engine), "--part", "LoadMixin")
    assert "step: calls emit_load" not in only.out


def test_the_json_has_every_use(command_line: Callable, engine: Path) -> None:
    report = json.loads(command_line("refactor", "measure", str(engine), "--format", "json").out)
    (mixin,) = [part for part in report["measurement"]["parts"] if part["role"] == "mixin"]
    uses = [(use["attribute"], use["kind"], use["line"]) for use in mixin["methods"][0]["accesses"]]
    assert uses == [("running", "read", 4), ("last", "rebind", 4)]
    assert report["leave_order"][0]["needs"][0]["kind"] == "fact"


def test_the_graph_and_the_picture_have_both_arrows(command_line: Callable, engine: Path) -> None:
    graph = command_line("refactor", "measure", str(engine), "--format", "mermaid").out.splitlines()
    assert graph[0] == "flowchart LR"
    assert set(graph[3:]) == {"    p1 -->|1| p0", "    p0 -->|1| p1"}
    picture = ElementTree.fromstring(command_line("refactor", "measure", str(engine), "--format", "svg").out)
    titles = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["LoadMixin uses of Scheduler: running", "Scheduler uses of LoadMixin: emit_load"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param(["nowhere.py"], "nowhere.py", id="no file"),
        pytest.param(["."], "has no Python file", id="no Python"),
        pytest.param(["mixins"], "no class has a mixin", id="no host"),
        pytest.param(["scheduler.py", "--host", "Other"], "is no class", id="another host"),
        pytest.param(["scheduler.py", "--part", "Other"], "is no part", id="another part"),
        pytest.param(["scheduler.py", "--format", "pdf"], "pdf", id="another format"),
        pytest.param(["latin.py"], "is not UTF-8", id="another encoding"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    command_line: Callable, engine: Path, arguments: list[str], named: str
) -> None:
    (engine / "empty").mkdir()
    (engine / "latin.py").write_bytes(b"# \xe9\n")
    path = engine / "empty" if arguments[0] == "." else engine / arguments[0]
    ran = command_line("refactor", "measure", str(path), *arguments[1:])
    assert (ran.code, ran.out) == (2, "")
    assert named in ran.complaint


NAMES = ("--mixin", "LoadMixin", "--component", "Load", "--attribute", "load")


@pytest.fixture
def repository(engine: Path) -> Path:
    (engine / "other.py").write_text("def watch(scheduler):\n    return scheduler.emit_load()\n")
    git(engine, "init", "--quiet")
    git(engine, "add", ".")
    git(engine, "commit", "--quiet", "--message", "Begin")
    return engine


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture
def author(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "A")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@example.org")


@pytest.mark.processes
@pytest.mark.usefixtures("author")
def test_a_mixin_is_prepared_and_moved_in_two_commits(command_line: Callable, repository: Path) -> None:
    assert command_line("refactor", "prepare", str(repository), *NAMES, "--commit").code == 0
    refused = command_line("refactor", "move", str(repository), *NAMES, "--commit")
    assert (refused.code, refused.out) == (1, "")
    assert "other.py:2: scheduler.emit_load may be the host's" in refused.complaint
    moved = command_line("refactor", "move", str(repository), *NAMES, "--receiver", "scheduler", "--commit")
    assert moved.code == 0
    subjects = git(repository, "log", "--format=%s", "--name-only").split("\n")
    assert [line for line in subjects if line] == [
        *("Move Load", ".refactor/move-load.json", "mixins/load.py", "other.py", "scheduler.py"),
        *("Prepare Load", ".refactor/prepare-load.json", "mixins/load.py", "scheduler.py"),
        *("Begin", "mixins/load.py", "other.py", "scheduler.py"),
    ]
    assert git(repository, "status", "--porcelain") == ""
    assert "return scheduler.load.emit_load()" in (repository / "other.py").read_text()
    verified = command_line("refactor", "verify", "HEAD~2", "HEAD", "--repository", str(repository))
    assert verified.code == 0, verified.out + verified.complaint


def test_a_plan_is_printed_edited_and_applied(command_line: Callable, engine: Path) -> None:
    before = (engine / "mixins" / "load.py").read_text()
    planned = command_line("refactor", "prepare", str(engine), *NAMES, "--plan")
    assert (engine / "mixins" / "load.py").read_text() == before
    recipe = engine / "edited.json"
    recipe.write_text(planned.out.replace('"Prepare Load"', '"Prepare reports"').replace("LoadMixin.", "Reports."))
    assert command_line("refactor", "prepare", str(engine), "--recipe", str(recipe)).code == 0
    assert "class Load:" in (engine / "mixins" / "load.py").read_text()
    assert (engine / ".refactor" / "prepare-reports.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        pytest.param(["--mixin", "X"], 2, "component=''", id="half of the names"),
        pytest.param(["--mixin", "OtherMixin", *NAMES[2:]], 2, "is no base of Scheduler", id="another mixin"),
        pytest.param([*NAMES, "--accept", "decorator"], 2, "RULE:NAME=REASON", id="an incomplete acceptance"),
        pytest.param(NAMES, 2, "is the name of 0 classes", id="not prepared"),
        pytest.param(["--recipe", "none.json"], 2, "none.json", id="no recipe"),
    ],
)
def test_a_move_that_is_not_clear_changes_nothing(
    command_line: Callable, engine: Path, arguments: list[str], code: int, named: str
) -> None:
    before = (engine / "scheduler.py").read_text()
    ran = command_line("refactor", "move", str(engine), *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert named in ran.complaint
    assert (engine / "scheduler.py").read_text() == before
    assert not (engine / ".refactor").exists()


def test_without_libcst_the_extra_is_named(
    command_line: Callable, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    ran = command_line("refactor", "move", str(engine), *NAMES)
    assert ran.code == 1
    assert "scheduler-components[refactor]" in ran.complaint
    assert command_line("refactor", "measure", str(engine)).code == 0
