"""ThreadPageMover: moves real pages on four threads: copies each way, reads from storage, writes to storage.

The scheduler's thread gives instructions and takes events. No agreement is ever made on another thread, so threads
cannot interleave anything between ranks.

Each thread is an executor of one worker, which does its work in order. What waits for a worker is bounded by what the
cache above begins: copies by the host's pages and ``max_load_back_pages``, reads by the lanes of prefetches. Every
piece of
work ends by itself, because stores are behind a deadline; so the interpreter may wait for the workers when it ends.

Every instruction is answered, whatever becomes of it. Work that raises is answered with the event that says that it
failed, and logged: the agreement takes care of the rest, on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from scheduler_components.cache.block_hash import split_digests
from scheduler_components.errors import ConfigError, StorageError
from scheduler_components.failure_log import FailureLog
from scheduler_components.hicache.memory import HostPool
from scheduler_components.hicache.page_keys import KeySpace
from scheduler_components.hicache.storage import CheckedPageStore, StorageStats
from scheduler_components.hicache.storage_backend import FramedBackend, StorageBackend, ZeroCopyBackend
from scheduler_components.hicache.thread_layer_counter import ThreadLayerDoneCounter
from scheduler_components.hicache.thread_storage import open_deadline_page_store, open_deadline_zero_copy_store
from scheduler_components.page_operations import (
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
from scheduler_components.ports import CopyEvent, DeviceMemory, NullCopyEvent, PageStore, ZeroCopyPageStore

__all__ = ["ThreadPageMover"]

_SLICE_PAGES = 32  # pages asked of storage at once: how much a stop may come too late
_CLOSE_S = 10.0


@dataclass(slots=True)
class _Backend:
    """An attached store: one ``StorageBackend`` per thread that uses it, since each counts for one thread."""

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
    """A piece of work that has ended: what it has to tell, the end of its copy, and what it raised."""

    event: IoEvent
    end: CopyEvent
    error: BaseException | None = None


class _Io:
    """The workers, the way of events back to the scheduler's thread, and what is under way."""

    def __init__(self) -> None:
        self._events: SimpleQueue[_Ended] = SimpleQueue()
        self._early: list[_Ended] = []  # taken off the queue, but not by a poll, or not done on the device's stream
        self._failures = FailureLog(logging.getLogger(__name__))
        self._is_closed = False
        self.copies, self.loads, self.reads, self.writes = (
            ThreadPoolExecutor(1, thread_name_prefix=f"pages-{name}")  # noqa: SCH008 threads start with the first work
            for name in ("copy", "load", "read", "write")
        )
        self.loading: dict[int, int] = {}  # operation -> pages
        self.reading: set[int] = set()  # operations that ask or read
        self.stopped: set[int] = set()

    def begin(self, worker: ThreadPoolExecutor, work: Callable[[], None], *, if_failed: IoEvent) -> None:
        """Let a worker do a piece of work; where it raises, ``if_failed`` is what it has to tell."""
        worker.submit(work).add_done_callback(partial(self._note_failure, if_failed))

    def put(self, event: IoEvent, end: CopyEvent = NullCopyEvent()) -> None:
        """Tell of an event once its copy has ended on the device's stream."""
        self._events.put(_Ended(event, end))

    def take(self) -> list[IoEvent]:
        taken, self._early = self._early, []
        while not self._events.empty():
            taken.append(self._events.get())
        events = []
        for ended in taken:
            if not ended.end.is_done():
                self._early.append(ended)
                continue
            events.append(ended.event)
            if ended.error is not None:
                self._failures.failed(_ACTIVITIES[type(ended.event)], ended.error)
            elif type(ended.event) in _ACTIVITIES:
                self._failures.succeeded(_ACTIVITIES[type(ended.event)])
        return events

    def wait(self, timeout_s: float) -> None:
        if not any(ended.end.is_done() for ended in self._early):
            try:
                self._early.append(self._events.get(timeout=timeout_s))
            except Empty:
                return

    def close(self) -> None:
        """End reads with their present slice, let everything else that was begun end, and end the workers."""
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
    """The last piece of work of a worker: when it is done, so is all before it."""


