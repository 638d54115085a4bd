"""The backstop thread: it looks while it is awake, and nobody may count on it before it has said that it sleeps."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from scheduler_components.kv_events import thread_backstop
from scheduler_components.kv_events.thread_backstop import Backstop, Look

Eventually = Callable[..., None]


class Scheduler:
    """Does not drain by itself; notes what the backstop does, in order."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.look: Callable[[], Look] = lambda: Look.QUIET
        self.sleeps = threading.Event()

    def drain_for_scheduler(self, late_s: float) -> Look:
        self.notes.append("look")
        if "stop deferring" in self.notes[-2:]:
            self.sleeps.set()
        return self.look()

    def stop_deferring(self) -> None:
        self.notes.append("stop deferring")


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def backstop(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backstop]:
    monkeypatch.setattr(thread_backstop, "_LOOK_EVERY_MS", 0.1)
    backstop = Backstop(scheduler, watched_fds=(), name="backstop-under-test")
    backstop.start()
    yield backstop
    assert backstop.stop(10.0)


def test_it_looks_once_more_after_it_has_said_that_it_sleeps(backstop: Backstop, scheduler: Scheduler) -> None:
    assert backstop.watch()
    assert scheduler.sleeps.wait(10.0)
    assert scheduler.notes[-2:] == ["stop deferring", "look"]
    assert scheduler.notes.count("stop deferring") == 1


def test_what_came_just_before_it_slept_keeps_it_awake(backstop: Backstop, scheduler: Scheduler) -> None:
    def look() -> Look:
        """A batch is found by the very last look, once."""
        is_last = scheduler.notes[-2:] == ["stop deferring", "look"]
        return Look.BUSY if is_last and scheduler.notes.count("stop deferring") == 1 else Look.QUIET

    scheduler.look = look
    backstop.watch()
    while scheduler.notes.count("stop deferring") < 2:
        assert scheduler.sleeps.wait(10.0)
    assert scheduler.notes.count("look") > 3


def test_it_wakes_again(backstop: Backstop, scheduler: Scheduler, eventually: Eventually) -> None:
    backstop.watch()
    assert scheduler.sleeps.wait(10.0)
    looks = scheduler.notes.count("look")
    eventually(lambda: backstop.watch() and scheduler.notes.count("look") > looks)


def test_a_dead_one_says_so(scheduler: Scheduler, eventually: Eventually) -> None:
    def look() -> Look:
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
        eventually(lambda: "look" in scheduler.notes)
    finally:
        assert backstop.stop(10.0)
        os.close(reader)
        os.close(writer)
