"""Test that each rule finds its broken code in the right line."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import pytest

from scheduler_refactor.component_lint import RULES

Lint = Callable[..., list[tuple[int, str]]]

# (code of the rule, name of the case, code; the lines with a problem end with "# found")
BROKEN = [
    (
        "SCH001",
        "a typed field",
        """
        @dataclass
        class Load:
            scheduler: Scheduler  # found
            def get_loads(self): return len(self.scheduler.waiting)
        """,
    ),
    (
        "SCH001",
        "a quoted, optional, subclassed type under another name",
        """
        @dataclass(frozen=True)
        class Load:
            owner: "PrefillScheduler | None"  # found
            others: Sequence["DecodeScheduler"]  # found
            def get_loads(self): return len(self.owner.waiting)
        """,
    ),
    (
        "SCH001",
        "a constructor's parameter",
        """
        class Load:
            def __init__(self, scheduler):
                self.scheduler = scheduler  # found
            def get_loads(self): return len(self.scheduler.waiting)
        """,
    ),
    (
        "SCH001",
        "a method's parameter",
        """
        class Load:
            @staticmethod
            def get_loads(scheduler: engine.Scheduler): return 1  # found
        """,
    ),
    (
        "SCH001",
        "uses of a field that other code sets",
        """
        class Load:
            def get_loads(self):
                return len(self.scheduler.waiting)  # found
        """,
    ),
    ("SCH002", "its name", "class LoadMixin:  # found\n    def get_loads(self): ..."),
    ("SCH002", "a class made of them", "class Scheduler(LoadMixin, MetricsMixin):  # found\n    pass"),
    (
        "SCH002",
        "a borrowed self",
        """
        class LoadPart:
            def get_loads(self: Scheduler): ...  # found
            def get_more(self: Scheduler): ...
        """,
    ),
    (
        "SCH003",
        "a dataclass",
        """
        @dataclass(slots=True)
        class Load:  # found
            a: int; b: int; c: int; d: int; e: int; f: int; g: int; queues: QueueSource
            def get_loads(self): return len(self.queues.waiting)
        """,
    ),
    (
        "SCH003",
        "a plain class that stores what it is given",
        """
        class Load:  # found
            def __init__(self, a, b, c, d, e, f, g, h):
                self.a = a; self.b = b; self.c = c; self.d = d
                self.e = e; self.f = f; self.g = g; self.h = h
        """,
    ),
    ("SCH004", "a bare one", "@dataclass\nclass Load:\n    read: Callable  # found"),
    ("SCH004", "a struct's", "class Load(msgspec.Struct):\n    read: Callable  # found"),
    ("SCH004", "any parameters", "@dataclass\nclass Load:\n    read: Callable[..., int]  # found"),
    ("SCH004", "any result", "@dataclass\nclass Load:\n    read: Callable[[int], Any] | None  # found"),
    ("SCH004", "many in one", "@dataclass\nclass Load:\n    readers: dict[str, Callable]  # found"),
    (
        "SCH004",
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
        "SCH005",
        "a page of lambdas to come",
        """
        @dataclass
        class Load:
            get_running: Callable[[], int]  # found
            get_waiting: Callable[[], int]
            get_pool: Callable[[], int]
        """,
    ),
    (
        "SCH006",
        "a dataclass",
        "@dataclass\nclass Load:\n    queues: Any  # found\n    def get_loads(self): return self.queues.num",
    ),
    (
        "SCH006",
        "a plain class",
        "class Load:\n    def __init__(self, queues: Any):\n        self.queues = queues  # found",
    ),
    ("SCH007", "an imported getter", "def gate():\n    return get_parallel().tp_rank  # found"),
    (
        "SCH007",
        "a getter of a module",
        "class A:\n    def f(self): return runtime_context.get_args().port  # found",
    ),
    ("SCH007", "a default", "@dataclass\nclass A:\n    rank: int = get_parallel().tp_rank  # found"),
    ("SCH007", "the environment", "class A:\n    def f(self): return os.environ['RANK']  # found"),
    ("SCH007", "one variable of it", "RANK = os.getenv('RANK')  # found"),
    ("SCH007", "a library's singleton", "class A:\n    def f(self): return zmq.Context.instance()  # found"),
    (
        "SCH007",
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
        "SCH007",
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
        "SCH008",
        "a socket",
        "class A:\n    def __init__(self, context):\n        self.pub = context.socket(zmq.PUB)  # found",
    ),
    (
        "SCH008",
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
        "SCH008",
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
        "SCH008",
        "what an open_... function opens, and a started part",
        """
        class A:
            def __init__(self, part):
                self.sockets = open_sockets()  # found
                self.part = part
                self.part.start()  # found
        """,
    ),
    ("SCH008", "a process", "class A:\n    def __init__(self):\n        subprocess.run(['ls'])  # found"),
    (
        "SCH009",
        "in an if, negated and nested",
        """
        class A:
            def f(self):
                if not self.enable_metrics or self.config.is_enabled:  # found
                    return
        """,
    ),
    (
        "SCH010",
        "a constructor with many parameters",
        """
        class Load:
            def __init__(self, a, b, c, d, *, e, f, g, h):  # found
                self.sizes = (a, b, c, d, e, f, g, h)
        """,
    ),
    (
        "SCH011",
        "a component",
        """
        @dataclass
        class Load:  # found
            queues: Queues
            def get_loads(self): return self.queues.num
        """,
    ),
    (
        "SCH011",
        "slots that are turned off",
        """
        @dataclass(slots=False, kw_only=True)
        class Load:  # found
            queues: Queues
            def get_loads(self): return self.queues.num
        @attrs.define(slots=False)
        class Other:  # found
            queues: Queues
            def get_loads(self): return self.queues.num
        @attr.s
        class Old:  # found
            queues: Queues = attr.ib()
            def get_loads(self): return self.queues.num
        """,
    ),
    ("SCH009", "in an expression", "class A:\n    def f(self): return 1 if self.metrics_enabled else 0  # found"),
]


@pytest.mark.parametrize(
    ("rule", "code"), [pytest.param(rule, code, id=f"{rule}: {name}") for rule, name, code in BROKEN]
)
def test_each_rule_finds_its_broken_code_in_the_marked_lines(lint: Lint, head: str, rule: str, code: str) -> None:
    source = head + dedent(code)
    marked = {number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# found")}
    assert marked
    assert {line for line, found in lint(source) if found == rule} == marked


def test_every_rule_has_a_broken_example() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(RULES)
