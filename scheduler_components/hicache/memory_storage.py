"""MemoryPageStore: a page store in process memory, for tests and simulation and as the reference implementation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from scheduler_components._internal.validators import check_integer
from scheduler_components.ports import PageBytes

__all__ = ["MemoryPageStore"]


class MemoryPageStore:
    """Pages in an ordered dict with LRU eviction.

    Args:
        capacity_bytes: the largest number of bytes to hold. A larger page is refused.

    Raises:
        ConfigError: ``capacity_bytes`` is below 1.
    """

    __slots__ = ("_pages", "_used_bytes", "capacity_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        check_integer("capacity_bytes", capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self._pages: OrderedDict[str, bytes] = OrderedDict()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def batch_exists(self, keys: Sequence[str]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self._pages), len(keys))

    def batch_get(self, keys: Sequence[str]) -> list[bytes | None]:
        for key in keys:
            if key in self._pages:
                self._pages.move_to_end(key)
        return [self._pages.get(key) for key in keys]

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> list[bool]:
        for key, page in zip(keys, pages, strict=True):
            self._put(key, page)
        return [key in self._pages for key in keys]

    def register(self, memory: memoryview) -> None:
        """Do nothing, because pages are copied."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        return [_fill(page, held) for page, held in zip(pages, self.batch_get(keys), strict=True)]

    def batch_put_from(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        return self.batch_set(keys, pages)

    def delete(self, keys: Sequence[str]) -> int:
        pages = [page for key in keys if (page := self._pages.pop(key, None)) is not None]
        self._used_bytes -= sum(map(len, pages))
        return len(pages)

    def close(self) -> None:
        self._pages.clear()
        self._used_bytes = 0

    def _put(self, key: str, page: PageBytes) -> None:
        if key in self._pages:
            self._pages.move_to_end(key)
            return
        if len(page) > self.capacity_bytes:
            return
        while self._used_bytes + len(page) > self.capacity_bytes:
            _, evicted = self._pages.popitem(last=False)
            self._used_bytes -= len(evicted)
        self._pages[key] = bytes(page)
        self._used_bytes += len(page)


def _fill(page: memoryview, held: bytes | None) -> bool:
    if held is None or len(held) != len(page):
        return False
    page[:] = held
    return True
