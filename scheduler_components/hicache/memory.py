"""Real memory of pages: the layouts of the device and host tiers, and the copies between them.

The device keeps each layer's pages together, as attention kernels read them; the host keeps each page's layers
together, so that a page is one run of bytes for storage. A copy between them is a transposition.

``HostPool`` says which host pages are free, in flight or in the tree. They are taken in two moves, because all ranks
must take them or none: ``reserve``, then, when the agreed values are known, ``commit`` or ``abort``. Only committed
pages may be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import attrs
import numpy as np
import numpy.typing as npt

from scheduler_components.cache import PagePool
from scheduler_components.errors import CacheIntegrityError
from scheduler_components.ports import PageBytes
from scheduler_components.validators import is_integer

__all__ = ["HostMemory", "HostPool", "PageShape", "SimulatedDeviceMemory", "copy_to_device", "copy_to_host"]

_Memory = npt.NDArray[np.uint8]


@attrs.frozen(kw_only=True)
class PageShape:
    """What one rank holds of one page.

    Attributes:
        num_layers: layers of this pipeline stage.
        layer_page_bytes: keys and values of one page's tokens in one layer, as this rank's slice of them.

    Raises:
        ConfigError: a size is below 1.
    """

    num_layers: int = attrs.field(validator=is_integer())
    layer_page_bytes: int = attrs.field(validator=is_integer())

    @property
    def page_bytes(self) -> int:
        """Bytes of a whole page on this rank."""
        return self.num_layers * self.layer_page_bytes


class HostMemory:
    """Pages one after the other: uint8 of shape ``(num_pages, num_layers, layer_page_bytes)``."""

    __slots__ = ("pages",)

    def __init__(self, shape: PageShape, num_pages: int) -> None:
        self.pages: _Memory = np.zeros((num_pages, shape.num_layers, shape.layer_page_bytes), np.uint8)

    def view(self, page: int) -> memoryview:
        """Return the page's own memory, ``page_bytes`` long."""
        return memoryview(self.pages[page].reshape(-1))


class SimulatedDeviceMemory:
    """A device's pages in host memory: uint8 of shape ``(num_layers, num_pages, layer_page_bytes)``."""

    __slots__ = ("layers", "shape")

    def __init__(self, shape: PageShape, num_pages: int) -> None:
        self.shape = shape
        self.layers: _Memory = np.zeros((shape.num_layers, num_pages, shape.layer_page_bytes), np.uint8)

    @property
    def num_pages(self) -> int:
        """Pages of the device."""
        return int(self.layers.shape[1])

    def write(self, page: int, content: PageBytes) -> None:
        """Put a page's bytes, layer after layer, where its layers are: what a prefill would compute."""
        flat = np.frombuffer(content, np.uint8)
        self.layers[:, page] = flat.reshape(self.shape.num_layers, self.shape.layer_page_bytes)

    def read(self, page: int) -> bytes:
        """Return a page's bytes, layer after layer."""
        return self.layers[:, page].tobytes()


def copy_to_host(
    device: SimulatedDeviceMemory, device_pages: Sequence[int], host: HostMemory, host_pages: Sequence[int]
) -> None:
    """Copy pages from the device, the n-th of ``device_pages`` to the n-th of ``host_pages``."""
    host.pages[list(host_pages)] = device.layers[:, list(device_pages)].swapaxes(0, 1)


def copy_to_device(
    host: HostMemory, host_pages: Sequence[int], device: SimulatedDeviceMemory, device_pages: Sequence[int]
) -> None:
    """Copy pages from the host, the n-th of ``host_pages`` to the n-th of ``device_pages``."""
    device.layers[:, list(device_pages)] = host.pages[list(host_pages)].swapaxes(0, 1)


