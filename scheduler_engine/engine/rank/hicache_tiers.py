"""The tiers of one rank: its KV memory, a host tier, a storage backend and the agreement with the other ranks.

The KV memory is simulated, or the torch tensors that a model computes into. A rank imports this module only if it has
tiers: it needs numpy, which an engine without a host tier does not install.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from scheduler_components import CacheIntegrityError, ConfigError, ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.step_agreement import AgreementPart
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
from scheduler_components.hicache.host_tier_pool import HostTierPool
from scheduler_components.ports import LayerDoneCounter, PageHook, ZeroCopyPageStore
from scheduler_components.values.page_shape import STORED_LAYOUT, PageShape
from scheduler_engine.device.device import NUM_SIMULATED_LAYERS
from scheduler_engine.engine.config import HiCacheConfig, SchedulerConfig

if TYPE_CHECKING:
    from scheduler_components.hicache import TorchDeviceMemory
    from scheduler_components.values import TierStats

# The pages are small because their content is compared, not computed with.
_SHAPE = PageShape(num_layers=NUM_SIMULATED_LAYERS, layer_page_bytes=64)
_WAIT_S = 0.001


@dataclass(slots=True, kw_only=True)
class SimulatedKvPages:
    """A ``PageHook`` that writes and compares simulated pages: the repeated digest plus the index of the rank's slice.

    The hook therefore detects a page of other tokens, another rank's slice and a torn page.

    Attributes:
        device: the memory. The bytes of a page in one layer are a multiple of ``DIGEST_BYTES``.
        slice_index: which slice of every page this rank holds.
    """

    device: SimulatedDeviceMemory
    slice_index: int

    def on_computed(self, digests: bytes, pages: Sequence[int]) -> None:
        self.device.layers[:, list(pages)] = self._content(digests)

    def on_loaded_back(self, digests: bytes, pages: Sequence[int]) -> None:
        found = self.device.layers[:, list(pages)]
        if not np.array_equal(found, np.broadcast_to(self._content(digests), found.shape)):
            raise CacheIntegrityError(f"device pages {pages[0]} to {pages[-1]} do not hold their content after a load")

    def _content(self, digests: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return bytes of shape ``(1, num_pages, layer_page_bytes)``, the same for every layer."""
        rows = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES) + np.uint8(self.slice_index)
        return np.tile(rows, self.device.shape.layer_page_bytes // DIGEST_BYTES)[np.newaxis]


@dataclass(slots=True, kw_only=True, frozen=True)
class TierLayerDoneCounter:
    """The ``LayerDoneCounter`` of a rank with tiers. ``start_batch`` submits the loads that batching has just decided.

    Attributes:
        stepper: submits the loads.
        layer_counter: counts their layers.
    """

    stepper: HiCacheStepper
    layer_counter: ThreadLayerDoneCounter

    def start_batch(self) -> None:
        self.stepper.submit()

    def wait_until(self, layer: int) -> None:
        self.layer_counter.wait_until(layer)


@dataclass(slots=True, kw_only=True)
class HiCacheTiers:
    """The ``CacheTiers`` of a ``HiRadixCache``.

    Attributes:
        stepper: agrees about the cache and moves its pages.
        mover: the mover of ``stepper``, for ``wait``.
        host: the host pool of the cache, for checks.
    """

    stepper: HiCacheStepper
    mover: ThreadPageMover
    host: HostPool

    @property
    def cache(self) -> HiRadixCache:
        return self.stepper.cache

    @property
    def num_operations(self) -> int:
        return self.stepper.cache.num_operations

    @property
    def state_digest(self) -> int:
        return self.stepper.cache.state_digest

    @property
    def lower_pools(self) -> Sequence[HostTierPool]:
        return (self.cache.host_pool(self.host),)

    @property
    def layer_counter(self) -> LayerDoneCounter:
        """Where the device waits for pages if the policy loads ``by_layer``."""
        return TierLayerDoneCounter(stepper=self.stepper, layer_counter=self.mover.layer_counter)

    def stats(self) -> TierStats:
        return self.stepper.cache.stats()

    def clear_storage_index(self) -> None:
        self.stepper.cache.clear_storage_index()

    @property
    def agreement_parts(self) -> Sequence[AgreementPart]:
        return (self.stepper,)

    def wait(self) -> None:
        self.mover.wait(_WAIT_S)

    def close(self) -> None:
        self.stepper.close()


KvMemory: TypeAlias = "SimulatedDeviceMemory | TorchDeviceMemory"


@dataclass(slots=True, kw_only=True, frozen=True)
class RankKvMemory:
    """The KV memory of a rank and the identity of its content.

    Attributes:
        memory: the pages.
        model: a unique name of the model and its weights. Engines with the same name read each other's pages.
        dtype: data type of keys and values.
        page_hook: called with the pages that were computed or loaded.
    """

    memory: KvMemory
    model: str
    dtype: str
    page_hook: PageHook | None = None


def make_simulated_kv_memory(scheduler: SchedulerConfig, parallel: ParallelState, *, model: str) -> RankKvMemory:
    """Make the memory of a simulated device. The bytes of each page are derived from its digest and compared later."""
    memory = SimulatedDeviceMemory(_SHAPE, scheduler.kv_pages)
    slice_index = parallel.pp_rank * parallel.attn_tp_size + parallel.attn_tp_rank
    hook = SimulatedKvPages(device=memory, slice_index=slice_index)
    return RankKvMemory(memory=memory, model=model, dtype="simulated", page_hook=hook)


def make_torch_kv_memory(memory: TorchDeviceMemory, *, model: str) -> RankKvMemory:
    """Describe the pool that a model computes into.

    Args:
        memory: with the page size and the number of pages of the scheduler.
        model: ``ModelSpec.identity``, or another unique name of configuration and weights.
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
    """Open the tiers of one rank. All ranks of a replica call it together. Closing the tiers closes ``groups``.

    Raises:
        ConfigError: the memory does not have the scheduler's pages, or the host memory cannot be allocated.
        ConfigError, StartError, StorageError: the storage cannot be opened.
        SyncTimeoutError: a rank did not join in time.
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
        settings = {
            "storage": hicache.storage,
            "storage checksum": hicache.storage_checksum,
            "key namespace": keys.namespace,
        }
        stepper = HiCacheStepper(
            cache=cache, groups=groups, mover=mover, settings=settings, leads=parallel.leads_replica
        )
        stepper.step()  # agree that all ranks reach their storage, or the first request would not ask it
        opened.pop_all()
    return HiCacheTiers(stepper=stepper, mover=mover, host=host)


def _open_store(hicache: HiCacheConfig) -> ZeroCopyPageStore | None:
    # Imported here so that a rank loads only the backend that it uses.
    if hicache.storage == "file":
        from scheduler_components.hicache import open_file_page_store

        return open_file_page_store(hicache.storage_path, capacity_bytes=hicache.storage_bytes)
    if hicache.storage == "mooncake":
        from scheduler_components.hicache import open_mooncake_page_store

        return open_mooncake_page_store(hicache.mooncake)
    return None
