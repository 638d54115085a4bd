"""BlockTableCache next to vLLM's own pool: in every history both give a request the same pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.block_pool_model import HISTORIES, PAGE_SIZE, BlockTableComparison

pytest.importorskip("vllm", reason="`make engines` makes an environment with vllm")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash, make_block_hash_with_group_id

from scheduler_components.cache import BlockTableCache

pytestmark = [pytest.mark.engine, pytest.mark.engines_only, pytest.mark.filterwarnings("default")]


class VllmPool:
    """vLLM's ``BlockPool``, called as its KV cache manager calls it."""

    def __init__(self, num_pages: int) -> None:
        self.pool = BlockPool(num_pages + 1, enable_caching=True, hash_block_size=PAGE_SIZE)

    def match(self, hashes: Sequence[int]) -> list[int]:
        found = []
        for each in hashes:
            blocks = self.pool.get_cached_block(_key(each), [0])
            if not blocks:
                break
            found.append(blocks[0].block_id)
        return found

    def touch(self, pages: Sequence[int]) -> None:
        self.pool.touch(self._blocks(pages))

    def num_free(self) -> int:
        return self.pool.get_num_free_blocks()

    def allocate(self, num_pages: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(num_pages)]

    def cache(self, pages: Sequence[int], hashes: Sequence[int]) -> None:
        for number, (block, each) in enumerate(zip(self._blocks(pages), hashes, strict=True), start=1):
            if block.block_hash is None:
                key = make_block_hash_with_group_id(_key(each), 0)
                self.pool._insert_block_hash(key, block, num_tokens=number * PAGE_SIZE)

    def free(self, pages: Sequence[int]) -> None:
        self.pool.free_blocks(reversed(self._blocks(pages)))

    def reset(self) -> None:
        assert self.pool.reset_prefix_cache()

    def hashes(self) -> set[int]:
        cached = self.pool.cached_block_hash_to_block._cache
        return {int.from_bytes(get_block_hash(key), "big", signed=True) for key in cached}

    def _blocks(self, pages: Sequence[int]) -> list[Any]:
        return [self.pool.blocks[page] for page in pages]


def _key(block_hash: int) -> Any:
    return block_hash.to_bytes(8, "big", signed=True)


@settings(max_examples=500, deadline=None)
@given(history=HISTORIES, num_pages=st.integers(1, 16))
def test_every_history_has_vllms_pages(history: list[tuple[object, ...]], num_pages: int) -> None:
    cache = BlockTableCache(
        page_size=PAGE_SIZE, capacity_tokens=num_pages * PAGE_SIZE, reserves_page_0=True, record=True
    )
    BlockTableComparison(cache, VllmPool(num_pages)).run(history)
