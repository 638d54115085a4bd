"""ThreadWatchdog: a thread that reports where the scheduler's thread is stuck.

The thread polls a `StallDetector` a few times per `after_s`. Each poll also postpones `faulthandler`'s dump. If a call
holds the GIL for so long that this thread cannot run either, the interpreter's own C thread writes the stacks to the
given file. Alerting other machines is the task of the process that supervises this one.
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

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components._internal.validators import check_number
from scheduler_components.values import StallReport
from scheduler_components.watchdog import StallDetector, StepProgress

__all__ = ["ThreadWatchdog", "log_stall", "open_thread_watchdog"]

logger = logging.getLogger(__name__)

_POLLS_PER_STALL = 4
_MAX_INTERVAL_S = 1.0
_REPORTING = "reporting a stall"


def log_stall(report: StallReport) -> None:
    """Log a stall with its stacks, or its end."""
    if report.is_resolved:
        logger.warning("%s", report)
    else:
        logger.error("%s\n%s", report, report.stacks)


@dataclass(slots=True, kw_only=True)
class ThreadWatchdog:
    """Polls the progress of a scheduler's thread. `open_thread_watchdog` creates it on the thread to watch.

    Attributes:
        detector: detects stalls.
        sink: receives the report of each stall, and of its end, on the watchdog's thread.
        watched: ident of the scheduler's thread; its stack comes first.
        stack_dump_file: where the interpreter writes the stacks if this thread cannot run; None for nowhere. A process
            has only one such dump.
        clock: monotonic seconds.
        failures: exceptions of the sink.
    """

    detector: StallDetector
    sink: Callable[[StallReport], None]
    watched: int
    stack_dump_file: TextIO | None = None
    clock: Callable[[], float] = time.monotonic
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _stop: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    _thread: threading.Thread | None = field(default=None, init=False, repr=False)

    def start(self) -> None:
        """Start the watchdog's thread."""
        self._postpone_dump()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and join the thread. Safe to call twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._interval_s):
                self._postpone_dump()
                report = self.detector.poll(self.clock())
                if report is not None:
                    self._report(report)
        finally:
            if self.stack_dump_file is not None:
                faulthandler.cancel_dump_traceback_later()

    @property
    def _interval_s(self) -> float:
        return min(self.detector.after_s / _POLLS_PER_STALL, _MAX_INTERVAL_S)

    def _postpone_dump(self) -> None:
        if self.stack_dump_file is not None:
            faulthandler.dump_traceback_later(self.detector.after_s + self._interval_s, file=self.stack_dump_file)

    def _report(self, report: StallReport) -> None:
        with self.failures.guard(_REPORTING):
            if not report.is_resolved:
                report = msgspec.structs.replace(report, stacks="\n".join(_format_stacks(first=self.watched)))
            self.sink(report)


def _format_stacks(*, first: int) -> Iterator[str]:
    """Yield the stack of each thread except the calling one, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # Python offers no other way to read the stack of another thread.
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
    sink: Callable[[StallReport], None] = log_stall,
    stack_dump_file: TextIO | None = None,
) -> ThreadWatchdog:
    """Start a watchdog for the calling thread, which writes `progress`.

    Args:
        progress: the current step and phase.
        rank: description of the rank, for reports.
        after_s: seconds in one phase after which it is a stall.
        sink: receives the report of each stall, and of its end, on the watchdog's thread.
        stack_dump_file: a file with a descriptor, where the interpreter writes all stacks if a call holds the GIL.

    Raises:
        ConfigError: `after_s` is not a positive number.
    """
    check_number("after_s", after_s)
    watchdog = ThreadWatchdog(
        detector=StallDetector(progress=progress, rank=rank, after_s=after_s),
        sink=sink,
        watched=threading.get_ident(),
        stack_dump_file=stack_dump_file,
    )
    watchdog.start()
    return watchdog
