"""The memory of pages: layouts of the device and host tiers, and the copies between them.

The device stores the pages of a layer contiguously, as attention kernels read them. The host stores the layers of a
page contiguously (``page_first``), so that storage can transfer a page as one buffer, or the pages of a layer
(``layer_first``), so that a run of pages is one copy. Storage gets the same bytes from both: layer by layer, part by
part.

``HostPool`` tracks which host pages are free, reserved or committed. A page is taken in two steps, because either all
ranks take it or none: ``reserve``, then ``commit`` or ``abort`` according to the agreed values. Only committed pages
may be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias
from zlib import crc32

from scheduler_components._internal.extras import naming_extras
from scheduler_components._internal.validators import check_choice
from scheduler_components.cache import PagePool
from scheduler_components.errors import CacheIntegrityError, ConfigError
from scheduler_components.ports import CopyEvent, DeviceMemory, HostLayerView, NullCopyEvent, PageBytes
from scheduler_components.values.page_shape import HOST_LAYOUTS, HostLayout, PageShape

with naming_extras:
    import numpy as np
    import numpy.typing as npt

__all__ = ["HostMemory", "HostPool", "SimulatedDeviceMemory", "merged_runs"]

_Memory: TypeAlias = npt.NDArray[np.uint8]


def merged_runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield the runs in which both lists of pages increase by one; each run needs a single copy."""
    start = 0
    for at in range(1, len(first) + 1):
        if at < len(first) and first[at] == first[at - 1] + 1 and second[at] == second[at - 1] + 1:
            continue
        length = at - start
        yield slice(first[start], first[start] + length), slice(second[start], second[start] + length)
        start = at


class HostMemory:
    """The memory of the host tier.

    Args:
        shape: shape of every page.
        num_pages: number of pages.
        layout: which bytes are contiguous.
        buffer: the memory, for at least ``num_pages`` pages, for example pinned memory; allocated by default.

    Raises:
        ConfigError: the layout is unknown, or the buffer is too small.
    """

    __slots__ = ("_pages", "layout", "shape")

    def __init__(
        self, shape: PageShape, num_pages: int, *, layout: HostLayout = "page_first", buffer: _Memory | None = None
    ) -> None:
        check_choice("layout", layout, HOST_LAYOUTS)
        num_bytes = num_pages * shape.page_bytes
        memory = np.zeros(num_bytes, np.uint8) if buffer is None else buffer.reshape(-1)[:num_bytes]
        if len(memory) < num_bytes:
            raise ConfigError("buffer", len(memory), f"is too small for {num_pages} pages", f"give {num_bytes} bytes")
        self.shape = shape
        self.layout = layout
        layers, parts, width = shape.num_layers, shape.num_parts, shape.part_bytes
        # In both layouts, the axes are page, layer, part, byte.
        self._pages: _Memory = (
            memory.reshape(num_pages, layers, parts, width)
            if layout == "page_first"
            else memory.reshape(layers, parts, num_pages, width).transpose(2, 0, 1, 3)
        )

    @property
    def all_bytes(self) -> memoryview | None:
        """All pages as one buffer; None with ``layer_first``, where a page is not contiguous."""
        return self._pages.reshape(-1).data if self.layout == "page_first" else None

    def layer_view(self, layer: int) -> HostLayerView:
        return self._pages[:, layer].swapaxes(0, 1)

    def view(self, page: int) -> memoryview | None:
        """Return a view of the page, ``page_bytes`` long; None if it is not contiguous."""
        return memoryview(self._pages[page].reshape(-1)) if self.layout == "page_first" else None

    def read(self, page: int) -> memoryview:
        """Return a page's bytes, read-only: a view, or a copy if the page is not contiguous."""
        return memoryview(self._pages[page].reshape(-1)).toreadonly()  # copies if not contiguous

    def write(self, page: int, content: PageBytes) -> None:
        """Overwrite a page with ``page_bytes`` bytes."""
        shape = self.shape
        self._pages[page] = np.frombuffer(content, np.uint8).reshape(
            shape.num_layers, shape.num_parts, shape.part_bytes
        )


