"""TorchDeviceMemory: a device's KV pool in torch tensors, for a model to compute into and for HiCache to copy.

On a CPU a copy is done when its call returns. On CUDA it runs on its own stream, from and to pinned host memory. An
event signals its end, and the forward's stream waits for the event. The CUDA path has never run: no GPU was available.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_components._internal.extras import naming_extras
from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import ConfigError, first_line
from scheduler_components.hicache.memory import merged_runs
from scheduler_components.ports import CopyEvent, HostLayerView, NullCopyEvent
from scheduler_components.values.page_shape import PageShape

with naming_extras:
    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = ["TorchDeviceMemory"]

_KEYS_AND_VALUES = 2


@dataclass(slots=True, kw_only=True, frozen=True)
class _StreamedCopy:
    """The ``CopyEvent`` of a copy on a stream."""

    event: torch.cuda.Event

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait_on_stream(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


@dataclass(slots=True, kw_only=True)
class TorchDeviceMemory:
    """A ``DeviceMemory``. Create it with ``allocate``.

    Attributes:
        keys, values: one tensor per layer, each ``[num_pages, page_size, kv_heads, head_dim]``, contiguous.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    _stream: torch.cuda.Stream | None = field(default=None, init=False)  # None if copies are synchronous

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> TorchDeviceMemory:
        """Allocate a pool of zeros, because masked attention over uninitialized memory could return NaN.

        Raises:
            ConfigError: a size is below 1, or the device has too little memory.
        """
        sizes = {"num_pages": num_pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, size in {"num_layers": num_layers, **sizes}.items():
            check_integer(name, size)
        try:
            pools = [torch.zeros(*sizes.values(), dtype=dtype, device=device) for _ in range(2 * num_layers)]
        except RuntimeError as error:  # out of memory, on every device
            raise ConfigError(
                "num_pages", num_pages, f"cannot be allocated ({first_line(error)})", "give fewer tokens"
            ) from error
        return cls(keys=tuple(pools[:num_layers]), values=tuple(pools[num_layers:]))

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The data type of keys and values."""
        return self.keys[0].dtype

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.keys[0].shape[1]

    @property
    def num_pages(self) -> int:
        return self.keys[0].shape[0]

    @property
    def shape(self) -> PageShape:
        """The shape of every page. Keys and values are the two parts of a layer."""
        part_bytes = self.keys[0][0].numel() * self.keys[0].element_size()
        return PageShape(
            num_layers=len(self.keys), layer_page_bytes=_KEYS_AND_VALUES * part_bytes, num_parts=_KEYS_AND_VALUES
        )

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.shape.page_bytes

    def host_buffer(self, num_pages: int) -> npt.NDArray[np.uint8]:
        """Return host memory for ``num_pages`` pages, pinned if the device is a GPU.

        Raises:
            ConfigError: the memory cannot be allocated.
        """
        try:
            pinned = torch.zeros(
                num_pages * self.shape.page_bytes, dtype=torch.uint8, pin_memory=self._stream is not None
            )
        except RuntimeError as error:
            raise ConfigError(
                "host_tokens", num_pages * self.page_size, f"cannot be allocated ({first_line(error)})", "give fewer"
            ) from error
        return pinned.numpy()

    def wait_for_compute_stream(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy_to_host(
        self, layer: int, pages: Sequence[int], layer_view: HostLayerView, host_pages: Sequence[int]
    ) -> CopyEvent:
        host = torch.from_numpy(layer_view)
        with torch.cuda.stream(self._stream):
            for part, own in enumerate(self._parts(layer)):
                for run, host_run in merged_runs(pages, host_pages):
                    _copy(host[part, host_run], own[run])
            return self._end()

    def copy_to_device(
        self, layer: int, layer_view: HostLayerView, host_pages: Sequence[int], pages: Sequence[int]
    ) -> CopyEvent:
        host = torch.from_numpy(layer_view)
        with torch.cuda.stream(self._stream):
            for part, own in enumerate(self._parts(layer)):
                for run, host_run in merged_runs(pages, host_pages):
                    _copy(own[run], host[part, host_run])
            return self._end()

    def _parts(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the keys and values of one layer as bytes, ``[num_pages, part_bytes]``."""
        keys, values = self.keys[layer], self.values[layer]
        return keys.view(self.num_pages, -1).view(torch.uint8), values.view(self.num_pages, -1).view(torch.uint8)

    def _end(self) -> CopyEvent:
        if self._stream is None:
            return NullCopyEvent()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _StreamedCopy(event=event)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy pages. On CUDA, copy non-contiguous pages one by one, because a strided copy would block the stream."""
    if not (target.is_cuda or source.is_cuda) or (target.is_contiguous() and source.is_contiguous()):
        target.copy_(source, non_blocking=True)
        return
    for page in range(len(target)):
        target[page].copy_(source[page], non_blocking=True)
