"""Watchdog: a thread that tells, from outside the scheduler's thread, where it is stuck.

The thread looks a few times in each ``after_s``. While it looks it also puts off ``faulthandler``'s dump: should a call
hold the GIL for so long that not even this thread runs, the interpreter's own C thread writes the stacks to the file
that was given. Who is told beyond that machine is the business of whoever listens for the process itself.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TextIO

import msgspec

from scheduler_components.failure_log import FailureLog
from scheduler_components.ports import StallSink
from scheduler_components.step_progress import StepProgress
from scheduler_components.validators import check_number
from scheduler_components.values import StallReport
from scheduler_components.watchdog import StallDetector

__all__ = ["LogStallSink", "ThreadWatchdog", "open_thread_watchdog"]

logger = logging.getLogger(__name__)

_LOOKS_PER_STALL = 4
_LONGEST_NAP_S = 1.0
_TELLING = "telling of a stall"


class LogStallSink:
    """The ``StallSink`` that logs: the stall with its stacks, and its end."""

    def on_stall(self, report: StallReport) -> None:
        """Log that no progress is made, and where."""
        logger.error("%s\n%s", report, report.stacks)

    def on_resume(self, report: StallReport) -> None:
        """Log that it is made again."""
        logger.warning("%s", report)


@dataclass(slots=True, kw_only=True)
class ThreadWatchdog:
    """Made by ``open_thread_watchdog``, which is called on the thread that is watched.

    Attributes:
        judge: says when it is a stall.
        sink: is told, on the watchdog's thread.
        watched: identity of the scheduler's thread; its stack comes first.
        stack_dump_file: where the interpreter writes the stacks when this thread cannot run; None for nowhere. There is
            one such dump per process.
        clock: monotonic seconds.
        failures: what the sink raised.
    """

    judge: StallDetector
    sink: StallSink
    watched: int
    stack_dump_file: TextIO | None = None
    clock: Callable[[], float] = time.monotonic
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _stop: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    _thread: threading.Thread | None = field(default=None, init=False, repr=False)

    def start(self) -> None:
        """Begin to look."""
        self._put_off_the_dump()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking. Safe to call twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._nap_s):
                self._put_off_the_dump()
                report = self.judge.poll(self.clock())
                if report is not None:
                    self._tell(report)
        finally:
            if self.stack_dump_file is not None:
                faulthandler.cancel_dump_traceback_later()

    @property
    def _nap_s(self) -> float:
        return min(self.judge.after_s / _LOOKS_PER_STALL, _LONGEST_NAP_S)

    def _put_off_the_dump(self) -> None:
        if self.stack_dump_file is not None:
            faulthandler.dump_traceback_later(self.judge.after_s + self._nap_s, file=self.stack_dump_file)

    def _tell(self, report: StallReport) -> None:
        try:
            if report.is_resolved:
                self.sink.on_resume(report)
            else:
                stacks = "\n".join(_stacks(first=self.watched))
                self.sink.on_stall(msgspec.structs.replace(report, stacks=stacks))
        except Exception as error:  # noqa: BLE001 - a broken sink must not end the watch; counted and logged
            self.failures.failed(_TELLING, error)
        else:
            self.failures.succeeded(_TELLING)


def _stacks(*, first: int) -> Iterator[str]:
    """The stack of each thread but this one, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # The only way that Python has to see another thread's stack.
    frames = sys._current_frames()
    for identity in sorted(frames, key=lambda each: each != first):
        if identity != threading.get_ident():
            yield f"thread {names.get(identity, identity)}, innermost call last:"
            yield "".join(traceback.format_stack(frames[identity])).rstrip()


def open_thread_watchdog(
    progress: StepProgress,
    *,
    rank: str,
    after_s: float,
    sink: StallSink | None = None,
    stack_dump_file: TextIO | None = None,
) -> ThreadWatchdog:
    """Watch the calling thread, which writes ``progress``.

    Args:
        progress: where the step stands.
        rank: whose step it is, in words.
        after_s: time in one phase from which on it is a stall.
        sink: is told on the watchdog's thread; by default a log.
        stack_dump_file: a file with a descriptor, where the interpreter itself writes all stacks when a call holds the
            GIL.

    Raises:
        ConfigError: ``after_s`` is no time span.
    """
    check_number("after_s", after_s)
    watchdog = ThreadWatchdog(
        judge=StallDetector(progress=progress, rank=rank, after_s=after_s),
        sink=sink if sink is not None else LogStallSink(),
        watched=threading.get_ident(),
        stack_dump_file=stack_dump_file,
    )
    watchdog.start()
    return watchdog
