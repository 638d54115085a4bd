"""What the engine is told of its hierarchical cache: plain values, checked once, sent to every rank."""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

from scheduler_components.errors import ConfigError
from scheduler_components.hicache.mooncake_storage import MooncakeAddress
from scheduler_components.hicache.policy import HiCachePolicy

__all__ = ["MOONCAKE_MASTER", "MOONCAKE_METADATA", "HiCacheConfig", "StorageKind"]

MOONCAKE_MASTER = "127.0.0.1:50051"
MOONCAKE_METADATA = "http://127.0.0.1:8080/metadata"
"""Where ``mooncake_master --enable_http_metadata_server=true`` listens when it is told nothing else."""

_SEGMENT_BYTES = 64 << 20  # of each rank, given to the cluster
_BUFFER_BYTES = 16 << 20

StorageKind: TypeAlias = Literal["none", "file", "mooncake"]
_STORAGE_KINDS = ("none", "file", "mooncake")


def _check_kind(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in _STORAGE_KINDS:
        raise ConfigError(attribute.name, value, "is no storage", f"give one of {', '.join(_STORAGE_KINDS)}")


def _check_size(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise ConfigError(attribute.name, value, "is not a size", "give an integer of at least 1")


@attrs.frozen(kw_only=True)
class HiCacheConfig:
    """Tiers behind the device.

    Attributes:
        host_tokens: size of each rank's host tier.
        storage: the tier behind that one. Each rank is a process of its own, so a store in memory would not be shared.
        storage_path: of ``file``: a directory that all ranks can write to; it outlives the engine.
        storage_bytes: of ``file``: most bytes in it.
        mooncake_master, mooncake_metadata: of ``mooncake``: the master's ``host:port``, and the metadata server's URL.
        policy: when to write, when to stop prefetching.

    Raises:
        ConfigError: naming the value that cannot work.
    """

    host_tokens: int = attrs.field(validator=_check_size)
    storage: StorageKind = attrs.field(default="none", validator=_check_kind)
    storage_path: str = ""
    storage_bytes: int = attrs.field(default=1 << 30, validator=_check_size)
    mooncake_master: str = MOONCAKE_MASTER
    mooncake_metadata: str = MOONCAKE_METADATA
    policy: HiCachePolicy = attrs.field(factory=HiCachePolicy)

    def __attrs_post_init__(self) -> None:
        if self.storage == "file" and not self.storage_path:
            raise ConfigError("storage_path", self.storage_path, "is empty", "name the directory to store pages in")
        if self.storage == "mooncake":
            _ = self.mooncake  # checked before any process is started

    @property
    def mooncake(self) -> MooncakeAddress:
        """Where each rank joins the Mooncake cluster, and what it gives to it."""
        return MooncakeAddress(
            master=self.mooncake_master,
            metadata=self.mooncake_metadata,
            segment_bytes=_SEGMENT_BYTES,
            buffer_bytes=_BUFFER_BYTES,
        )