class SimulatedDeviceMemory:
    """A ``DeviceMemory`` in host memory.

    Attributes:
        shape: shape of every page.
        layers: uint8 of shape ``(num_layers, num_pages, layer_page_bytes)``.
    """

    __slots__ = ("layers", "shape")

    def __init__(self, shape: PageShape, num_pages: int) -> None:
        self.shape = shape
        self.layers: _Memory = np.zeros((shape.num_layers, num_pages, shape.layer_page_bytes), np.uint8)

    @property
    def num_pages(self) -> int:
        return int(self.layers.shape[1])

    def write(self, page: int, content: PageBytes) -> None:
        """Write a page's bytes, layer by layer, as a prefill would."""
        flat = np.frombuffer(content, np.uint8)
        self.layers[:, page] = flat.reshape(self.shape.num_layers, self.shape.layer_page_bytes)

    def read(self, page: int) -> bytes:
        """Return a page's bytes, layer by layer."""
        return self.layers[:, page].tobytes()

    def host_buffer(self, num_pages: int) -> npt.NDArray[np.uint8]:
        return np.zeros(num_pages * self.shape.page_bytes, np.uint8)

    def wait_for_compute_stream(self) -> None:
        """Return immediately: computation is synchronous here."""

    def copy_to_host(
        self, layer: int, pages: Sequence[int], layer_view: HostLayerView, host_pages: Sequence[int]
    ) -> CopyEvent:
        own = self._plane(layer)
        for run, host_run in merged_runs(pages, host_pages):
            layer_view[:, host_run] = own[:, run]
        return NullCopyEvent()

    def copy_to_device(
        self, layer: int, layer_view: HostLayerView, host_pages: Sequence[int], pages: Sequence[int]
    ) -> CopyEvent:
        own = self._plane(layer)
        for run, host_run in merged_runs(pages, host_pages):
            own[:, run] = layer_view[:, host_run]
        return NullCopyEvent()

    def _plane(self, layer: int) -> _Memory:
        """Return one layer in the axis order of the host: part, page, byte."""
        rows = self.layers[layer].reshape(self.num_pages, self.shape.num_parts, self.shape.part_bytes)
        layer_view: _Memory = rows.swapaxes(0, 1)
        return layer_view


