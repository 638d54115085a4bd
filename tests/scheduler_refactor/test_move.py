"""A move takes bodies byte for byte, rewrites the callers, and refuses what would mean something else."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import msgspec
import pytest

from scheduler_refactor.apply import apply_recipe
from scheduler_refactor.recipe import (
    Accepted,
    ClassRef,
    ComponentField,
    Move,
    Port,
    Prepare,
    Recipe,
    Rename,
    RenameFile,
    Replace,
    Step,
)
from scheduler_refactor.refusals import RefusedError

SCHED, LOADS, OUT, ELSE = (f"engine/{name}.py" for name in ("scheduler", "load_mixin", "output", "other"))
HOST = ClassRef(file=SCHED, name="Scheduler")
MIXIN = ClassRef(file=LOADS, name="LoadMixin")
LOAD = ClassRef(file=LOADS, name="Load")

SCHEDULER = '''
"""A scheduler."""

from __future__ import annotations

from engine.load_mixin import LoadMixin
from engine.output import OutputMixin


class Scheduler(
    LoadMixin,
    OutputMixin,
):
    """Serves."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.running = []

        # Reports come last.
        self.init_load(3)
        self.table = {"load": self.get_load}

    def step(self):
        self.running = [*self.running, 1]
        self.load_sequence += 1
        return self.get_load()  # each step

    def close(self): ...
'''
LOAD_MIXIN = '''
"""Load reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.scheduler import Scheduler

LIMIT = 8


class LoadMixin:
    """Reports load."""

    def init_load(self: Scheduler, first: int) -> None:
        self.load_sequence = first

    # How busy it is:
    # two numbers.
    def get_load(
        self: Scheduler,
        limit = LIMIT,   # odd   spaces stay
    ):
        """Return the load.

        def get_load(self): a docstring of several lines that looks like code
        """
        s = self
        busy = len( s.running )# and so do these
        for each in self.running:
            busy += self._weight(each) if self.cfg else \\
                0

            # a comment at the end of a block
        return busy, limit
        # the last comment

    async def _weight(self, each): return self.cfg.weight[each]
'''
OUTPUT = """
class OutputMixin:
    def send(self):
        return self.get_load(limit=2), self.load_sequence
"""
OTHER = """
def watch(scheduler):
    return scheduler.get_load()

class Reader:
    def get_load(self):
        return self.get_load()
