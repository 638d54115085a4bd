"""Pages of KV: the memory, the stores and the mover of a cache with tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from scheduler_components.values.page_operations import Instruction, IoEvent
from scheduler_components.values.page_shape import PageShape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "CopyEvent",
    "DeviceMemory",
    "HostLayerView",
    "HostPages",
    "LayerDoneCounter",
    "NullCopyEvent",
    "NullLayerDoneCounter",
    "PageBytes",
    "PageHook",
    "PageMover",
    "PageStore",
    "ZeroCopyPageStore",
]

PageBytes: TypeAlias = bytes | bytearray | memoryview
"""The content of one page, as contiguous bytes."""


class PageStore(Protocol):
    """The storage tier: pages by key. The stores of `hicache` implement it. Only one thread at a time calls it.

    A key names its content, so a page never changes. A store that already holds the key may keep its copy. Every
    method may raise `StorageError`; `hicache.CheckedPageStore` turns that into misses and counters.
    """

    def batch_exists(self, keys: Sequence[str]) -> int:
        """Return the number of leading keys that are held: the index of the first key that is not."""
        ...

    def batch_get(self, keys: Sequence[str]) -> Sequence[PageBytes | None]:
        """Return one page per key; None for a key that is not held."""
        ...

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> Sequence[bool]:
        """Store pages of at least one byte; return for each whether its key is held now."""
        ...

    def delete(self, keys: Sequence[str]) -> int:
        """Remove the keys that can be removed now; return their number."""
        ...

    def close(self) -> None:
        """Release files, sockets and memory. Stored pages remain if the store outlives the process."""
        ...


class ZeroCopyPageStore(PageStore, Protocol):
    """A `PageStore` that reads into and writes from the host's own pages: the file, memory and Mooncake stores.

    Its calls end by themselves: a page is not used for anything else until its call has returned.
    """

    def register(self, memory: memoryview) -> None:
        """Register the memory that contains all later buffers. It is writable and contiguous. Called once."""
        ...

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[memoryview]) -> Sequence[bool]:
        """Fill each buffer with the page of its key; return for each whether exactly that many bytes were held.

        The content of a buffer is undefined where the answer is False.
        """
        ...

    def batch_put_from(self, keys: Sequence[str], pages: Sequence[memoryview]) -> Sequence[bool]:
        """Store the bytes of each buffer; return for each whether its key is held now."""
        ...


HostLayerView: TypeAlias = "npt.NDArray[np.uint8]"
"""One layer of all host pages: shape ``(num_parts, num_pages, part_bytes)``, with strides of the host's layout."""


class CopyEvent(Protocol):
    """Completion of a copy between tiers, like a CUDA event: `NullCopyEvent`, or an event of a device's stream."""

    def is_done(self) -> bool:
        """Return whether the copy is complete. Never wait."""
        ...

    def wait_on_stream(self) -> None:
        """Order all later device work of the calling thread after this copy. The thread itself does not wait."""
        ...


class NullCopyEvent:
    """The completion of a copy that was done when its call returned."""

    def is_done(self) -> bool:
        return True

    def wait_on_stream(self) -> None:
        pass


class DeviceMemory(Protocol):
    """The pages of the device tier: `hicache.SimulatedDeviceMemory`, `hicache.TorchDeviceMemory`.

    `hicache.HostPool` calls it on the copying thread, layer by layer, so that a forward may use one layer while the
    next one is being copied. `layer_view` is the host's memory of that layer. The caller has checked page numbers.
    """

    @property
    def shape(self) -> PageShape:
        """Shape of every page."""
        ...

    @property
    def num_pages(self) -> int:
        """Number of device pages."""
        ...

    def wait_for_compute_stream(self) -> None:
        """Order all later copies after the device work that the calling thread's forward has queued. Never wait."""
        ...

    def copy_to_host(
        self, layer: int, pages: Sequence[int], layer_view: HostLayerView, host_pages: Sequence[int]
    ) -> CopyEvent:
        """Copy one layer of pages to the host, the n-th of `pages` to the n-th of `host_pages`."""
        ...

    def copy_to_device(
        self, layer: int, layer_view: HostLayerView, host_pages: Sequence[int], pages: Sequence[int]
    ) -> CopyEvent:
        """Copy one layer of pages from the host, the n-th of `host_pages` to the n-th of `pages`."""
        ...


class LayerDoneCounter(Protocol):
    """Where a forward waits for the pages of one layer that are still being copied to the device.

    A device calls it on the thread of its forward.
    """

    def start_batch(self) -> None:
        """Start the copies of the pages that the launched batch reads."""
        ...

    def wait_until(self, layer: int) -> None:
        """Wait until this layer of the pages is on the device. Return immediately if none is being copied.

        Raises:
            LoadBackError: the copy failed; the batch cannot be computed.
        """
        ...


class NullLayerDoneCounter:
    """The counter of a device whose pages are loaded before a request runs."""

    def start_batch(self) -> None:
        pass

    def wait_until(self, layer: int) -> None:
        pass


class HostPages(Protocol):
    """The pages of the host tier: `hicache.HostPool`. Called by `HiRadixCache`."""

    def reserve(self, num_pages: int) -> list[int]:
        """Reserve free pages for writing.

        Raises:
            OutOfPagesError: too few are free; none is reserved.
        """
        ...

    def commit(self, pages: Sequence[int]) -> None:
        """Make reserved pages readable."""
        ...

    def abort(self, pages: Sequence[int]) -> None:
        """Return reserved pages to the free list."""
        ...

    def release(self, pages: Sequence[int]) -> None:
        """Return committed pages to the free list."""
        ...

    def check_integrity(self, committed: Sequence[int]) -> None:
        """Check that free, reserved and committed pages add up; `committed` are the pages of the tree.

        Raises:
            CacheIntegrityError: naming the count that does not add up.
        """
        ...


class PageMover(Protocol):
    """Move pages between device, host and storage without blocking: `hicache.ThreadPageMover`.

    Called by `HiRadixCache`.
    """

    def submit(self, instructions: Sequence[Instruction]) -> None:
        """Start these instructions, in order."""
        ...

    def poll(self) -> Sequence[IoEvent]:
        """Return the events on this rank since the last call.

        Every instruction gets an answer. A failure is an event too and raises nothing, so that all ranks can agree
        on it.
        """
        ...

    @property
    def load_back_budget_pages(self) -> int:
        """Number of pages that this rank can start to copy to the device now."""
        ...

    @property
    def has_storage(self) -> bool:
        """Whether this rank has an attached and usable storage backend."""
        ...

    def close(self) -> None:
        """End the running operations and release threads and backend. Safe to call twice."""
        ...


class PageHook(Protocol):
    """Observe pages that were computed or loaded: a simulated device that fills them, a test that checks them.

    Called by `HiRadixCache`.
    """

    def on_computed(self, digests: bytes, pages: Sequence[int]) -> None:
        """Handle pages that the device has computed; `digests` are their full digests, concatenated."""
        ...

    def on_loaded_back(self, digests: bytes, pages: Sequence[int]) -> None:
        """Handle device pages that were copied from the host. Requests may use them from now on.

        Raises:
            CacheIntegrityError: a page holds the bytes of another one, or changed during the copy.
        """
        ...
