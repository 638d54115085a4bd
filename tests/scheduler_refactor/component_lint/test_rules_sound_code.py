"""Test that each rule accepts correct code that resembles its broken code."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import pytest

from scheduler_refactor.component_lint import RULES

Lint = Callable[..., list[tuple[int, str]]]

# (code of the rule, code in which the rule finds no problem)
SOUND = [
    (
        "SCH001",
        """
        @dataclass
        class Load:
            queues: QueueSource
            scheduler: SchedulerConfig  # its sizes
            def get_loads(self): return self.queues.waiting + self.scheduler.page_size
        class MyScheduler:
            def __init__(self):
                self.load = Load(queues=self)
        @dataclass
        class Replica:  # a record without behaviour
            scheduler: MyScheduler
        def run(scheduler: MyScheduler):  # the caller of the scheduler
            scheduler.step()
        class Steps(Protocol):
            scheduler: MyScheduler
        """,
    ),
    (
        "SCH002",
        """
        class Load(ABC):
            def __enter__(self: SelfT) -> SelfT: ...
            def copy(self: "Load") -> "Load": ...
        """,
    ),
    (
        "SCH003",
        """
        @dataclass
        class Load:
            KIND: ClassVar[str] = "load"
            _: KW_ONLY
            a: int; b: int; c: int; d: int; e: int; f: int; g: int
            _h: int = field(default=0, init=False)
            def get_loads(self): ...
        @dataclass(frozen=True)
        class Facts:
            a: int; b: int; c: int; d: int; e: int; f: int; g: int; h: int
            def get_loads(self): ...
        @attrs.frozen
        class More:
            a: int; b: int; c: int; d: int; e: int; f: int; g: int; h: int
            def get_loads(self): ...
        @dataclass
        class Record:
            a: int; b: int; c: int; d: int; e: int; f: int; g: int; h: int
            @property
            def total(self): return self.a
        class Own:
            def __init__(self, a):
                self.a = a; self.b = 0; self.c = 0; self.d = 0; self.e = 0; self.f = 0; self.g = 0; self.h = 0
        class Twice:
            def __init__(self, a, b, c, d, e):
                self.a = a; self.b = b; self.c = c; self.d = d
                self.a = b; self.b = c; self.c = d; self.d = e
        """,
    ),
    (
        "SCH004",
        """
        @dataclass
        class Load:
            clock: Callable[[], float]
            waiting: Sequence[int]
        class Verbs(Protocol):
            read: Callable
        def sort(key: Callable): ...
        """,
    ),
    (
        "SCH005",
        "@dataclass\nclass Load:\n    clock: Callable[[], float]\n    sleep: Callable[[float], None]",
    ),
    (
        "SCH006",
        """
        @dataclass
        class Load:
            options: dict[str, Any]
            def get_loads(self, what: Any): ...
        class Frame(msgspec.Struct):
            body: Any
        """,
    ),
    (
        "SCH007",
        """
        class A:
            def f(self, get_load: Callable[[], int], environ: dict):
                return get_load(), self.load.get_loads(), self.get_more(), environ["RANK"]
            def g(self):
                get_size = self.size
                return get_size(), threading.get_ident(), get_parallel_of(self.rank)
        def get_parser(): return object()
        def main(): return get_parser()
        limit: int = 8
        """,
    ),
    (
        "SCH008",
        """
        class A:
            def __init__(self, socket, matches: re.Match):
                self._socket = socket
                self._thread = threading.Thread(target=self.run)
                self._lock = threading.Lock()
                self._open = lambda: open("log")
                self.first = matches.start()
            def start(self):
                self._thread.start()
            def open(self):
                self._socket.bind("tcp://*:0")
            def run(self): ...
        def open_a(context):
            return A(context.socket(zmq.PUB), None)
        """,
    ),
    (
        "SCH009",
        """
        class A:
            def f(self, enabled: bool):
                if enabled or self.parallel.owns_kv_stream or self.rehabilitated:
                    self.enable_later = True
        """,
    ),
    (
        "SCH010",
        """
        class Load:
            def __init__(self, a, b, c, d, *rest, e, f, g, **more):
                self.sizes = (a, b, c, d, e, f, g)
            def get_loads(self, a, b, c, d, e, f, g, h): ...
        class Wide:  # reported once, by its fields
            def __init__(self, a, b, c, d, e, f, g, h):
                self.a = a; self.b = b; self.c = c; self.d = d
                self.e = e; self.f = f; self.g = g; self.h = h
        def make(a, b, c, d, e, f, g, h): ...
        """,
    ),
    (
        "SCH011",
        """
        @dataclass(slots=True)
        class Load:
            queues: Queues
            def get_loads(self): return self.queues.num
        @attrs.define
        class Other:
            queues: Queues
            def get_loads(self): return self.queues.num
        @dataclass
        class Record:
            num_waiting: int
        class Plain:
            def __init__(self, queues): self.queues = queues
            def get_loads(self): return self.queues.num
        """,
    ),
]


@pytest.mark.parametrize(("rule", "code"), SOUND, ids=[rule for rule, _ in SOUND])
def test_each_rule_accepts_its_correct_code(lint: Lint, head: str, rule: str, code: str) -> None:
    assert [line for line, found in lint(head + dedent(code)) if found == rule] == []


def test_every_rule_has_a_correct_example() -> None:
    assert {rule for rule, _ in SOUND} == set(RULES)


def test_a_file_named_config_may_read_the_environment(lint: Lint) -> None:
    source = "import os\nport = os.environ.get('PORT')\n"
    assert lint(source, name="engine/config.py") == []
    assert lint(source, name="engine/configuration.py") == [(2, "SCH007")]