class HostPool:
    """Pages of host memory, each free, reserved or committed.

    Ranks that make the same calls get the same pages. A call that names a wrong page changes nothing.

    Args:
        shape: of every page.
        num_pages: pages in the pool.
        verify: checksum pages when they are committed and again when they are read, to find out that something
            wrote to a page in between. Costs about a millisecond per megabyte each time; meant for tests and for
            finding bugs.

    Raises:
        ConfigError: ``num_pages`` is below 1.
    """

    def __init__(self, shape: PageShape, num_pages: int, *, verify: bool = False) -> None:
        self._pages = PagePool(num_pages)
        self._memory = HostMemory(shape, num_pages)
        self._verify = verify
        self._committed: dict[int, int] = {}  # page -> checksum, 0 where pages are not verified

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self._pages.num_pages

    @property
    def num_free(self) -> int:
        """Pages that ``reserve`` can hand out."""
        return self._pages.num_free

    @property
    def num_reserved(self) -> int:
        """Pages in flight: being written, and not yet to be read."""
        return self._pages.num_held

    @property
    def num_committed(self) -> int:
        """Pages that may be read."""
        return self._pages.num_cached

    def reserve(self, num_pages: int) -> list[int]:
        """Take free pages, to write to.

        Raises:
            OutOfPagesError: fewer are free; nothing is taken. Answer no in the next proposal.
        """
        return self._pages.allocate(num_pages).tolist()

    def commit(self, pages: Sequence[int]) -> None:
        """Make reserved pages readable: every rank has its part of them.

        Raises:
            CacheIntegrityError: a page is not reserved, or is named twice.
        """
        self._pages.to_cache(pages)
        self._committed |= {page: self._checksum(page) for page in pages}

    def abort(self, pages: Sequence[int]) -> None:
        """Give reserved pages back unread.

        Raises:
            CacheIntegrityError: a page is not reserved, or is named twice.
        """
        self._pages.free(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Give committed pages back: they have been evicted.

        Raises:
            CacheIntegrityError: a page is not committed, or is named twice.
        """
        self._pages.from_cache(pages)
        for page in pages:
            del self._committed[page]

    def view_reserved(self, page: int) -> memoryview:
        """Return a reserved page's own memory, for a transfer that writes to it; done before ``commit`` or ``abort``.

        Raises:
            CacheIntegrityError: the page is not reserved.
        """
        self._pages.expect_held((page,))
        return self._memory.view(page)

    def write(self, page: int, content: PageBytes) -> None:
        """Fill a reserved page with what storage delivered.

        Raises:
            CacheIntegrityError: the page is not reserved, or the content is not a page long.
        """
        memory = self.view_reserved(page)
        if len(content) != len(memory):
            raise CacheIntegrityError(f"{len(content)} bytes for a page of {len(memory)}")
        memory[:] = content

    def read(self, page: int) -> memoryview:
        """Return a committed page's own memory, read-only; copy what must outlive the page.

        Raises:
            CacheIntegrityError: the page is not committed, or (when verifying) has changed since it was.
        """
        self._expect_readable((page,))
        return self._memory.view(page).toreadonly()

    def load_from(self, device: SimulatedDeviceMemory, device_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copy pages from the device into reserved pages, in order.

        Raises:
            CacheIntegrityError: a page is not reserved, is named twice, does not exist, or the numbers of pages differ.
        """
        self._pages.expect_held(pages)
        _expect_one_for_one(device, device_pages, pages)
        copy_to_host(device, device_pages, self._memory, pages)

    def load_back(self, pages: Sequence[int], device: SimulatedDeviceMemory, device_pages: Sequence[int]) -> None:
        """Copy committed pages to the device, in order.

        Raises:
            CacheIntegrityError: a page is not committed, is named twice, does not exist, has changed (when verifying),
                or the numbers of pages differ.
        """
        _expect_one_for_one(device, device_pages, pages)
        if len(set(device_pages)) != len(device_pages):
            raise CacheIntegrityError("a device page is named twice")
        self._expect_readable(pages)
        copy_to_device(self._memory, pages, device, device_pages)

    def check_integrity(self, committed: Sequence[int]) -> None:
        """Check that free, reserved and committed pages add up, ``committed`` being those that the tree holds.

        Raises:
            CacheIntegrityError: with the count that does not add up, or the page that has changed.
        """
        self._pages.check(committed)
        self._expect_readable(committed)

    def _expect_readable(self, pages: Sequence[int]) -> None:
        for page in pages:
            if page not in self._committed:
                raise CacheIntegrityError(f"page {page} is not committed")
            if self._committed[page] != self._checksum(page):
                raise CacheIntegrityError(f"page {page} has changed since it was committed")

    def _checksum(self, page: int) -> int:
        return crc32(self._memory.view(page)) if self._verify else 0


def _expect_one_for_one(device: SimulatedDeviceMemory, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
    if len(device_pages) != len(host_pages):
        raise CacheIntegrityError(f"{len(device_pages)} device pages for {len(host_pages)} host pages")
    for page in device_pages:
        if not 0 <= page < device.num_pages:  # numpy would take -1 for the last page
            raise CacheIntegrityError(f"device page {page} is not one of 0 to {device.num_pages - 1}")
