"""The radix tree of prefixes at page granularity: structure alone.

A node holds a run of consecutive pages; a child is found by the first page of its run. No two children of a node begin
with the same page, so a prefix has one place in the tree, and a block hash (which names a whole prefix) occurs at most
once. All namespaces share one root: below it, a child's key begins with the namespace's seed.

What a run costs in memory is flat: packed tokens, page indices and digests lie in three buffers, so a page needs no
object of its own.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_components.cache.block_hash import (
    DIGEST_BYTES,
    PLAIN_NAMESPACE,
    TOKEN_BYTES,
    PrefixNamespace,
    block_hashes_of,
    page_digests,
)
from scheduler_components.errors import CacheIntegrityError

__all__ = [
    "Descent",
    "RadixNode",
    "RadixTree",
    "EvictionOrder",
]


def _no_pages() -> array[int]:
    return array("I")


@dataclass(slots=True, eq=False, repr=False)
class RadixNode:
    """A run of pages. Plain data: the tree, the eviction order and the tiers write to it.

    Attributes:
        parent: None for the root and for a node that has left the tree.
        key: the bytes under which the parent finds this node.
        tokens: packed tokens of the run.
        num_pages: pages in the run.
        pages: device page indices, one a page; empty where the run is not on the device (hierarchical cache only).
        host_pages: host page indices, one a page; empty where the run is not on the host.
        is_stored: the storage tier is known to hold every page of the run.
        digests: 32 bytes a page; empty in a tree that does not hash.
        namespace: of the whole prefix.
        lock_count: holders of this node's device pages, or of those of a node below it.
        host_lock_count: the same for host pages.
        is_writing, is_backing_up: copies to the host, and to storage, are under way.
    """

    parent: RadixNode | None = None
    key: bytes = b""
    tokens: bytearray = field(default_factory=bytearray)
    num_pages: int = 0
    pages: array[int] = field(default_factory=_no_pages)
    digests: bytearray = field(default_factory=bytearray)
    namespace: PrefixNamespace = PLAIN_NAMESPACE
    lock_count: int = 0
    host_pages: array[int] = field(default_factory=_no_pages)
    host_lock_count: int = 0
    is_stored: bool = False
    is_writing: bool = False
    is_backing_up: bool = False
    children: dict[bytes, RadixNode] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<RadixNode {self.num_pages} pages, {len(self.children)} children, {self.lock_count} locks>"


class Descent(NamedTuple):
    """How far a prefix was found in the tree.

    Attributes:
        path: nodes below the root, in order.
        num_pages: pages found.
        cut: pages found of the last node; less than it holds where the prefix leaves it midway.
    """

    path: list[RadixNode]
    num_pages: int
    cut: int


class RadixTree:
    """Prefixes as runs of pages.

    Args:
        page_size: tokens a page.
        hashed: keep every page's digest, which events and storage keys are made from.
    """

    __slots__ = ("hashed", "page_bytes", "page_size", "root")

    def __init__(self, page_size: int, *, hashed: bool) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.hashed = hashed
        self.root = RadixNode()

    def find(self, packed: bytes, seed: bytes) -> Descent:
        """Follow packed tokens from the root as far as whole pages are there. Changes nothing."""
        page_bytes = self.page_bytes
        end = len(packed) - len(packed) % page_bytes
        path: list[RadixNode] = []
        node, offset, key = self.root, 0, seed + packed[:page_bytes]
        while offset < end and (child := node.children.get(key)) is not None:
            path.append(child)
            if not packed.startswith(child.tokens, offset):
                cut = self._common_pages(child, packed, offset)
                return Descent(path, offset // page_bytes + cut, cut)
            node, offset = child, offset + len(child.tokens)
            key = packed[offset : offset + page_bytes]
        return Descent(path, offset // page_bytes, path[-1].num_pages if path else 0)

    def _common_pages(self, node: RadixNode, packed: bytes, offset: int) -> int:
        """Pages that a node's run shares with the tokens at ``offset``, by bisection: the first is known to."""
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
        """Hang a new run of whole pages below ``parent``, which must have no child that begins with its first page.

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
        return node

    def split(self, node: RadixNode, cut: int) -> RadixNode:
        """Cut a run after ``cut`` pages and return the new upper part; ``node`` stays the end of its prefix.

        Who holds ``node`` holds the same prefix as before. Costs what the lower part's bytes cost to move.
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
            host_pages=node.host_pages,
            host_lock_count=node.host_lock_count,
            is_stored=node.is_stored,
            is_writing=node.is_writing,
            is_backing_up=node.is_backing_up,
        )
        node.tokens = _take_tail(upper.tokens, cut * self.page_bytes)
        # A tier that the run is not on has an empty array, and so have both parts.
        node.pages = upper.pages[cut:]
        del upper.pages[cut:]
        node.host_pages = upper.host_pages[cut:]
        del upper.host_pages[cut:]
        node.digests = _take_tail(upper.digests, cut * DIGEST_BYTES)
        node.num_pages -= cut
        node.key = bytes(node.tokens[: self.page_bytes])
        node.parent.children[upper.key] = upper
        node.parent = upper
        upper.children[node.key] = node
        return upper

    def remove(self, leaf: RadixNode) -> None:
        """Take a leaf out of the tree."""
        assert leaf.parent is not None
        assert not leaf.children
        del leaf.parent.children[leaf.key]
        leaf.parent = None

    def clear(self) -> None:
        """Take every node out of the tree, so that who still holds one can be told."""
        for node in list(self.walk()):
            node.parent = None
            node.children.clear()
        self.root.children.clear()

    def path_of(self, node: RadixNode) -> list[RadixNode]:
        """Return the nodes from ``node`` up to the child of the root.

        Raises:
            CacheIntegrityError: the node is not in this tree: it was evicted or cleared, or is another tree's.
        """
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        if node is not self.root:
            raise CacheIntegrityError(f"{path[0] if path else node} is not in the tree: evicted before it was locked?")
        return path

    def walk(self) -> Iterator[RadixNode]:
        """Every node below the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def block_hashes(self) -> Iterator[int]:
        """The hash of every page, parents before children; computed on the way in a tree that does not hash."""
        stack = [(node, node.namespace.seed()) for node in self.root.children.values()]
        while stack:
            node, prior = stack.pop()
            digests = node.digests or page_digests(node.tokens, self.page_size, prior)
            yield from block_hashes_of(digests)
            last = bytes(digests[-DIGEST_BYTES:])
            stack.extend((child, last) for child in node.children.values())

    def check(self) -> None:
        """Check parents, keys, runs, digests and lock counts.

        Raises:
            CacheIntegrityError: naming the node and what does not fit.
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
        if len(node.pages) != node.num_pages and (node.pages or not node.host_pages):
            yield f"{len(node.pages)} page indices, {node.num_pages} pages"
        if len(node.host_pages) not in (0, node.num_pages):
            yield f"{len(node.host_pages)} host page indices, {node.num_pages} pages"
        prior = seed or bytes(parent.digests[-DIGEST_BYTES:])
        if node.digests != (page_digests(node.tokens, self.page_size, prior) if self.hashed else b""):
            yield "its digests do not follow from its parent's and its tokens"
        locked_below = sum(child.lock_count for child in node.children.values())
        if node.lock_count < locked_below:
            yield f"{node.lock_count} locks, its children {locked_below}"
        locked_below = sum(child.host_lock_count for child in node.children.values())
        if node.host_lock_count < locked_below:
            yield f"{node.host_lock_count} host locks, its children {locked_below}"


