"""RadixTree: cached prefixes at page granularity.

**Pages.** A page is ``page_size`` consecutive tokens. Keys and values are computed, cached, moved and hashed by whole
pages; a partial last page is never in the tree. A page's hash covers everything before it, so one hash names one
prefix.

**Nodes.** A node holds a run of consecutive pages. Its parent finds it by the first page of its run. No two children of
a node begin with the same page, so a prefix has one place in the tree and a block hash occurs at most once. All
namespaces share one root: below it, a child's key begins with the namespace's seed. A run is stored in three flat
buffers (packed tokens, page indices, digests), so a page needs no object of its own.

**Splits.** A prefix may end inside a run. The tree then cuts the node in two: the new *upper* part takes the node's
place, and the node itself becomes the lower part. A holder of the node still holds the same prefix. No page moves, and
readers of events see no change.

**Joins.** A prefix that grows page by page would become a chain of short runs, and every walk would cost the chain's
length. So the tree joins a run with its parent's when nothing distinguishes the two: the parent has no other child,
both have the same holders, and both were used together. The lower node stays, so its holders hold the same prefix. The
parent has no holder of its own, because such a holder would be counted on the parent alone. Joins wait for the next
call that may evict; until then a caller may keep a node that it has not locked yet.

**Locks.** A lock keeps a whole prefix: it is counted on the node where the prefix ends and on all nodes above it. So a
node's count is at least the sum of its children's counts, and an unlocked node has no locked descendant. A split gives
both parts the same count.

**Eviction.** The unlocked nodes are in one order (``LruList``), least recently used first. A path is touched from its
deepest node up, so a node always precedes its ancestors and the first node is a leaf: eviction never searches. Time is
the order of calls and never a clock, so ranks that make equal calls evict equal pages.

**Tiers.** ``RadixNode.pages`` and ``lock_count`` describe the device. In a hierarchical cache a node may have no pages
there. Lower tiers keep their own facts about a node, so a tree without tiers has no cost for them.

The invariant, which ``RadixTree.check`` and ``LruList.check`` verify: every node is below its parent under its first
page; the lengths of tokens, pages and digests agree with ``num_pages``; digests continue the parent's; and the order
holds exactly the unlocked nodes, each before its ancestors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_components.cache.block_hash import (
    DEFAULT_NAMESPACE,
    DIGEST_BYTES,
    TOKEN_BYTES,
    PrefixNamespace,
    block_hashes_of,
    page_digests,
)
from scheduler_components.errors import CacheIntegrityError

__all__ = ["PathMatch", "RadixNode", "RadixTree"]


def _no_pages() -> array[int]:
    return array("I")


@dataclass(slots=True, eq=False, repr=False)
class RadixNode:
    """A run of pages. Plain data that the tree and the cache modify.

    Attributes:
        parent: None for the root and for a node that has left the tree.
        key: the bytes under which the parent finds this node.
        tokens: packed tokens of the run.
        num_pages: pages in the run.
        pages: device page indices, one per page; empty if the run is not on the device (hierarchical cache only).
        digests: 32 bytes per page; empty in a tree that does not hash.
        namespace: of the whole prefix.
        lock_count: holders of this node's device pages, or of those of a descendant.
        num_hits: requests that matched it, if a policy counts them (hierarchical cache only).
        children: by the first page of their runs.
    """

    parent: RadixNode | None = None
    key: bytes = b""
    tokens: bytearray = field(default_factory=bytearray)
    num_pages: int = 0
    pages: array[int] = field(default_factory=_no_pages)
    digests: bytearray = field(default_factory=bytearray)
    namespace: PrefixNamespace = DEFAULT_NAMESPACE
    lock_count: int = 0
    num_hits: int = 0
    children: dict[bytes, RadixNode] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<RadixNode {self.num_pages} pages, {len(self.children)} children, {self.lock_count} locks>"


class PathMatch(NamedTuple):
    """The part of a prefix that the tree contains.

    Attributes:
        path: nodes below the root, in order.
        num_pages: matched pages.
        cut: matched pages of the last node; fewer than it holds if the prefix leaves it midway.
    """

    path: list[RadixNode]
    num_pages: int
    cut: int


class RadixTree:
    """Prefixes as runs of pages.

    Args:
        page_size: tokens per page.
        hashed: keep every page's digest, for events and storage keys.

    Attributes:
        joinable: nodes that may be joined with their parents; an ordered set.
    """

    __slots__ = ("hashed", "joinable", "page_bytes", "page_size", "root")

    def __init__(self, page_size: int, *, hashed: bool) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.hashed = hashed
        self.root = RadixNode()
        self.joinable: dict[RadixNode, None] = {}

    def find(self, packed: bytes, seed: bytes) -> PathMatch:
        """Match packed tokens from the root, in whole pages. Changes nothing."""
        page_bytes = self.page_bytes
        end = len(packed) - len(packed) % page_bytes
        path: list[RadixNode] = []
        node, offset, key = self.root, 0, seed + packed[:page_bytes]
        while offset < end and (child := node.children.get(key)) is not None:
            path.append(child)
            if not packed.startswith(child.tokens, offset):
                cut = self._common_pages(child, packed, offset)
                return PathMatch(path, offset // page_bytes + cut, cut)
            node, offset = child, offset + len(child.tokens)
            key = packed[offset : offset + page_bytes]
        return PathMatch(path, offset // page_bytes, path[-1].num_pages if path else 0)

    def _common_pages(self, node: RadixNode, packed: bytes, offset: int) -> int:
        """Return how many pages a node's run shares with the tokens at ``offset``, at least 1. Uses bisection."""
        page_bytes = self.page_bytes
        same, differs = 1, min(node.num_pages, (len(packed) - offset) // page_bytes) + 1
        while differs - same > 1:
            middle = (same + differs) // 2
            start, stop = same * page_bytes, middle * page_bytes
            if packed.startswith(node.tokens[start:stop], offset + start):
                same = middle
            else:
                differs = middle
        return same

    def append(self, parent: RadixNode, packed: bytes, pages: array[int], namespace: PrefixNamespace) -> RadixNode:
        """Add a new run of whole pages below ``parent``, which must have no child that begins with the same page.

        ``pages`` is empty for a run that is not on the device.
        """
        seed = namespace.seed() if parent is self.root else b""
        node = RadixNode(
            parent=parent,
            key=seed + packed[: self.page_bytes],
            tokens=bytearray(packed),
            num_pages=len(packed) // self.page_bytes,
            pages=pages,
            namespace=namespace,
        )
        if self.hashed:
            node.digests = bytearray(
                page_digests(packed, self.page_size, seed or bytes(parent.digests[-DIGEST_BYTES:]))
            )
        parent.children[node.key] = node
        self.joinable[node] = None
        return node

    def split(self, node: RadixNode, cut: int) -> RadixNode:
        """Cut a run after ``cut`` pages and return the new upper part. ``node`` stays the end of its prefix.

        The cost is moving the bytes of the lower part. The caller must update the eviction order first, then all other
        records of nodes.
        """
        assert node.parent is not None
        upper = RadixNode(
            parent=node.parent,
            key=node.key,
            tokens=node.tokens,
            num_pages=cut,
            pages=node.pages,
            digests=node.digests,
            namespace=node.namespace,
            lock_count=node.lock_count,
            num_hits=node.num_hits,
        )
        node.tokens = _take_tail(upper.tokens, cut * self.page_bytes)
        node.pages = upper.pages[cut:]  # empty in both parts if the run is not on the device
        del upper.pages[cut:]
        node.digests = _take_tail(upper.digests, cut * DIGEST_BYTES)
        node.num_pages -= cut
        node.key = bytes(node.tokens[: self.page_bytes])
        node.parent.children[upper.key] = upper
        node.parent = upper
        upper.children[node.key] = node
        return upper

    def can_join(self, node: RadixNode) -> bool:
        """Return True if the tree has no reason to keep a node on the device apart from its parent."""
        upper = node.parent
        return (
            upper is not None
            and upper is not self.root
            and len(upper.children) == 1
            and upper.lock_count == node.lock_count
            and bool(upper.pages and node.pages)
        )

    def join(self, node: RadixNode) -> None:
        """Prepend the run of a node's parent to its own and remove the parent. This undoes ``split``.

        The cost is moving the node's own bytes. The caller must update all other records of nodes before.
        """
        upper = node.parent
        assert upper is not None
        assert upper.parent is not None
        for above, own in ((upper.tokens, node.tokens), (upper.digests, node.digests)):
            above += own
        upper.pages.extend(node.pages)
        node.tokens, node.digests, node.pages = upper.tokens, upper.digests, upper.pages
        node.num_pages += upper.num_pages
        node.key, node.parent = upper.key, upper.parent
        node.parent.children[node.key] = node
        upper.parent = None
        upper.children = {}

    def remove(self, leaf: RadixNode) -> None:
        assert leaf.parent is not None
        assert not leaf.children
        del leaf.parent.children[leaf.key]
        leaf.parent = None

    def clear(self) -> None:
        """Remove every node. Locking a removed node raises an error."""
        for node in list(self.walk()):
            node.parent = None
            node.children.clear()
        self.root.children.clear()
        self.joinable.clear()

    def path_to_root(self, node: RadixNode) -> list[RadixNode]:
        """Return the nodes from ``node`` up to the child of the root.

        Raises:
            CacheIntegrityError: the node is not in this tree: it was evicted or cleared, or belongs to another tree.
        """
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        if node is not self.root:
            raise CacheIntegrityError(f"{path[0] if path else node} is not in the tree: evicted before it was locked?")
        return path

    def walk(self) -> Iterator[RadixNode]:
        """Iterate over the nodes below the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def block_hashes(self) -> Iterator[int]:
        """Iterate over the hashes of all pages, parents before children. Computes them in a tree that does not hash."""
        stack = [(node, node.namespace.seed()) for node in self.root.children.values()]
        while stack:
            node, prior = stack.pop()
            digests = node.digests or page_digests(node.tokens, self.page_size, prior)
            yield from block_hashes_of(digests)
            last = bytes(digests[-DIGEST_BYTES:])
            stack.extend((child, last) for child in node.children.values())

    def check(self) -> None:
        """Check parents, keys, runs and digests.

        Raises:
            CacheIntegrityError: with the node and the property that is wrong.
        """
        for node in self.walk():
            for problem in self._problems(node):
                raise CacheIntegrityError(f"{node}: {problem}")

    def _problems(self, node: RadixNode) -> Iterator[str]:
        parent = node.parent
        if parent is None or parent.children.get(node.key) is not node:
            yield "its parent does not have it under its key"
            return
        seed = node.namespace.seed() if parent is self.root else b""
        if node.key != seed + node.tokens[: self.page_bytes]:
            yield "its key is not its first page"
        if not len(node.tokens) == node.num_pages * self.page_bytes > 0:
            yield f"{len(node.tokens)} token bytes, {node.num_pages} pages of {self.page_bytes}"
        if len(node.pages) not in (0, node.num_pages):
            yield f"{len(node.pages)} page indices, {node.num_pages} pages"
        prior = seed or bytes(parent.digests[-DIGEST_BYTES:])
        if node.digests != (page_digests(node.tokens, self.page_size, prior) if self.hashed else b""):
            yield "its digests do not follow from its parent's and its tokens"


def _take_tail(run: bytearray, start: int) -> bytearray:
    tail = run[start:]
    del run[start:]
    return tail
