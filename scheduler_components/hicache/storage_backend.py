"""Transfers between host pages and a store: framed copies, or zero-copy.

**Framed** (``FramedBackend``): each page is copied and framed with a checksum, in both directions. A store with a
deadline never accesses host memory, so an abandoned operation is harmless, and no wrong page is ever used.

**Zero-copy** (``ZeroCopyBackend``): the store reads and writes the host pages themselves. A page therefore stays
reserved, or committed, until the store has finished with it: a stalled store keeps its pages and gets no further work.
Without checksums no page is hashed and the store is trusted. With checksums each page has a small sidecar object, which
contains its length and a CRC-32 of key and page and detects torn, changed and swapped pages. Pages with and without
checksums have the same keys; framed pages have other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import TypeAlias
from zlib import crc32

from scheduler_components.hicache.memory import HostPool
from scheduler_components.hicache.storage import CheckedPageStore, StorageStats, StoreClient, parse_count, parse_list
from scheduler_components.ports import ZeroCopyPageStore
from scheduler_components.values.page_shape import STORED_LAYOUT

__all__ = ["ZERO_COPY_LAYOUT", "FramedBackend", "ZeroCopyBackend", "StorageBackend"]

ZERO_COPY_LAYOUT = f"{STORED_LAYOUT},unframed"
"""For ``KeySpace.layout``: zero-copy pages have no frame."""

_SUM = Struct(">4sQI")  # magic, length, checksum
_SUM_MAGIC = b"KVS1"


@dataclass(slots=True, kw_only=True)
class FramedBackend:
    """Copies and verifies pages. It does not raise errors of the store.

    Attributes:
        host: the host pages.
        store: frames and verifies them.
    """

    host: HostPool
    store: CheckedPageStore

    def exists(self, keys: Sequence[str]) -> int:
        """Return how many keys from the first on are held."""
        return self.store.batch_exists(keys)

    def read(self, keys: Sequence[str], host_pages: Sequence[int]) -> int:
        """Read into reserved pages; return how many pages, from the first on, were read."""
        for at, (page, content) in enumerate(zip(host_pages, self.store.batch_get(keys), strict=True)):
            if content is None:
                return at  # the prefix ends at the first missing page
            self.host.write(page, content)
        return len(keys)

    def write(self, keys: Sequence[str], host_pages: Sequence[int]) -> bool:
        """Write committed pages; return whether the store holds all of them."""
        return all(self.store.batch_set(keys, [self.host.read(page) for page in host_pages]))

    def stats(self) -> StorageStats:
        return self.store.stats()

    def close(self) -> None:
        self.store.close()


@dataclass(slots=True, kw_only=True)
class ZeroCopyBackend:
    """Lets the store read and write the host pages themselves. It does not raise errors of the store.

    Attributes:
        host: the host pages, ``page_first``.
        store: a store with which the host memory is registered.
        has_checksums: each page has a sidecar object with its checksum.
    """

    host: HostPool
    store: ZeroCopyPageStore
    has_checksums: bool
    _calls: StoreClient = field(default_factory=StoreClient, init=False)

    def exists(self, keys: Sequence[str]) -> int:
        num_held = self._exists(keys)
        return min(num_held, self._exists([_sum_key(key) for key in keys])) if self.has_checksums else num_held

    def read(self, keys: Sequence[str], host_pages: Sequence[int]) -> int:
        pages = [_not_none(self.host.view_reserved(page)) for page in host_pages]
        got = self._ask_each("batch_get_into", keys, lambda: self.store.batch_get_into(keys, pages))
        sums = self._sums(keys) if self.has_checksums and got is not None else []
        if got is None or sums is None:  # a failure does not mean that the pages are corrupt
            self._calls.count(pages_missed=len(keys))
            return 0
        is_there = [answer is True for answer in got]
        is_right = is_there
        if self.has_checksums:
            is_right = [found == _sum_of(key, page) for key, page, found in zip(keys, pages, sums, strict=True)]
        self._delete_wrong(keys, is_there, is_right)
        good = [there and right for there, right in zip(is_there, is_right, strict=True)]
        num_hit = sum(good)
        self._calls.count(pages_hit=num_hit, pages_missed=len(keys) - num_hit)
        return good.index(False) if num_hit < len(keys) else num_hit

    def write(self, keys: Sequence[str], host_pages: Sequence[int]) -> bool:
        pages = [self.host.read(page) for page in host_pages]
        if self.has_checksums:  # before the pages, because a page without a checksum is a miss
            sums = [_sum_of(key, page) for key, page in zip(keys, pages, strict=True)]
            sum_keys = [_sum_key(key) for key in keys]
            set_sums = self._ask_each("batch_set", keys, lambda: self.store.batch_set(sum_keys, sums))
            if set_sums is None or not all(answer is True for answer in set_sums):
                self._calls.count(pages_refused=len(keys))
                return False
        answers = self._ask_each("batch_put_from", keys, lambda: self.store.batch_put_from(keys, pages)) or ()
        num_held = sum(answer is True for answer in answers)
        self._calls.count(pages_written=num_held, pages_refused=len(keys) - num_held)
        return num_held == len(keys)

    def stats(self) -> StorageStats:
        return self._calls.stats

    def close(self) -> None:
        self._calls.call("close", self.store.close, lambda _: None, None)

    def _exists(self, keys: Sequence[str]) -> int:
        return self._calls.call("batch_exists", lambda: self.store.batch_exists(keys), parse_count(len(keys)), 0)

    def _sums(self, keys: Sequence[str]) -> list[object] | None:
        sum_keys = [_sum_key(key) for key in keys]
        return self._ask_each("batch_get", keys, lambda: self.store.batch_get(sum_keys))

    def _ask_each(self, operation: str, keys: Sequence[str], ask: Callable[[], object]) -> list[object] | None:
        """Return one answer per key, or None, counted, if the store fails."""
        return self._calls.call(operation, ask, parse_list(len(keys)), None)

    def _delete_wrong(self, keys: Sequence[str], is_there: Sequence[bool], is_right: Sequence[bool]) -> None:
        """Delete corrupt pages, because the store would keep them instead of writing new ones.

        This may also delete a page that another rank has written in the meantime; it is then written again.
        """
        wrong = [key for key, there, right in zip(keys, is_there, is_right, strict=True) if there and not right]
        if not all(is_there):
            first = keys[is_there.index(False)]
            if self._exists([first]):  # it has another length
                wrong.append(first)
        if wrong:
            self._calls.count(pages_corrupt=len(wrong))
            both = wrong + [_sum_key(key) for key in wrong]
            self._calls.call("delete", lambda: self.store.delete(both), parse_count(len(both)), 0)


StorageBackend: TypeAlias = FramedBackend | ZeroCopyBackend


def _not_none(view: memoryview | None) -> memoryview:
    assert view is not None, "attach_zero_copy checks the layout"
    return view


def _sum_key(key: str) -> str:
    return f"{key}.sum"


def _sum_of(key: str, page: memoryview) -> bytes:
    return _SUM.pack(_SUM_MAGIC, len(page), crc32(page, crc32(key.encode())))