"""
TREE = {
    SCHED: SCHEDULER[1:],
    LOADS: LOAD_MIXIN[1:],
    OUT: OUTPUT[1:],
    ELSE: OTHER[1:],
    "README.md": "no Python: get_load(",
}
PREPARE = Prepare(
    component=LOAD,
    doc="Counts what waits.",
    host=HOST,
    attribute="load",
    before="self.init_load(3)",
    above="LoadMixin",
    ports=(Port(name="queues", protocol="LoadQueues", members={"running": "running: list[int]"}),),
    fields=(
        ComponentField(name="cfg", annotation="object", kind="fact"),
        ComponentField(name="load_sequence", annotation="int", kind="state"),
    ),
    host_import="from engine.load_mixin import Load",
)
MOVE = Move(
    source=MIXIN,
    component=LOAD,
    host=HOST,
    attribute="load",
    methods=("init_load", "get_load", "_weight"),
    routes={"running": "queues"},
    facts=("cfg",),
    states=("load_sequence",),
    receivers=("scheduler",),
)


def applied(*steps: Step, tree: Mapping[str, str] = TREE) -> dict[str, str]:
    return apply_recipe(tree, Recipe(title="Move load", steps=steps))


def edited(path: str, old: str, new: str, tree: Mapping[str, str] = TREE) -> dict[str, str]:
    assert tree[path].count(old) == 1, old
    return dict(tree) | {path: tree[path].replace(old, new)}


def test_a_prepared_tree_has_the_component_and_moves_nothing() -> None:
    after = applied(PREPARE)
    assert after[LOADS] == LOAD_MIXIN[1:].replace(
        "from typing import TYPE_CHECKING\n",
        "from dataclasses import dataclass, field\nfrom typing import TYPE_CHECKING, Protocol\n",
    ).replace(
        "class LoadMixin:",
        '''class LoadQueues(Protocol):
    """The members of the scheduler that `Load` uses."""

    running: list[int]


@dataclass(slots=True, kw_only=True)
class Load:
    """Counts what waits."""

    queues: LoadQueues
    cfg: object
    load_sequence: int = field(init=False, repr=False)


class LoadMixin:''',
    )
    assert after[SCHED] == SCHEDULER[1:].replace("import LoadMixin\n", "import Load, LoadMixin\n").replace(
        "        # Reports come last.\n        self.init_load(3)",
        "        self.load = Load(queues=self, cfg=self.cfg)\n        # Reports come last.\n        self.init_load(3)",
    )
    assert {path: text for path, text in after.items() if TREE[path] != text}.keys() == {
        LOADS,
        SCHED,
    }


def test_bodies_move_byte_for_byte_and_callers_follow() -> None:
    after = applied(PREPARE, MOVE)
    moved = LOAD_MIXIN[LOAD_MIXIN.index("    def init_load") :]
    moved = moved.replace("self: Scheduler", "self").replace("s.running", "s.queues.running")
    moved = moved.replace("in self.running", "in self.queues.running")
    assert after[LOADS].endswith(f"load_sequence: int = field(init=False, repr=False)\n\n{moved}")
    assert "LoadMixin" not in "".join(after.values())
    assert "TYPE_CHECKING" not in after[LOADS]
    scheduler = after[SCHED]
    assert "class Scheduler(\n    OutputMixin,\n):" in scheduler
    assert "from engine.load_mixin import Load\n" in scheduler
    assert "        self.load.init_load(3)\n" in scheduler
    assert '{"load": self.load.get_load}' in scheduler
    assert "        self.load.load_sequence += 1\n        return self.load.get_load()  # each step\n" in scheduler
    assert "self.load.get_load(limit=2), self.load.load_sequence" in after[OUT]
    assert after[ELSE] == OTHER[1:].replace("scheduler.get_load", "scheduler.load.get_load")
    assert after["README.md"] == TREE["README.md"]
    for path, text in after.items():
        assert not path.endswith(".py") or ast.parse(text)


def test_the_moved_code_runs_as_before() -> None:
    results = []
    for tree in (TREE, applied(PREPARE, MOVE)):
        code = [tree[f"engine/{name}.py"] for name in ("load_mixin", "output", "scheduler")]
        code = [text.replace("async def _weight", "def _weight").replace("# and so do these", "") for text in code]
        code = ["\n".join(line for line in text.split("\n") if not line.startswith("from engine")) for text in code]
        code[1:] = [text.replace("from __future__ import annotations", "") for text in code[1:]]
        names: dict[str, type] = {"__name__": __name__}  # type: ignore[dict-item]
        exec("\n".join(code), names)
        scheduler = names["Scheduler"](None)
        results.append([scheduler.step(), scheduler.send(), scheduler.step(), scheduler.table["load"]()])
    assert results[0] == results[1]


def test_the_last_base_leaves_no_comma_and_comments_stay_in_their_place() -> None:
    tree = edited(SCHED, "    LoadMixin,\n    OutputMixin,\n", "    OutputMixin, LoadMixin\n")
    prepared = edited(LOADS, "repr=False)\n", "repr=False)\n    # the end of the fields\n", applied(PREPARE, tree=tree))
    after = applied(MOVE, tree=prepared)
    assert "class Scheduler(\n    OutputMixin\n):" in after[SCHED]
    assert "repr=False)\n    # the end of the fields\n\n    def init_load(" in after[LOADS]


def test_a_function_of_a_module_is_no_member_of_the_host() -> None:
    tree = edited(ELSE, "def watch", "import far.away\n\ndef other():\n    return far.away.get_load()\n\ndef watch")
    assert "return far.away.get_load()" in applied(PREPARE, MOVE, tree=tree)[ELSE]


def test_delegates_keep_the_old_names() -> None:
    delegates = ("get_load", "_weight", "load_sequence")
    step = msgspec.structs.replace(MOVE, delegates=delegates, delegate_note="until 0.8", receivers=())
    tree = edited(LOADS, "limit = LIMIT,   # odd   spaces stay", "limit: int = 8, *more, key=None, **rest")
    after = applied(PREPARE, step, tree=tree)
    assert after[SCHED].endswith("""    def close(self): ...

    def get_load(self, limit: int=8, *more, key=None, **rest):  # forwards until 0.8: use self.load
        return self.load.get_load(limit, *more, key=key, **rest)

    async def _weight(self, each):  # forwards until 0.8: use self.load
        return await self.load._weight(each)

    @property
    def load_sequence(self):  # forwards until 0.8: use self.load
        return self.load.load_sequence

    @load_sequence.setter
    def load_sequence(self, value):
        self.load.load_sequence = value
