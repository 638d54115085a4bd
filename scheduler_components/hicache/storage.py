"""What a stored page is: its frame, the checks around any store, and the keys of each rank's slices.

**Frame.** Length and checksum stand in front of a page, so that a torn, changed or swapped page is never taken:
``magic 4 | length 8, big-endian | BLAKE2b-128 of (key, page) | page``. The key is part of the checksum, so a store that
answers with another key's page is found out too. It is no signature: whoever may write to a store can forge its pages.

**Checks.** ``CheckedPageStore`` makes any store safe: what fails, stalls, lies or answers half is a miss and a count.

**Keys.** ``Placement`` declares once how a page's bytes lie over the ranks, and ``KeySpace`` derives who reads and who
writes which key. Peers decided this rank by rank. With a rank in the key where the data is the same on every rank, the
cache splits into keys that nobody reads. Without one where it differs, ranks read each other's slices and the output
is garbled.
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
"""How much longer a framed page is."""


def frame_page(key: str, page: PageBytes) -> bytes:
    """Return a framed copy of the page: what happens to the page's memory afterwards cannot reach the store."""
    return b"".join((_HEADER.pack(_MAGIC, len(page), _checksum(key, page)), page))


def unframe_page(key: str, framed: PageBytes) -> memoryview | None:
    """Return a view of the page in ``framed``, or None when it is not exactly what was stored under ``key``."""
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
    """What a store has done so far; all counts only grow.

    Attributes:
        pages_hit: pages read and verified.
        pages_missed: pages asked for and not delivered, for whatever reason.
        pages_written: pages that the store said it holds after a write.
        pages_refused: pages that it did not take.
        pages_corrupt: pages that were not what had been stored: torn, changed, of another key or another size.
        stalls: operations that passed their deadline.
        failures: operations that raised anything else.
        bad_answers: operations whose answer was not of the port's form.
        last_problem: the latest stall, failure or bad answer in words; empty when there was none.
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
    """Asks a store, and counts what came of it; for one thread.

    Attributes:
        stats: the counts up to now.
    """

    stats: StorageStats = field(default_factory=StorageStats, init=False)

    def call(
        self, operation: str, ask: Callable[[], object], read: Callable[[object], Answer], otherwise: Answer
    ) -> Answer:
        """Return what the store answers, as ``read`` takes it; ``otherwise``, counted, when there is no such answer."""
        try:
            answer = ask()
        except StorageStallError as error:
            self._note("stalls", str(error))
            return otherwise
        except Exception as error:  # noqa: BLE001 - stores are third parties' code; nothing of theirs may end a scheduler
            self._note("failures", f"{operation}: {type(error).__name__}: {error}")
            return otherwise
        try:
            return read(answer)
        except ValueError as error:
            self._note("bad_answers", f"{operation}: {error}")
            return otherwise

    def count(self, **more: int) -> None:
        """Add to the counts of these names."""
        counted = {name: getattr(self.stats, name) + count for name, count in more.items()}
        self.stats = msgspec.structs.replace(self.stats, **counted)

    def _note(self, counter: str, problem: str) -> None:
        self.count(**{counter: 1})
        self.stats = msgspec.structs.replace(self.stats, last_problem=problem)


@dataclass(slots=True, kw_only=True)
class CheckedPageStore:
    """A page store that never raises and never hands out a wrong page.

    Put it outermost: pages are framed, and so copied, before a store behind a deadline sees them. A write that stalls
    and lands late then stores what was given, not what the host page holds by then. Its counts are for one thread:
    several threads have one each, over a shared ``DeadlinePageStore``.

    Attributes:
        store: the store proper.
        page_bytes: length of every page of this cache.
    """

    store: PageStore
    page_bytes: int
    _calls: StoreClient = field(default_factory=StoreClient, init=False)

    def stats(self) -> StorageStats:
        """Return the counts up to now."""
        return self._calls.stats

    def batch_exists(self, keys: Sequence[str]) -> int:
        """Return how many keys from the first on are held; 0 when the store cannot say."""
        return self._calls.call("batch_exists", lambda: self.store.batch_exists(keys), parse_count(len(keys)), 0)

    def batch_get(self, keys: Sequence[str]) -> list[memoryview | None]:
        """Return one verified page per key, None where there is none. Corrupt pages are deleted."""
        nothing: list[object] = [None] * len(keys)
        frames = self._calls.call("batch_get", lambda: self.store.batch_get(keys), parse_list(len(keys)), nothing)
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
        """Store pages; return for each whether it is held now.

        Raises:
            ValueError: a page is not ``page_bytes`` long, or there is not one page per key: the caller is to blame.
        """
        if len(keys) != len(pages) or any(len(page) != self.page_bytes for page in pages):
            raise ValueError(f"give one page of {self.page_bytes} bytes per key")
        sealed = [frame_page(key, page) for key, page in zip(keys, pages, strict=True)]
        nothing: list[object] = [False] * len(keys)
        taken = self._calls.call(
            "batch_set", lambda: self.store.batch_set(keys, sealed), parse_list(len(keys)), nothing
        )
        held = [answer is True for answer in taken]
        self._calls.count(pages_written=sum(held), pages_refused=len(held) - sum(held))
        return held

    def delete(self, keys: Sequence[str]) -> int:
        """Remove what can be removed; return how many keys were."""
        return self._calls.call("delete", lambda: self.store.delete(keys), parse_count(len(keys)), 0)

    def close(self) -> None:
        """Close the store; a failure to do so is counted."""
        self._calls.call("close", self.store.close, lambda _: None, None)

    def _verified(self, key: str, frame: object) -> memoryview | None:
        if not isinstance(frame, bytes | bytearray | memoryview):
            return None
        page = unframe_page(key, frame)
        return page if page is not None and len(page) == self.page_bytes else None


def parse_count(num_keys: int) -> Callable[[object], int]:
    """For ``StoreClient.ask``: a number of keys."""

    def read(answer: object) -> int:
        if not isinstance(answer, int) or not 0 <= answer <= num_keys:
            raise ValueError(f"{answer!r} of {num_keys} keys")
        return int(answer)

    return read


def parse_list(num_keys: int) -> Callable[[object], list[object]]:
    """For ``StoreClient.ask``: one answer per key."""

    def read(answer: object) -> list[object]:
        if not isinstance(answer, list | tuple) or len(answer) != num_keys:
            raise ValueError(f"{type(answer).__name__} instead of one answer per key for {num_keys} keys")
        return list(answer)

    return read
