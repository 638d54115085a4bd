"""vLLM's block pool: copies, eviction and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)


class KVCacheBlock:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash: bytes | None = None
        self.ref_cnt = 0


class BlockHashToBlockMap:
    def __init__(self) -> None:
        self._cache: dict[bytes, dict[int, KVCacheBlock]] = {}

    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        return next(iter(self._cache.get(key, {}).values()), None)

    def insert(self, key: bytes, block: KVCacheBlock) -> None:
        self._cache.setdefault(key, {})[block.block_id] = block

    def pop(self, key: bytes, block_id: int) -> None:
        del self._cache[key][block_id]
        if not self._cache[key]:
            del self._cache[key]


class BlockPool:
    def __init__(
        self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int, enable_kv_cache_events: bool
    ) -> None:
        self.blocks = [KVCacheBlock(number) for number in range(num_gpu_blocks)]
        self._free = deque(self.blocks[1:])  # the first is a placeholder
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.kv_event_queue: list[KVCacheEvent] = []

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        key = make_block_hash_with_group_id(block_hash, kv_cache_group_ids[0])
        block = self.cached_block_hash_to_block.get_one_block(key)
        return None if block is None else [block]

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        taken = [self._free.popleft() for _ in range(num_blocks)]
        for block in taken:
            self._evict(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free.append(block)

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            self._evict(self.blocks[block_id])

    def _evict(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self.cached_block_hash_to_block.pop(block.block_hash, block.block_id)
            self._emit_block_removed_events([block.block_hash])
            block.block_hash = None

    def _emit_block_removed_events(self, block_hashes: list[bytes]) -> None:
        for key in block_hashes:
            self.kv_event_queue.append(
                BlockRemoved([maybe_convert_block_hash(get_block_hash(key))], "GPU", get_group_id(key))
            )

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        if num_cached_blocks >= num_full_blocks:
            return
        for number in range(num_cached_blocks, num_full_blocks):
            key = make_block_hash_with_group_id(request.block_hashes[number], kv_cache_group_id)
            blocks[number].block_hash = key
            self.cached_block_hash_to_block.insert(key, blocks[number])
        self._emit_stored(request, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id)

    def emit_cached_block_events(
        self, request: Any, num_cached_blocks: int, block_size: int, kv_cache_group_id: int
    ) -> None:
        self._emit_stored(request, 0, num_cached_blocks, block_size, kv_cache_group_id)

    def _emit_stored(self, request: Any, first: int, stop: int, block_size: int, group: int) -> None:
        hashes = [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes[:stop]]
        stored = BlockStored(
            block_hashes=hashes[first:],
            parent_block_hash=hashes[first - 1] if first else None,
            token_ids=request.all_token_ids[first * block_size : stop * block_size],
            block_size=block_size,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            group_idx=group,
        )
        self.kv_event_queue.append(stored)

    def reset_prefix_cache(self) -> bool:
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        for block in self.blocks:
            block.block_hash = None
        self.kv_event_queue.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVCacheEvent]:
        events, self.kv_event_queue = self.kv_event_queue, []
        return events
