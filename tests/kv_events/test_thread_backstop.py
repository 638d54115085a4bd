"""The backstop thread polls while it is awake, and no batch is left to it after it has stopped deferring."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from scheduler_components.kv_events import thread_backstop
from scheduler_components.kv_events.thread_backstop import Backstop

pytestmark = pytest.mark.threads

SOON_S = 0.0001
WATCHES_S = 0.008
"""Long enough that the thread waits on its descriptors and not in a plain sleep."""

Eventually = Callable[..., None]


class Scheduler:
    """A scheduler that does not drain; records the backstop's calls in order."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.look: Callable[[], float] = lambda: math.inf
        self.sleeps = threading.Event()
        self.late_s: list[float] = []

    def poll(self, late_s: float) -> float:
        self.notes.append("look")
        self.late_s.append(late_s)
        if "stop deferring" in self.notes[-2:]:
            self.sleeps.set()
        return self.look()

    def stop_deferring(self) -> None:
        self.notes.append("stop deferring")


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture(params=[thread_backstop._NAPS_S, ()], ids=["dozing", "fast asleep"], autouse=True)
def naps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_backstop, "_NAPS_S", request.param)


@pytest.fixture
def backstop(scheduler: Scheduler, naps: None) -> Iterator[Backstop]:
    backstop = Backstop(scheduler, watched_fds=(), name="backstop-under-test")
    backstop.start()
    yield backstop
    assert backstop.stop(10.0)


