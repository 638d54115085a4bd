"""Opens one rank's hierarchical cache: memory, threads, storage, and the sockets over which ranks agree."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TypeAlias

import zmq

from scheduler_components import PageStore, ParallelState
from scheduler_components.hicache import (
    HiRadixCache,
    HostPool,
    KeySpace,
    PageShape,
    Placement,
    SimulatedDeviceMemory,
    SyncDomain,
    TierStepper,
    open_thread_page_mover,
    world_rank_sets,
)
from scheduler_components.reference.device import SimulatedKv
from scheduler_components.reference.engine.cache_tiers import HostTiers
from scheduler_components.reference.engine.config import HiCacheConfig, RankConfig
from scheduler_components.reference.engine.zmq_sync import WaitFor, open_zmq_sync_domain

__all__ = [
    "open_host_tiers",
]

_SHAPE = PageShape(num_layers=2, layer_page_bytes=64)  # small: its content is checked, not computed with
_AGREEMENT_TIMEOUT_S = 60.0  # eight interpreters that start at once on two busy cores
_STORAGE_DEADLINE_S = 2.0

_Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]


def open_host_tiers(
    config: RankConfig, hicache: HiCacheConfig, parallel: ParallelState, *, context: _Context, wait_for: WaitFor
) -> tuple[HiRadixCache, HostTiers]:
    """Open everything; all ranks of a replica do so, and wait for each other here.

    Raises:
        ConfigError, StartError, StorageError: the storage cannot be opened.
        SyncTimeoutError: not all ranks came.
        StopRequested: the engine stops.
    """
    engine = config.engine
    page_size = engine.scheduler.page_size
    host = HostPool(_SHAPE, max(1, hicache.host_tokens // page_size))
    device = SimulatedDeviceMemory(_SHAPE, engine.scheduler.kv_pages)
    with ExitStack() as opened:
        mover = open_thread_page_mover(host, device, _keys(config, parallel))
        opened.callback(mover.close)
        store = _open_store(hicache)
        if store is not None:
            mover.attach(store, deadline_s=_STORAGE_DEADLINE_S)
        domain = _open_domain(config, parallel, context, wait_for)
        opened.callback(domain.close)
        cache = HiRadixCache(
            page_size=page_size,
            capacity_tokens=engine.scheduler.kv_tokens,
            host=host,
            num_host_pages=domain.min("host pages", host.num_pages, step=0),
            policy=hicache.policy,
            record=parallel.owns_kv_stream,
            page_hook=SimulatedKv(device=device, slice_index=parallel.attn_tp_rank),
        )
        opened.pop_all()
    return cache, HostTiers(stepper=TierStepper(cache=cache, domain=domain, mover=mover), mover=mover)


def _keys(config: RankConfig, parallel: ParallelState) -> KeySpace:
    return KeySpace(
        model=config.engine.model_name,
        dtype="simulated",
        page_size=config.engine.scheduler.page_size,
        layout="page_first",
        placement=Placement(),
        parallel=parallel,
    )


def _open_store(hicache: HiCacheConfig) -> PageStore | None:
    # Imported here: a rank starts with what it needs and nothing else.
    if hicache.storage == "file":
        from scheduler_components.hicache import open_file_page_store

        return open_file_page_store(hicache.storage_path, capacity_bytes=hicache.storage_bytes)
    if hicache.storage == "mooncake":
        from scheduler_components.hicache import open_mooncake_page_store

        return open_mooncake_page_store(hicache.mooncake)
    return None


def _open_domain(config: RankConfig, parallel: ParallelState, context: _Context, wait_for: WaitFor) -> SyncDomain:
    return open_zmq_sync_domain(
        context,
        rank=parallel.tp_rank,
        hops=world_rank_sets(parallel)[parallel.tp_rank].hops,
        address_of=config.sockets.sync,
        wait_for=wait_for,
        timeout_s=_AGREEMENT_TIMEOUT_S,
    )
