"""Behind a deadline a store gives its answer, its error or a stall in time, and nothing piles up."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from kit.page_stores import FixedAnswerStore, GatedPageStore

from scheduler_components.errors import StorageError, StorageStallError
from scheduler_components.hicache import CheckedPageStore, MemoryPageStore, open_deadline_page_store
from scheduler_components.hicache.storage import unframe_page

pytestmark = pytest.mark.threads

PAGE_BYTES = 8
PAGES = {key: key.encode() * PAGE_BYTES for key in "ab"}


def test_a_stalled_write_is_a_miss_and_later_stores_the_original_page() -> None:
    gated = GatedPageStore("batch_set")
    deadline = open_deadline_page_store(gated, deadline_s=0.05)
    store = CheckedPageStore(store=deadline, page_bytes=PAGE_BYTES)
    memory = bytearray(PAGES["a"])
    assert store.batch_set(["a"], [memory]) == [False]
    assert gated.entered.wait(60)
    memory[:] = bytes(PAGE_BYTES)  # the host page has another owner by now
    assert store.batch_exists(["a"]) == 0
    assert store.stats().stalls == 2
    assert store.stats().last_problem == "deadline batch_exists: busy with an earlier batch_set"
    with pytest.raises(StorageStallError, match="close: still busy"):
        deadline.close()
    gated.gate.set()
    deadline.join()
    assert unframe_page("a", gated.batch_get(["a"])[0] or b"") == PAGES["a"]


def test_a_closed_store_raises_immediately() -> None:
    closed = []

    class Counting(MemoryPageStore):
        def close(self) -> None:
            closed.append(True)

    store = open_deadline_page_store(Counting(1000), deadline_s=60)
    store.close()
    store.close()
    assert closed == [True]
    with pytest.raises(StorageError, match="the store is closed"):
        store.batch_exists(["a"])


def test_a_store_that_recovers_is_used_again() -> None:
    gated = GatedPageStore("batch_set")
    deadline = open_deadline_page_store(gated, deadline_s=0.05)
    store = CheckedPageStore(store=deadline, page_bytes=PAGE_BYTES)
    assert store.batch_set(["a"], [PAGES["a"]]) == [False]
    gated.gate.set()
    patient = Event()
    for _ in range(6000):
        if store.batch_set(["b"], [PAGES["b"]]) == [True]:
            break
        patient.wait(0.01)
    assert store.batch_get(["b"]) == [PAGES["b"]]
    store.close()


@pytest.mark.parametrize("error", [KeyError("x"), TimeoutError("x")])
def test_an_error_of_the_store_reaches_its_caller(error: Exception) -> None:
    """An error of the store's own, not a stall: also where the store itself ran into a time limit."""
    deadline = open_deadline_page_store(FixedAnswerStore(error), deadline_s=60)
    with pytest.raises(type(error), match="x"):
        deadline.batch_exists(["a"])
    with pytest.raises(type(error), match="x"):
        deadline.close()


def test_a_write_queued_behind_a_stalled_one_is_cancelled() -> None:
    """Both callers get a stall in time; the store is at work on the first until the gate opens."""
    gated = GatedPageStore("batch_set")
    deadline = open_deadline_page_store(gated, deadline_s=0.2)
    with ThreadPoolExecutor(1) as callers:
        first = callers.submit(deadline.batch_set, ["a"], [PAGES["a"]])
        assert gated.entered.wait(60)
        with pytest.raises(StorageStallError):
            deadline.batch_set(["b"], [PAGES["b"]])
        assert isinstance(first.exception(), StorageStallError)
    with pytest.raises(StorageStallError, match="busy with an earlier batch_set"):
        deadline.batch_exists(["a"])
    gated.gate.set()
    deadline.close()
    assert [gated.batch_exists([key]) for key in "ab"] == [1, 0]


NEVER = """
from threading import Event
from scheduler_components.errors import StorageStallError
from scheduler_components.hicache import open_deadline_page_store

class Never:
    def batch_exists(self, keys):
        Event().wait()

try:
    open_deadline_page_store(Never(), deadline_s=0.05).batch_exists(["a"])
except StorageStallError as error:
    print(error)
"""


def test_a_store_that_never_returns_does_not_keep_the_process_from_ending() -> None:
    ended = subprocess.run([sys.executable, "-c", NEVER], capture_output=True, text=True, timeout=60, check=True)
    assert "no answer within 0.05 s" in ended.stdout
