"""A host of several classes is measured as a whole: its bases, what overrides them, and all that gets the host."""

from __future__ import annotations

from textwrap import dedent

import pytest

from scheduler_components import ConfigError
from scheduler_refactor.leave_order import group_methods, plan_leaving
from scheduler_refactor.measurement import Measurement, find_host, measure_host
from scheduler_refactor.source_index import SourceIndex

SCHEDULER = """
    from engine.load import LoadMixin
    from engine.output import OutputMixin as Out
    from engine import tools, parts

    class Scheduler(LoadMixin, Out):
        limit = 4

        def __init__(self, cfg):
            self.cfg = cfg
            self.init_load()
            if cfg.fast:
                self.running = []
            tools.prepare(self)
            self.observer = parts.Observer(self, name="x")
            self.board = parts.Board(get_running=lambda: self.running)

        @property
        def busy(self):
            return bool(self.running)

        def step(self):
            self.running = self.running[1:]
            self.table = {"load": self.get_load}
            self.send(1)
            super().step()
    """
FILES = {
    "engine/scheduler.py": SCHEDULER,
    "engine/load.py": """
        class LoadMixin:
            def init_load(self):
                self.sequence = self.limit

            def get_load(self: "Scheduler"):
                self.sequence += 1
                return self.busy, self.cfg.size, self.unheard_of

            def step(self):
                self.waiting.append(self.sequence)
        """,
    "engine/output.py": """
        from .base import Base

        class OutputMixin(Base):
            def send(self, item):
                self.sequence_of_output.n += 1
                helper(self)

        def helper(scheduler):
            scheduler.running.clear()
        """,
    "engine/base.py": """
        class Base:
            def step(self): ...
            def send(self, item): ...
        """,
    "engine/tools.py": """
        import engine.scheduler

        def prepare(owner, *, other=None):
            owner.waiting = []
            inner(1, o=owner)

        def inner(n, o):
            o.prepared = n

        def annotated(n, sched: "engine.scheduler.Scheduler | None" = None):
            if sched is not None:
                return sched.get_load()

        def no_host(sched):
            return sched.running
        """,
    "engine/parts.py": """
        from dataclasses import dataclass

        class Observer:
            def __init__(self, scheduler, name):
                self.scheduler = scheduler
                self.name = name
                self.first = scheduler.running
                super().__init__()

            def look(self):
                s = self.scheduler
                s.observed = self.name
                return self.scheduler.step()

        @dataclass
        class Board:
            get_running: object
        """,
    "engine/fast.py": """
        from engine.scheduler import Scheduler

        class FastScheduler(Scheduler):
            def send(self, item):
                super().send(item)
        """,
    "tests/test_scheduler.py": """
        from unittest.mock import patch
        from engine.scheduler import Scheduler

        def test_one():
            with patch.object(Scheduler, "get_load"):
                getattr(Scheduler, "init_load")
            names = ["get_load", "something", "engine.scheduler.Scheduler.send"]
        """,
}


def measured(**more: str) -> Measurement:
    files = {path: dedent(text) for path, text in FILES.items()} | more
    index = SourceIndex.parse(files)
    return measure_host(index, find_host(index, "Scheduler"))


def uses(measurement: Measurement, part: str, method: str) -> list[str]:
    (found,) = [each for each in measurement.parts if each.name == part]
    (use,) = [each for each in found.methods if each.name == method]
    return [f"{access.kind}:{access.attribute}" for access in use.accesses]


def test_the_parts_are_in_the_order_of_lookup() -> None:
    measurement = measured()
    found = [(part.name, part.role) for part in measurement.parts]
    assert found == [
        ("Scheduler", "host"),
        ("LoadMixin", "mixin"),
        ("OutputMixin", "mixin"),
        ("Base", "base"),
        ("FastScheduler", "subclass"),
        ("Observer", "component"),
        ("engine/output.py", "function"),
        ("engine/tools.py", "function"),
        ("tests/test_scheduler.py", "module"),
    ]
    assert measurement.unknown_bases == ()


def test_the_host_is_followed_into_functions_and_components() -> None:
    measurement = measured()
    assert uses(measurement, "engine/output.py", "helper") == ["mutate:running"]
    assert uses(measurement, "engine/tools.py", "prepare") == ["rebind:waiting"]
    assert uses(measurement, "engine/tools.py", "inner") == ["rebind:prepared"]
    assert uses(measurement, "engine/tools.py", "annotated") == ["call:get_load"]
    assert "no_host" not in {use.name for part in measurement.parts for use in part.methods}
    assert uses(measurement, "Observer", "__init__") == ["read:running"]
    assert uses(measurement, "Observer", "look") == ["rebind:observed", "call:step"]
    assert uses(measurement, "tests/test_scheduler.py", "<module>") == ["rebind:get_load", "read:init_load"]


def test_overrides_and_calls_of_super_are_listed() -> None:
    found = {each.name: (each.parts, each.calls_super) for each in measured().overrides}
    assert found == {
        "send": (("FastScheduler", "OutputMixin", "Base"), True),
        "step": (("Scheduler", "LoadMixin", "Base"), True),
    }


