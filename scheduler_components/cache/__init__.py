"""The reference prefix cache: a radix tree of pages that records events of its own changes.

``BlockTableCache`` is a table of full pages instead, by vLLM's rules: a page of a request is never replaced.
``BlockTableRecorder`` records events for engines that have such a table of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from scheduler_components.cache.block_hash import DEFAULT_NAMESPACE, PrefixNamespace, hash_pages
    from scheduler_components.cache.block_table import BlockTableRecorder
    from scheduler_components.cache.block_table_cache import BlockTableCache, TableMatch
    from scheduler_components.cache.page_pool import PagePool
    from scheduler_components.cache.radix_cache import PrefixMatch, RadixCache
    from scheduler_components.cache.radix_tree import RadixNode
    from scheduler_components.events import signed_block_hash

__all__ = [
    "DEFAULT_NAMESPACE",
    "BlockTableCache",
    "BlockTableRecorder",
    "PagePool",
    "PrefixMatch",
    "PrefixNamespace",
    "RadixCache",
    "RadixNode",
    "TableMatch",
    "hash_pages",
    "signed_block_hash",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.cache.block_hash": "DEFAULT_NAMESPACE PrefixNamespace hash_pages",
        "scheduler_components.cache.block_table": "BlockTableRecorder",
        "scheduler_components.cache.block_table_cache": "BlockTableCache TableMatch",
        "scheduler_components.cache.page_pool": "PagePool",
        "scheduler_components.cache.radix_cache": "PrefixMatch RadixCache",
        "scheduler_components.cache.radix_tree": "RadixNode",
        "scheduler_components.events": "signed_block_hash",
    },
)
