"""SimulatedAdapters: the adapters of a simulated device, which change its text."""

from __future__ import annotations

from scheduler_components.waiting.lora_queue import Adapter


class SimulatedAdapters:
    """An ``AdapterStore`` without weights: the path of an adapter is a part of the source of each text."""

    __slots__ = ("_paths",)

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}

    def load(self, adapter: Adapter) -> None:
        self._paths[adapter.lora_id] = adapter.path

    def unload(self, adapter: Adapter) -> None:
        self._paths.pop(adapter.lora_id, None)

    def path_of(self, lora_id: int) -> str | None:
        """Return the path of an adapter; None if it is not loaded."""
        return self._paths.get(lora_id)
