"""Tiers behind the device, of one rank: its KV memory, a host tier, storage, and the agreement of all ranks.

The memory is simulated, or the torch tensors that a model computes into. Imported by a rank that has tiers: they need
numpy, which an engine without a host tier need not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from scheduler_components import CacheIntegrityError, ConfigError, ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.cache.block_hash import DIGEST_BYTES
from scheduler_components.hicache import (
    ZERO_COPY_LAYOUT,
    HiCacheStepper,
    HiRadixCache,
    HostPool,
    KeySpace,
    Placement,
    SimulatedDeviceMemory,
    ThreadLayerDoneCounter,
    ThreadPageMover,
)
from scheduler_components.page_shape import STORED_LAYOUT, PageShape
from scheduler_components.ports import LayerDoneCounter, NullPageHook, PageHook, ZeroCopyPageStore
from scheduler_components.reference.device.device import NUM_SIMULATED_LAYERS
from scheduler_components.reference.engine.config import HiCacheConfig, SchedulerConfig

if TYPE_CHECKING:
    from scheduler_components.hicache import TorchDeviceMemory

__all__ = [
    "HiCacheTiers",
    "RankKvMemory",
    "SimulatedKvPages",
    "TierLayerDoneCounter",
    "open_hicache_tiers",
    "make_simulated_kv_memory",
    "make_torch_kv_memory",
]

_SHAPE = PageShape(
    num_layers=NUM_SIMULATED_LAYERS, layer_page_bytes=64
)  # small: its content is checked, not computed with
_WAIT_S = 0.001


@dataclass(slots=True, kw_only=True)
class SimulatedKvPages:
    """A ``PageHook``. A page's bytes are its digest, repeated, plus the number of the slice that this rank has.

    So a page of other tokens, another rank's slice and a torn page all differ from what they should be.

    Attributes:
        device: the memory, with pages of a multiple of ``DIGEST_BYTES`` in each layer.
        slice_index: which slice of every page this rank holds.
    """

    device: SimulatedDeviceMemory
    slice_index: int

    def on_computed(self, digests: bytes, pages: Sequence[int]) -> None:
        self.device.layers[:, list(pages)] = self._content(digests)

    def on_loaded_back(self, digests: bytes, pages: Sequence[int]) -> None:
        found = self.device.layers[:, list(pages)]
        if not np.array_equal(found, np.broadcast_to(self._content(digests), found.shape)):
            raise CacheIntegrityError(f"device pages {pages[0]} to {pages[-1]} came back with other bytes")

    def _content(self, digests: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Bytes of shape ``(1, num_pages, layer_page_bytes)``, the same in every layer."""
        rows = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES) + np.uint8(self.slice_index)
        return np.tile(rows, self.device.shape.layer_page_bytes // DIGEST_BYTES)[np.newaxis]


@dataclass(slots=True, kw_only=True, frozen=True)
class TierLayerDoneCounter:
    """A ``LayerDoneCounter`` over the tiers of a rank.

    Attributes:
        stepper: has the loads that were decided while the batch was made.
        layer_counter: of their layers.
    """

    stepper: HiCacheStepper
    layer_counter: ThreadLayerDoneCounter

    def start_batch(self) -> None:
        self.stepper.submit()

    def wait_until(self, layer: int) -> None:
        self.layer_counter.wait_until(layer)


@dataclass(slots=True, kw_only=True)
class HiCacheTiers:
    """``CacheTiers`` of a ``HiRadixCache``.

    Attributes:
        stepper: steps the cache.
        mover: the stepper's, which this one waits for.
    """

    stepper: HiCacheStepper
    mover: ThreadPageMover

    @property
    def cache(self) -> HiRadixCache:
        return self.stepper.cache

    @property
    def contents(self) -> HiRadixCache:
        return self.stepper.cache

    @property
    def layer_counter(self) -> LayerDoneCounter:
        """Where the device waits for pages, for a policy that loads ``by_layer``."""
        return TierLayerDoneCounter(stepper=self.stepper, layer_counter=self.mover.layer_counter)

    def step(self) -> None:
        self.stepper.step()

    def wait(self) -> None:
        self.mover.wait(_WAIT_S)

    def close(self) -> None:
        self.stepper.close()


KvMemory: TypeAlias = "SimulatedDeviceMemory | TorchDeviceMemory"


@dataclass(slots=True, kw_only=True, frozen=True)
class RankKvMemory:
    """The KV memory of a rank, and what its pages mean.

    Attributes:
        memory: its pages.
        model: the model and its weights, by a name that no others have: engines of one name read each other's pages.
        dtype: of keys and values.
        page_hook: learns which pages were computed and loaded.
    """

    memory: KvMemory
    model: str
    dtype: str
    page_hook: PageHook = field(default_factory=NullPageHook)


def make_simulated_kv_memory(scheduler: SchedulerConfig, parallel: ParallelState, *, model: str) -> RankKvMemory:
    """Make memory for a device that computes nothing: each page's bytes are made from its digest, and looked at."""
    memory = SimulatedDeviceMemory(_SHAPE, scheduler.kv_pages)
    slice_index = parallel.pp_rank * parallel.attn_tp_size + parallel.attn_tp_rank
    hook = SimulatedKvPages(device=memory, slice_index=slice_index)
    return RankKvMemory(memory=memory, model=model, dtype="simulated", page_hook=hook)


def make_torch_kv_memory(memory: TorchDeviceMemory, *, model: str) -> RankKvMemory:
    """Take the pool that a model computes into.

    Args:
        memory: as many pages of as many tokens as the scheduler has.
        model: ``ModelSpec.identity``, or another name for configuration and weights.
    """
    return RankKvMemory(memory=memory, model=model, dtype=str(memory.dtype).removeprefix("torch."))


def open_hicache_tiers(
    kv: RankKvMemory,
    hicache: HiCacheConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelState,
    *,
    groups: ParallelGroups,
) -> HiCacheTiers:
    """Open everything; all ranks of a replica do so, and wait for each other here. Closing it closes ``groups``.

    Raises:
        ConfigError: the memory has not the scheduler's pages, or the host has no room.
        ConfigError, StartError, StorageError: the storage cannot be opened.
        SyncTimeoutError: not all ranks came.
        StopRequestedError: the engine stops.
    """
    if kv.memory.num_pages != scheduler.kv_pages:
        problem = f"is {scheduler.kv_pages} pages, but the KV memory has {kv.memory.num_pages}"
        raise ConfigError("kv_tokens", scheduler.kv_tokens, problem, "allocate the memory by the scheduler's config")
    num_pages = max(1, hicache.host_tokens // scheduler.page_size)
    buffer = kv.memory.host_buffer(num_pages)
    host = HostPool(kv.memory.shape, num_pages, layout=hicache.host_layout, buffer=buffer)
    is_framed = hicache.storage_checksum == "frame"
    keys = KeySpace(
        model=kv.model,
        dtype=kv.dtype,
        page_size=scheduler.page_size,
        layout=STORED_LAYOUT if is_framed else ZERO_COPY_LAYOUT,
        placement=Placement(),
        parallel=parallel,
    )
    with ExitStack() as opened:
        mover = ThreadPageMover(host=host, device=kv.memory, keys=keys)
        opened.callback(mover.close)
        store = _open_store(hicache)
        if store is not None and is_framed:
            mover.attach(store, deadline_s=hicache.storage_deadline_s)
        elif store is not None:
            has_checksums = hicache.storage_checksum == "sidecar"
            mover.attach_zero_copy(store, deadline_s=hicache.storage_deadline_s, has_checksums=has_checksums)
        cache = HiRadixCache(
            page_size=scheduler.page_size,
            capacity_tokens=scheduler.kv_tokens,
            host=host,
            num_host_pages=groups.all_reduce_min("host pages", host.num_pages, step=0),
            policy=hicache.policy,
            record=parallel.owns_kv_stream,
            page_hook=kv.page_hook,
        )
        opened.pop_all()
    settings = {
        "storage": hicache.storage,
        "storage checksum": hicache.storage_checksum,
        "key namespace": keys.namespace,
    }
    return HiCacheTiers(stepper=HiCacheStepper(cache=cache, groups=groups, mover=mover, settings=settings), mover=mover)


def _open_store(hicache: HiCacheConfig) -> ZeroCopyPageStore | None:
    # Imported here: a rank starts with what it needs and nothing else.
    if hicache.storage == "file":
        from scheduler_components.hicache import open_file_page_store

        return open_file_page_store(hicache.storage_path, capacity_bytes=hicache.storage_bytes)
    if hicache.storage == "mooncake":
        from scheduler_components.hicache import open_mooncake_page_store

        return open_mooncake_page_store(hicache.mooncake)
    return None
