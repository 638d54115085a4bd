"""A planned recipe names what the mixin needs, with the types that its file can have, and can be applied."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from scheduler_components import ConfigError
from scheduler_refactor.apply import apply_step
from scheduler_refactor.plan import MovePlanner
from scheduler_refactor.recipe import Prepare
from scheduler_refactor.refusals import RefusedError

SCHEDULER = """
from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING
from engine.load import LoadMixin
from .near import Near

if TYPE_CHECKING:
    from engine.request import Request


class Scheduler(LoadMixin):
    def __init__(self, cfg):
        self.cfg: dict[str, int] = cfg
        if cfg:
            self.fast = True
        self.near: Near = None
        self.waiting: deque[Request] = deque()
        # A comment.
        if cfg:
            self.start_load()
        self.late = 1

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def run(self, batch: Request, *more: int, n: int = 3, x=4, **rest) -> list[Request]:
        self.waiting = deque()
        return self.load_count
"""
LOAD = '''
from __future__ import annotations


class LoadMixin:
    """Reports load.

    More of it.
    """

    def start_load(self):
        self.load_count: int = self.cfg["n"]
        keep(self)

    def report(self):
        self.waiting.clear()
        return self.near, self.fast, self.late, self.busy, self.run(1)
'''
TREE = {"engine/scheduler.py": SCHEDULER[1:], "engine/load.py": LOAD[1:]}


BARE = {"a.py": "class LoadMixin: ...\nclass Scheduler(LoadMixin): ..."}


def planner(tree: Mapping[str, str] = TREE, **names: str) -> MovePlanner:
    chosen = {"host": "Scheduler", "mixin": "LoadMixin", "component": "Load", "attribute": "load"} | names
    return MovePlanner(tree=tree, **chosen)


def planned(tree: Mapping[str, str] = TREE) -> Prepare:
    return planner(tree).prepare()


def test_a_plan_divides_facts_state_and_the_port() -> None:
    step = planned()
    assert (step.before, step.above, step.doc) == ("if cfg:", "LoadMixin", "Reports load.")
    assert {(field.name, field.annotation, field.kind) for field in step.fields} == {
        ("cfg", "dict[str, int]", "fact"),
        ("near", "Any", "fact"),  # a relative import means something else in another file
        ("load_count", "int", "state"),
    }
    (port,) = step.ports
    assert port.members == {
        "busy": "busy: bool",
        "fast": "fast: Any",
        "late": "late: Any",
        "run": "def run(self, batch: Request, *more: int, n: int = ..., x=..., **rest) -> list[Request]: ...",
        "waiting": "waiting: deque[Request]",
    }
    assert step.imports == ("from typing import Any",)
    assert step.type_imports == ("from collections import deque", "from engine.request import Request")


def test_a_file_that_evaluates_annotations_imports_for_run_time() -> None:
    tree = dict(TREE) | {"engine/load.py": LOAD[1:].replace("from __future__ import annotations\n", "")}
    step = planned(tree)
    assert step.type_imports == ()
    assert "from engine.request import Request" in step.imports


def test_a_plan_that_is_ambiguous_is_refused_and_an_edited_one_is_applied() -> None:
    with pytest.raises(RefusedError, match="2 statements that begin with 'if cfg:'"):
        apply_step(TREE, planned())
    text = SCHEDULER[1:].replace("if cfg:\n            self.fast", "if self.cfg:\n            self.fast")
    tree = dict(TREE) | {"engine/scheduler.py": text}
    prepared = apply_step(tree, planned(tree))
    step = planner(prepared).move()
    assert (step.facts, step.states, step.whole) == (("cfg", "near"), ("load_count",), "host")
    assert set(step.routes) == {"busy", "fast", "late", "run", "waiting"}
    moved = apply_step(prepared, step)
    assert "self.load.start_load()" in moved["engine/scheduler.py"]
    assert "return self.load.load_count" in moved["engine/scheduler.py"]
    assert "keep(self.host)" in moved["engine/load.py"]
    assert "self.near, self.host.fast, self.host.late, self.host.busy, self.host.run(1)" in moved["engine/load.py"]


def test_a_mixin_that_only_passes_the_host_on_gets_an_empty_port() -> None:
    tree = dict(TREE) | {"engine/load.py": "class LoadMixin:\n    def start_load(self):\n        keep(self)\n"}
    text = SCHEDULER[1:].replace("if cfg:\n            self.fast", "if self.cfg:\n            self.fast")
    tree["engine/scheduler.py"] = text.replace("return self.load_count", "return []")
    prepared = apply_step(tree, planned(tree))
    moved = apply_step(prepared, planner(prepared).move())
    assert "        keep(self.host)\n" in moved["engine/load.py"]


@pytest.mark.parametrize(
    ("names", "tree", "problem"),
    [
        pytest.param({"mixin": "OtherMixin"}, TREE, "is no base of Scheduler", id="another mixin"),
        pytest.param({"host": "Other"}, TREE, "is no class", id="another host"),
        pytest.param(
            {}, {"a.py": "class LoadMixin: ...\nclass Scheduler(LoadMixin): ..."}, "no constructor", id="none"
        ),
    ],
)
def test_a_plan_needs_its_classes(names: dict[str, str], tree: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        planner(tree, **names).prepare()


def test_a_move_needs_a_prepared_component() -> None:
    with pytest.raises(ConfigError, match="prepare it first"):
        planner().move()
