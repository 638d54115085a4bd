"""Command-line options of the hierarchical cache, and what they come to."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.reference.hicache_config import MOONCAKE_MASTER, MOONCAKE_METADATA, HiCacheConfig

__all__ = [
    "MOONCAKE_MASTER",
    "MOONCAKE_METADATA",
    "HiCacheOption",
    "HostTokens",
    "MooncakeMaster",
    "MooncakeMetadata",
    "Prefetch",
    "PrefetchStop",
    "Storage",
    "StorageKind",
    "StoragePath",
    "Write",
    "WriteKind",
    "hicache_config",
]

_HOST_TO_DEVICE = 4  # tokens on the host for each on the device, unless the operator says


class StorageKind(StrEnum):
    """Tiers behind the host."""

    NONE = "none"
    FILE = "file"
    MOONCAKE = "mooncake"


class WriteKind(StrEnum):
    """When pages go to the host."""

    THROUGH = "write_through"
    BACK = "write_back"


class PrefetchStop(StrEnum):
    """When a prefetch ends before it is complete."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


HiCacheOption = Annotated[bool, typer.Option("--hicache", help="Keep pages that the device evicts, on the host.")]
HostTokens = Annotated[
    int | None,
    typer.Option("--hicache-host-tokens", min=1, help="Size of the host tier. Default: four times --kv-tokens."),
]
Storage = Annotated[StorageKind, typer.Option("--hicache-storage", help="The tier behind the host.")]
StoragePath = Annotated[
    Path | None, typer.Option("--hicache-storage-path", help="Directory of the file storage; outlives the engine.")
]
MooncakeMaster = Annotated[
    str, typer.Option("--hicache-mooncake-master", metavar="HOST:PORT", help="Address of Mooncake's master.")
]
MooncakeMetadata = Annotated[
    str, typer.Option("--hicache-mooncake-metadata", metavar="URL", help="Address of Mooncake's metadata server.")
]
Write = Annotated[WriteKind, typer.Option("--hicache-write", help="When pages are copied to the host.")]
Prefetch = Annotated[PrefetchStop, typer.Option("--hicache-prefetch", help="When a prefetch from storage ends.")]


def hicache_config(
    is_on: bool,
    kv_tokens: int,
    *,
    host_tokens: int | None,
    storage: StorageKind,
    storage_path: Path | None,
    mooncake_master: str,
    mooncake_metadata: str,
    write: WriteKind,
    prefetch: PrefetchStop,
) -> HiCacheConfig | None:
    """Put the options together; None without ``--hicache``.

    Raises:
        ConfigError: naming what cannot work.
    """
    if not is_on:
        return None
    return HiCacheConfig(
        host_tokens=host_tokens if host_tokens is not None else _HOST_TO_DEVICE * kv_tokens,
        storage=storage.value,
        storage_path=str(storage_path.absolute()) if storage_path is not None else "",
        mooncake_master=mooncake_master,
        mooncake_metadata=mooncake_metadata,
        policy=HiCachePolicy(write=write.value, prefetch=prefetch.value),
    )
