"""Wrong moves, as a table: what goes wrong, and which net finds it.

The engine has three files. Its right move makes a component of `ResultMixin`. A row changes either the engine before
the move, so that this move would change its meaning, or the result of the move, as a person does by mistake.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from scheduler_refactor.recipe import ClassRef, ComponentField, Move, Port, Prepare, Recipe

__all__ = ["ENGINE", "RECIPE", "WRONG_MOVES", "Hazard", "Mistake", "Net", "changed"]

Net: TypeAlias = Literal["refused", "verify", "replay"]

MIXIN, HOST, TEXT, COMPONENT = "engine/mixin.py", "engine/host.py", "engine/text.py", "engine/results.py"

ENGINE = {
    "engine/__init__.py": "",
    TEXT: '''"""Texts."""

LIMIT = 2


def label(count: int) -> str:
    return f"batch of {count}"
''',
    MIXIN: '''"""Results of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.text import LIMIT, label

if TYPE_CHECKING:
    from engine.host import Scheduler


class ResultMixin:
    """Processes results."""

    def init_results(self: Scheduler) -> None:
        self.num_ended = 0
        self.history = []

    def process(self: Scheduler, batch: list[list], limit: int = 3) -> int:
        # Ends come first, so that their slots are free again.
        for request in batch:
            request[1] -= 1
            if request[1] <= 0:
                self.end(request)
        self.send(f"{len(batch)} processed")
        self.note(label(len(batch)))
        self.running = [each for each in self.running if each[1] > 0]
        return min(limit, len(self.running))

    def end(self: Scheduler, request: list) -> None:
        self.num_ended += 1
        self.send(f"{request[0]} ends as number {self.num_ended}")  # clients count on the number

    def note(self: Scheduler, text: str) -> None:
        self.history.append(text)
        if len(self.history) > LIMIT:
            self.history.pop(0)

    @property
    def is_idle(self: Scheduler) -> bool:
        return not self.running and not self.waiting
''',
    HOST: '''"""The scheduler."""

from __future__ import annotations

from collections.abc import Callable

from engine.mixin import ResultMixin


