"""Random mixins do the same after they have become components: a planned move changes no result and no state."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_refactor.apply import apply_step
from scheduler_refactor.plan import MovePlanner

SCHEDULER = """
from __future__ import annotations

from contextlib import contextmanager
from engine.mixin import TheMixin


class Scheduler(TheMixin):
    def __init__(self):
        self.fixed = {"k": 1}
        self.rebound = [1]
        self.number = 2
        self.table = {}
        self.init_mixin(3)

    def helper(self, n):
        self.rebound = [*self.rebound, n]
        return self.own + n

    @property
    def total(self):
        return self.number + len(self.rebound)

    def call(self, name, n):
        return [self.m0, self.m1, self.m2][name](n)

    def dump(self):
        return self.fixed, self.rebound, self.number, self.table, self.own, self.kept
"""
MIXIN = """
from __future__ import annotations

from contextlib import contextmanager


@contextmanager
def opened(n):
    yield n * 2


def keep(host, n):
    host.number += n
    host.rebound.append(n)


class TheMixin:
    def init_mixin(self, first):
        self.own = first
        self.kept: list[int] = []

    def leaf(self, n):
        self.own += 1
        return self.number % 7

"""
STATEMENTS = (
    "self.own += n",
    "self.kept.append(self.number)  # stays",
    "self.number = n + len(self.rebound)",
    "self.rebound.append(n)",
    "self.rebound = self.rebound[-3:]",
    "self.table[n] = self.own",
    "self.table.pop(n, None)",
    "self.fixed['k'] += n",
    "x = self\nx.number -= 1\nx.own += x.number",
    "q = self.kept\nq.append(n)",
    "q = self.rebound\nself.rebound = []\nq.append(n)\nself.own += len(q)",
    "for self.number in (n, n + 1):\n    self.own += self.number",
    "self.kept = [self.own + r for r in self.rebound if r != self.number][:4]",
    "[self.kept.append(self.number + r) for r in range(n % 3)]",
    "f = lambda v: self.number + v\nself.own = f(n)",
    "def inner():\n    self.own += self.number\n    return self.own\nn += inner()",
    "with opened(n) as self.number:\n    self.own += self.number",
    "self.own, self.number = self.number, self.own",
    "setattr(self, 'number', n)\nn += getattr(self, 'number')",
    "getattr(self, 'rebound').append(n)",
    "n += self.helper(n)",
    "n += self.total",
    "if n > 0:\n    n += self.leaf(n)",
    "keep(self, n)",
    "match n % 2:\n    case 0:\n        self.number += 1\n    case _:\n        self.own -= 1",
    "if (y := self.number) > 3:\n    n -= y",
    "self.rebound[:], n = [n], n + self.rebound[0] if self.rebound else 0",
    "class Inner:\n    seen = self.own\n\n    def read(it):\n        return self.number\nn += Inner().read()",
)
bodies = st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=5)
calls = st.lists(st.tuples(st.integers(0, 2), st.integers(-2, 9)), max_size=8)


def run(tree: dict[str, str], made: Sequence[tuple[int, int]]) -> list[object]:
    code = "\n".join(tree[path] for path in ("engine/mixin.py", "engine/scheduler.py"))
    lines = [line for line in code.split("\n") if not line.startswith(("from engine", "from __future__"))]
    names: dict[str, object] = {"__name__": __name__}
    exec(compile("from __future__ import annotations\n" + "\n".join(lines), "moved", "exec"), names)
    scheduler = names["Scheduler"]()  # type: ignore[operator]
    return [[scheduler.call(name, n), repr(scheduler.dump())] for name, n in made]


def check(written: Sequence[Sequence[str]], made: Sequence[tuple[int, int]]) -> None:
    methods = ""
    for number, statements in enumerate(written):
        body = "\n".join([*statements, "return n"])
        methods += f"    def m{number}(self: Scheduler, n):\n{indent(body, '        ')}\n\n"
    before = {"engine/scheduler.py": SCHEDULER[1:], "engine/mixin.py": MIXIN[1:] + methods}
    planner = MovePlanner(tree=before, host="Scheduler", mixin="TheMixin", component="The", attribute="the")
    planner.tree = apply_step(before, planner.prepare())
    after = apply_step(planner.tree, planner.move())
    assert "TheMixin" not in after["engine/scheduler.py"]
    assert run(after, made) == run(before, made)


@pytest.mark.soak
@given(written=st.tuples(bodies, bodies, bodies), made=calls)
@settings(max_examples=num_examples(1) // 6, deadline=None)
def test_a_random_mixin_does_the_same_as_a_component(
    written: tuple[list[str], ...], made: list[tuple[int, int]]
) -> None:
    check(written, made)


def test_all_statements_in_one_mixin() -> None:
    check((STATEMENTS, STATEMENTS[::-1], ("self.own += 1",)), [(0, 3), (1, 4), (2, 1), (0, 2)])
