"""What goes in and out of HiCache's controller: instructions to a mover, its I/O events, and decisions.

The cache begins an operation; an ``Instruction`` goes to the rank's mover; its ``IoEvent`` comes back, on each rank in
its own time; when all ranks agree, the ``Decision`` goes to the tree.

An operation has one number, the same on every rank, because every rank begins the same operations in the same order.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "BackupDone",
    "BackupOutcome",
    "CopyToDevice",
    "CopyToHost",
    "Decision",
    "Instruction",
    "DiscardLoadBack",
    "IoEvent",
    "LoadBackDone",
    "LoadBackOutcome",
    "PagesRead",
    "PrefetchDrained",
    "PrefetchHit",
    "PrefetchOutcome",
    "QueryStorage",
    "ReadDone",
    "ReadFromStorage",
    "CancelPrefetch",
    "QueryDone",
    "StorageDetached",
    "ReleaseStorage",
    "WriteDone",
    "WriteOutcome",
    "WriteToStorage",
]

Pages: TypeAlias = tuple[int, ...]


class CopyToHost(msgspec.Struct, frozen=True, gc=False):
    """Copy device pages into reserved host pages; answer with ``WriteDone``."""

    op: int
    device_pages: Pages
    host_pages: Pages


class CopyToDevice(msgspec.Struct, frozen=True, gc=False):
    """Copy committed host pages to the device; answer with ``LoadBackDone``.

    ``by_layer``: requests read them already, so the next forward waits before each layer until it is there.
    """

    op: int
    host_pages: Pages
    device_pages: Pages
    by_layer: bool = False


class DiscardLoadBack(msgspec.Struct, frozen=True, gc=False):
    """No request reads the pages of this failed load, which went ``by_layer``: forwards need not fail any more."""

    op: int


class WriteToStorage(msgspec.Struct, frozen=True, gc=False):
    """Store committed host pages, their whole digests follow one another in ``digests``; answer with ``BackupDone``."""

    op: int
    digests: bytes
    host_pages: Pages


class QueryStorage(msgspec.Struct, frozen=True, gc=False):
    """Ask how many of these pages, from the first on, storage holds; ``QueryDone`` comes also on failure."""

    op: int
    digests: bytes


class ReadFromStorage(msgspec.Struct, frozen=True, gc=False):
    """Read pages into reserved host pages, in order; answer with ``PagesRead``, at last with ``ReadDone``."""

    op: int
    digests: bytes
    host_pages: Pages


class CancelPrefetch(msgspec.Struct, frozen=True, gc=False):
    """Nobody waits for this ``QueryStorage`` or ``ReadFromStorage``: do no more for it than what is begun.

    ``QueryDone`` follows all the same, or ``ReadDone`` once nothing writes to the host pages any more.
    """

    op: int


class ReleaseStorage(msgspec.Struct, frozen=True, gc=False):
    """No operation uses storage: a backend that is being detached may be closed now."""


Instruction: TypeAlias = (
    CopyToHost
    | CopyToDevice
    | DiscardLoadBack
    | WriteToStorage
    | QueryStorage
    | ReadFromStorage
    | CancelPrefetch
    | ReleaseStorage
)


class WriteDone(msgspec.Struct, frozen=True, gc=False):
    """This rank's copy to the host has ended; good when all its bytes are there."""

    op: int
    is_ok: bool


class LoadBackDone(msgspec.Struct, frozen=True, gc=False):
    """This rank's copy to the device has ended; good when all its bytes are there."""

    op: int
    is_ok: bool


class BackupDone(msgspec.Struct, frozen=True, gc=False):
    """This rank's part of a backup to storage has ended; good when every page is held there."""

    op: int
    is_ok: bool


class QueryDone(msgspec.Struct, frozen=True, gc=False):
    """Storage holds ``num_pages`` of this rank's slices, from the first on; 0 for a miss and for a failure."""

    op: int
    num_pages: int


class PagesRead(msgspec.Struct, frozen=True, gc=False):
    """``num_pages`` pages, counted from the first one, are in host memory by now."""

    op: int
    num_pages: int


class ReadDone(msgspec.Struct, frozen=True, gc=False):
    """No more pages will land, and nothing writes to the operation's host pages any more."""

    op: int


IoEvent: TypeAlias = WriteDone | LoadBackDone | BackupDone | QueryDone | PagesRead | ReadDone


class WriteOutcome(msgspec.Struct, frozen=True, gc=False):
    """All ranks have copied to the host and committed ``host_pages``; or, when there are none, all have given up."""

    op: int
    host_pages: Pages


class LoadBackOutcome(msgspec.Struct, frozen=True, gc=False):
    """The device pages hold the content on every rank; or, when not good, must not be used on any."""

    op: int
    is_ok: bool


class BackupOutcome(msgspec.Struct, frozen=True, gc=False):
    """Storage holds every rank's slice of every page; or, when not good, nobody may count on it."""

    op: int
    is_ok: bool


class PrefetchHit(msgspec.Struct, frozen=True, gc=False):
    """Storage holds ``num_pages`` on every rank: say with ``HiCacheController.reserve`` how many to read."""

    op: int
    num_pages: int


class PrefetchOutcome(msgspec.Struct, frozen=True, gc=False):
    """A prefetch has ended on every rank with the same number of pages, committed to the host: perhaps none.

    ``num_draining_pages`` more were reserved and are not free yet: some rank may still write to them.
    """

    op: int
    host_pages: Pages
    num_draining_pages: int = 0


class PrefetchDrained(msgspec.Struct, frozen=True, gc=False):
    """Storage does nothing any more for a prefetch that was given up, on any rank: ``num_pages`` were given back."""

    op: int
    num_pages: int


class StorageDetached(msgspec.Struct, frozen=True, gc=False):
    """Storage is no longer attached on every rank: nobody may count on what it held."""


Decision: TypeAlias = (
    WriteOutcome | LoadBackOutcome | BackupOutcome | PrefetchHit | PrefetchOutcome | PrefetchDrained | StorageDetached
)
