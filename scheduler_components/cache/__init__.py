"""The reference prefix cache: a radix tree of pages that records events from its own transitions. Beside it, the
recorder for engines that keep a table of hashed blocks instead."""

from __future__ import annotations

from scheduler_components.cache.block_hash import (
    DEFAULT_NAMESPACE,
    DIGEST_BYTES,
    PrefixNamespace,
    block_hash_array,
    block_hashes_of,
    hash_pages,
    pack_tokens,
    page_digests,
    unpack_tokens,
)
from scheduler_components.cache.block_table import BlockTableRecorder, signed_block_hash
from scheduler_components.cache.page_pool import PagePool
from scheduler_components.cache.radix_cache import LowerTiers, PrefixMatch, RadixCache
from scheduler_components.cache.radix_tree import LruList, PathMatch, RadixNode, RadixTree
from scheduler_components.cache.recorder import MAX_EVENT_TOKENS, EventRecorder, NullEventRecorder

__all__ = [
    "DIGEST_BYTES",
    "MAX_EVENT_TOKENS",
    "DEFAULT_NAMESPACE",
    "BlockTableRecorder",
    "PathMatch",
    "EventRecorder",
    "LruList",
    "LowerTiers",
    "NullEventRecorder",
    "PagePool",
    "PrefixMatch",
    "PrefixNamespace",
    "RadixCache",
    "RadixNode",
    "RadixTree",
    "block_hash_array",
    "block_hashes_of",
    "hash_pages",
    "pack_tokens",
    "page_digests",
    "signed_block_hash",
    "unpack_tokens",
]
