"""Process groups of the ranks that compute one model together: they share its layers, or the positions of a prompt.

A sum over the ranks is bitwise equal on all of them, because gloo and NCCL reduce each element once and distribute the
result.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from scheduler_components import StartError
from scheduler_components.errors import first_line

__all__ = [
    "ModelParallelGroup",
    "NullModelParallelGroup",
    "TorchModelParallelGroup",
    "open_model_parallel_group",
]

_TIMEOUT_S = 120.0  # a rank may compute its shard of a long chunk on a core that other processes use


class ModelParallelGroup(Protocol):
    """The ranks that compute one model together. Used by one thread."""

    @property
    def rank(self) -> int:
        """This rank within the group, from 0."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: torch.Tensor) -> None:
        """Replace ``partial`` by its sum over all ranks. All ranks pass equal shapes in equal order.

        Raises:
            RuntimeError: a rank did not join in time or has exited.
        """
        ...

    def close(self) -> None:
        """Leave the group. Idempotent."""
        ...


class _Wait(Protocol):
    def wait(self) -> object: ...


class _ProcessGroup(Protocol):
    """The used members of torch's process groups, whose stubs declare none."""

    def allreduce(self, tensors: list[torch.Tensor]) -> _Wait: ...


class NullModelParallelGroup:
    """A rank that computes alone."""

    rank, size = 0, 1

    def all_reduce(self, partial: torch.Tensor) -> None:
        """Leave ``partial`` as it is."""

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class TorchModelParallelGroup:
    """A ``ModelParallelGroup`` over gloo or NCCL. It does not touch the default group of the process.

    Attributes:
        rank, size: this rank and the number of ranks.
        group: the process group of these ranks, from ``open_model_parallel_group``; None once closed.
    """

    rank: int
    size: int
    group: _ProcessGroup | None

    def all_reduce(self, partial: torch.Tensor) -> None:
        if self.group is None:
            raise RuntimeError("the group of ranks is closed")
        self.group.allreduce([partial]).wait()

    def close(self) -> None:
        self.group = None


def open_model_parallel_group(
    meeting: Path, *, rank: int, size: int, on_cuda: bool = False, timeout_s: float = _TIMEOUT_S
) -> TorchModelParallelGroup:
    """Join the other ranks. All ranks are on this machine: gloo connects over loopback.

    Args:
        meeting: a new file that all ranks can write.
        rank, size: this rank and the number of ranks.
        on_cuda: reduce over NCCL, one CUDA device per rank. This path has not been run for lack of a device.
        timeout_s: longest wait for the other ranks, here and in each sum.

    Raises:
        StartError: not all ranks joined in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store: Any = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        group = _nccl(store, rank, size, timeout) if on_cuda else _gloo(store, rank, size, timeout)
    except RuntimeError as error:
        raise StartError(
            f"rank {rank} of {size} of the model", first_line(error), "see why the others ended"
        ) from error
    return TorchModelParallelGroup(rank=rank, size=size, group=group)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> _ProcessGroup:
    # torch's stubs omit these members, and only the options select the interface to listen on.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    group: _ProcessGroup = gloo(store, rank, size, options)
    return group


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> _ProcessGroup:
    nccl: Any = dist.ProcessGroupNCCL  # missing from CPU builds of torch
    group: _ProcessGroup = nccl(store, rank, size, timeout)
    return group
