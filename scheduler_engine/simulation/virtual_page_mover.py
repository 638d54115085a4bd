"""VirtualPageMover: transfers between tiers that take virtual time and move nothing.

**Links.** A replica has four links: device to host, host to device, host to storage, storage to host. A link does one
piece of work after the other, in the order of submission. Different links do not slow each other down. A piece takes
the latency of its link and its bytes divided by the bandwidth.

**Storage** may be shared by replicas that step in the order of time. It holds pages by their digests, so what one
replica has written, another one can read. It answers what it holds when a query or a read is submitted. Written pages
are there when their writer next polls after the end of the write, so a replica that fails before then has not written
them. If it is full, the pages that were used longest ago are dropped. With a bandwidth of its own it serves the pages
of all replicas one after the other, in the order in which they were submitted, whatever becomes of them: those of a
cancelled read and of a replica that fails are served, too. A piece ends when both its link and storage have done it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from scheduler_components._internal.virtual_clock import NEVER_NS, VirtualClock
from scheduler_components.cache.block_hash import split_digests
from scheduler_components.hicache import MemoryPageStore
from scheduler_components.values.page_operations import (
    BackupDone,
    CancelPrefetch,
    CopyToDevice,
    CopyToHost,
    Instruction,
    IoEvent,
    LoadBackDone,
    PagesRead,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    WriteDone,
    WriteToStorage,
)

_SLICE_PAGES = 32  # pages per piece of a read, as in ThreadPageMover
_MAX_LOAD_BACK_PAGES = 4096  # as in ThreadPageMover
_NUM_LAYERS = 32  # of the model whose sizes ``CostModel`` and ``TierConfig`` have


class _Piece(msgspec.Struct, frozen=True):
    """Work on a link: its operation, its first possible moment, its duration, what it answers, what it stores.

    It ends no earlier than ``served_ns``, when storage has served it.
    """

    op: int
    submitted_ns: int
    duration_ns: int
    event: IoEvent
    num_pages: int = 0
    keys: tuple[str, ...] = ()
    served_ns: int = 0

    def end_ns(self, free_ns: int) -> int:
        """Return when it ends on a link that is free from ``free_ns`` on."""
        return max(max(self.submitted_ns, free_ns) + self.duration_ns, self.served_ns)


@dataclass(slots=True, kw_only=True)
class SimulatedStorage:
    """The storage that replicas share.

    Attributes:
        pages: what it holds; each page counts as one byte.
        ns_per_page: of its own bandwidth, reads and writes of all replicas together; 0 for no bound.
    """

    pages: MemoryPageStore
    ns_per_page: float = 0.0
    _free_ns: int = field(default=0, init=False, repr=False)

    def serve(self, num_pages: int, now_ns: int) -> int:
        """Queue the transfer of pages that is submitted now. Return when it is done."""
        self._free_ns = max(self._free_ns, now_ns) + round(num_pages * self.ns_per_page)
        return self._free_ns


@dataclass(slots=True, kw_only=True)
class TransferLink:
    """One direction between two tiers. Pieces of work take turns in the order of their submission.

    Attributes:
        ns_per_page: duration of a page.
        latency_ns: duration of every piece with pages, besides that.
    """

    ns_per_page: float
    latency_ns: int
    _pieces: deque[_Piece] = field(default_factory=deque, init=False, repr=False)
    _free_ns: int = field(default=0, init=False, repr=False)

    def duration_ns(self, num_pages: int) -> int:
        """Return how long a transfer of so many pages takes."""
        return self.latency_ns + round(num_pages * self.ns_per_page)

    def push(self, piece: _Piece) -> None:
        self._pieces.append(piece)

    @property
    def next_end_ns(self) -> int:
        """When the piece under way ends; ``NEVER_NS`` without one."""
        return self._pieces[0].end_ns(self._free_ns) if self._pieces else NEVER_NS

    @property
    def last_end_ns(self) -> int:
        """When all pieces have ended; 0 without one."""
        end_ns = 0
        for piece in self._pieces:
            end_ns = piece.end_ns(end_ns or self._free_ns)
        return end_ns

    def pop_ended(self, now_ns: int) -> list[_Piece]:
        """Remove and return the pieces that have ended."""
        ended: list[_Piece] = []
        while (end_ns := self.next_end_ns) <= now_ns:
            self._free_ns = end_ns
            ended.append(self._pieces.popleft())
        return ended

    def cancel(self, op: int, now_ns: int) -> None:
        """Drop the pieces of a read that have not begun. Its last piece, which takes no time, stays."""
        kept, free_ns = deque[_Piece](), self._free_ns
        for piece in self._pieces:
            start_ns = max(piece.submitted_ns, free_ns)
            if piece.op == op and isinstance(piece.event, PagesRead) and start_ns > now_ns:
                continue
            kept.append(piece)
            free_ns = piece.end_ns(free_ns)
        self._pieces = kept


@dataclass(slots=True, kw_only=True)
class VirtualPageMover:
    """A ``PageMover`` whose transfers take virtual time and move nothing. No transfer fails.

    Attributes:
        clock: the time of the replica.
        storage: shared with other replicas; None without a storage tier.
        to_host, to_device, to_storage, from_storage: the links.
        num_calls: instructions and events so far. While it stays the same, the tiers wait for the end of an operation.
    """

    clock: VirtualClock
    storage: SimulatedStorage | None
    to_host: TransferLink
    to_device: TransferLink
    to_storage: TransferLink
    from_storage: TransferLink
    num_calls: int = field(default=0, init=False)
    _num_loading_pages: int = field(default=0, init=False, repr=False)
    _layers_end_ns: int = field(default=0, init=False, repr=False)

    @property
    def has_storage(self) -> bool:
        return self.storage is not None

    @property
    def load_back_budget_pages(self) -> int:
        return max(0, _MAX_LOAD_BACK_PAGES - self._num_loading_pages)

    @property
    def next_end_ns(self) -> int:
        """When the next operation ends, or a part of a read; ``NEVER_NS`` without one."""
        return min(
            self.to_host.next_end_ns,
            self.to_device.next_end_ns,
            self.to_storage.next_end_ns,
            self.from_storage.next_end_ns,
        )

    def end_of_forward_ns(self, duration_ns: int) -> int:
        """Return when a forward that begins now ends: its last layer waits for the loads that go by layer."""
        return max(self.clock.now_ns + duration_ns, self._layers_end_ns + duration_ns // _NUM_LAYERS)

    def submit(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            self._begin(instruction)

    def poll(self) -> list[IoEvent]:
        now_ns, events = self.clock.now_ns, list[IoEvent]()
        for link in (self.to_host, self.to_device, self.to_storage, self.from_storage):
            for piece in link.pop_ended(now_ns):
                events.append(self._end(piece))
        self.num_calls += len(events)
        return events

    def close(self) -> None:
        pass

    def _begin(self, instruction: Instruction) -> None:
        now_ns = self.clock.now_ns
        match instruction:
            case CopyToHost(op, pages):
                link = self.to_host
                link.push(_Piece(op, now_ns, link.duration_ns(len(pages)), WriteDone(op, True)))
            case CopyToDevice(op, pages):
                link, num_pages = self.to_device, len(pages)
                link.push(_Piece(op, now_ns, link.duration_ns(num_pages), LoadBackDone(op, True), num_pages))
                self._num_loading_pages += num_pages
                if instruction.by_layer:
                    self._layers_end_ns = link.last_end_ns
            case WriteToStorage(op, digests):
                link, keys = self.to_storage, _keys(digests)
                num_missing = len(keys) - self._num_stored(keys)
                served_ns = self._serve(num_missing)
                link.push(
                    _Piece(
                        op, now_ns, link.duration_ns(num_missing), BackupDone(op, True), keys=keys, served_ns=served_ns
                    )
                )
            case QueryStorage(op, digests):
                answer = QueryDone(op, self._num_stored(_keys(digests)))
                self.from_storage.push(_Piece(op, now_ns, self.from_storage.latency_ns, answer))
            case ReadFromStorage(op, digests):
                self._begin_read(op, _keys(digests))
            case CancelPrefetch(op):
                self.from_storage.cancel(op, now_ns)
            case _:
                return  # the others are about threads and backends
        self.num_calls += 1

    def _begin_read(self, op: int, keys: tuple[str, ...]) -> None:
        """Read slice by slice up to the first page that storage no longer holds."""
        assert self.storage is not None, "a read follows a hit"
        link, now_ns, num_stored = self.from_storage, self.clock.now_ns, self._num_stored(keys)
        self.storage.pages.batch_get(keys[:num_stored])
        for first in range(0, num_stored, _SLICE_PAGES):
            end = min(first + _SLICE_PAGES, num_stored)
            served_ns = self._serve(end - first)
            link.push(_Piece(op, now_ns, link.duration_ns(end - first), PagesRead(op, end), served_ns=served_ns))
        link.push(_Piece(op, now_ns, 0, ReadDone(op)))

    def _end(self, piece: _Piece) -> IoEvent:
        self._num_loading_pages -= piece.num_pages
        if piece.keys and self.storage is not None:
            return BackupDone(piece.op, all(self.storage.pages.batch_set(piece.keys, [b"\0"] * len(piece.keys))))
        return piece.event

    def _num_stored(self, keys: tuple[str, ...]) -> int:
        return self.storage.pages.batch_exists(keys) if self.storage is not None else 0

    def _serve(self, num_pages: int) -> int:
        return self.storage.serve(num_pages, self.clock.now_ns) if self.storage is not None else 0


def _keys(digests: bytes) -> tuple[str, ...]:
    return tuple(digest.hex() for digest in split_digests(digests))