def test_to_wake_it_does_not_hand_it_the_interpreter(
    backstop: Backstop, scheduler: Scheduler, eventually: Eventually
) -> None:
    """With the GIL it would work one slice before ``publish()`` returns: hundreds of microseconds inside vLLM."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # no thread is interrupted: it runs when another one releases the GIL
    try:
        for _ in range(50):
            eventually(lambda: scheduler.sleeps.is_set() or not scheduler.notes)
            eventually(lambda: not backstop._is_polling)
            num_notes = len(scheduler.notes)
            backstop.watch()
            assert len(scheduler.notes) == num_notes
            scheduler.sleeps.clear()
            assert scheduler.sleeps.wait(30.0)
    finally:
        sys.setswitchinterval(interval_s)


@pytest.mark.parametrize("moment", ["in a nap", "after the last nap", "fast asleep"])
def test_a_wakeup_while_it_falls_asleep_is_not_lost(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, eventually: Eventually, moment: str
) -> None:
    monkeypatch.setattr(thread_backstop, "_NAPS_S", (0.001,))
    backstop = Backstop(scheduler, watched_fds=(), name="backstop-under-test")
    bell = backstop._bell
    rung: list[bool] = []

    def ring(now: str) -> None:
        if now == moment and not rung:
            rung.append(backstop.watch())

    class Bell:
        release = staticmethod(bell.release)

        @staticmethod
        def acquire(blocking: bool = True, timeout: float = -1) -> bool:
            ring("in a nap" if blocking else "fast asleep")
            is_rung = bell.acquire(blocking, timeout)
            ring("after the last nap")
            return is_rung

    backstop._bell = Bell()  # type: ignore[assignment]
    backstop.start()
    eventually(lambda: "look" in scheduler.notes)
    assert backstop.stop(10.0)


def test_it_dozes_first_and_then_sleeps_on_its_descriptors(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(thread_backstop, "_NAPS_S", (0.001, 0.001))
    backstop = Backstop(scheduler, watched_fds=(), name="backstop-under-test")
    backstop.start()
    eventually(lambda: backstop._is_asleep)
    assert scheduler.notes == []
    scheduler.look = lambda: SOON_S
    backstop.watch()
    eventually(lambda: "look" in scheduler.notes)
    assert not backstop._is_asleep
    assert backstop.stop(10.0)


def test_a_dead_thread_is_reported(scheduler: Scheduler, eventually: Eventually) -> None:
    def look() -> float:
        raise RuntimeError("a bug")

    scheduler.look = look
    backstop = Backstop(scheduler, watched_fds=(), name="backstop-under-test")
    backstop.start()
    backstop.watch()
    eventually(lambda: backstop.has_ended and scheduler.notes[-1] == "stop deferring")
    assert not backstop.watch()
    assert backstop.stop(10.0)


def test_a_descriptor_that_becomes_readable_wakes_it(scheduler: Scheduler, eventually: Eventually) -> None:
    reader, writer = os.pipe()
    backstop = Backstop(scheduler, watched_fds=(reader,), name="backstop-under-test")
    backstop.start()
    try:
        os.write(writer, b"!")
        eventually(lambda: scheduler.late_s)
        assert scheduler.late_s[0] == 0.0, "a poll after a client's request is not late"
    finally:
        assert backstop.stop(10.0)
        os.close(reader)
        os.close(writer)


def test_it_polls_until_there_is_nothing_to_poll_for(backstop: Backstop, scheduler: Scheduler) -> None:
    scheduler.look = lambda: SOON_S if len(scheduler.notes) < 5 else math.inf
    assert backstop.watch()
    assert scheduler.sleeps.wait(30.0)
    assert scheduler.notes == ["look"] * 5 + ["stop deferring", "look"]


def test_a_batch_just_before_it_sleeps_makes_it_poll_again(backstop: Backstop, scheduler: Scheduler) -> None:
    waits_s = [math.inf, SOON_S, SOON_S, math.inf, math.inf]
    scheduler.look = lambda: waits_s.pop(0)
    assert backstop.watch()
    while waits_s:
        assert scheduler.sleeps.wait(30.0)
    assert scheduler.notes.count("look") == 5


def test_it_wakes_by_itself_when_a_late_poll_is_due(backstop: Backstop, scheduler: Scheduler) -> None:
    """The publisher polls for a stuck client occasionally."""
    waits_s = [0.02, 0.02, math.inf, math.inf]
    scheduler.look = lambda: waits_s.pop(0) if waits_s else math.inf
    assert backstop.watch()
    while waits_s:
        scheduler.sleeps.clear()
        assert scheduler.sleeps.wait(30.0)


@pytest.mark.parametrize("wait_s", [0.001, WATCHES_S])
def test_it_reports_the_delay_of_each_poll(
    backstop: Backstop, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    now_s = 0.0

    def monotonic() -> float:
        """Advance by 10 ms per call, as if another thread kept the GIL."""
        nonlocal now_s
        now_s += 0.01
        return now_s

    monkeypatch.setattr(thread_backstop, "time", SimpleNamespace(monotonic=monotonic, sleep=lambda _: None))
    scheduler.look = lambda: wait_s if len(scheduler.notes) < 4 else math.inf
    assert backstop.watch()
    assert scheduler.sleeps.wait(30.0)
    assert scheduler.late_s[:4] == pytest.approx([0.01, *[0.01 - wait_s] * 3])


def test_its_next_poll_is_known_while_it_waits(
    backstop: Backstop, scheduler: Scheduler, eventually: Eventually
) -> None:
    """``publish()`` takes over from a thread whose poll is overdue."""
    assert backstop.due_s == math.inf
    before_s = time.monotonic()
    scheduler.look = lambda: WATCHES_S
    backstop.watch()
    assert backstop.due_s < math.inf
    eventually(lambda: backstop.due_s >= before_s + WATCHES_S)
    scheduler.look = lambda: math.inf
    eventually(lambda: backstop.due_s == math.inf)


@pytest.mark.parametrize("wait_s", [0.001, WATCHES_S])
def test_only_a_long_wait_ends_when_a_peer_asks(
    scheduler: Scheduler, eventually: Eventually, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    reader, writer = os.pipe()
    backstop = Backstop(scheduler, watched_fds=(reader,), name="backstop-under-test")
    waits: list[object] = []
    wait = thread_backstop._wait
    monkeypatch.setattr(thread_backstop, "_wait", lambda *args: (waits.append(args[2]), wait(*args))[1])
    scheduler.look = lambda: wait_s
    backstop.start()
    try:
        backstop.watch()
        eventually(lambda: len(scheduler.notes) > 2)
        assert (wait_s * 1e3 in waits) == (wait_s == WATCHES_S)
        os.write(writer, b"!")
        eventually(lambda: len(scheduler.notes) > 4)
    finally:
        assert backstop.stop(10.0)
        os.close(reader)
        os.close(writer)
