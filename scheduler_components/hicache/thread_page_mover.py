"""ThreadPageMover: move pages on four threads: copies in each direction, reads from storage, writes to storage.

The scheduler's thread submits instructions and polls events. No collective runs on another thread, so threads cannot
reorder collectives between ranks.

Each thread is an executor with one worker, which processes its work in order. The cache bounds the waiting work: copies
by the host's pages and ``max_load_back_pages``, reads by the lanes of prefetches. All work ends, because stores are
behind a deadline, so the interpreter can join the workers when it exits.

Every instruction is answered. If the work raises, the answer is an event that reports the failure, which is also
logged, and the agreement handles it on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components.cache.block_hash import split_digests
from scheduler_components.errors import ConfigError, StorageError
from scheduler_components.hicache.memory import HostPool
from scheduler_components.hicache.page_keys import KeySpace
from scheduler_components.hicache.storage import CheckedPageStore, StorageStats
from scheduler_components.hicache.storage_backend import FramedBackend, StorageBackend, ZeroCopyBackend
from scheduler_components.hicache.thread_layer_counter import ThreadLayerDoneCounter
from scheduler_components.hicache.thread_storage import open_deadline_page_store, open_deadline_zero_copy_store
from scheduler_components.ports import CopyEvent, DeviceMemory, NullCopyEvent, PageStore, ZeroCopyPageStore
from scheduler_components.values.page_operations import (
    BackupDone,
    CancelPrefetch,
    CopyToDevice,
    CopyToHost,
    DiscardLoadBack,
    Instruction,
    IoEvent,
    LoadBackDone,
    PagesRead,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    ReleaseStorage,
    WriteDone,
    WriteToStorage,
)

__all__ = ["ThreadPageMover"]

_SLICE_PAGES = 32  # pages per read or write; a cancelled read ends after the present slice
_CLOSE_S = 10.0


@dataclass(slots=True)
class _Backend:
    """An attached store: one ``StorageBackend`` per thread, because their counts are not synchronized."""

    for_reads: StorageBackend
    for_writes: StorageBackend


_ACTIVITIES: dict[type[IoEvent], str] = {
    WriteDone: "copying pages to the host",
    LoadBackDone: "copying pages to the device",
    BackupDone: "writing pages to storage",
    QueryDone: "asking storage for pages",
    ReadDone: "reading pages from storage",
}


class _Ended(NamedTuple):
    """The result of a piece of work: its event, the event of its copy on the device, and the exception it raised."""

    event: IoEvent
    copy: CopyEvent
    error: BaseException | None = None


class _Io:
    """The workers, the queue of events to the scheduler's thread, and the operations under way."""

    def __init__(self) -> None:
        self._events: SimpleQueue[_Ended] = SimpleQueue()
        self._early: list[_Ended] = []  # dequeued, but not yet polled, or not yet done on the device's stream
        self._failures = FailureLog(logging.getLogger(__name__))
        self._is_closed = False
        self.copies, self.loads, self.reads, self.writes = (
            ThreadPoolExecutor(1, thread_name_prefix=f"pages-{name}")  # noqa: SCH008 threads start with the first work
            for name in ("copy", "load", "read", "write")
        )
        self.loading: dict[int, int] = {}  # operation -> pages
        self.reading: set[int] = set()  # queries and reads
        self.stopped: set[int] = set()

    def begin(self, worker: ThreadPoolExecutor, work: Callable[[], None], *, if_failed: IoEvent) -> None:
        """Run work on a worker. If it raises, its event is ``if_failed``."""
        worker.submit(work).add_done_callback(partial(self._note_failure, if_failed))

    def put(self, event: IoEvent, copy: CopyEvent = NullCopyEvent()) -> None:
        """Queue an event. ``take`` returns it once ``copy`` has ended on the device's stream."""
        self._events.put(_Ended(event, copy))

    def take(self) -> list[IoEvent]:
        taken, self._early = self._early, []
        while not self._events.empty():
            taken.append(self._events.get())
        events = []
        for ended in taken:
            if not ended.copy.is_done():
                self._early.append(ended)
                continue
            events.append(ended.event)
            if ended.error is not None:
                self._failures.failed(_ACTIVITIES[type(ended.event)], ended.error)
            elif type(ended.event) in _ACTIVITIES:
                self._failures.succeeded(_ACTIVITIES[type(ended.event)])
        return events

    def wait(self, timeout_s: float) -> None:
        if not any(ended.copy.is_done() for ended in self._early):
            try:
                self._early.append(self._events.get(timeout=timeout_s))
            except Empty:
                return

    def close(self) -> None:
        """Cancel reads after their present slice, wait for the other work, and end the workers."""
        if self._is_closed:
            return
        self._is_closed = True
        self.stopped |= self.reading
        workers = (self.copies, self.loads, self.reads, self.writes)
        ends = [worker.submit(_nothing) for worker in workers]
        wait(ends, timeout=_CLOSE_S)
        for worker, end in zip(workers, ends, strict=True):
            worker.shutdown(wait=end.done(), cancel_futures=True)

    def _note_failure(self, if_failed: IoEvent, done: Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._events.put(_Ended(if_failed, NullCopyEvent(), error))


def _nothing() -> None:
    """Do nothing. When this ends, all earlier work of the worker has ended."""


@dataclass(slots=True, kw_only=True)
class ThreadPageMover:
    """A ``PageMover`` over a host pool, device memory and any page store.

    Call all methods on the scheduler's thread. The workers start with the first instructions; ``close`` ends them.

    Attributes:
        host: the rank's host pool. The cache commits and releases its pages; the mover writes and reads them.
        device: the rank's device pages.
        keys: the keys of the rank's slices, and whether this rank writes them.
        max_load_back_pages: the largest number of pages that are copied to the device at a time.
        layer_counter: forwards wait at it for each layer.
    """

    host: HostPool
    device: DeviceMemory
    keys: KeySpace
    max_load_back_pages: int = 4096
    layer_counter: ThreadLayerDoneCounter = field(default_factory=ThreadLayerDoneCounter, init=False)
    _io: _Io = field(default_factory=_Io, init=False)
    _backend: _Backend | None = field(default=None, init=False)
    _is_detaching: bool = field(default=False, init=False)

    @property
    def has_storage(self) -> bool:
        return self._backend is not None and not self._is_detaching

    @property
    def load_back_budget_pages(self) -> int:
        return max(0, self.max_load_back_pages - sum(self._io.loading.values()))

    def attach(self, store: PageStore, *, deadline_s: float) -> None:
        """Attach a store for framed copies. It is used once all ranks of the replica have agreed to have one.

        Args:
            store: the mover owns it and closes it.
            deadline_s: longest wait for an operation; a late answer is a miss.

        Raises:
            StorageError: another store is attached, or is still being detached.
        """
        self._check_detached()
        shared = open_deadline_page_store(store, deadline_s=deadline_s)
        page_bytes = self.device.shape.page_bytes
        self._backend = _Backend(
            FramedBackend(host=self.host, store=CheckedPageStore(store=shared, page_bytes=page_bytes)),
            FramedBackend(host=self.host, store=CheckedPageStore(store=shared, page_bytes=page_bytes)),
        )

    def attach_zero_copy(self, store: ZeroCopyPageStore, *, deadline_s: float, has_checksums: bool) -> None:
        """Attach a store that reads and writes the host pages themselves; see ``ZeroCopyBackend``.

        Args:
            store: the mover owns it and closes it. ``keys`` must have ``ZERO_COPY_LAYOUT``.
            deadline_s: longest wait for an operation that does not access host pages.
            has_checksums: store a checksum with each page and verify it when the page is read.

        Raises:
            ConfigError: the host's layout is not ``page_first``.
            StorageError: another store is attached or still being detached, or the store refuses the host memory.
        """
        self._check_detached()
        memory = self.host.memory
        if memory is None:
            problem = "does not work with a zero-copy store: a page is not contiguous"
            raise ConfigError("host_layout", "layer_first", problem, "give page_first, or use framed copies")
        store.register(memory)
        shared = open_deadline_zero_copy_store(store, deadline_s=deadline_s)
        self._backend = _Backend(
            ZeroCopyBackend(host=self.host, store=shared, has_checksums=has_checksums),
            ZeroCopyBackend(host=self.host, store=shared, has_checksums=has_checksums),
        )

    def _check_detached(self) -> None:
        if self._backend is not None:
            raise StorageError("mover", "attach", "another store is attached or in use; detach it, then step")

    def detach(self) -> None:
        """Stop using storage; no effect without a store.

        No rank begins a storage operation after the next agreement. When all operations have settled, the writing
        thread closes the store, so that no step waits for it.
        """
        self._is_detaching = self._backend is not None

    def storage_stats(self) -> tuple[StorageStats, StorageStats]:
        """Return the counts of reads and of writes with the attached store."""
        if self._backend is None:
            return StorageStats(), StorageStats()
        return self._backend.for_reads.stats(), self._backend.for_writes.stats()

    def submit(self, instructions: Sequence[Instruction]) -> None:
        if any(isinstance(instruction, CopyToHost | CopyToDevice) for instruction in instructions):
            # Copies start after the forwards launched before.
            self.device.wait_for_compute_stream()
        for instruction in instructions:
            self._begin(instruction)

    def poll(self) -> list[IoEvent]:
        events = self._io.take()
        for event in events:
            if isinstance(event, LoadBackDone):
                del self._io.loading[event.op]
                self.layer_counter.finish_load_back(event.op)
            elif isinstance(event, QueryDone | ReadDone):
                self._io.reading.discard(event.op)
                self._io.stopped.discard(event.op)
        return events

    def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for an event to poll, when the scheduler is otherwise idle."""
        self._io.wait(timeout_s)

    def close(self) -> None:
        """End the threads and close the store."""
        self._io.close()
        backend = self._release_store()
        if backend is not None:
            backend.for_writes.close()

    def _begin(self, instruction: Instruction) -> None:
        io = self._io
        match instruction:
            case CopyToHost(op):
                io.begin(io.copies, partial(self._copy_to_host, instruction), if_failed=WriteDone(op, False))
            case CopyToDevice(op):
                io.loading[op] = len(instruction.device_pages)
                if instruction.by_layer:
                    self.layer_counter.start_load_back(op)
                io.begin(io.loads, partial(self._copy_to_device, instruction), if_failed=LoadBackDone(op, False))
            case DiscardLoadBack(op):
                self.layer_counter.discard_load_back(op)
            case WriteToStorage(op):
                io.begin(io.writes, partial(self._write, instruction), if_failed=BackupDone(op, False))
            case QueryStorage(op):
                io.reading.add(op)
                io.begin(io.reads, partial(self._query, instruction), if_failed=QueryDone(op, 0))
            case ReadFromStorage(op):
                io.reading.add(op)
                io.begin(io.reads, partial(self._read, instruction), if_failed=ReadDone(op))
            case CancelPrefetch(op):
                if op in io.reading:
                    io.stopped.add(op)
            case ReleaseStorage():
                backend = self._release_store() if self._is_detaching else None
                if backend is not None:
                    io.writes.submit(backend.for_writes.close)  # does not raise; takes up to the deadline

    def _release_store(self) -> _Backend | None:
        """Detach the store and return it; the caller closes it."""
        backend, self._backend, self._is_detaching = self._backend, None, False
        return backend

    # --- on the worker threads ---

    def _copy_to_host(self, copy: CopyToHost) -> None:
        event = self.host.copy_from_device(self.device, copy.device_pages, copy.host_pages)
        self._io.put(WriteDone(copy.op, True), event)

    def _copy_to_device(self, copy: CopyToDevice) -> None:
        event: CopyEvent = NullCopyEvent()
        try:
            for event in self.host.copy_to_device_by_layer(copy.host_pages, self.device, copy.device_pages):
                if copy.by_layer:
                    self.layer_counter.complete_layer(copy.op, event)
        except BaseException:
            self.layer_counter.fail_load_back(copy.op)
            raise
        self._io.put(LoadBackDone(copy.op, True), event)

    def _write(self, write: WriteToStorage) -> None:
        backend, is_ok = self._backend, True
        if self.keys.is_writer:  # the result of the writing rank decides; the others have nothing to do
            keys = self._keys(write.digests)
            num_held = backend.for_writes.exists(keys) if backend is not None else 0
            for at in range(num_held, len(keys), _SLICE_PAGES):
                part = slice(at, at + _SLICE_PAGES)
                is_ok = is_ok and backend is not None and backend.for_writes.write(keys[part], write.host_pages[part])
        self._io.put(BackupDone(write.op, is_ok))

    def _query(self, query: QueryStorage) -> None:
        backend, num_pages = self._backend, 0
        if backend is not None and query.op not in self._io.stopped:
            num_pages = backend.for_reads.exists(self._keys(query.digests))
        self._io.put(QueryDone(query.op, num_pages))

    def _read(self, read: ReadFromStorage) -> None:
        backend, keys, num_read = self._backend, self._keys(read.digests), 0
        while backend is not None and num_read < len(keys) and read.op not in self._io.stopped:
            part = slice(num_read, num_read + _SLICE_PAGES)
            count = backend.for_reads.read(keys[part], read.host_pages[part])
            num_read += count
            if count < len(keys[part]):
                backend = None  # the prefix ends at the first missing page
            self._io.put(PagesRead(read.op, num_read))
        self._io.put(ReadDone(read.op))

    def _keys(self, digests: bytes) -> list[str]:
        return [self.keys.key(digest) for digest in split_digests(digests)]
