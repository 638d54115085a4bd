"""WeightStore: the weights of one rank and of an update in progress, and the account of the loaded tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from scheduler_components.errors import ConfigError

__all__ = ["LoadedTensors", "NullWeightStore", "WeightStore"]


class WeightStore(Protocol):
    """One rank's current weights, and the new weights of a weight update. Called by `QuiesceController`.

    An exception of `begin`, `load` or `checksum` ends the update on all ranks. The other two methods must not fail.
    """

    def begin(self, weight_version: str) -> None:
        """Allocate memory for the weights of this version, next to the current ones."""
        ...

    def load(self, name: str, content: bytes) -> None:
        """Load one tensor of the new weights."""
        ...

    def checksum(self) -> int:
        """Return 63 bits over all loaded tensors as received. Ranks with different slices return the same value."""
        ...

    def commit(self) -> None:
        """Use the loaded weights from now on."""
        ...

    def roll_back(self) -> None:
        """Discard the loaded weights, if there are any."""
        ...


class NullWeightStore:
    """The store of a scheduler whose weights cannot be updated. It rejects an update when it begins."""

    def begin(self, weight_version: str) -> None:
        raise ConfigError("weight_version", weight_version, "cannot be loaded", "give this scheduler a WeightStore")

    def load(self, name: str, content: bytes) -> None:
        self.begin(name)

    def checksum(self) -> int:
        return 0

    def commit(self) -> None:
        pass

    def roll_back(self) -> None:
        pass


@dataclass(slots=True)
class LoadedTensors:
    """Names and digests of the tensors that an update has loaded, whatever slice of each a rank keeps."""

    _digests: dict[str, bytes] = field(default_factory=dict, init=False, repr=False)

    def add(self, name: str, content: bytes) -> None:
        """Record one tensor as received.

        Raises:
            ConfigError: it was loaded before, or is empty.
        """
        if name in self._digests:
            raise ConfigError("name", name, "was loaded before", "load each tensor once")
        if not content:
            raise ConfigError("content", content, f"is empty, in tensor {name!r}", "leave the tensor out")
        self._digests[name] = blake2b(name.encode()).digest() + blake2b(content).digest()

    def checksum(self) -> int:
        """Return 63 bits over names and contents. The order of loading does not matter."""
        digest = blake2b(digest_size=8)
        for _, tensor_digest in sorted(self._digests.items()):
            digest.update(tensor_digest)
        return int.from_bytes(digest.digest(), "big") >> 1

    def clear(self) -> None:
        self._digests = {}
