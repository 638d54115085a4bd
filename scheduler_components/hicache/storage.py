"""Frames and checks of stored pages.

**Frame.** A header with length and checksum precedes each page, so that a torn, changed or swapped page is never used:
``magic 4 | length 8, big-endian | BLAKE2b-128 of (key, page) | page``. The checksum covers the key, so it also detects
a store that returns the page of another key. It is not a signature: anyone with write access to the store can forge
pages.

**Checks.** ``CheckedPageStore`` makes any store safe: a failure, a stall, a wrong page or an incomplete answer is a
counted miss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct
from typing import TypeVar

import msgspec

from scheduler_components.errors import StorageStallError
from scheduler_components.ports import PageBytes, PageStore

__all__ = [
    "FRAME_BYTES",
    "CheckedPageStore",
    "StorageStats",
    "StoreClient",
    "parse_count",
    "parse_list",
    "frame_page",
    "unframe_page",
]

_HEADER = Struct(">4sQ16s")
_MAGIC = b"KVP1"

FRAME_BYTES = _HEADER.size
"""Size of the header."""


def frame_page(key: str, page: PageBytes) -> bytes:
    """Return a framed copy of the page, so that later changes of the page's memory do not reach the store."""
    return b"".join((_HEADER.pack(_MAGIC, len(page), _checksum(key, page)), page))


def unframe_page(key: str, framed: PageBytes) -> memoryview | None:
    """Return a view of the page in ``framed``, or None if it is not exactly the page stored under ``key``."""
    view = memoryview(framed)
    if len(view) < FRAME_BYTES:
        return None
    magic, length, checksum = _HEADER.unpack_from(view)
    page = view[FRAME_BYTES:]
    if magic != _MAGIC or length != len(page) or checksum != _checksum(key, page):
        return None
    return page


def _checksum(key: str, page: PageBytes) -> bytes:
    name = key.encode()
    digest = blake2b(len(name).to_bytes(4, "big") + name, digest_size=16)
    digest.update(page)
    return digest.digest()


Answer = TypeVar("Answer")


class StorageStats(msgspec.Struct, frozen=True, gc=False):
    """Counts of a store's results since the start.

    Attributes:
        pages_hit: pages read and verified.
        pages_missed: pages requested and not returned, for any reason.
        pages_written: pages that the store reported as held after a write.
        pages_refused: pages that the store did not accept.
        pages_corrupt: pages that differ from the stored page: torn, changed, of another key or another size.
        stalls: operations that passed their deadline.
        failures: operations that raised another error.
        bad_answers: operations whose answer violated the interface.
        last_problem: description of the latest stall, failure or bad answer; empty if there was none.
    """

    pages_hit: int = 0
    pages_missed: int = 0
    pages_written: int = 0
    pages_refused: int = 0
    pages_corrupt: int = 0
    stalls: int = 0
    failures: int = 0
    bad_answers: int = 0
    last_problem: str = ""


@dataclass(slots=True)
class StoreClient:
    """Calls a store and counts the results, on one thread.

    Attributes:
        stats: the counts so far.
    """

    stats: StorageStats = field(default_factory=StorageStats, init=False)

    def call(
        self, operation: str, ask: Callable[[], object], read: Callable[[object], Answer], otherwise: Answer
    ) -> Answer:
        """Return the store's answer, parsed by ``read``; count a failure or a bad answer and return ``otherwise``."""
        try:
            answer = ask()
        except StorageStallError as error:
            self._note("stalls", str(error))
            return otherwise
        except Exception as error:  # noqa: BLE001 - an error in a third-party store must not end the scheduler
            self._note("failures", f"{operation}: {type(error).__name__}: {error}")
            return otherwise
        try:
            return read(answer)
        except ValueError as error:
            self._note("bad_answers", f"{operation}: {error}")
            return otherwise

    def count(self, **more: int) -> None:
        """Add to the named counts."""
        counted = {name: getattr(self.stats, name) + count for name, count in more.items()}
        self.stats = msgspec.structs.replace(self.stats, **counted)

    def _note(self, counter: str, problem: str) -> None:
        self.count(**{counter: 1})
        self.stats = msgspec.structs.replace(self.stats, last_problem=problem)