def _take_tail(run: bytearray, start: int) -> bytearray:
    tail = run[start:]
    del run[start:]
    return tail


# Which node is evicted next: least recently used first, descendants before their ancestors.


class EvictionOrder:
    """The unlocked nodes, oldest use first.

    A path is touched from its deepest node up, so descendants always stand before their ancestors and the oldest node
    is a leaf: eviction never searches. Time is the order of calls, so ranks that make the same calls evict the same.
    """

    __slots__ = ("_nodes", "num_pages")

    def __init__(self) -> None:
        self._nodes: OrderedDict[RadixNode, None] = OrderedDict()
        self.num_pages = 0  # pages of all unlocked nodes

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._nodes)

    def add(self, node: RadixNode) -> None:
        """Take in a new leaf; ``touch`` its path next."""
        self._nodes[node] = None
        self.num_pages += node.num_pages

    def touch(self, path_up: Iterable[RadixNode]) -> None:
        """Make a path the most recently used; the upper part of a node just split comes in here.

        Args:
            path_up: from the deepest node to the child of the root.
        """
        nodes = self._nodes
        for node in path_up:
            if not node.lock_count:
                nodes[node] = None
                nodes.move_to_end(node)

    def lock(self, path_up: Iterable[RadixNode]) -> None:
        """Count one more holder on every node of a path."""
        for node in path_up:
            if not node.lock_count:
                del self._nodes[node]
                self.num_pages -= node.num_pages
            node.lock_count += 1

    def unlock(self, path_up: Iterable[RadixNode]) -> None:
        """Count one holder less on every node of a path; what nobody holds any more becomes the most recently used."""
        for node in path_up:
            node.lock_count -= 1
            if not node.lock_count:
                self._nodes[node] = None
                self.num_pages += node.num_pages

    def pop_oldest(self) -> RadixNode:
        """Remove and return the least recently used node: a leaf."""
        node, _ = self._nodes.popitem(last=False)
        self.num_pages -= node.num_pages
        return node

    def put_oldest(self, node: RadixNode) -> None:
        """Take in what is left of the node that ``pop_oldest`` returned."""
        self.add(node)
        self._nodes.move_to_end(node, last=False)

    def clear(self) -> None:
        """Forget every node."""
        self._nodes.clear()
        self.num_pages = 0

    def check(self, nodes: Iterable[RadixNode]) -> None:
        """Check the order against all nodes of the tree.

        Raises:
            CacheIntegrityError: with the count or the node that does not fit.
        """
        unlocked = {node for node in nodes if not node.lock_count}
        if unlocked != self._nodes.keys():
            raise CacheIntegrityError(f"{len(unlocked)} unlocked nodes, {len(self._nodes)} in the eviction order")
        num_pages = sum(node.num_pages for node in unlocked)
        if num_pages != self.num_pages:
            raise CacheIntegrityError(f"unlocked nodes hold {num_pages} pages, {self.num_pages} are counted evictable")
        seen: set[RadixNode] = set()
        for node in self._nodes:
            if not seen.issuperset(node.children.values()):
                raise CacheIntegrityError(f"{node} stands before a child of its own in the eviction order")
            seen.add(node)
