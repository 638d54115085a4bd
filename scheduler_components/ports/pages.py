"""Pages of KV: the memory, the stores and the movers of a cache with tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from scheduler_components.page_operations import Instruction, IoEvent
from scheduler_components.page_shape import PageShape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "PageBytes",
    "PageStore",
    "ZeroCopyPageStore",
    "HostLayerView",
    "CopyEvent",
    "NullCopyEvent",
    "DeviceMemory",
    "LayerDoneCounter",
    "NullLayerDoneCounter",
    "HostPages",
    "PageMover",
    "PageHook",
    "NullPageHook",
]


PageBytes: TypeAlias = bytes | bytearray | memoryview
"""The content of one page, as contiguous bytes."""


class PageStore(Protocol):
    """The storage tier, pages under keys: the stores of ``hicache``. Called by one thread at a time.

    A key names its content, so a page never changes: a store that holds the key already may keep what it has. Every
    method may raise ``StorageError``; ``hicache.CheckedPageStore`` turns that into misses and counters.
    """

    def batch_exists(self, keys: Sequence[str]) -> int:
        """Return how many of ``keys`` are held, counted from the first to the first one that is not."""
        ...

    def batch_get(self, keys: Sequence[str]) -> Sequence[PageBytes | None]:
        """Return one page per key, None where it is not held."""
        ...

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> Sequence[bool]:
        """Store pages of at least one byte; return for each whether its key is held now."""
        ...

    def delete(self, keys: Sequence[str]) -> int:
        """Remove what can be removed of ``keys`` now; return how many were."""
        ...

    def close(self) -> None:
        """Let go of files, sockets and memory; what is stored stays where the store outlives the process."""
        ...


class ZeroCopyPageStore(PageStore, Protocol):
    """A ``PageStore`` that also reads into and writes from the host's own pages: the file, memory and Mooncake stores.

    Its calls end by themselves: a page is not used for anything else until its call has returned.
    """

    def register(self, memory: memoryview) -> None:
        """Take note of the memory that all later buffers are parts of, writable and contiguous; called once."""
        ...

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[memoryview]) -> Sequence[bool]:
        """Fill each buffer with the page of its key; return for each whether exactly that many bytes were held.

        What a buffer holds after a no is undefined.
        """
        ...

    def batch_put_from(self, keys: Sequence[str], pages: Sequence[memoryview]) -> Sequence[bool]:
        """Store the bytes of each buffer; return for each whether its key is held now."""
        ...


HostLayerView: TypeAlias = "npt.NDArray[np.uint8]"
"""One layer of all host pages: shape ``(num_parts, num_pages, part_bytes)``, with strides of the host's layout."""


class CopyEvent(Protocol):
    """The end of a copy between tiers that was begun: ``NullCopyEvent``, or an event of a device's stream."""

    def is_done(self) -> bool:
        """All its bytes are there. Never waits."""
        ...

    def wait_on_stream(self) -> None:
        """What the calling thread's forward begins from now on comes after this copy; the thread does not wait."""
        ...


class NullCopyEvent:
    """The end of a copy that was done when its call returned."""

    def is_done(self) -> bool:
        return True

    def wait_on_stream(self) -> None:
        pass


class DeviceMemory(Protocol):
    """The pages of the device tier: ``hicache.SimulatedDeviceMemory``, ``hicache.TorchDeviceMemory``.

    Called by ``hicache.HostPool`` on the thread that copies, one layer at a time, so that a forward may use a layer
    while the next one is on its way. ``layer_view`` is the host's memory of that layer. Page numbers were checked by
    the
    caller.
    """

    @property
    def shape(self) -> PageShape:
        """Of every page."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages of the device."""
        ...

    def wait_for_compute_stream(self) -> None:
        """Let copies that begin from now on come after what the calling thread's forward has begun. Never waits."""
        ...

    def copy_to_host(
        self, layer: int, pages: Sequence[int], layer_view: HostLayerView, host_pages: Sequence[int]
    ) -> CopyEvent:
        """Copy one layer of pages to the host, the n-th of ``pages`` to the n-th of ``host_pages``."""
        ...

    def copy_to_device(
        self, layer: int, layer_view: HostLayerView, host_pages: Sequence[int], pages: Sequence[int]
    ) -> CopyEvent:
        """Copy one layer of pages from the host, the n-th of ``host_pages`` to the n-th of ``pages``."""
        ...


class LayerDoneCounter(Protocol):
    """Where a forward waits for pages that are still on their way to the device: ``HiCacheTiers.fence`` of the
    reference
    engine. Called by a device, on the thread of its forward.
    """

    def start_batch(self) -> None:
        """A batch is launched: let the copies begin whose pages it reads."""
        ...

    def wait_until(self, layer: int) -> None:
        """Wait until this layer of the pages is there; at once where none are on their way.

        Raises:
            LoadBackError: they do not come; the batch cannot be computed.
        """
        ...


class NullLayerDoneCounter:
    """The fence of a device whose pages are there before a request runs."""

    def start_batch(self) -> None:
        pass

    def wait_until(self, layer: int) -> None:
        pass


class HostPages(Protocol):
    """The pages of the host tier: ``hicache.HostPool``. Called by ``HiRadixCache``."""

    def reserve(self, num_pages: int) -> list[int]:
        """Take free pages, to write to.

        Raises:
            OutOfPagesError: this rank cannot; nothing is taken.
        """
        ...

    def commit(self, pages: Sequence[int]) -> None:
        """Make reserved pages readable."""
        ...

    def abort(self, pages: Sequence[int]) -> None:
        """Give reserved pages back."""
        ...

    def release(self, pages: Sequence[int]) -> None:
        """Give committed pages back."""
        ...

    def check_integrity(self, committed: Sequence[int]) -> None:
        """Check that free, reserved and committed pages add up, ``committed`` being those that the tree holds.

        Raises:
            CacheIntegrityError: with the count that does not add up.
        """
        ...


class PageMover(Protocol):
    """Moves pages between device, host and storage, without blocking: ``hicache.ThreadPageMover``.

    Called by ``HiRadixCache``.
    """

    def submit(self, instructions: Sequence[Instruction]) -> None:
        """Begin these, in order."""
        ...

    def poll(self) -> Sequence[IoEvent]:
        """Return what has happened since the last call, on this rank.

        Every instruction is answered. One that could not be carried out, for whatever reason, is answered with an event
        that says so; nothing is raised, so that all ranks can agree on it.
        """
        ...

    @property
    def load_back_budget_pages(self) -> int:
        """Pages that this rank can begin to copy to the device now."""
        ...

    @property
    def has_storage(self) -> bool:
        """This rank has a storage backend attached and can use it."""
        ...

    def close(self) -> None:
        """End what is under way and let go of threads and backend; safe to call twice."""
        ...


class PageHook(Protocol):
    """Sees pages that were computed and loaded: a simulated device that makes their bytes, a test that checks them.

    Called by ``HiRadixCache``.
    """

    def on_computed(self, digests: bytes, pages: Sequence[int]) -> None:
        """The device has computed these pages; their whole digests stand one after the other."""
        ...

    def on_loaded_back(self, digests: bytes, pages: Sequence[int]) -> None:
        """These device pages were copied from the host, and requests may use them from now on.

        Raises:
            CacheIntegrityError: a page holds another's bytes, or changed on its way.
        """
        ...


class NullPageHook:
    """The page hook of an engine that does not look into its pages."""

    def on_computed(self, digests: bytes, pages: Sequence[int]) -> None:
        pass

    def on_loaded_back(self, digests: bytes, pages: Sequence[int]) -> None:
        pass
