"""``refactor record`` and ``refactor replay`` compare versions of a scheduler, and say what the workloads covered."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

HARNESS = """
from __future__ import annotations

import json
import msgspec
from hypothesis import strategies as st

class Work(msgspec.Struct):
    numbers: list[Number]

Number = int

class LoopHarness:
    exits = {"sum": json.loads}
    targets = ("ten",)
    workload_type = Work

    def workloads(self):
        return st.builds(Work, st.lists(st.integers(0, 9), max_size=4))

    def play(self, workload, recorder):
        add = recorder.load("loop").add
        for n in workload.numbers:
            recorder.begin(f"add {n}")
            total = add(n)
            recorder.emit("sum", b"%d" % total)
            if total >= 10:
                recorder.reach("ten")

harness = LoopHarness()
"""
LOOP = """
TOTAL = [0]

def add(n):
    TOTAL[0] += n
    return TOTAL[0]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a harness, an old version, and a new one that is wrong from 9 on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "harness.py").write_text(dedent(HARNESS))
    for name, text in {"old": LOOP, "same": f"# moved\n{LOOP}", "new": LOOP.replace("+= n", "+= min(n, 8)")}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "loop.py").write_text(text)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_version_is_recorded_and_others_are_compared_with_it(command_line: Callable) -> None:
    recorded = command_line("refactor", "record", "harness.py", "old", "old.rec", "--workloads", "60")
    assert recorded.code == 0
    assert "60 workloads" in recorded.out
    assert "reached ten" in recorded.out
    same = command_line("refactor", "replay", "harness.py", "same", "--recording", "old.rec")
    assert (same.code, same.out.splitlines()[-1]) == (0, "no difference")
    other = command_line("refactor", "replay", "harness.py", "loop=new/loop.py", "--recording", "old.rec")
    assert other.code == 1
    assert re.search(r"difference: step \d \(add 9\), exit 'sum', byte \d: .*; value: old \d+, new \d+\n", other.out)


@pytest.mark.usefixtures("folder")
def test_two_versions_are_compared_and_the_workload_is_small(command_line: Callable) -> None:
    assert command_line("refactor", "replay", "harness.py", "same", "--old", "old").code == 0
    other = command_line("refactor", "replay", "harness.py", "new", "--old", "old", "--workloads", "100")
    assert other.code == 1
    assert other.out.splitlines()[0] == 'workload: {"numbers":[9]}'
    assert other.out.splitlines()[-1].startswith("difference: step 0 (add 9), exit 'sum', byte 0")


def test_what_no_workload_reached_is_a_failure(command_line: Callable, folder: Path) -> None:
    text = (folder / "harness.py").read_text().replace('("ten",)', '("ten", "abort")')
    (folder / "harness.py").write_text(text.replace("exits = {", 'exits = {"log": bytes, '))
    found = command_line("refactor", "replay", "harness.py", "same", "--old", "old")
    assert found.code == 1
    assert found.out.splitlines()[-3:] == ["exit 'log' stayed silent", "no workload reached 'abort'", "no difference"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["record", "missing.py", "old", "x.rec"], "harness='missing.py': is no Python file"),
        (["record", "old/loop.py", "old", "x.rec"], "harness='old/loop.py': defines no `harness`"),
        (["record", "harness.py", "empty", "x.rec"], "tree='empty': has no package"),
        (["record", "harness.py", "old", "no/x.rec", "--workloads", "1"], "file='no/x.rec': cannot be written"),
        (["replay", "harness.py", "new"], "old=None: leaves open what to compare with"),
        (["replay", "harness.py", "new", "--recording", "x", "--old", "old"], "old='old': leaves open"),
        (["replay", "harness.py", "new", "--recording", "harness.py"], "harness.py is no file of recordings"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_wrong_argument_is_named(arguments: list[str], complaint: str, command_line: Callable) -> None:
    found = command_line("refactor", *arguments)
    assert found.complaint.startswith(complaint)


def test_a_harness_without_workloads_is_named(command_line: Callable, folder: Path) -> None:
    text = (folder / "harness.py").read_text()
    (folder / "harness.py").write_text(text.replace("def workloads(", "def others("))
    assert "with 'workloads'" in command_line("refactor", "record", "harness.py", "old", "x.rec").complaint
