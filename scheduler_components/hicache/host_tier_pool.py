"""HostTierPool: the pages and locks of the host tier, as `PoolInvariantChecker` checks them.

The pages that are free come from the host pool of this rank, the cached ones from the tree, and the reserved ones from
the operations under way. The three are kept by different objects, so a page that one of them loses is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler_components.cache import RadixNode
from scheduler_components.hicache.tiers import TierTree
from scheduler_components.hicache.transfers import TierTransfers
from scheduler_components.values import PageHolding, PoolCount

if TYPE_CHECKING:  # the host pool needs numpy, which a rank without tiers does not load
    from scheduler_components.hicache.memory import HostPool

__all__ = ["HOST_POOL", "HostTierPool"]

HOST_POOL = "host"
"""Name of the host tier in checks and allocation logs."""


@dataclass(slots=True, frozen=True)
class _HostNode:
    """A node of the tree, as the host tier sees it: its host pages and its locks on the host."""

    node: RadixNode
    tiers: TierTree

    @property
    def pages(self) -> Sequence[int]:
        return self.tiers.membership.host_pages.get(self.node, ())

    @property
    def lock_count(self) -> int:
        return self.tiers.host.num_locks(self.node)

    @property
    def parent(self) -> _HostNode | None:
        parent = self.node.parent
        return None if parent is None else _HostNode(parent, self.tiers)


@dataclass(slots=True, kw_only=True)
class HostTierPool:
    """The `AuditedPool` of the host tier of one rank. Made by `HiRadixCache.host_pool`.

    Pages of which the device has a copy count as evictable unless an operation locks them.

    Attributes:
        pages: the host pool of this rank.
        tiers: the tree and its locks.
        transfers: the operations that hold pages and locks.
        name: name of the pool.
    """

    pages: HostPool
    tiers: TierTree
    transfers: TierTransfers
    name: str = HOST_POOL

    def count(self) -> PoolCount:
        pages, host = self.pages, self.tiers.host
        num_locked = sum(node.num_pages for node in host.locked)
        num_in_transfer = sum(len(reserved) for _, reserved in self.transfers.controller.host_pages_held())
        return PoolCount(
            self.name,
            pages.num_pages,
            pages.num_free,
            evictable=pages.num_committed - num_locked,
            protected=num_locked,
            in_transfer=num_in_transfer,
            num_locks=host.num_path_locks,
        )

    def free_pages(self) -> Sequence[int]:
        return self.pages.free_pages()

    def holdings(self) -> Iterator[PageHolding]:
        for operation, pages in self.transfers.controller.host_pages_held():
            yield PageHolding(operation, "transfer", pages)
        for operation, node in self.transfers.host_locks():
            yield PageHolding(operation, "transfer", node=_HostNode(node, self.tiers))

    def tree_nodes(self) -> Iterator[_HostNode]:
        tiers = self.tiers
        return (_HostNode(node, tiers) for node in tiers.tree.walk() if node in tiers.membership.host_pages)
