"""Deadlines for page stores: the store works on a thread of its own, and no caller waits longer than it said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from scheduler_components.errors import StorageError, StorageStallError
from scheduler_components.ports import PageBytes, PageStore, ZeroCopyPageStore

__all__ = ["DeadlineZeroCopyStore", "DeadlinePageStore", "open_deadline_page_store", "open_deadline_zero_copy_store"]

Answer = TypeVar("Answer")


class DeadlinePageStore:
    """A page store behind one worker thread. Any number of threads may use it; operations run one after the other.

    An operation that passes the deadline raises ``StorageStallError`` and its late answer is dropped. Until the worker
    is free again, further operations raise the same at once, so nothing piles up behind it. Make it with
    ``open_deadline_page_store``.
    """

    # The worker is a daemon thread and not an executor's: the interpreter waits for those when it ends, and a store
    # that never returns must not keep the process from ending.

    def __init__(self, store: PageStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()  # noqa: SCH004 any call of a store
        self._worker = Thread(target=self._work, name="page-store", daemon=True)
        self._stalled: tuple[str, Future[Any]] | None = None
        self._is_closed = False
        self._given_up: Future[None] = Future()  # done when a close has not waited for the store

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
        """Store pages, whose memory must not change even after a stall: hand over copies, as ``frame_page`` makes."""
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
        closing = self._put(self._store.close)
        self._jobs.put(None)
        wait((closing,), timeout=self._deadline_s)
        if not closing.done():
            self._given_up.set_result(None)
            raise StorageStallError("deadline", "close", f"still at work after {self._deadline_s:g} s")
        self.join()
        closing.result()

    def run_without_deadline(self, operation: str, work: Callable[[], Answer]) -> Answer:
        """Let the store do what reads or writes the caller's memory, and wait as long as it does so.

        Raises:
            StorageStallError: it is at an earlier operation beyond its deadline; or ``close`` did not wait for it.
        """
        job = self._begin(operation, work)
        either: tuple[Future[Any], ...] = (job, self._given_up)
        wait(either, return_when=FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise StorageStallError("deadline", operation, "still at work when the store was closed")

    def join(self) -> None:
        """Wait, without a bound, for the worker to end; call ``close`` first."""
        self._worker.join()

    def _ask(self, operation: str, work: Callable[[], Answer]) -> Answer:
        job = self._begin(operation, work)
        wait((job,), timeout=self._deadline_s)
        if job.done():
            return job.result()
        if not job.cancel():  # the worker is at it; a job that waits for another one is only taken back
            self._stalled = operation, job
        raise StorageStallError("deadline", operation, f"no answer within {self._deadline_s:g} s")

    def _begin(self, operation: str, work: Callable[[], Answer]) -> Future[Answer]:
        if self._is_closed:
            raise StorageError("deadline", operation, "the store is closed")
        if self._stalled is not None and not self._stalled[1].done():
            raise StorageStallError("deadline", operation, f"still at an earlier {self._stalled[0]}")
        return self._put(work)

    def _put(self, work: Callable[[], Answer]) -> Future[Answer]:
        job: Future[Answer] = Future()
        self._jobs.put((job, work))
        return job

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, work = entry
            if job.set_running_or_notify_cancel():
                try:
                    job.set_result(work())
                except Exception as error:  # noqa: BLE001 - raised again on the caller's thread
                    job.set_exception(error)


def open_deadline_page_store(store: PageStore, *, deadline_s: float) -> DeadlinePageStore:
    """Give a store a thread of its own, and its callers a longest wait of ``deadline_s`` per operation."""
    opened = DeadlinePageStore(store, deadline_s)
    opened.start()
    return opened


class DeadlineZeroCopyStore:
    """An ``ZeroCopyPageStore`` behind one worker thread, as ``DeadlinePageStore``; made by
    ``open_deadline_zero_copy_store``.

    Whoever gives its own pages away waits until the store is done with them: reads and writes in place have no
    deadline. Everything else has, and raises ``StorageStallError``.
    """

    def __init__(self, store: ZeroCopyPageStore, worker: DeadlinePageStore) -> None:
        self._store = store
        self._worker = worker
        self.batch_exists = worker.batch_exists
        self.batch_get = worker.batch_get
        self.batch_set = worker.batch_set
        self.delete = worker.delete
        self.close = worker.close

    def register(self, memory: memoryview) -> None:
        self._worker.run_without_deadline("register", lambda: self._store.register(memory))

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[memoryview]) -> Sequence[bool]:
        return self._worker.run_without_deadline("batch_get_into", lambda: self._store.batch_get_into(keys, pages))

    def batch_put_from(self, keys: Sequence[str], pages: Sequence[memoryview]) -> Sequence[bool]:
        return self._worker.run_without_deadline("batch_put_from", lambda: self._store.batch_put_from(keys, pages))


def open_deadline_zero_copy_store(store: ZeroCopyPageStore, *, deadline_s: float) -> DeadlineZeroCopyStore:
    """Give a store a thread of its own, and what does not touch its callers' pages a longest wait of ``deadline_s``."""
    return DeadlineZeroCopyStore(store, open_deadline_page_store(store, deadline_s=deadline_s))
