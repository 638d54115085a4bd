"""Real memory of pages: the layouts of the device and host tiers, and the copies between them.

The device keeps each layer's pages together, as attention kernels read them; the host keeps each page's layers
together, so that a page is one run of bytes for storage. A copy between them is a transposition.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from scheduler_components.errors import ConfigError
from scheduler_components.ports import PageBytes

__all__ = ["HostMemory", "PageShape", "SimulatedDeviceMemory", "copy_to_device", "copy_to_host"]

_Memory = npt.NDArray[np.uint8]


def _check_size(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(attribute.name, value, "is not a size", "give an integer of at least 1")


@attrs.frozen(kw_only=True)
class PageShape:
    """What one rank holds of one page.

    Attributes:
        num_layers: layers of this pipeline stage.
        layer_page_bytes: keys and values of one page's tokens in one layer, as this rank's slice of them.

    Raises:
        ConfigError: a size is below 1.
    """

    num_layers: int = attrs.field(validator=_check_size)
    layer_page_bytes: int = attrs.field(validator=_check_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a whole page on this rank."""
        return self.num_layers * self.layer_page_bytes


class HostMemory:
    """Pages one after the other: uint8 of shape ``(num_pages, num_layers, layer_page_bytes)``."""

    __slots__ = ("pages", "shape")

    def __init__(self, shape: PageShape, num_pages: int) -> None:
        self.shape = shape
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
