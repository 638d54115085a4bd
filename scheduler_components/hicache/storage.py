"""CheckedPageStore: any page store, made safe. What fails, stalls, lies or answers half is a miss and a counter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from scheduler_components.errors import StorageStallError
from scheduler_components.hicache.page_frame import seal_page, unseal_page
from scheduler_components.ports import PageBytes, PageStore

__all__ = ["CheckedPageStore", "StorageStats"]

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


@dataclass(slots=True, kw_only=True)
class CheckedPageStore:
    """A page store that never raises and never hands out a wrong page.

    Put it outermost: pages are framed, and so copied, before a store behind a deadline sees them. A write that stalls
    and lands late then stores what was meant, not what the host page holds by then. It counts for one thread: several
    threads have one each, over a shared ``DeadlinePageStore``.

    Attributes:
        store: the store proper.
        page_bytes: length of every page of this cache.
    """

    store: PageStore
    page_bytes: int
    _stats: StorageStats = field(default_factory=StorageStats, init=False)

    def stats(self) -> StorageStats:
        """Return the counts up to now."""
        return self._stats

    def batch_exists(self, keys: Sequence[str]) -> int:
        """Return how many keys from the first on are held; 0 when the store cannot say."""
        return self._ask("batch_exists", lambda: self.store.batch_exists(keys), _read_count(len(keys)), 0)

    def batch_get(self, keys: Sequence[str]) -> list[memoryview | None]:
        """Return one verified page per key, None where there is none. Corrupt pages are deleted: a write can heal."""
        nothing: list[object] = [None] * len(keys)
        frames = self._ask("batch_get", lambda: self.store.batch_get(keys), _read_list(len(keys)), nothing)
        pages = [self._verified(key, frame) for key, frame in zip(keys, frames, strict=True)]
        corrupt = [
            key for key, frame, page in zip(keys, frames, pages, strict=True) if page is None and frame is not None
        ]
        num_hit = sum(page is not None for page in pages)
        self._count(pages_hit=num_hit, pages_missed=len(keys) - num_hit, pages_corrupt=len(corrupt))
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
        sealed = [seal_page(key, page) for key, page in zip(keys, pages, strict=True)]
        nothing: list[object] = [False] * len(keys)
        taken = self._ask("batch_set", lambda: self.store.batch_set(keys, sealed), _read_list(len(keys)), nothing)
        held = [answer is True for answer in taken]
        self._count(pages_written=sum(held), pages_refused=len(held) - sum(held))
        return held

    def delete(self, keys: Sequence[str]) -> int:
        """Remove what can be removed; return how many keys were."""
        return self._ask("delete", lambda: self.store.delete(keys), _read_count(len(keys)), 0)

    def close(self) -> None:
        """Close the store; a failure to do so is counted."""
        self._ask("close", self.store.close, lambda _: None, None)

    def _ask(
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

    def _verified(self, key: str, frame: object) -> memoryview | None:
        if not isinstance(frame, bytes | bytearray | memoryview):
            return None
        page = unseal_page(key, frame)
        return page if page is not None and len(page) == self.page_bytes else None

    def _note(self, counter: str, problem: str) -> None:
        self._count(**{counter: 1})
        self._stats = msgspec.structs.replace(self._stats, last_problem=problem)

    def _count(self, **more: int) -> None:
        counted = {name: getattr(self._stats, name) + count for name, count in more.items()}
        self._stats = msgspec.structs.replace(self._stats, **counted)


def _read_count(num_keys: int) -> Callable[[object], int]:
    def read(answer: object) -> int:
        if not isinstance(answer, int) or not 0 <= answer <= num_keys:
            raise ValueError(f"{answer!r} of {num_keys} keys")
        return int(answer)

    return read


def _read_list(num_keys: int) -> Callable[[object], list[object]]:
    def read(answer: object) -> list[object]:
        if not isinstance(answer, list | tuple) or len(answer) != num_keys:
            raise ValueError(f"{type(answer).__name__} instead of one answer per key for {num_keys} keys")
        return list(answer)

    return read