def test_methods_that_are_reached_by_name_are_listed() -> None:
    found = {(each.name, each.how, each.path) for each in measured().reached}
    tests = "tests/test_scheduler.py"
    assert found == {
        ("get_load", "reference", "engine/scheduler.py"),
        ("get_load", "getattr", tests),
        ("init_load", "getattr", tests),
        ("get_load", "string", tests),
        ("send", "string", tests),
    }


def test_the_constructor_is_walked_in_order() -> None:
    measurement = measured()
    steps = [(step.attribute, step.through, step.is_conditional) for step in measurement.init_order]
    assert steps == [
        ("cfg", (), False),
        ("sequence", ("init_load",), False),
        ("running", (), True),
        ("observer", (), False),
        ("board", (), False),
    ]
    early = measured(**{"engine/load.py": "class LoadMixin:\n    def init_load(self):\n        self.a = self.board\n"})
    assert [(step.attribute, step.line) for step in early.read_before_bound] == [("board", 3)]


def test_a_plan_says_what_a_part_needs() -> None:
    load = next(plan for plan in plan_leaving(measured()) if plan.part == "LoadMixin")
    assert {need.name: (need.kind, need.origin) for need in load.needs} == {
        "busy": ("property", "Scheduler"),
        "cfg": ("fact", "Scheduler"),
        "limit": ("fact", "Scheduler"),
        "unheard_of": ("unknown", ""),
        "waiting": ("late", "engine/tools.py"),
    }
    assert load.own_state == ("sequence",)
    assert load.entries == {"get_load": 3, "init_load": 2, "step": 2}
    assert [obstacle.partition(" is ")[0] for obstacle in load.obstacles] == ["step"]


def test_the_cheapest_part_leaves_first_and_components_come_last() -> None:
    plans = plan_leaving(measured())
    own = [plan for plan in plans if plan.part != "Observer"]
    assert plans[-1].part == "Observer"
    assert [plan.cost for plan in own] == sorted(plan.cost for plan in own)


def test_methods_that_share_state_are_a_group() -> None:
    text = """
        class LoadMixin:
            def one(self):
                self.tally = 1
            def two(self):
                return self.tally + self.three()
            def three(self):
                return self.running
            def four(self):
                return self.cfg
        """
    (group,) = group_methods(measured(**{"engine/load.py": dedent(text)}))
    assert (group.part, group.methods, group.state) == ("LoadMixin", ("one", "two", "three"), ("tally",))


def test_an_unknown_base_is_said_as_unknown() -> None:
    files = {"a.py": "from far import FarMixin\nclass Scheduler(FarMixin):\n    pass\n"}
    index = SourceIndex.parse(files)
    assert measure_host(index, find_host(index)).unknown_bases == ("FarMixin",)


def test_the_file_of_a_base_is_found_and_a_stub_is_not_the_base() -> None:
    text = "if x:\n    from far.away import FarMixin\nelse:\n    class FarMixin:\n        pass\n\n"
    index = SourceIndex.parse({"a.py": text + "class Scheduler(FarMixin):\n    pass\n"})
    index.find_module = lambda module, importer: (
        ("far/away.py", "class FarMixin:\n    def f(self):\n        self.a = 1\n") if module == "far.away" else None
    )
    measurement = measure_host(index, find_host(index))
    assert uses(measurement, "FarMixin", "f") == ["rebind:a"]


@pytest.mark.parametrize(
    ("files", "name", "problem"),
    [
        pytest.param({"a.py": "class A: ..."}, "", "no class has a mixin", id="no mixin"),
        pytest.param({"a.py": "class A: ..."}, "B", "is no class", id="no such class"),
        pytest.param({"a.py": "class A: ...", "b.py": "class A: ..."}, "A", "a.py:A, b.py:A", id="ambiguous"),
        pytest.param({"a.py": "class A(B): ...\nclass B(A): ..."}, "A", "is its own base", id="a circle"),
        pytest.param(
            {"a.py": "class X: ...\nclass Y(X): ...\nclass A(X, Y): ..."}, "A", "consistent order", id="no order"
        ),
    ],
)
def test_a_host_that_cannot_be_measured_is_an_error(files: dict[str, str], name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        index = SourceIndex.parse(files)
        measure_host(index, find_host(index, name))


def test_one_of_two_classes_of_a_name_is_chosen_by_its_file() -> None:
    index = SourceIndex.parse(dict.fromkeys(("a.py", "b.py", "old/b.py", "old/engine/b.py", "xb.py"), "class A: ..."))
    assert find_host(index, "b.py:A").path == "b.py"
    assert find_host(index, "engine/b.py:A").path == "old/engine/b.py"


def test_a_file_that_is_not_python_is_named() -> None:
    with pytest.raises(ConfigError, match=r"path='a.py': is not Python \(.*line 1"):
        SourceIndex.parse({"a.py": "class A(:\n"})
