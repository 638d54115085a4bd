"""The operations on pages: instructions to a mover, its I/O events, and the decisions of all ranks.

The cache begins an operation and submits an ``Instruction`` to the rank's mover. The mover answers with an ``IoEvent``,
at a different time on each rank. When all ranks agree, the cache applies a ``TierDecision`` to its tree.

An operation has the same number on every rank, because all ranks begin the same operations in the same order.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "BackupDone",
    "BackupOutcome",
    "CopyToDevice",
    "CopyToHost",
    "TierDecision",
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

    ``by_layer``: requests already use the pages, so the next forward waits before each layer until it has been copied.
    """

    op: int
    host_pages: Pages
    device_pages: Pages
    by_layer: bool = False


class DiscardLoadBack(msgspec.Struct, frozen=True, gc=False):
    """No request uses the pages of this failed ``by_layer`` load any more, so forwards need not fail for it."""

    op: int


class WriteToStorage(msgspec.Struct, frozen=True, gc=False):
    """Store committed host pages; ``digests`` are their full digests, concatenated. Answer with ``BackupDone``."""

    op: int
    digests: bytes
    host_pages: Pages


class QueryStorage(msgspec.Struct, frozen=True, gc=False):
    """Query how many of these pages, from the first on, storage holds; answer with ``QueryDone``, also on failure."""

    op: int
    digests: bytes


class ReadFromStorage(msgspec.Struct, frozen=True, gc=False):
    """Read pages into reserved host pages, in order; answer with ``PagesRead`` events and a final ``ReadDone``."""

    op: int
    digests: bytes
    host_pages: Pages


class CancelPrefetch(msgspec.Struct, frozen=True, gc=False):
    """Stop this ``QueryStorage`` or ``ReadFromStorage`` after the part that is under way.

    ``QueryDone`` is still sent, or ``ReadDone`` as soon as no thread writes to the host pages.
    """

    op: int


class ReleaseStorage(msgspec.Struct, frozen=True, gc=False):
    """No operation uses storage, so a backend that is being detached can be closed."""


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
    """This rank's copy to the host has ended; ``is_ok`` if it is complete."""

    op: int
    is_ok: bool


class LoadBackDone(msgspec.Struct, frozen=True, gc=False):
    """This rank's copy to the device has ended; ``is_ok`` if it is complete."""

    op: int
    is_ok: bool


class BackupDone(msgspec.Struct, frozen=True, gc=False):
    """This rank's part of a backup has ended; ``is_ok`` if storage holds every page."""

    op: int
    is_ok: bool


class QueryDone(msgspec.Struct, frozen=True, gc=False):
    """Storage holds ``num_pages`` of this rank's slices, from the first on; 0 for a miss or a failure."""

    op: int
    num_pages: int


class PagesRead(msgspec.Struct, frozen=True, gc=False):
    """The first ``num_pages`` pages of the read are in host memory."""

    op: int
    num_pages: int


class ReadDone(msgspec.Struct, frozen=True, gc=False):
    """The read has ended, and no thread writes to its host pages."""

    op: int


IoEvent: TypeAlias = WriteDone | LoadBackDone | BackupDone | QueryDone | PagesRead | ReadDone


class WriteOutcome(msgspec.Struct, frozen=True, gc=False):
    """All ranks have committed ``host_pages``; or none has, if it is empty."""

    op: int
    host_pages: Pages


class LoadBackOutcome(msgspec.Struct, frozen=True, gc=False):
    """The device pages hold their content on every rank; unless ``is_ok``, no rank may use them."""

    op: int
    is_ok: bool


class BackupOutcome(msgspec.Struct, frozen=True, gc=False):
    """Storage holds every rank's slice of every page; unless ``is_ok``, the pages do not count as stored."""

    op: int
    is_ok: bool


class PrefetchHit(msgspec.Struct, frozen=True, gc=False):
    """Storage holds ``num_pages`` for every rank. Answer with ``ActivePrefetches.reserve``."""

    op: int
    num_pages: int


class PrefetchOutcome(msgspec.Struct, frozen=True, gc=False):
    """A prefetch has ended on every rank with the same number of committed host pages, possibly none.

    A rank may still write to ``num_draining_pages`` further reserved pages, which are not free yet.
    """

    op: int
    host_pages: Pages
    num_draining_pages: int = 0


class PrefetchDrained(msgspec.Struct, frozen=True, gc=False):
    """Storage has stopped working for a terminated prefetch on all ranks; its ``num_pages`` are free."""

    op: int
    num_pages: int


class StorageDetached(msgspec.Struct, frozen=True, gc=False):
    """At least one rank has detached its storage, so no page counts as stored."""


TierDecision: TypeAlias = (
    WriteOutcome | LoadBackOutcome | BackupOutcome | PrefetchHit | PrefetchOutcome | PrefetchDrained | StorageDetached
)
