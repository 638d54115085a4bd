"""``refactor measure`` prints a measurement as text, JSON, a graph and a picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_components.reference.cli.refactor_commands import REFACTOR_COMMANDS

OPTIONS = {"measure": {"format", "host", "part"}}

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
