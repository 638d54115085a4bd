"""Play a workload on a version of a scheduler, record all of its exits, and compare two versions.

A user writes one `Harness`: which exits there are, which workloads, and how to run one. The kit plays it on each
`ModuleTree` and compares the recordings. `workload_search` generates the workloads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from scheduler_components._internal.virtual_clock import VirtualClock
from scheduler_components.errors import ComponentError, ConfigError, DecodeError
from scheduler_refactor.module_tree import START_S, ModuleTree
from scheduler_refactor.recording import (
    RAISED,
    Decoder,
    Difference,
    Emission,
    Recording,
    RecordingFile,
    first_difference,
)

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

W = TypeVar("W")
T = TypeVar("T")


class HarnessError(ConfigError):
    """The harness uses an exit or a target that it does not declare."""


class NotReproducibleError(ComponentError):
    """The old scheduler differs from itself on one workload, so a comparison with it proves nothing.

    Args:
        difference: of two plays of the old scheduler.
    """

    def __init__(self, difference: Difference) -> None:
        self.difference = difference
        super().__init__(
            f"the old scheduler differs from itself: {difference}; control what varies (time, random numbers, the "
            "order of sets, state of modules that both share)"
        )


class Recorder:
    """What a harness gets for one play: the exits, the clock and the modules of one version.

    Attributes:
        clock: the time that all modules of the tree see. Only the harness and ``sleep`` move it.
    """

    def __init__(self, tree: ModuleTree, exits: Sequence[str], targets: Sequence[str]) -> None:
        self.clock: VirtualClock = tree.clock
        self._tree = tree
        self._exits = frozenset([*exits, RAISED])
        self._targets = frozenset(targets)
        self._steps: list[str] = []
        self._emissions: list[Emission] = []
        self._reached: set[str] = set()

    def load(self, module: str) -> ModuleType:
        """Import a module of the version that is played."""
        return self._tree.load(module)

    def begin(self, label: str = "") -> None:
        """Begin the next step. What leaves before the first one belongs to step 0, too."""
        self._steps.append(label)

    def emit(self, exit: str, payload: bytes) -> None:
        """Record bytes that leave now.

        Raises:
            HarnessError: the harness does not declare the exit.
        """
        if exit not in self._exits:
            raise HarnessError("exit", exit, "is not declared", "add it to the harness's `exits`")
        self._emissions.append(Emission(max(0, len(self._steps) - 1), exit, bytes(payload)))

    def sink(self, exit: str, encode: Callable[[T], bytes]) -> Callable[[T], None]:
        """Return a function that records each value which it receives."""
        return lambda value: self.emit(exit, encode(value))

    def call(self, exit: str, function: Callable[[], T], encode: Callable[[T], bytes]) -> T | None:
        """Call a function and record its result, or its exception; return the result, or None after an exception."""
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - an error is behaviour, so it is recorded
            self.emit(exit, describe_error(error))
            return None
        self.emit(exit, encode(result))
        return result

    @contextmanager
    def logs(self, exit: str, logger: str = "", level: int = logging.INFO) -> Iterator[None]:
        """Record the level, the logger and the message of each log record of a logger and those below it."""
        target = logging.getLogger(logger)
        before, handler = target.level, _LogExit(self, exit, level)
        target.addHandler(handler)
        target.setLevel(level)
        try:
            yield
        finally:
            target.removeHandler(handler)
            target.setLevel(before)

    def reach(self, target: str) -> None:
        """Note that this workload reached a target, for example a retraction.

        Raises:
            HarnessError: the harness does not declare the target.
        """
        if target not in self._targets:
            raise HarnessError("target", target, "is not declared", "add it to the harness's `targets`")
        self._reached.add(target)

    def recording(self) -> Recording:
        """Return what was recorded until now."""
        return Recording(tuple(self._steps), tuple(self._emissions), tuple(sorted(self._reached)))


class _LogExit(logging.Handler):
    def __init__(self, recorder: Recorder, exit_name: str, level: int) -> None:
        super().__init__(level)
        self._recorder = recorder
        self._exit = exit_name

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = f"{record.levelname} {record.name}: {record.getMessage()}"
        suffix = b" " + describe_error(error) if error is not None else b""
        self._recorder.emit(self._exit, text.encode() + suffix)


class Harness(Protocol[W]):
    """What a user writes for a scheduler, and the only part that knows it.

    Attributes:
        exits: name of each exit -> decoder of its bytes, which only the text of a difference uses.
        targets: what some workload must reach, for example ``"retraction"``. Otherwise a test proves nothing about it.
        workload_type: type of a workload, so that a file of recordings can contain it. A msgspec.Struct.
    """

    exits: Mapping[str, Decoder]
    targets: Sequence[str]
    workload_type: type[W]

    def workloads(self) -> SearchStrategy[W]:
        """Return the workloads as a Hypothesis strategy."""
        ...

    def play(self, workload: W, recorder: Recorder) -> None:
        """Open the scheduler of `recorder.load(...)`, run the workload, record every exit, and close it."""
        ...


def play(harness: Harness[W], tree: ModuleTree, workload: W, *, fresh: bool = True) -> Recording:
    """Play one workload on one version, from the same time on.

    An exception that leaves the harness ends the play, and is its last emission.

    Args:
        harness: the user's.
        tree: the version.
        workload: one of the harness's.
        fresh: whether the modules of the tree are run again, so that their globals are new. Turn it off for a tree
            that takes long to import and keeps no state in its modules.
    """
    if fresh:
        tree.forget()
    tree.clock.now_s = START_S
    recorder = Recorder(tree, list(harness.exits), harness.targets)
    with tree.active():
        try:
            harness.play(workload, recorder)
        except HarnessError:
            raise
        except Exception as error:  # noqa: BLE001 - an error of one version is a difference to the other one
            recorder.emit(RAISED, describe_error(error))
    return recorder.recording()


def compare_versions(
    harness: Harness[W], old: ModuleTree, new: ModuleTree, workload: W, *, fresh: bool = True
) -> tuple[Recording, Difference | None]:
    """Play a workload on two versions; return the old recording, and the first difference or None.

    Raises:
        NotReproducibleError: they differ, and so do two plays of the old version.
    """
    expected = play(harness, old, workload, fresh=fresh)
    found = first_difference(expected, play(harness, new, workload, fresh=fresh), harness.exits)
    if found is not None:
        again = first_difference(expected, play(harness, old, workload, fresh=fresh), harness.exits)
        if again is not None:
            raise NotReproducibleError(again)
    return expected, found


def replay_recordings(
    harness: Harness[W], tree: ModuleTree, file: RecordingFile, *, fresh: bool = True
) -> Difference | None:
    """Play the workloads of a file on a version; return the first difference to the file's recordings, or None.

    Raises:
        DecodeError: a workload of the file is none of this harness.
    """
    for encoded, expected in zip(file.workloads, file.recordings, strict=True):
        try:
            workload = msgspec.msgpack.decode(encoded, type=harness.workload_type)
        except msgspec.MsgspecError as error:
            raise DecodeError(f"the file has a workload of another harness: {error}") from error
        found = first_difference(expected, play(harness, tree, workload, fresh=fresh), harness.exits)
        if found is not None:
            return found
    return None


def describe_error(error: BaseException) -> bytes:
    """Return the type and the text of an exception, and those of its causes, as the bytes of an exit."""
    texts = []
    seen: BaseException | None = error
    while seen is not None:
        texts.append(f"{type(seen).__module__}.{type(seen).__qualname__}: {seen}")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return " from ".join(texts).encode(errors="backslashreplace")
