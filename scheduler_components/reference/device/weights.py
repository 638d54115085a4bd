"""Weights and memory of a simulated device: what an update changes, and what a release gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import attrs

from scheduler_components import ConfigError
from scheduler_components.reference.device.device import SimulatedDevice, SimulatedModel
from scheduler_components.weight_updater import LoadedTensors

__all__ = ["SimulatedMemory", "SimulatedWeights"]


@dataclass(slots=True, kw_only=True)
class SimulatedWeights:
    """A ``WeightStore`` whose weights are the seed of a ``SimulatedModel``: other parts give other tokens.

    Attributes:
        device: its model is replaced.
    """

    device: SimulatedDevice
    _parts: LoadedTensors = field(default_factory=LoadedTensors, init=False, repr=False)

    def begin(self, weight_version: str) -> None:  # noqa: ARG002 - the port's
        self._parts.clear()

    def load(self, name: str, content: bytes) -> None:
        """Take one part.

        Raises:
            ConfigError: it came before, or is empty.
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
    """A ``MemoryOccupation`` that counts bytes, of a device that others use too.

    Attributes:
        device: loses its model's seed with its weights.
        free_bytes: of the device, without what is held here.
        held_bytes: by tag.
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
        """Take regions again.

        Raises:
            ConfigError: somebody else has the memory now.
        """
        wanted = sum(self.held_bytes[tag] for tag in set(tags) & self._released)
        if wanted > self.free_bytes:
            raise ConfigError("tags", list(tags), f"need {wanted} bytes, {self.free_bytes} are free", "free some first")
        self.free_bytes -= wanted
        self._released.difference_update(tags)
