"""For every rule: broken code that it finds, on the right line, by limits that are options."""

from __future__ import annotations

from textwrap import dedent

import pytest

from scheduler_components.component_lint.rules import RULES, LintOptions
from scheduler_components.component_lint.source_lint import lint_source

# (rule, name of the case, code; the lines that must be found end with "# found")
BROKEN = [
    (
        "whole-scheduler",
        "a typed field",
        """
        @dataclass
        class Load:
            scheduler: Scheduler  # found
            def get_loads(self): return len(self.scheduler.waiting)
        """,
    ),
    (
        "whole-scheduler",
        "a quoted, optional, subclassed type under another name",
        """
        @dataclass(frozen=True)
        class Load:
            owner: "PrefillScheduler | None"  # found
            others: Sequence["DecodeScheduler"]  # found
            def get_loads(self): return 1
        """,
    ),
    (
        "whole-scheduler",
        "a constructor's parameter",
        """
        class Load:
            def __init__(self, scheduler):
                self.scheduler = scheduler  # found
            def get_loads(self): return len(self.scheduler.waiting)
        """,
    ),
    (
        "whole-scheduler",
        "a method's parameter",
        """
        class Load:
            @staticmethod
            def get_loads(scheduler: engine.Scheduler): return 1  # found
        """,
    ),
    (
        "whole-scheduler",
        "uses of a field that somebody else sets",
        """
        class Load:
            def get_loads(self):
                return len(self.scheduler.waiting)  # found
        """,
    ),
    ("mixin", "its name", "class LoadMixin:  # found\n    def get_loads(self): ..."),
    ("mixin", "a class made of them", "class Scheduler(LoadMixin, MetricsMixin):  # found\n    pass"),
    (
        "mixin",
        "a borrowed self",
        """
        class LoadPart:
            def get_loads(self: Scheduler): ...  # found
            def get_more(self: Scheduler): ...
        """,
    ),
    (
        "too-many-fields",
        "a dataclass",
        """
        @dataclass(slots=True)
        class Load:  # found
            a: int; b: int; c: int; d: int; e: int; f: int; g: int; h: int
            def get_loads(self): ...
        """,
    ),
    (
        "too-many-fields",
        "a plain class that stores what it is given",
        """
        class Load:  # found
            def __init__(self, a, b, c, d, e, f, g, h):
                self.a = a; self.b = b; self.c = c; self.d = d
                self.e = e; self.f = f; self.g = g; self.h = h
        """,
    ),
    ("untyped-callable", "a bare one", "@dataclass\nclass Load:\n    read: Callable  # found"),
    ("untyped-callable", "any parameters", "@dataclass\nclass Load:\n    read: Callable[..., int]  # found"),
    ("untyped-callable", "any result", "@dataclass\nclass Load:\n    read: Callable[[int], Any] | None  # found"),
    ("untyped-callable", "many in one", "@dataclass\nclass Load:\n    readers: dict[str, Callable]  # found"),
    (
        "untyped-callable",
        "stored by a plain class, and by a mixin's init",
        """
        class Load:
            def __init__(self, read: Callable):
                self._read = read  # found
            def init_outputs(self, send: "Callable[..., None]"):
                self.send = send  # found
        """,
    ),
    (
        "many-callables",
        "a page of lambdas to come",
        """
        @dataclass
        class Load:
            get_running: Callable[[], int]  # found
            get_waiting: Callable[[], int]
            get_pool: Callable[[], int]
        """,
    ),
    ("any-field", "a dataclass", "@dataclass\nclass Load:\n    queues: Any  # found\n    def get_loads(self): ..."),
    (
        "any-field",
        "a plain class",
        "class Load:\n    def __init__(self, queues: Any):\n        self.queues = queues  # found",
    ),
    ("ambient-context", "an imported getter", "def gate():\n    return get_parallel().tp_rank  # found"),
    (
        "ambient-context",
        "a getter of a module",
        "class A:\n    def f(self): return runtime_context.get_args()  # found",
    ),
    ("ambient-context", "a default", "@dataclass\nclass A:\n    rank: int = get_parallel().tp_rank  # found"),
    ("ambient-context", "the environment", "class A:\n    def f(self): return os.environ['RANK']  # found"),
    ("ambient-context", "one variable of it", "RANK = os.getenv('RANK')  # found"),
    ("ambient-context", "a library's singleton", "class A:\n    def f(self): return zmq.Context.instance()  # found"),
    (
        "ambient-context",
        "a singleton of its own",
        """
        _state = None
        def set_state(state):
            global _state  # found
            _state = state
        def get_state():
            return _state
        def use():
            return get_state()  # found
        """,
    ),
    (
        "ambient-context",
        "a class that keeps its only object",
        """
        class A:
            _instance = None
            @classmethod
            def make(cls):
                cls._instance = cls()  # found
                return cls._instance
        """,
    ),
    (
        "io-in-constructor",
        "a socket",
        "class A:\n    def __init__(self, context):\n        self.pub = context.socket(zmq.PUB)  # found",
    ),
    (
        "io-in-constructor",
        "a dataclass's hook",
        """
        @dataclass
        class A:
            path: str
            def __post_init__(self):
                self.log = open(self.path)  # found
        """,
    ),
    (
        "io-in-constructor",
        "a thread, by way of a method",
        """
        class A:
            def __init__(self):
                self._start()
            def _start(self):
                thread = threading.Thread(target=self.run)
                thread.start()  # found
            def run(self): ...
        """,
    ),
    (
        "io-in-constructor",
        "what an open_... function opens, and a started part",
        """
        class A:
            def __init__(self, part):
                self.sockets = open_sockets()  # found
                self.part = part
                self.part.start()  # found
        """,
    ),
    ("io-in-constructor", "a process", "class A:\n    def __init__(self):\n        subprocess.run(['ls'])  # found"),
    (
        "enabled-gate",
        "in an if, negated and nested",
        """
        class A:
            def f(self):
                if not self.enable_metrics or self.config.is_enabled:  # found
                    return
        """,
    ),
    ("enabled-gate", "in an expression", "class A:\n    def f(self): return 1 if self.metrics_enabled else 0  # found"),
    ("bad-suppression", "no reason", "x = 1  # component-lint: ignore[mixin]"),
    ("bad-suppression", "no such rule", "x = 1  # component-lint: ignore[mixins] because"),
    ("bad-suppression", "no rule", "x = 1  # component-lint: ignore because"),
    ("bad-suppression", "another verb", "x = 1  # component-lint: disable[mixin] because"),
    ("unused-suppression", "nothing to ignore", "x = 1  # component-lint: ignore[mixin] because"),
    ("not-python", "a syntax error", "class A(:"),
    ("not-python", "a null byte", "x = '\0'"),
]


@pytest.mark.parametrize(
    ("rule", "code"), [pytest.param(rule, code, id=f"{rule}: {name}") for rule, name, code in BROKEN]
)
def test_broken_code_is_found_where_it_stands(head: str, rule: str, code: str) -> None:
    source = head + dedent(code)
    marked = [number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# found")]
    found = [each for each in lint_source(source).findings if each.rule == rule]
    assert found
    if marked:
        assert sorted({each.line for each in found}) == marked
    assert all(each.message and each.hint == RULES[rule].hint for each in found)


def test_every_rule_has_a_broken_example() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


def test_limits_are_options(head: str) -> None:
    source = head + "@dataclass\nclass A:\n    a: int\n    b: Callable[[], int]\n    def f(self): ...\n"
    found = lint_source(source, options=LintOptions(max_fields=1, max_callables=0)).findings
    assert [each.rule for each in found] == ["too-many-fields", "many-callables"]
