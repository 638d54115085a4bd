"""Deadlines for page stores: the store runs on its own thread, and its callers wait for a bounded time."""

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
    """A page store on one worker thread. Several threads may call it; its operations run one after the other.

    An operation that exceeds the deadline raises ``StorageStallError``, and its late answer is discarded. Until the
    worker is free again, further operations raise the same error immediately, so none is queued behind it. Create it
    with ``open_deadline_page_store``.
    """

    # The worker is a daemon thread, because the interpreter joins the threads of executors at exit and would wait for a
    # store that never returns.

    def __init__(self, store: PageStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()  # noqa: SCH004 any call of a store
        self._worker = Thread(target=self._work, name="page-store", daemon=True)
        self._stalled: tuple[str, Future[Any]] | None = None
        self._is_closed = False
        self._abandoned: Future[None] = Future()  # done once close() has stopped waiting for the store

    def start(self) -> None:
        self._worker.start()

    def batch_exists(self, keys: Sequence[str]) -> int:
        asked = tuple(keys)
        return self._ask("batch_exists", lambda: self._store.batch_exists(asked))

    def batch_get(self, keys: Sequence[str]) -> Sequence[PageBytes | None]:
        asked = tuple(keys)
        return self._ask("batch_get", lambda: self._store.batch_get(asked))

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> Sequence[bool]:
        """Store pages. Pass copies, as ``frame_page`` makes them: a stalled operation may still read them later."""
        asked, given = tuple(keys), tuple(pages)
        return self._ask("batch_set", lambda: self._store.batch_set(asked, given))

    def delete(self, keys: Sequence[str]) -> int:
        asked = tuple(keys)
        return self._ask("delete", lambda: self._store.delete(asked))

    def close(self) -> None:
        """Close the store on its thread and end the thread, within the deadline. Safe to call twice.

        Raises:
            StorageStallError: the store is still busy; it is closed when it returns.
        """
        if self._is_closed:
            return
        self._is_closed = True
        closing = self._put(self._store.close)
        self._jobs.put(None)
        wait((closing,), timeout=self._deadline_s)
        if not closing.done():
            self._abandoned.set_result(None)
            raise StorageStallError("deadline", "close", f"still busy after {self._deadline_s:g} s")
        self.join()
        closing.result()

    def run_without_deadline(self, operation: str, work: Callable[[], Answer]) -> Answer:
        """Run an operation that accesses the caller's memory, and wait until it ends.

        Raises:
            StorageStallError: an earlier operation is past its deadline, or ``close`` stopped waiting for the store.
        """
        job = self._begin(operation, work)
        either: tuple[Future[Any], ...] = (job, self._abandoned)
        wait(either, return_when=FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise StorageStallError("deadline", operation, "still busy when the store was closed")

    def join(self) -> None:
        """Wait for the worker to end, without a timeout. Call ``close`` first."""
        self._worker.join()

    def _ask(self, operation: str, work: Callable[[], Answer]) -> Answer:
        job = self._begin(operation, work)
        wait((job,), timeout=self._deadline_s)
        if job.done():
            return job.result()
        if not job.cancel():  # the worker has begun; a queued job is cancelled instead
            self._stalled = operation, job
        raise StorageStallError("deadline", operation, f"no answer within {self._deadline_s:g} s")

    def _begin(self, operation: str, work: Callable[[], Answer]) -> Future[Answer]:
        if self._is_closed:
            raise StorageError("deadline", operation, "the store is closed")
        if self._stalled is not None and not self._stalled[1].done():
            raise StorageStallError("deadline", operation, f"busy with an earlier {self._stalled[0]}")
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
    """Run a store on its own thread and limit each operation to ``deadline_s``."""
    opened = DeadlinePageStore(store, deadline_s)
    opened.start()
    return opened


class DeadlineZeroCopyStore:
    """A ``ZeroCopyPageStore`` on one worker thread. Create it with ``open_deadline_zero_copy_store``.

    Zero-copy reads and writes have no deadline, because the caller must not reuse its pages before the store has
    finished. All other operations behave as those of ``DeadlinePageStore``.
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
    """Run a store on its own thread and limit each operation that does not access the caller's pages."""
    return DeadlineZeroCopyStore(store, open_deadline_page_store(store, deadline_s=deadline_s))
