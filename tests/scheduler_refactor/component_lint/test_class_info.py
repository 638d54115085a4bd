"""Test that no rule about components applies to a data class without behaviour."""

from __future__ import annotations

import ast
from collections.abc import Callable
from textwrap import dedent, indent

import pytest

from scheduler_refactor.component_lint import ComponentChecker

Lint = Callable[..., list[tuple[int, str]]]

ABOUT_COMPONENTS = {"SCH001", "SCH003", "SCH004", "SCH005", "SCH006", "SCH010"}
KINDS = [
    "@dataclass\nclass Stats:",
    "@dataclass(slots=True, kw_only=True)\nclass Stats:",
    "@attrs.define\nclass Stats:",
    "@attrs.frozen\nclass Stats:",
    "class Stats(msgspec.Struct):",
    "class Stats(Base, frozen=True):",
    "class Stats(pydantic.BaseModel):",
    "class Stats(NamedTuple):",
]
FIELDS = """
num_used: int = 0
num_free: Optional[int] = None
names: list[str] | None = None
by_rank: "dict[int, int]" = {}
chunks: deque[bytes] = ()
digest: Any = None
next_ids: torch.Tensor = None
scheduler: Scheduler = None
"""
# Methods of a data class that only store, check, create and format its own data.
NO_BEHAVIOUR = {
    "none": "",
    "a property": "@property\ndef total(self): return self.next_ids.sum()",
    "dunders": "def __len__(self): return len(self.next_ids.shape)\ndef __enter__(self): return self",
    "another constructor": "@classmethod\ndef of(cls, pool):\n    pool.freeze()\n    return cls(pool.num_used)",
    "a static method": "@staticmethod\ndef order(requests): requests.sort()",
    "an answer": "def get_usage(self): return self.num_used / max(1, self.num_free)",
    "a text": "def parts(self):\n    parts = []\n    parts.append(f'{self.num_used}')\n    return parts",
    "writes": "def mark(self, now):\n    self.num_used = now\n    self.by_rank[0] = now\n    setattr(self, 'x', 1)",
    "a container's own": "def add(self, text): self.chunks.append(text); self.names.sort()",
    "its own methods": "def both(self): self.check()\ndef check(self): raise ValueError",
    "a log line": "def log(self): logger.info('used %d', self.num_used)",
    "a copy into another": "def fill(self, other): other.num_used = self.num_used",
}
BEHAVIOUR = {
    "it reads a collaborator": "def get_loads(self): return self.next_ids.shape[0]",
    "it calls one": "def act(self): return self.digest()",
    "it acts on another object": "def act(self, group): group.all_reduce(self.num_used)",
    "it acts on the world": "def act(self): subprocess.call(['ls'])",
    "it waits": "async def act(self):\n    await anything",
    "it is called": "def __call__(self): return self.scheduler.num",
    "a field is to be called": "on_done: Callable[[], None] = None",
}


def codes_of(head: str, kind: str, methods: str) -> set[str]:
    """Return the codes of the checker alone, which takes a tenth of flake8's time."""
    found = ComponentChecker(ast.parse(f"{head}{kind}{indent(FIELDS + methods, '    ')}\n")).run()
    return {problem.split(" ", 1)[0] for _, _, problem, _ in found}


@pytest.mark.parametrize("kind", KINDS)
def test_no_component_rule_applies_to_a_record(head: str, kind: str) -> None:
    for case, methods in NO_BEHAVIOUR.items():
        assert codes_of(head, kind, methods).isdisjoint(ABOUT_COMPONENTS), case


@pytest.mark.parametrize("kind", KINDS[:3])
def test_component_rules_apply_to_a_data_class_with_behaviour(head: str, kind: str) -> None:
    for case, methods in BEHAVIOUR.items():
        assert codes_of(head, kind, methods) >= {"SCH001", "SCH003", "SCH006"}, case


def test_component_rules_apply_to_every_plain_class(lint: Lint, head: str) -> None:
    code = """
        class Load:
            def __init__(self, scheduler: Scheduler, what: Any):
                self.scheduler = scheduler
                self.what = what
    """
    assert [code for _, code in lint(head + dedent(code))] == ["SCH001", "SCH006"]


def test_other_rules_apply_to_a_record(lint: Lint, head: str) -> None:
    code = """
        @dataclass
        class LogMixin:
            path: str
            def __post_init__(self): self.log = open(self.path)
    """
    assert [code for _, code in lint(head + dedent(code))] == ["SCH002", "SCH008"]
