"""A harness is played on two versions, and the smallest workload with a difference is found."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st

from scheduler_components.errors import DecodeError
from scheduler_refactor.harness import (
    HarnessError,
    NotReproducibleError,
    Recorder,
    compare_versions,
    play,
    replay_recordings,
)
from scheduler_refactor.module_tree import ModuleTree
from scheduler_refactor.recording import (
    RAISED,
    Decoder,
    read_recordings,
    write_recordings,
)
from scheduler_refactor.workload_search import find_difference, record_workloads

LOOP = """
import logging
import time

logger = logging.getLogger("loop")
SEEN = []

class Loop:
    def __init__(self, send):
        self.send, self.queue, self.total = send, [], 0

    def submit(self, n):
        if n > 8:
            raise ValueError(f"{n} is too long")
        self.queue.append(n)

    def step(self):
        if not self.queue:
            time.sleep(1.0)
            return
        n = self.queue.pop(0)
        self.total += n
        SEEN.append(n)
        self.send([n, time.monotonic()])
        if n == 7:
            logger.warning("seven of %d", len(SEEN))

    def load(self):
        return {"waiting": len(self.queue), "total": self.total}
"""


class Work(msgspec.Struct, frozen=True):
    requests: tuple[int, ...]
    num_steps: int


class LoopHarness:
    exits: Mapping[str, Decoder] = {"sent": json.loads, "load": json.loads, "log": bytes, "submit": bytes}
    targets: Sequence[str] = ("two waiting",)
    workload_type = Work

    def workloads(self) -> st.SearchStrategy[Work]:
        return st.builds(Work, st.lists(st.integers(0, 9), max_size=5).map(tuple), st.integers(0, 6))

    def play(self, workload: Work, recorder: Recorder) -> None:
        loop = recorder.load("loop").Loop(recorder.sink("sent", msgspec.json.encode))
        with recorder.logs("log", "loop"):
            for n in workload.requests:
                recorder.begin(f"submit {n}")
                recorder.call("submit", lambda n=n: loop.submit(n), lambda _: b"")  # type: ignore[misc]
            for _ in range(workload.num_steps):
                recorder.begin("step")
                loop.step()
                load = loop.load()
                recorder.emit("load", msgspec.json.encode(load))
                if load["waiting"] == 2:
                    recorder.reach("two waiting")


def tree(folder: Path, *changes: tuple[str, str]) -> ModuleTree:
    text = LOOP
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir()
    (folder / "loop.py").write_text(text)
    return ModuleTree.below(folder)


@pytest.fixture
def old(tmp_path: Path) -> ModuleTree:
    return tree(tmp_path / "old")


def test_every_exit_is_recorded_with_its_step(old: ModuleTree) -> None:
    found = play(LoopHarness(), old, Work((7, 9), 2))
    assert found.steps == ("submit 7", "submit 9", "step", "step")
    assert [(each.step, each.exit, each.payload) for each in found.emissions] == [
        (0, "submit", b""),
        (1, "submit", b"builtins.ValueError: 9 is too long"),
        (2, "sent", b"[7,1700000000.0]"),
        (2, "log", b"WARNING loop: seven of 1"),
        (2, "load", b'{"waiting":0,"total":7}'),
        (3, "load", b'{"waiting":0,"total":7}'),
    ]
    assert old.clock() == 1_700_000_001.0


def test_plays_are_independent_of_each_other(old: ModuleTree) -> None:
    first = play(LoopHarness(), old, Work((7,), 2))
    assert play(LoopHarness(), old, Work((7,), 2)) == first
    assert play(LoopHarness(), old, Work((7,), 2), fresh=False) != first


CHANGES = {
    "an equal version": ((), None),
    "a value": ((("self.total += n", "self.total += min(n, 6)"),), ("load", "total: old 7, new 6")),
    "two calls swapped": (
        (("return {", 'self.send("?"); return {'),),
        ("load", "old goes on with 'load', new with 'sent', 'load'"),
    ),
    "another error": ((("n > 8", "n >= 8"),), ("submit", "byte 0")),
    "the order": ((("pop(0)", "pop()"),), ("sent", "[0]: old 0, new 1")),
    "a log": ((("n == 7", "n == 6"),), ("log", "")),
    "the time": ((("sleep(1.0)", "sleep(2.0)"),), None),
    "a crash": ((("self.total += n", "self.total += n // n"),), (RAISED, "")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_smallest_difference_is_found(name: str, old: ModuleTree, tmp_path: Path) -> None:
    changes, expected = CHANGES[name]
    new = tree(tmp_path / "new", *changes)
    coverage, found = find_difference(LoopHarness(), old, new, count=50, derandomize=True)
    if expected is None:
        assert found is None
        assert coverage.num_workloads > 30
        assert coverage.missing(list(LoopHarness.exits), LoopHarness.targets) == []
        return
    assert found is not None
    assert len(found.workload.requests) <= 2
    assert found.workload.num_steps <= 2
    assert expected[0] in (found.difference.exit, *str(found.difference).split("'"))
    assert expected[1] in str(found.difference)


def test_a_version_that_differs_from_itself_is_reported(old: ModuleTree, tmp_path: Path) -> None:
    change = ('"total": self.total', '"total": int.from_bytes(__import__("os").urandom(6))')
    random = tree(tmp_path / "new", change)
    with pytest.raises(NotReproducibleError, match="exit 'load'"):
        compare_versions(LoopHarness(), random, old, Work((), 1))
    _, found = compare_versions(LoopHarness(), old, random, Work((), 1))
    assert found is not None


def test_a_recorded_version_is_replayed_from_its_file(old: ModuleTree, tmp_path: Path) -> None:
    workloads, recordings = record_workloads(LoopHarness(), old, count=20)
    assert workloads == record_workloads(LoopHarness(), old, count=20)[0]
    write_recordings(tmp_path / "rec", workloads, recordings)
    file = read_recordings(tmp_path / "rec")
    assert replay_recordings(LoopHarness(), old, file) is None
    found = replay_recordings(LoopHarness(), tree(tmp_path / "new", ("self.total += n", "self.total -= n")), file)
    assert found is not None
    assert found.exit == "load"
    file = msgspec.structs.replace(file, workloads=(b"\x01",), recordings=file.recordings[:1])
    with pytest.raises(DecodeError, match="another harness"):
        replay_recordings(LoopHarness(), old, file)


class Undeclared(LoopHarness):
    def __init__(self, what: str) -> None:
        self.what = what

    def play(self, workload: Work, recorder: Recorder) -> None:
        if self.what == "exit":
            recorder.emit("elsewhere", b"")
        recorder.reach("elsewhere")


@pytest.mark.parametrize("what", ["exit", "target"])
def test_undeclared_names_are_refused(what: str, old: ModuleTree) -> None:
    with pytest.raises(HarnessError, match=f"^{what}='elsewhere'"):
        play(Undeclared(what), old, Work((), 0))


def test_logs_keep_the_error_of_a_record_and_restore_the_logger(old: ModuleTree) -> None:
    logger = logging.getLogger("loop.inner")
    logger.setLevel(logging.ERROR)
    recorder = Recorder(old, ["log"], [])
    with recorder.logs("log", "loop.inner", logging.DEBUG):
        try:
            raise KeyError("x") from ValueError("y")
        except KeyError:
            logger.exception("went wrong")
        logger.debug("detail")
    logger.error("later")
    assert [each.payload for each in recorder.recording().emissions] == [
        b"ERROR loop.inner: went wrong builtins.KeyError: 'x' from builtins.ValueError: y",
        b"DEBUG loop.inner: detail",
    ]
    assert (logger.level, logger.handlers) == (logging.ERROR, [])
