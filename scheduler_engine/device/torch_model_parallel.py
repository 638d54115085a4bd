"""Process groups of the ranks that compute one model together: they share its layers, or the positions of a prompt.

A sum over the ranks is bitwise equal on all of them, because gloo and NCCL reduce each element once and distribute the
result.

A rank that dies within a sum ends it on all others with a ``SyncTimeoutError`` that names it. Its neighbours in
gloo's ring see a closed connection. Each survivor writes that it has failed into the file in which the ranks have met,
and a rank that waits reads there four times per second whether another one has failed. A stopped rank closes no
connection, so its end is gloo's timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import torch
import torch.distributed as dist

from scheduler_components import StartError
from scheduler_components.agreement.torch_sync import wait_for_collective
from scheduler_components.errors import SyncTimeoutError, first_line

_TIMEOUT_S = 120.0  # a rank may compute its shard of a long chunk on a core that other processes use
_ROLL_CALL_S = 2.0  # a survivor looks for failures of others every quarter of a second while it waits
_OPERATION = "sum of the model"

_abandoned: list[object] = []
"""Groups with a collective in flight that no rank will complete. Their destructor would wait for gloo's timeout."""


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
            SyncTimeoutError: a rank did not join in time or has exited.
        """
        ...

    def close(self) -> None:
        """Leave the group. Idempotent."""
        ...


class _ProcessGroup(Protocol):
    """The used members of torch's process groups, whose stubs declare none."""

    def allreduce(self, tensors: list[torch.Tensor]) -> dist.Work: ...


class _Store(Protocol):
    """The used members of torch's ``FileStore``, whose stubs declare none."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool: ...


def keep_waiting() -> None:
    """Do nothing while a rank waits for others."""


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
        rank: this rank.
        names: the number of each rank in the world, which errors name.
        group: the process group of these ranks, from ``open_model_parallel_group``; None once closed.
        store: the file in which the ranks have met.
        timeout_s: longest wait for the other ranks in a sum.
        on_wait: called four times per second during a long wait over gloo. What it raises ends the wait.
        is_polled: False for NCCL, whose sums are waited for on the device.
    """

    rank: int
    names: tuple[int, ...]
    group: _ProcessGroup | None
    store: _Store
    timeout_s: float = _TIMEOUT_S
    on_wait: Callable[[], None] = keep_waiting
    is_polled: bool = True
    _num_sums: int = field(default=0, init=False)
    _is_in_flight: bool = field(default=False, init=False)

    @property
    def size(self) -> int:
        return len(self.names)

    def all_reduce(self, partial: torch.Tensor) -> None:
        if self.group is None:
            raise RuntimeError("the group of ranks is closed")
        self._num_sums += 1
        try:
            work = self.group.allreduce([partial])
            if not self.is_polled:
                work.wait()
                return
            self._is_in_flight = True
            wait_for_collective(work, timeout_s=self.timeout_s, on_wait=self._on_wait)
            self._is_in_flight = False
        except RuntimeError as error:
            raise self._failure(first_line(error)) from error

    def close(self) -> None:
        group, self.group = self.group, None
        if self._is_in_flight:
            _abandoned.append(group)

    def _on_wait(self) -> None:
        self.on_wait()
        failed = [peer for peer in range(self.size) if peer != self.rank and self.store.check([_failed_key(peer)])]
        if failed:
            raise self._failure(f"rank {self.names[failed[0]]} has failed")

    def _failure(self, cause: str) -> SyncTimeoutError:
        """Return the error that names the ranks which do not say within the roll call that they have failed, too."""
        self.store.set(_failed_key(self.rank), "1")
        missing = set(range(self.size)) - {self.rank}
        deadline_s = time.monotonic() + min(_ROLL_CALL_S, self.timeout_s)
        while missing and time.monotonic() < deadline_s:
            missing -= {peer for peer in missing if self.store.check([_failed_key(peer)])}
            _pause()
        names = tuple(self.names[peer] for peer in sorted(missing))
        return SyncTimeoutError(_OPERATION, self._num_sums, names, self.timeout_s, cause)


def _failed_key(rank: int) -> str:
    return f"failed/{rank}"


def _pause() -> None:
    Event().wait(0.02)


def open_model_parallel_group(
    meeting: Path,
    *,
    rank: int,
    names: Sequence[int],
    on_cuda: bool = False,
    timeout_s: float = _TIMEOUT_S,
    on_wait: Callable[[], None] = keep_waiting,
) -> TorchModelParallelGroup:
    """Join the other ranks. All ranks are on this machine: gloo connects over loopback.

    Args:
        meeting: a new file that all ranks can write.
        rank: this rank within the group.
        names: the number of each rank in the world.
        on_cuda: reduce over NCCL, one CUDA device per rank. This path has not been run for lack of a device.
        timeout_s: longest wait for the other ranks, here and in each sum.
        on_wait: see ``TorchModelParallelGroup``.

    Raises:
        StartError: not all ranks joined in time.
    """
    timeout, size = timedelta(seconds=timeout_s), len(names)
    try:
        store: Any = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        group = _nccl(store, rank, size, timeout) if on_cuda else _gloo(store, rank, size, timeout)
    except RuntimeError as error:
        raise StartError(
            f"rank {rank} of {size} of the model", first_line(error), "see why the others ended"
        ) from error
    return TorchModelParallelGroup(
        rank=rank,
        names=tuple(names),
        group=group,
        store=store,
        timeout_s=timeout_s,
        on_wait=on_wait,
        is_polled=not on_cuda,
    )


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