""")
    assert after[ELSE] == OTHER[1:]


def test_a_method_moves_to_another_file_with_its_imports() -> None:
    target = ClassRef(file="engine/reports/load.py", name="Load")
    tree = edited(
        LOADS,
        "from typing import TYPE_CHECKING\n",
        "import math\nfrom typing import TYPE_CHECKING, Any\n",
    )
    tree = edited(LOADS, "limit = LIMIT", "limit: Any = 8", tree)
    tree = edited(LOADS, "return busy, limit", "return math.ceil(busy), limit", tree)
    prepare = msgspec.structs.replace(
        PREPARE, component=target, above="", host_import="from engine.reports.load import Load"
    )
    after = applied(prepare, msgspec.structs.replace(MOVE, component=target), tree=tree)
    assert after["engine/reports/load.py"].startswith('''"""Counts what waits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol


class LoadQueues(Protocol):
''')
    assert "class" not in after[LOADS]
    assert "from engine.reports.load import Load\n" in after[SCHED]


REFUSED = [
    # What the bodies use
    (LOADS, "self.cfg else", "self.waiting else", "unrouted", "waiting"),
    (LOADS, "return busy, limit", "self.cfg = 1", "fact-rebound", "cfg"),
    (LOADS, "self.load_sequence = first", "self.cfg = first", "fact-rebound", "cfg"),
    (LOADS, "return busy, limit", "self.busy = 1", "unrouted", "busy"),
    (LOADS, "return busy, limit", "return super().get_load()", "super", "get_load"),
    (LOADS, "return busy, limit", "return __class__", "super", "__class__"),
    (LOADS, "return busy, limit", "return self.__busy", "private-name", "__busy"),
    (LOADS, "return busy, limit", "global LIMIT; LIMIT = 1", "global-write", "LIMIT"),
    (LOADS, "return busy, limit", "return getattr(self, limit)", "indirect", "get_load"),
    (LOADS, "return busy, limit", "return vars(self)", "indirect", "get_load"),
    (LOADS, "return busy, limit", "return hasattr(self, 'load_sequence')", "by-name", "load_sequence"),
    (LOADS, "return busy, limit", "return print(self)", "whole-host", "get_load"),
    (LOADS, "return busy, limit", "return self", "whole-host", "get_load"),
    (LOADS, "return busy, limit", "return busy is self", "whole-host", "get_load"),
    (LOADS, "return busy, limit", "return isinstance(self, int)", "whole-host", "get_load"),
    (LOADS, "return busy, limit", "return f'{self}'", "whole-host", "get_load"),
    (LOADS, "return busy, limit", "return type(self).running", "class", "running"),
    (LOADS, "        s = self\n", "        s = self if limit else limit\n", "uncertain", "running"),
    (LOADS, "return busy, limit", "return Scheduler.running", "class", "running"),
    # Where they are evaluated
    (LOADS, "limit = LIMIT", "limit = make()", "default", "get_load"),
    (LOADS, "limit = LIMIT", "limit = TWICE", "default", "TWICE"),
    (LOADS, "    # How busy", "    @wrapped(1)\n    # How busy", "decorator", "wrapped"),
    (LOADS, '    """Reports load."""\n', "    N = 1\n", "default", "N"),
    (LOADS, "    # How busy", "    @classmethod\n    # How busy", "decorator", "classmethod"),
    # Who else defines or reaches a member
    (OUT, "    def send", "    def get_load(self): ...\n    def send", "override", "get_load"),
    (ELSE, "class Reader", "class Fast(Scheduler):\n    _weight = 1\nclass Reader", "override", "_weight"),
    (ELSE, "scheduler.get_load()", "engine.get_load()", "unknown-receiver", "get_load"),
    (ELSE, "return scheduler.get_load()", "return 'get_load'", "by-name", "get_load"),
    (ELSE, "return scheduler.get_load()", "patch.object(Scheduler, 'get_load')", "by-name", "get_load"),
    (OUT, "self.get_load(limit=2)", "getattr(self, 'get_load')", "by-name", "get_load"),
    (OUT, "self.get_load(limit=2)", "super().get_load()", "super", "get_load"),
    (OUT, "self.get_load(limit=2)", "LoadMixin.get_load(self)", "class", "get_load"),
    (OUT, "self.get_load(limit=2)", "(self or x).get_load()", "uncertain", "get_load"),
    (ELSE, "class Reader", "class Other(LoadMixin): ...\nclass Reader", "mixin-name", "LoadMixin"),
    (ELSE, "return scheduler.get_load()", "return 'engine.load_mixin.LoadMixin'", "mixin-name", "LoadMixin"),
    (OUT, "class OutputMixin:\n", "class OutputMixin:\n    load_sequence = 4\n", "class-attribute", "load_sequence"),
    # When the component is made
    (SCHED, "        self.cfg = cfg\n", "        self.cfg = cfg\n        self.send()\n", "before-construction", "load"),
    (SCHED, "        self.load_sequence += 1\n", "        self.cfg = 2\n", "fact-rebound", "cfg"),
    # What would be lost
    (LOADS, "class LoadMixin:", "class LoadMixin:  # for a reason", "comment", "LoadMixin"),
]  # fmt: skip
IDS = [f"{row[3]} {row[2]!r:.30}" for row in REFUSED]
IMPORTING = edited(LOADS, "class LoadMixin:", "TWICE = 1\nTWICE = 2\n\n\nclass LoadMixin:")
IMPORTING = edited(OUT, "class Out", "from engine.load_mixin import LoadMixin\nclass Out", IMPORTING)
IMPORTING = edited(ELSE, "def watch", "from engine.load_mixin import LoadMixin\ndef watch", IMPORTING)
IMPORTING = edited(ELSE, "def watch", "from engine.scheduler import Scheduler\ndef watch", IMPORTING)


@pytest.mark.parametrize(("path", "old", "new", "rule", "name"), REFUSED, ids=IDS)
def test_a_change_of_meaning_is_refused_with_its_place(path: str, old: str, new: str, rule: str, name: str) -> None:
    tree = IMPORTING
    if new == "    N = 1\n":
        tree = edited(LOADS, "limit = LIMIT", "limit = N", tree)
    after = applied(PREPARE, tree=tree)
    after = edited(path, old, new, after)
    with pytest.raises(RefusedError) as raised:
        applied(MOVE, tree=after)
    found = [refusal for refusal in raised.value.refusals if (refusal.rule, refusal.name) == (rule, name)]
    assert found, str(raised.value)
    line = after[found[0].path].splitlines()[found[0].line - 1]
    words = new.strip().replace("\n", " ").split()
    assert name in line or any(word.strip("()") in line for word in words), f"{found[0]} is at {line!r}"


def test_the_tree_of_the_refusals_is_moved_without_their_edits() -> None:
    """So that each refusal above is due to its own edit."""
    tree = IMPORTING
    assert "LoadMixin" not in "".join(applied(PREPARE, MOVE, tree=tree).values())


def test_an_accepted_refusal_is_none() -> None:
    tree = edited(LOADS, "    # How busy", "    @wrapped(1)\n    # How busy")
    accepted = (Accepted(rule="decorator", name="wrapped", why="It only measures."),)
    after = applied(PREPARE, msgspec.structs.replace(MOVE, accepted=accepted), tree=tree)
    assert "\n\n    @wrapped(1)\n    # How busy it is:\n" in after[LOADS]


@pytest.mark.parametrize("call", ["print(self)", "print(1, key=self)", "[s]", "getattr(self, 'running')"])
def test_a_whole_host_is_passed_through_a_port(call: str) -> None:
    tree = edited(LOADS, "return busy, limit", f"return {call}")
    after = applied(PREPARE, msgspec.structs.replace(MOVE, whole="queues"), tree=tree)
    routed = call.replace("self", "self.queues").replace("[s]", "[s.queues]")
    assert f"        return {routed}\n" in after[LOADS]


def test_a_renamed_method_takes_its_users_along() -> None:
    rename = Rename(owner=HOST, old="get_load", new="read_load", receivers=("scheduler",))
    after = applied(rename)
    changed = {path: text.replace("scheduler.get_load", "scheduler.read_load") for path, text in TREE.items()}
    for path in (SCHED, OUT):
        changed[path] = changed[path].replace("self.get_load", "self.read_load")
    changed[LOADS] = LOAD_MIXIN[1:].replace("def get_load(\n", "def read_load(\n")
    assert after == changed


def test_a_renamed_file_takes_its_imports_along() -> None:
    tree = dict(TREE) | {"engine/more.py": "from .load_mixin import LIMIT\nfrom .load_mixin_two import X\n"}
    after = applied(RenameFile(file=LOADS, to="engine/load.py"), tree=tree)
    assert after["engine/load.py"] == TREE[LOADS]
    assert LOADS not in after
    assert after["engine/more.py"] == "from .load import LIMIT\nfrom .load_mixin_two import X\n"
    assert "from engine.load import LoadMixin\n" in after[SCHED]


REBOUND = ComponentField(name="running", annotation="list", kind="fact")
SAME = ComponentField(name="queues", annotation="int", kind="state")
UNKNOWN = Port(name="q", protocol="Q", members={"x": "x: int"})
TO_OUT = RenameFile(file=OUT, to="engine/out.py")


def other(step: Step, **changes: object) -> Step:
    return msgspec.structs.replace(step, **changes)


@pytest.mark.parametrize(
    ("step", "more", "rule"),
    [
        pytest.param(other(MOVE, methods=("get_load", "unheard_of")), "", "missing-method", id="no such method"),
        pytest.param(other(MOVE, facts=("cfg", "unheard_of")), "", "missing-field", id="no such field"),
        pytest.param(other(MOVE, routes={"running": "unheard_of"}), "", "missing-field", id="no such port"),
        pytest.param(other(MOVE, source=ClassRef(file=ELSE, name="Reader")), "", "no-mixin", id="another class"),
        pytest.param(other(MOVE, component=ClassRef(file=ELSE, name="Load")), "", "missing-class", id="no component"),
        pytest.param(other(MOVE, delegates=("close",)), "", "missing-method", id="a delegate that stays"),
        pytest.param(other(PREPARE, attribute="running"), "", "name-clash", id="a taken attribute"),
        pytest.param(other(PREPARE, attribute="step"), "", "name-clash", id="a taken method"),
        pytest.param(other(PREPARE, component=MIXIN), "", "name-clash", id="a taken class"),
        pytest.param(other(PREPARE, before="self.unheard_of()"), "", "place", id="no place"),
        pytest.param(other(PREPARE, before="self.cfg = cfg"), "", "fact-unbound", id="too early"),
        pytest.param(other(PREPARE, method="unheard_of", before=""), "", "place", id="no method"),
        pytest.param(other(PREPARE, above="Unheard"), "", "missing-class", id="above nothing"),
        pytest.param(other(PREPARE, fields=(REBOUND,)), "", "fact-rebound", id="rebound"),
        pytest.param(other(PREPARE, fields=(SAME,)), "", "name-clash", id="two fields"),
        pytest.param(other(PREPARE, ports=(UNKNOWN,)), "", "unknown-member", id="none"),
        pytest.param(other(PREPARE, host=ClassRef(file=ELSE, name="Scheduler")), "", "missing-class", id="no host"),
        pytest.param(Rename(owner=HOST, old="get_load", new="step", receivers=("scheduler",)), "", "name-clash",
                     id="a taken name"),
        pytest.param(Rename(owner=HOST, old="get_load", new="read_load"), "", "unknown-receiver", id="a receiver"),
        pytest.param(RenameFile(file="engine/no.py", to="engine/load.py"), "", "missing-file", id="no file"),
        pytest.param(RenameFile(file=OUT, to=ELSE), "", "name-clash", id="a taken file"),
        pytest.param(TO_OUT, "import engine.output", "import", id="import"),
        pytest.param(TO_OUT, "from engine import output", "import", id="module"),
        pytest.param(TO_OUT, "'engine.output'", "by-name", id="string"),
        pytest.param(RenameFile(file="engine/more.py", to="m.py"), "from .x import y", "relative-import", id="dots"),
    ],
)  # fmt: skip
def test_a_step_that_does_not_fit_is_refused(step: Step, more: str, rule: str) -> None:
    prepared = (PREPARE,) if isinstance(step, Move) else ()
    with pytest.raises(RefusedError) as raised:
        applied(*prepared, step, tree=dict(TREE) | {"engine/more.py": f"{more}\n"})
    assert rule in {refusal.rule for refusal in raised.value.refusals}


ACCEPTED = tuple(Accepted(rule=rule, name="*", why="Needed.") for rule in ("missing-class", "place"))


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(
            msgspec.structs.replace(MOVE, component=ClassRef(file=ELSE, name="Load"), accepted=ACCEPTED), id="class"
        ),
        pytest.param(msgspec.structs.replace(PREPARE, before="self.never = 1", accepted=ACCEPTED), id="place"),
    ],
)
def test_what_is_missing_cannot_be_accepted(step: Step) -> None:
    with pytest.raises(RefusedError, match=r"\[(missing-class|place) "):
        applied(step)


def test_a_replaced_text_is_there_once() -> None:
    step = Replace(file=ELSE, old="scheduler.get_load()", new="1", why="By hand.")
    assert "return 1\n" in applied(step)[ELSE]
    with pytest.raises(RefusedError, match="there 2 times"):
        applied(msgspec.structs.replace(step, old="get_load()"))


def test_paths_limit_what_a_recipe_sees() -> None:
    rename = Rename(owner=HOST, old="get_load", new="read")
    recipe = Recipe(title="Rename", steps=(rename,), paths=(SCHED, LOADS, OUT))
    assert apply_recipe(TREE, recipe)[ELSE] == TREE[ELSE]


def test_other_newlines_stay() -> None:
    tree = {path: text.replace("\n", "\r\n") for path, text in TREE.items()}
    after = applied(PREPARE, MOVE, tree=tree)
    plain = applied(PREPARE, MOVE)
    assert {path: text.replace("\r\n", "\n") for path, text in after.items()} == plain
    assert after[SCHED].count("\r\n") == after[SCHED].count("\n")


def test_a_moved_tree_moves_no_second_time() -> None:
    with pytest.raises(RefusedError):
        applied(PREPARE, MOVE, MOVE)