@dataclass(slots=True, kw_only=True)
class CheckedPageStore:
    """A page store that never raises and never returns a wrong page.

    Wrap it around a store with a deadline, not inside: it frames, and so copies, each page first. A write that stalls
    and completes late then stores the original page and not the later content of the host page. Each thread needs its
    own ``CheckedPageStore``, because the counts are not synchronized; they can share one ``DeadlinePageStore``.

    Attributes:
        store: the wrapped store.
        page_bytes: size of every page of this cache.
    """

    store: PageStore
    page_bytes: int
    _calls: StoreClient = field(default_factory=StoreClient, init=False)

    def stats(self) -> StorageStats:
        """Return the counts so far."""
        return self._calls.stats

    def batch_exists(self, keys: Sequence[str]) -> int:
        """Return how many keys from the first on are held; 0 if the store fails."""
        return self._calls.call("batch_exists", lambda: self.store.batch_exists(keys), parse_count(len(keys)), 0)

    def batch_get(self, keys: Sequence[str]) -> list[memoryview | None]:
        """Return one verified page per key, or None. Corrupt pages are deleted."""
        no_answer: list[object] = [None] * len(keys)
        frames = self._calls.call("batch_get", lambda: self.store.batch_get(keys), parse_list(len(keys)), no_answer)
        pages = [self._verified(key, frame) for key, frame in zip(keys, frames, strict=True)]
        corrupt = [
            key for key, frame, page in zip(keys, frames, pages, strict=True) if page is None and frame is not None
        ]
        num_hit = sum(page is not None for page in pages)
        self._calls.count(pages_hit=num_hit, pages_missed=len(keys) - num_hit, pages_corrupt=len(corrupt))
        if corrupt:
            self.delete(corrupt)
        return pages

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> list[bool]:
        """Store pages; return for each page whether the store holds it.

        Raises:
            ValueError: the caller passed a page of another size, or not one page per key.
        """
        if len(keys) != len(pages) or any(len(page) != self.page_bytes for page in pages):
            raise ValueError(f"give one page of {self.page_bytes} bytes per key")
        framed = [frame_page(key, page) for key, page in zip(keys, pages, strict=True)]
        no_answer: list[object] = [False] * len(keys)
        taken = self._calls.call(
            "batch_set", lambda: self.store.batch_set(keys, framed), parse_list(len(keys)), no_answer
        )
        held = [answer is True for answer in taken]
        self._calls.count(pages_written=sum(held), pages_refused=len(held) - sum(held))
        return held

    def delete(self, keys: Sequence[str]) -> int:
        """Remove keys; return how many were removed."""
        return self._calls.call("delete", lambda: self.store.delete(keys), parse_count(len(keys)), 0)

    def close(self) -> None:
        """Close the store; count a failure."""
        self._calls.call("close", self.store.close, lambda _: None, None)

    def _verified(self, key: str, frame: object) -> memoryview | None:
        if not isinstance(frame, bytes | bytearray | memoryview):
            return None
        page = unframe_page(key, frame)
        return page if page is not None and len(page) == self.page_bytes else None


def parse_count(num_keys: int) -> Callable[[object], int]:
    """Return a parser for ``StoreClient.call`` that accepts a number of keys."""

    def read(answer: object) -> int:
        if not isinstance(answer, int) or not 0 <= answer <= num_keys:
            raise ValueError(f"{answer!r} of {num_keys} keys")
        return int(answer)

    return read


def parse_list(num_keys: int) -> Callable[[object], list[object]]:
    """Return a parser for ``StoreClient.call`` that accepts one answer per key."""

    def read(answer: object) -> list[object]:
        if not isinstance(answer, list | tuple) or len(answer) != num_keys:
            raise ValueError(f"{type(answer).__name__} instead of one answer per key for {num_keys} keys")
        return list(answer)

    return read
