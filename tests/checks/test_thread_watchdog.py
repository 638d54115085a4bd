"""A stalled thread is reported with step, phase, request and all stacks, even while a call holds the GIL."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from scheduler_components import ConfigError
from scheduler_components.checks.thread_watchdog import open_thread_watchdog
from scheduler_components.values import StallReport
from scheduler_components.watchdog import IDLE_PHASE, StepProgress

pytestmark = pytest.mark.processes


def test_a_report_has_rank_step_phase_request_and_stacks(eventually: Callable[..., None]) -> None:
    progress, reports = StepProgress(), list[StallReport]()
    go_on, done = threading.Event(), threading.Event()

    def stuck_in_the_device() -> None:
        go_on.wait(60)

    def scheduler() -> None:
        watchdog = open_thread_watchdog(progress, rank="dp0/tp1", after_s=0.05, sink=reports.append)
        progress.begin_step(17, "device")
        progress.request = "r5"
        stuck_in_the_device()
        progress.enter_phase(IDLE_PHASE)
        done.wait(60)
        watchdog.close()
        watchdog.close()

    thread = threading.Thread(target=scheduler)
    thread.start()
    try:
        eventually(lambda: reports)
        report = reports[0]
        assert str(report).startswith("rank dp0/tp1 has made no progress for")
        assert str(report).endswith("in step 17, phase device, request r5")
        first_stack = report.stacks.partition("\nthread ")[0]
        assert "stuck_in_the_device" in first_stack
        assert "MainThread" in report.stacks
        go_on.set()
        eventually(lambda: len(reports) > 1)
        assert "continued after" in str(reports[1])
        assert progress.num_stalls == 1
    finally:
        go_on.set()
        done.set()
        thread.join()


def test_a_sink_that_raises_does_not_end_the_watch(
    eventually: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    progress, reports = StepProgress(), list[StallReport]()

    def raise_at_first(report: StallReport) -> None:
        if not report.is_resolved:
            raise OSError("no way out")
        reports.append(report)

    progress.enter_phase("device")
    watchdog = open_thread_watchdog(progress, rank="tp0", after_s=0.02, sink=raise_at_first)
    try:
        eventually(lambda: watchdog.failures.total)
        progress.enter_phase("results")
        eventually(lambda: reports)
        assert reports[0].is_resolved
    finally:
        watchdog.close()


def test_stacks_are_dumped_while_a_call_holds_the_gil() -> None:
    """No thread of Python runs then, not even the watchdog's."""
    script = """
import ctypes, sys
from scheduler_components.checks.thread_watchdog import open_thread_watchdog
from scheduler_components.watchdog import StepProgress
progress = StepProgress()
watchdog = open_thread_watchdog(progress, rank="tp0", after_s=0.2, stack_dump_file=sys.stderr)
progress.begin_step(1, "device")
def in_native_code():
    ctypes.PyDLL(None).usleep(900_000)
in_native_code()
watchdog.close()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "in_native_code" in ended.stderr


def test_an_invalid_time_span_is_rejected() -> None:
    with pytest.raises(ConfigError, match="after_s"):
        open_thread_watchdog(StepProgress(), rank="tp0", after_s=0, stack_dump_file=io.StringIO())