@dataclass(slots=True, kw_only=True)
class ThreadPageMover:
    """A ``PageMover`` over a host pool, a device's memory and any page store.

    All methods are for one thread, the scheduler's. The workers start with the first instructions; ``close`` ends them.

    Attributes:
        host: the rank's host pool; the cache above commits and releases, this writes and reads.
        device: the rank's device pages.
        keys: names the rank's slices in storage, and says whether this rank writes them.
        max_load_back_pages: copies to the device that may be under way.
        layer_counter: what forwards wait for, layer by layer.
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
        """Use ``store`` from the agreement on at which every rank of the replica has one; it gets framed copies.

        Args:
            store: owned by the mover from here on.
            deadline_s: longest wait for one of its operations; a late answer is a miss.

        Raises:
            StorageError: another store is attached, or is still in use while it is being detached.
        """
        self._expect_none()
        shared = open_deadline_page_store(store, deadline_s=deadline_s)
        page_bytes = self.device.shape.page_bytes
        self._backend = _Backend(
            FramedBackend(host=self.host, store=CheckedPageStore(store=shared, page_bytes=page_bytes)),
            FramedBackend(host=self.host, store=CheckedPageStore(store=shared, page_bytes=page_bytes)),
        )

    def attach_zero_copy(self, store: ZeroCopyPageStore, *, deadline_s: float, has_checksums: bool) -> None:
        """Do what ``attach`` does; the store reads and writes the host's own pages, which wait for it.

        Args:
            store: owned by the mover from here on; give ``keys`` an ``ZERO_COPY_LAYOUT``.
            deadline_s: longest wait for what it does elsewhere than in pages.
            has_checksums: keep a checksum beside each page, and look at it when the page is read.

        Raises:
            ConfigError: the host's layout is not ``page_first``.
            StorageError: another store is attached, or is still in use; or this one refuses the host's memory.
        """
        self._expect_none()
        memory = self.host.memory
        if memory is None:
            problem = "cannot be read and written in place: a page is not one run of bytes"
            raise ConfigError("host_layout", "layer_first", problem, "give page_first, or let pages be framed")
        store.register(memory)
        shared = open_deadline_zero_copy_store(store, deadline_s=deadline_s)
        self._backend = _Backend(
            ZeroCopyBackend(host=self.host, store=shared, has_checksums=has_checksums),
            ZeroCopyBackend(host=self.host, store=shared, has_checksums=has_checksums),
        )

    def _expect_none(self) -> None:
        if self._backend is not None:
            raise StorageError("mover", "attach", "another store is attached or still in use: detach it, then step on")

    def detach(self) -> None:
        """Stop using storage. From the next agreement on no rank begins anything with it; when all that was begun has
        settled, the store is closed on the thread that writes: a step does not wait for it. Without a store, nothing
        happens."""
        self._is_detaching = self._backend is not None

    def storage_stats(self) -> tuple[StorageStats, StorageStats]:
        """Return the counts of reads and of writes with the attached store."""
        if self._backend is None:
            return StorageStats(), StorageStats()
        return self._backend.for_reads.stats(), self._backend.for_writes.stats()

    def submit(self, instructions: Sequence[Instruction]) -> None:
        if any(isinstance(instruction, CopyToHost | CopyToDevice) for instruction in instructions):
            # Copies start after the forwards that this thread has launched.
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
        """Wait until there is something to poll, at most ``timeout_s``: for a scheduler that has nothing else to do."""
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
                    io.writes.submit(backend.for_writes.close)  # never raises; may take up to the deadline

    def _release_store(self) -> _Backend | None:
        """Give up the store; whoever gets it closes it."""
        backend, self._backend, self._is_detaching = self._backend, None, False
        return backend

    # --- on the threads ---

    def _copy_to_host(self, copy: CopyToHost) -> None:
        end = self.host.copy_from_device(self.device, copy.device_pages, copy.host_pages)
        self._io.put(WriteDone(copy.op, True), end)

    def _copy_to_device(self, copy: CopyToDevice) -> None:
        end: CopyEvent = NullCopyEvent()
        try:
            for end in self.host.copy_to_device_by_layer(copy.host_pages, self.device, copy.device_pages):
                if copy.by_layer:
                    self.layer_counter.complete_layer(copy.op, end)
        except BaseException:
            self.layer_counter.fail_load_back(copy.op)
            raise
        self._io.put(LoadBackDone(copy.op, True), end)

    def _write(self, write: WriteToStorage) -> None:
        backend, is_ok = self._backend, True
        if self.keys.is_writer:  # the one rank that writes this slice answers for it; the others have nothing to do
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
                backend = None  # a hole ends the prefix
            self._io.put(PagesRead(read.op, num_read))
        self._io.put(ReadDone(read.op))

    def _keys(self, digests: bytes) -> list[str]:
        return [self.keys.key(digest) for digest in split_digests(digests)]
