"""Layer-wise loading: a forward computes a layer while the next ones are still being copied to the device.

One thread copies, layer by layer; the forward's thread waits before each layer until every load that requests read has
brought it. On a device with streams nobody's thread waits for bytes: the copy's event holds the forward's stream.
"""

from __future__ import annotations

from threading import Condition

from scheduler_components.errors import LoadBackError
from scheduler_components.ports import CopyEvent

__all__ = ["ThreadLayerDoneCounter"]

_WAIT_S = 30.0  # the copy thread does nothing else, so a layer that takes longer does not come


class ThreadLayerDoneCounter:
    """Which layers of the loads under way have come.

    ``begin``, ``end`` and ``forget`` are for the scheduler's thread, ``landed`` and ``fail`` for the one that copies,
    ``wait`` for the forward's.

    Args:
        timeout_s: longest wait for a layer.
    """

    __slots__ = ("_changed", "_failed", "_landed", "_timeout_s")

    def __init__(self, *, timeout_s: float = _WAIT_S) -> None:
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._landed: dict[int, list[CopyEvent]] = {}  # load -> ends of the layers that have come, or are on a stream
        self._failed: set[int] = set()

    def start_load_back(self, op: int) -> None:
        """From now on forwards wait for this load."""
        with self._changed:
            self._landed[op] = []

    def complete_layer(self, op: int, end: CopyEvent) -> None:
        """The next layer of a load has come, or is on its way on a stream."""
        with self._changed:
            self._landed[op].append(end)
            self._changed.notify_all()

    def fail_load_back(self, op: int) -> None:
        """The rest of a load does not come. Without effect for one that no forward waits for."""
        with self._changed:
            if op in self._landed:
                self._failed.add(op)
                self._changed.notify_all()

    def finish_load_back(self, op: int) -> None:
        """All of a load is there. One that failed is not: forwards fail until it is forgotten."""
        with self._changed:
            if op not in self._failed:
                self._landed.pop(op, None)

    def discard_load_back(self, op: int) -> None:
        """Nobody reads any more what a failed load was to bring."""
        with self._changed:
            self._landed.pop(op, None)
            self._failed.discard(op)

    def wait_until(self, layer: int) -> None:
        """Wait until every load under way has brought this layer.

        Raises:
            LoadBackError: one has failed, or does not come.
        """
        if not self._landed:  # nothing is begun while a forward runs
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failed or not self._missing(layer), self._timeout_s)
            for op in self._failed:
                raise LoadBackError(op, "failed, and requests read its pages already")
            for op in self._missing(layer):
                raise LoadBackError(op, f"layer {layer} has not come within {self._timeout_s:g} s")
            for ends in self._landed.values():
                ends[layer].wait_on_stream()

    def _missing(self, layer: int) -> list[int]:
        return [op for op, ends in self._landed.items() if len(ends) <= layer]
