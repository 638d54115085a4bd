"""The bytes of a simulated device's KV pages: made from what a page stands for, and checked when they come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_components import CacheIntegrityError
from scheduler_components.cache import DIGEST_BYTES
from scheduler_components.hicache import SimulatedDeviceMemory

__all__ = [
    "SimulatedKv",
]


@dataclass(slots=True, kw_only=True)
class SimulatedKv:
    """A ``PageHook``. A page's bytes are its digest, over and over, turned by which slice of the page this rank has.

    So a page of other tokens, another rank's slice and a torn page all differ from what they should be.

    Attributes:
        device: the memory, with pages of a multiple of ``DIGEST_BYTES`` in each layer.
        slice_index: which slice of every page this rank holds.
    """

    device: SimulatedDeviceMemory
    slice_index: int

    def computed(self, digests: bytes, pages: Sequence[int]) -> None:
        self.device.layers[:, list(pages)] = self._content(digests)

    def loaded(self, digests: bytes, pages: Sequence[int]) -> None:
        found = self.device.layers[:, list(pages)]
        if not np.array_equal(found, np.broadcast_to(self._content(digests), found.shape)):
            raise CacheIntegrityError(f"device pages {pages[0]} to {pages[-1]} came back with other bytes")

    def _content(self, digests: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Bytes of shape ``(1, num_pages, layer_page_bytes)``, the same in every layer."""
        rows = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES) + np.uint8(self.slice_index)
        return np.tile(rows, self.device.shape.layer_page_bytes // DIGEST_BYTES)[np.newaxis]
