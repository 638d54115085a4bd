"""Parts of an update that have come, as any ``WeightStore`` keeps account of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from scheduler_components.errors import ConfigError

__all__ = ["LoadedTensors"]


@dataclass(slots=True)
class LoadedTensors:
    """Names and digests: each part once, and 63 bits over all of them, whatever a rank keeps of each."""

    _digests: dict[str, bytes] = field(default_factory=dict, init=False, repr=False)

    def add(self, name: str, content: bytes) -> None:
        """Note one part, as it came.

        Raises:
            ConfigError: it came before, or is empty.
        """
        if name in self._digests:
            raise ConfigError("name", name, "was loaded before", "load each part once")
        if not content:
            raise ConfigError("content", content, f"is empty, in part {name!r}", "leave the part out")
        self._digests[name] = blake2b(name.encode()).digest() + blake2b(content).digest()

    def checksum(self) -> int:
        """Return 63 bits over names and contents; the order of parts is none."""
        digest = blake2b(digest_size=8)
        for _, of_part in sorted(self._digests.items()):
            digest.update(of_part)
        return int.from_bytes(digest.digest(), "big") >> 1

    def clear(self) -> None:
        """Forget all parts."""
        self._digests = {}