class HostPool:
    """Pages of host memory, each free, reserved or committed.

    Ranks that make the same calls get the same pages. A call with a wrong page changes nothing.

    Args:
        shape: shape of every page.
        num_pages: pages in the pool.
        verify: compute a checksum of each page at commit and compare it at each read, to detect writes in between. It
            costs about one millisecond per megabyte each time and is meant for tests and debugging.
        layout: which bytes are contiguous.
        buffer: memory for at least ``num_pages`` pages, for example pinned memory; allocated by default.

    Raises:
        ConfigError: ``num_pages`` is below 1, or layout or buffer cannot be used.
    """

    def __init__(
        self,
        shape: PageShape,
        num_pages: int,
        *,
        verify: bool = False,
        layout: HostLayout = "page_first",
        buffer: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        self._pages = PagePool(num_pages)
        self._memory = HostMemory(shape, num_pages, layout=layout, buffer=buffer)
        self._verify = verify
        self._committed: dict[int, int] = {}  # page -> checksum, 0 where pages are not verified

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    @property
    def memory(self) -> memoryview | None:
        """All pages as one buffer, for a zero-copy store; None with ``layer_first``."""
        return self._memory.all_bytes

    @property
    def num_free(self) -> int:
        """Pages that can be reserved."""
        return self._pages.num_free

    @property
    def num_reserved(self) -> int:
        """Reserved pages, which must not be read yet."""
        return self._pages.num_held

    @property
    def num_committed(self) -> int:
        """Committed pages, which may be read."""
        return self._pages.num_cached

    def free_pages(self) -> Sequence[int]:
        """Return a copy of the free list. Use it in checks, not in steps."""
        return self._pages.free_pages()

    def reserve(self, num_pages: int) -> list[int]:
        """Reserve free pages for writing.

        Raises:
            OutOfPagesError: fewer pages are free; none is reserved.
        """
        return self._pages.allocate(num_pages).tolist()

    def commit(self, pages: Sequence[int]) -> None:
        """Make reserved pages readable, because every rank holds its slice of them.

        Raises:
            CacheIntegrityError: a page is not reserved, or is named twice.
        """
        self._pages.move_to_cache(pages)
        self._committed |= {page: self._checksum(page) for page in pages}

    def abort(self, pages: Sequence[int]) -> None:
        """Free reserved pages.

        Raises:
            CacheIntegrityError: a page is not reserved, or is named twice.
        """
        self._pages.free(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Free committed pages after their eviction.

        Raises:
            CacheIntegrityError: a page is not committed, or is named twice.
        """
        self._pages.free_cached(pages)
        for page in pages:
            del self._committed[page]

    def view_reserved(self, page: int) -> memoryview | None:
        """Return a view of a reserved page for a transfer that writes to it before ``commit`` or ``abort``.

        None with ``layer_first``, where a page is not contiguous; use ``write`` there.

        Raises:
            CacheIntegrityError: the page is not reserved.
        """
        self._pages.check_held((page,))
        return self._memory.view(page)

    def write(self, page: int, content: PageBytes) -> None:
        """Overwrite a reserved page with bytes from storage.

        Raises:
            CacheIntegrityError: the page is not reserved, or the content does not have the size of a page.
        """
        self._pages.check_held((page,))
        if len(content) != self._memory.shape.page_bytes:
            raise CacheIntegrityError(f"{len(content)} bytes for a page of {self._memory.shape.page_bytes}")
        self._memory.write(page, content)

    def read(self, page: int) -> memoryview:
        """Return a read-only view of a committed page, or a copy with ``layer_first``. A view changes with its page.

        Raises:
            CacheIntegrityError: the page is not committed, or (with ``verify``) has changed since the commit.
        """
        self._expect_readable((page,))
        return self._memory.read(page)

    def copy_from_device(self, device: DeviceMemory, device_pages: Sequence[int], pages: Sequence[int]) -> CopyEvent:
        """Copy device pages into reserved pages, in order. The returned event is done when the copy has ended.

        Raises:
            CacheIntegrityError: a page is not reserved, is named twice, does not exist, or the numbers of pages differ.
        """
        self._pages.check_held(pages)
        _expect_one_for_one(device, device_pages, pages)
        event: CopyEvent = NullCopyEvent()
        for layer in range(device.shape.num_layers):  # copies end in order
            event = device.copy_to_host(layer, device_pages, self._memory.layer_view(layer), pages)
        return event

    def copy_to_device(self, pages: Sequence[int], device: DeviceMemory, device_pages: Sequence[int]) -> CopyEvent:
        """Copy all layers of committed pages to the device, with the errors of ``copy_to_device_by_layer``."""
        event: CopyEvent = NullCopyEvent()
        for event in self.copy_to_device_by_layer(pages, device, device_pages):  # noqa: B007 - copies end in order
            pass
        return event

    def copy_to_device_by_layer(
        self, pages: Sequence[int], device: DeviceMemory, device_pages: Sequence[int]
    ) -> Iterator[CopyEvent]:
        """Yield the event of each layer. The copy of a layer begins when the iterator advances to it.

        Raises:
            CacheIntegrityError: a page is not committed, is named twice, does not exist, has changed (with ``verify``),
                or the numbers of pages differ; no layer is copied.
        """
        _expect_one_for_one(device, device_pages, pages)
        if len(set(device_pages)) != len(device_pages):
            raise CacheIntegrityError("a device page is named twice")
        self._expect_readable(pages)
        return (
            device.copy_to_device(layer, self._memory.layer_view(layer), pages, device_pages)
            for layer in range(device.shape.num_layers)
        )

    def check_integrity(self, committed: Sequence[int]) -> None:
        """Check that free, reserved and committed pages add up. ``committed`` are the pages in the tree.

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
        return crc32(self._memory.read(page)) if self._verify else 0


def _expect_one_for_one(device: DeviceMemory, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
    if len(device_pages) != len(host_pages):
        raise CacheIntegrityError(f"{len(device_pages)} device pages for {len(host_pages)} host pages")
    for page in device_pages:
        if not 0 <= page < device.num_pages:  # numpy would take -1 for the last page
            raise CacheIntegrityError(f"device page {page} is not one of 0 to {device.num_pages - 1}")