class Scheduler(ResultMixin):
    """Runs two requests at a time."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send
        self.waiting = []
        self.running = []
        self.init_results()

    def submit(self, rid: str, num_tokens: int) -> None:
        if num_tokens > 4:
            raise ValueError(f"{rid} is too long")
        self.waiting.append([rid, num_tokens])

    def step(self) -> None:
        while self.waiting and len(self.running) < 2:
            self.running.append(self.waiting.pop(0))
        left = self.process(self.running)
        self.send(f"{left} left, {self.num_ended} ended, {self.history}")

    def close(self) -> None:
        for request in self.running:
            self.end(request)
        self.send("idle" if self.is_idle else "stopped")
''',
}

_HOST, _COMPONENT = ClassRef(file=HOST, name="Scheduler"), ClassRef(file=COMPONENT, name="Results")
_QUEUES = {"running": "running: list[list]", "waiting": "waiting: list[list]"}

RECIPE = Recipe(
    title="Make a component of the results",
    steps=(
        Prepare(
            component=_COMPONENT,
            doc="Processes results.",
            host=_HOST,
            attribute="results",
            before="self.init_results()",
            ports=(Port(name="queues", protocol="Queues", members=_QUEUES),),
            fields=(
                ComponentField(name="send", annotation="Callable[[str], None]", kind="fact"),
                ComponentField(name="num_ended", annotation="int", kind="state"),
                ComponentField(name="history", annotation="list[str]", kind="state"),
            ),
            imports=("from collections.abc import Callable",),
            host_import="from engine.results import Results",
        ),
        Move(
            source=ClassRef(file=MIXIN, name="ResultMixin"),
            component=_COMPONENT,
            host=_HOST,
            attribute="results",
            methods=("init_results", "process", "end", "note", "is_idle"),
            routes={"running": "queues", "waiting": "queues"},
            facts=("send",),
            states=("num_ended", "history"),
        ),
    ),
)


class Hazard(msgspec.Struct, frozen=True):
    """Code before the move whose meaning this move would change: the move is refused.

    Attributes:
        name: of the wrong move.
        file: the file that is changed before the move.
        old: text in it; empty to append.
        new: the text instead.
        rule: of the refusal; empty for a survivor, which a replay finds.
    """

    name: str
    file: str
    old: str
    new: str
    rule: str


class Mistake(msgspec.Struct, frozen=True):
    """A difference between the right result and a commit.

    Attributes:
        name: of the wrong move.
        file: the file that is changed after the move.
        old: text in it; empty to append.
        new: the text instead.
        replay: whether the workloads show it, too.
    """

    name: str
    file: str
    old: str
    new: str
    replay: bool


def changed(text: str, old: str, new: str) -> str:
    """Return the text with one place changed."""
    if not old:
        return text + new
    assert text.count(old) == 1, f"{text.count(old)} times: {old!r}"
    return text.replace(old, new)


_END = "    def end(self: Scheduler, request: list) -> None:\n"
_CHECK = '        if num_tokens > 4:\n            raise ValueError(f"{rid} is too long")\n'
_APPEND = "        self.waiting.append([rid, num_tokens])\n"

HAZARDS = (
    Hazard(
        "the host overrides a method",
        HOST,
        "",
        "\n    def end(self, request):\n        super().end(request)\n",
        "override",
    ),
    Hazard(
        "a variant of the host overrides a method",
        HOST,
        "",
        "\n\nclass Other(Scheduler):\n    def note(self, text): ...\n",
        "override",
    ),
    Hazard(
        "super() in a body",
        MIXIN,
        "        self.num_ended += 1\n",
        "        self.num_ended += 1\n        super().__init__()\n",
        "super",
    ),
    Hazard(
        "a body names its class",
        MIXIN,
        "        self.num_ended += 1\n",
        "        self.num_ended += 1\n        __class__.last = 1\n",
        "super",
    ),
    Hazard(
        "name mangling",
        MIXIN,
        "        self.num_ended += 1\n",
        "        self.num_ended += 1\n        self.__last = request\n",
        "private-name",
    ),
    Hazard("a decorator that sees the class", MIXIN, _END, "    @functools.cached_property\n" + _END, "decorator"),
    Hazard(
        "the order of two decorators", MIXIN, _END, "    @property\n    @functools.wraps(label)\n" + _END, "decorator"
    ),
    Hazard(
        "reached by getattr",
        HOST,
        "            self.end(request)\n",
        '            getattr(self, "en" "d")(request)\n',
        "by-name",
    ),
    Hazard("named in a table of calls", HOST, "", '\n\nCALLS = {"end": "end"}\n', "by-name"),
    Hazard("patched in a test", HOST, "", '\n\ndef test(patch):\n    patch.object(Scheduler, "note")\n', "by-name"),
    Hazard(
        "the host has slots",
        HOST,
        '    """Runs two requests at a time."""\n',
        '    """Runs two requests at a time."""\n\n    __slots__ = ("running", "send", "waiting")\n',
        "slots",
    ),
    Hazard(
        "a class attribute that instances share",
        MIXIN,
        '    """Processes results."""\n',
        '    """Processes results."""\n\n    history = []\n',
        "class-attribute",
    ),
    Hazard("a default that is computed in the class", MIXIN, "limit: int = 3", "limit: int = len(MANY)", "default"),
    Hazard(
        "a global that a body binds",
        MIXIN,
        "        self.num_ended += 1\n",
        "        global COUNT\n        COUNT = 1\n        self.num_ended += 1\n",
        "global-write",
    ),
    Hazard(
        "a fact that the host rebinds", HOST, "", "\n    def mute(self):\n        self.send = print\n", "fact-rebound"
    ),
    Hazard(
        "the whole host is passed on",
        MIXIN,
        "        self.num_ended += 1\n",
        "        self.num_ended += 1\n        label(self)\n",
        "whole-host",
    ),
    Hazard(
        "a member that the recipe forgets",
        MIXIN,
        "        self.num_ended += 1\n",
        "        self.num_ended += 1\n        self.extra = 1\n",
        "unrouted",
    ),
    Hazard(
        "a caller with an unknown receiver",
        HOST,
        "",
        "\n\ndef stop(scheduler):\n    scheduler.end([])\n",
        "unknown-receiver",
    ),
    Hazard(
        "a call before the component exists",
        HOST,
        "        self.running = []\n",
        '        self.running = []\n        self.note("early")\n',
        "before-construction",
    ),
    Hazard(
        "reached by a computed name",
        HOST,
        "            self.end(request)\n",
        '            getattr(self, "e" + "nd")(request)\n',
        "",
    ),
    Hazard(
        "an attribute with a computed name",
        MIXIN,
        "        self.num_ended += 1\n",
        "        self.num_ended += 1\n        setattr(self, request[0], 1)\n",
        "indirect",
    ),
    Hazard(
        "the dictionary of the host",
        MIXIN,
        "        self.num_ended += 1\n",
        "        self.num_ended += 1\n        vars(self).clear()\n",
        "indirect",
    ),
    Hazard(
        "a name that means something else in the new file",
        COMPONENT,
        "",
        "from __future__ import annotations\n\nLIMIT = 9\n",
        "name-clash",
    ),
    Hazard(
        "a name captured from the old file",
        MIXIN,
        "import LIMIT, label\n",
        "import LIMIT\n\n\ndef label(count):\n    return str(count)\n",
        "captured-name",
    ),
    Hazard("annotations that are evaluated in the new file", COMPONENT, "", '"""Results."""\n', "annotations"),
)
"""The code is read and never run, so it need not be complete."""

MISTAKES = (
    Mistake("a forgotten call site", HOST, "self.results.process(self.running)", "self.process(self.running)", True),
    Mistake("a forgotten state", HOST, "{self.results.num_ended} ended", "{self.num_ended} ended", True),
    Mistake("a lost comment", COMPONENT, "        # Ends come first, so that their slots are free again.\n", "", False),
    Mistake("a lost comment behind a line", COMPONENT, "  # clients count on the number", "", False),
    Mistake(
        "two calls swapped",
        COMPONENT,
        '        self.num_ended += 1\n        self.send(f"{request[0]} ends as number {self.num_ended}")',
        '        self.send(f"{request[0]} ends as number {self.num_ended}")\n        self.num_ended += 1',
        True,
    ),
    Mistake("a changed default", COMPONENT, "limit: int = 3", "limit: int = 1", True),
    Mistake("a default evaluated elsewhere", COMPONENT, "limit: int = 3", "limit: int = LIMIT + 1", False),
    Mistake(
        "mutation in place instead of rebinding",
        COMPONENT,
        "        self.queues.running = [",
        "        self.queues.running[:] = [",
        False,
    ),
    Mistake(
        "rebinding instead of mutation in place",
        COMPONENT,
        "        self.history.append(text)\n",
        "        self.history = [*self.history, text]\n",
        False,
    ),
    Mistake(
        "a list that is bound when the component is constructed",
        HOST,
        "queues=self,",
        "queues=type('Queues', (), {'running': self.running, 'waiting': self.waiting}),",
        True,
    ),
    Mistake(
        "a state that all instances share",
        COMPONENT,
        "self) -> None:\n        self.num_ended = 0\n        self.history = []",
        "self, history=[]) -> None:\n        self.num_ended = 0\n        self.history = history",
        True,
    ),
    Mistake("a property turned into a method", COMPONENT, "    @property\n    def is_idle", "    def is_idle", True),
    Mistake(
        "a value captured from another module",
        COMPONENT,
        "from engine.text import LIMIT, label\n",
        "from engine.text import label\n\nLIMIT = 3\n",
        True,
    ),
    Mistake("another order of exceptions", HOST, f"{_CHECK}{_APPEND}", f"{_APPEND}{_CHECK}", True),
    Mistake("another type of exception", HOST, "raise ValueError(", "raise RuntimeError(", True),
    Mistake(
        "a lost result",
        COMPONENT,
        "        return min(limit, len(self.queues.running))\n",
        "        min(limit, len(self.queues.running))\n",
        True,
    ),
    Mistake(
        "another local",
        COMPONENT,
        "for request in batch:\n            request[1] -= 1\n            if request[1] <= 0:",
        "for each in batch:\n            request = each\n            request[1] -= 1\n            if request[1] <= 0:",
        False,
    ),
    Mistake(
        "another format of the same code",
        COMPONENT,
        "        return min(limit, len(self.queues.running))\n",
        "        return min(\n            limit, len(self.queues.running)\n        )\n",
        False,
    ),
    Mistake("an edit on the way", COMPONENT, "if len(self.history) > LIMIT:", "if len(self.history) >= LIMIT:", True),
    Mistake(
        "another annotation", COMPONENT, "    def note(self, text: str)", "    def note(self, text: object)", False
    ),
    Mistake(
        "a message sent twice",
        COMPONENT,
        '        self.send(f"{len(batch)} processed")\n',
        '        self.send(f"{len(batch)} processed")\n        self.send("")\n',
        True,
    ),
    Mistake("a change of another file", TEXT, '"""Texts."""', '"""All texts."""', False),
    Mistake(
        "the component constructed too early",
        HOST,
        "        self.running = []\n",
        "        self.running = []\n        self.results.note('early')\n",
        True,
    ),
)

WRONG_MOVES: tuple[Hazard | Mistake, ...] = (*HAZARDS, *MISTAKES)
