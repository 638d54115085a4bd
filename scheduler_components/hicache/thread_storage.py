"""Deadlines for page stores: the store works on a thread of its own, and no caller waits longer than it said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Generic, TypeVar

from scheduler_components.errors import StorageError, StorageStallError
from scheduler_components.ports import PageBytes, PageStore

__all__ = ["DeadlinePageStore", "open_deadline_page_store"]

Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class _Job(Generic[Answer]):
    """One operation: run at most once, by the worker, unless its caller has given up before."""

    operation: str
    work: Callable[[], Answer]
    lock: Lock = field(default_factory=Lock)
    done: Event = field(default_factory=Event)
    given_up: bool = False
    answer: Answer | None = None
    error: Exception | None = None

    def run(self) -> None:
        with self.lock:
            wanted = not self.given_up
        try:
            if wanted:
                self.answer = self.work()
        except Exception as error:  # noqa: BLE001 - raised again on the caller's thread
            self.error = error
        self.done.set()

    def give_up(self) -> None:
        with self.lock:
            self.given_up = True


class DeadlinePageStore:
    """A page store behind one worker thread; any number of threads may use it, their operations run in turn.

    An operation that passes the deadline raises ``StorageStallError`` and its late answer is dropped. Until the worker
    is free again, further operations raise the same at once, so nothing piles up behind it. The worker is a daemon: a
    store that never returns does not keep the process from ending. Make it with ``open_deadline_page_store``.
    """

    def __init__(self, store: PageStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._worker = Thread(target=self._work, name="page-store", daemon=True)
        self._stalled: _Job[Any] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the worker."""
        self._worker.start()

    def batch_exists(self, keys: Sequence[str]) -> int:
        asked = tuple(keys)
        return self._ask("batch_exists", lambda: self._store.batch_exists(asked))

    def batch_get(self, keys: Sequence[str]) -> Sequence[PageBytes | None]:
        asked = tuple(keys)
        return self._ask("batch_get", lambda: self._store.batch_get(asked))

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> Sequence[bool]:
        """Store pages, whose memory must not change even after a stall: hand over copies, as ``seal_page`` makes."""
        asked, given = tuple(keys), tuple(pages)
        return self._ask("batch_set", lambda: self._store.batch_set(asked, given))

    def delete(self, keys: Sequence[str]) -> int:
        asked = tuple(keys)
        return self._ask("delete", lambda: self._store.delete(asked))

    def close(self) -> None:
        """Close the store on its thread and end the thread, within the deadline. Safe to call twice.

        Raises:
            StorageStallError: the store is still at work; it is closed when it returns.
        """
        if self._is_closed:
            return
        self._is_closed = True
        closing = _Job("close", self._store.close)
        self._jobs.put(closing)
        self._jobs.put(None)
        if not closing.done.wait(self._deadline_s):
            raise StorageStallError("deadline", "close", f"still at work after {self._deadline_s:g} s")
        self.join()
        if closing.error is not None:
            raise closing.error

    def join(self) -> None:
        """Wait, without a bound, for the worker to end; call ``close`` first."""
        self._worker.join()

    def _ask(self, operation: str, work: Callable[[], Answer]) -> Answer:
        if self._is_closed:
            raise StorageError("deadline", operation, "the store is closed")
        stalled = self._stalled
        if stalled is not None and not stalled.done.is_set():
            raise StorageStallError("deadline", operation, f"still at an earlier {stalled.operation}")
        job = _Job(operation, work)
        self._jobs.put(job)
        if not job.done.wait(self._deadline_s):
            job.give_up()
            self._stalled = job
            raise StorageStallError("deadline", operation, f"no answer within {self._deadline_s:g} s")
        if job.error is not None:
            raise job.error
        return job.answer  # type: ignore[return-value]  # set before done, whenever there is no error

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


def open_deadline_page_store(store: PageStore, *, deadline_s: float) -> DeadlinePageStore:
    """Give a store a thread of its own, and its callers a longest wait of ``deadline_s`` an operation."""
    opened = DeadlinePageStore(store, deadline_s)
    opened.start()
    return opened
