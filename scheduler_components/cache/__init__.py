"""The reference prefix cache: a radix tree of pages that records events of its own changes.

``BlockTableRecorder`` records events for engines that keep a table of hashed blocks instead of a tree.
"""

from __future__ import annotations

from scheduler_components.cache.block_hash import DEFAULT_NAMESPACE, PrefixNamespace, hash_pages
from scheduler_components.cache.block_table import BlockTableRecorder
from scheduler_components.cache.page_pool import PagePool
from scheduler_components.cache.radix_cache import PrefixMatch, RadixCache
from scheduler_components.cache.radix_tree import RadixNode
from scheduler_components.events import signed_block_hash

__all__ = [
    "DEFAULT_NAMESPACE",
    "BlockTableRecorder",
    "PagePool",
    "PrefixMatch",
    "PrefixNamespace",
    "RadixCache",
    "RadixNode",
    "hash_pages",
    "signed_block_hash",
]
