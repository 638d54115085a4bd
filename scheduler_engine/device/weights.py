"""Weights and memory of a simulated device, for weight updates and memory release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import attrs

from scheduler_components import ConfigError
from scheduler_components.weight_updater import LoadedTensors
from scheduler_engine.device.device import SimulatedDevice, SimulatedModel


@dataclass(slots=True, kw_only=True)
class SimulatedWeights:
    """A ``WeightStore`` whose weights are the seed of a ``SimulatedModel``, so that new weights give new tokens.

    Attributes:
        device: a commit replaces its model.
    """

    device: SimulatedDevice
    _parts: LoadedTensors = field(default_factory=LoadedTensors, init=False, repr=False)

    def begin(self, weight_version: str) -> None:
        self._parts.clear()

    def load(self, name: str, content: bytes) -> None:
        """Load one tensor.

        Raises:
            ConfigError: the tensor was loaded before or is empty.
        """
        self._parts.add(name, content)

    def checksum(self) -> int:
        return self._parts.checksum()

    def commit(self) -> None:
        self.device.model = attrs.evolve(self.device.model, seed=self.checksum())
        self._parts.clear()

    def roll_back(self) -> None:
        self._parts.clear()


@dataclass(slots=True, kw_only=True)
class SimulatedMemory:
    """A ``MemoryOccupation`` that counts the bytes of a shared device.

    Attributes:
        device: its model loses its seed when the weights are discarded.
        free_bytes: free memory of the device.
        held_bytes: held memory by tag.
    """

    device: SimulatedDevice
    free_bytes: int = 0
    held_bytes: dict[str, int] = field(default_factory=lambda: {"weights": 16 << 30, "kv_cache": 48 << 30})
    _released: set[str] = field(default_factory=set, init=False)

    def release(self, tags: Sequence[str], *, keep_weights: bool) -> None:
        for tag in set(tags) - self._released:
            self.free_bytes += self.held_bytes[tag]
        self._released.update(tags)
        if "weights" in tags and not keep_weights:
            self.device.model = SimulatedModel(vocab_size=self.device.model.vocab_size)

    def resume(self, tags: Sequence[str]) -> None:
        """Allocate regions again.

        Raises:
            ConfigError: another process uses the memory now.
        """
        wanted = sum(self.held_bytes[tag] for tag in set(tags) & self._released)
        if wanted > self.free_bytes:
            raise ConfigError("tags", list(tags), f"need {wanted} bytes, {self.free_bytes} are free", "free some first")
        self.free_bytes -= wanted
        self._released.difference_update(tags)
