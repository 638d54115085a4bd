"""ThreadLayerDoneCounter: let a forward compute a layer while later layers are still being copied to the device.

One thread copies, layer by layer. The forward's thread waits before each layer until that layer of all loads in use has
been copied. On a device with streams no thread waits for the bytes: the forward's stream waits for the copy's event.
"""

from __future__ import annotations

from threading import Condition

from scheduler_components.errors import LoadBackError
from scheduler_components.ports import CopyEvent

__all__ = ["ThreadLayerDoneCounter"]

_WAIT_S = 30.0  # the copy thread does nothing else, so a layer that takes longer has failed


class ThreadLayerDoneCounter:
    """The layers of each load under way that have been copied.

    The scheduler's thread calls ``start_load_back``, ``finish_load_back`` and ``discard_load_back``, the copying thread
    ``complete_layer`` and ``fail_load_back``, and the forward's thread ``wait_until``.

    Args:
        timeout_s: longest wait for a layer.
    """

    __slots__ = ("_changed", "_failed", "_copied", "_timeout_s")

    def __init__(self, *, timeout_s: float = _WAIT_S) -> None:
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._copied: dict[int, list[CopyEvent]] = {}  # load -> events of its layers, copied or on a stream
        self._failed: set[int] = set()

    def start_load_back(self, op: int) -> None:
        """Make forwards wait for this load."""
        with self._changed:
            self._copied[op] = []

    def complete_layer(self, op: int, event: CopyEvent) -> None:
        """Record that the next layer of a load has been copied, or is on a stream."""
        with self._changed:
            self._copied[op].append(event)
            self._changed.notify_all()

    def fail_load_back(self, op: int) -> None:
        """Record that a load failed. No effect if no forward waits for it."""
        with self._changed:
            if op in self._copied:
                self._failed.add(op)
                self._changed.notify_all()

    def finish_load_back(self, op: int) -> None:
        """Stop waiting for a load. Forwards continue to fail for a failed load until it is discarded."""
        with self._changed:
            if op not in self._failed:
                self._copied.pop(op, None)

    def discard_load_back(self, op: int) -> None:
        """Forget a failed load, whose pages no request uses any more."""
        with self._changed:
            self._copied.pop(op, None)
            self._failed.discard(op)

    def wait_until(self, layer: int) -> None:
        """Wait until this layer of every load under way has been copied.

        Raises:
            LoadBackError: a load has failed or timed out.
        """
        if not self._copied:  # no load begins while a forward runs
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failed or not self._missing(layer), self._timeout_s)
            for op in self._failed:
                raise LoadBackError(op, "failed while requests use its pages")
            for op in self._missing(layer):
                raise LoadBackError(op, f"layer {layer} was not copied within {self._timeout_s:g} s")
            for events in self._copied.values():
                events[layer].wait_on_stream()

    def _missing(self, layer: int) -> list[int]:
        return [op for op, events in self._copied.items() if len(events) <= layer]
