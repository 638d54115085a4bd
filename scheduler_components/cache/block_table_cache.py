"""BlockTableCache: a prefix cache that is a table of full pages, with vLLM's rules (its ``BlockPool``).

- A page never moves. If two requests compute the same tokens, both pages stay in the table as copies of one block, and
  each request keeps its own page. So the block table of a running request only grows, as a worker needs it that holds a
  copy of that table. A match returns the oldest copy.
- A page has a reference per request that uses it. Without references it stays in the table, and is evicted when pages
  run out, least recently released first. A request releases its last page first, so a block is always evicted before
  its ancestors, and each block of the table can be reached.
- Free pages are used again in the order last freed, first allocated. They are used before any page is evicted.
- Page 0 may be reserved: an engine writes the tokens of its padding there.

A block is found by its parent and its tokens, which takes one lookup per page and no hash of the tokens before it. The
hash that events carry is computed once, when a block enters the table.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TypeAlias

from scheduler_components._internal.validators import check_integer
from scheduler_components.cache.block_hash import (
    DEFAULT_NAMESPACE,
    DIGEST_BYTES,
    TOKEN_BYTES,
    PrefixNamespace,
    block_hash_array,
    pack_tokens,
    page_digests,
    weight_namespace,
)
from scheduler_components.cache.block_table import BlockTableRecorder
from scheduler_components.cache.page_pool import PagePool
from scheduler_components.errors import CacheIntegrityError, ConfigError, OutOfPagesError
from scheduler_components.events import KVCacheEvent, MediumGroup, medium_group

__all__ = ["BlockTableCache", "TableMatch"]


class _Block:
    """The content of a page: its tokens and all tokens before it."""

    __slots__ = ("block_hash", "digest", "key", "pages")

    def __init__(self, key: _BlockKey, digest: bytes, block_hash: int) -> None:
        self.key = key
        self.digest = digest
        self.block_hash = block_hash
        self.pages: list[int] = []  # the copies, oldest first; never empty in the table

    @property
    def parent(self) -> _Block | None:
        above = self.key[0]
        return above if isinstance(above, _Block) else None


_BlockKey: TypeAlias = (
    "tuple[_Block | bytes, bytes]"  # the parent, or the namespace's seed at the root; the packed tokens
)


class TableMatch:
    """The cached part of a prompt. It is its own ``node``: the argument of ``lock`` and ``unlock``.

    Attributes:
        num_tokens: covered tokens, in whole pages.
        page_array: the pages that hold them, in order, as an ``array("I")``.
    """

    __slots__ = ("_end", "num_tokens", "page_array")

    def __init__(self, num_tokens: int, page_array: array[int], end: _Block | None) -> None:
        self.num_tokens = num_tokens
        self.page_array = page_array
        self._end = end

    @property
    def pages(self) -> tuple[int, ...]:
        """``page_array`` as a new tuple."""
        return tuple(self.page_array)

    @property
    def node(self) -> TableMatch:
        return self

    def __repr__(self) -> str:
        return f"<TableMatch {self.num_tokens} tokens, pages {self.page_array.tolist()}>"


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class BlockTableCache:
    """A table of full pages over a pool, by the rules at the top of this file.

    It has the methods of ``RadixCache``, and is a ``KvEventSource``, ``PoolSource`` and ``HeldBlocksSource`` too. A
    page is free, held by a request (``allocate``), or in the table (``insert``). Only the order of calls decides. Not
    thread-safe.

    Args:
        record: keep events for ``take_events``; give ``ParallelState.owns_kv_stream``.

    Attributes:
        page_size: tokens per page.
        capacity_tokens: size of the KV pool, rounded down to whole pages, without the reserved page.
        reserves_page_0: page 0 exists in addition and is never allocated: the pages are numbered from 1.
        namespace: of calls that give none.
        num_locks: calls of `lock` without their `unlock`.
        pool: states of the pages, for checks.

    Raises:
        ConfigError: the page size is below 1, or the capacity below one page.
    """

    page_size: int
    capacity_tokens: int
    reserves_page_0: bool = False
    record: InitVar[bool] = False
    namespace: PrefixNamespace = field(default=DEFAULT_NAMESPACE, init=False)
    num_locks: int = field(default=0, init=False)
    pool: PagePool = field(init=False)
    _table: dict[_BlockKey, _Block] = field(default_factory=dict, init=False)
    _block_of: list[_Block | None] = field(init=False)
    _references: list[int] = field(init=False)
    _evictable: OrderedDict[int, None] = field(default_factory=OrderedDict, init=False)
    _recorder: BlockTableRecorder | None = field(default=None, init=False)

    def __post_init__(self, record: bool) -> None:
        check_integer("page_size", self.page_size)
        num_pages = self.capacity_tokens // self.page_size
        if num_pages < 1:
            hint = f"give at least page_size={self.page_size}"
            raise ConfigError("capacity_tokens", self.capacity_tokens, "does not hold one page", hint)
        self.capacity_tokens = num_pages * self.page_size
        self.pool = PagePool(num_pages + self.first_page)
        self.pool.allocate(self.first_page)
        self._block_of = [None] * self.pool.num_pages
        self._references = [0] * self.pool.num_pages
        if record:
            # Beyond two turnovers of the pool, the present content is shorter than the backlog.
            self._recorder = BlockTableRecorder(self.page_size, 2 * num_pages)

    @property
    def first_page(self) -> int:
        """Number of the first page that can be allocated."""
        return int(self.reserves_page_0)

    @property
    def num_pages(self) -> int:
        """Pages that can be allocated."""
        return self.pool.num_pages - self.first_page

    @property
    def num_evictable(self) -> int:
        """Pages of the table without references."""
        return len(self._evictable)

    @property
    def free_tokens(self) -> int:
        """Tokens that can be allocated without eviction."""
        return self.pool.num_free * self.page_size

    @property
    def evictable_tokens(self) -> int:
        """Cached tokens without references. Copies count, too."""
        return len(self._evictable) * self.page_size

    @property
    def used_tokens(self) -> int:
        """Tokens that running requests hold or lock: neither free nor evictable."""
        return self.capacity_tokens - (self.pool.num_free + len(self._evictable)) * self.page_size

    @property
    def num_event_collapses(self) -> int:
        """How often the present content replaced the recorded events, because they were not taken for too long."""
        return self._recorder.num_collapses if self._recorder is not None else 0

    def match_prefix(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> TableMatch:
        """Find the longest cached prefix, in whole pages. It changes nothing, not even the order of eviction.

        Raises:
            ConfigError: a token id does not fit u32, or the namespace cannot be encoded.
        """
        path = self._find(pack_tokens(token_ids), (namespace or self.namespace).seed())
        return self._match([block.pages[0] for block in path], path[-1] if path else None)

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace | None = None
    ) -> TableMatch:
        """Enter a computed prefix into the table and take over its pages. They are the most recently used ones.

        Args:
            token_ids: the tokens; a partial last page is omitted and stays the caller's.
            pages: one page index for each whole page of ``token_ids``: first those that ``match_prefix`` or an earlier
                ``insert`` returned, then those that ``allocate`` returned.
            namespace: the other properties that the pages depend on.

        Returns:
            The same pages. A page whose content is in the table already stays as another copy.

        Raises:
            ConfigError: ``pages`` is not one per whole page, a token id does not fit u32, or the namespace cannot be
                encoded.
            CacheIntegrityError: no request holds a page that the table would take over. After any error nothing has
                changed.
        """
        packed, size, space = pack_tokens(token_ids), self.page_size * TOKEN_BYTES, namespace or self.namespace
        given = self.pool.as_array(pages)
        if len(given) != len(token_ids) // self.page_size:
            hint = f"give {len(token_ids) // self.page_size} for {len(token_ids)} tokens"
            raise ConfigError("pages", len(given), f"is not one page per {self.page_size} tokens", hint)
        path = self._find(packed, space.seed())[: len(given)]
        num_known = next((i for i, block in enumerate(path) if given[i] not in block.pages), len(path))
        fresh = given[num_known:]
        self.pool.move_to_cache(fresh)  # may raise; the rest cannot fail

        above: _Block | bytes = path[-1] if path else space.seed()
        prior = above.digest if isinstance(above, _Block) else above
        tail = packed[len(path) * size : len(given) * size]
        digests = page_digests(tail, self.page_size, prior)
        for index, block_hash in enumerate(block_hash_array(digests)):
            key = (above, tail[index * size : (index + 1) * size])
            above = _Block(key, digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES], block_hash)
            self._table[key] = above
            path.append(above)
        for block, page in zip(path[num_known:], fresh, strict=True):
            block.pages.append(page)
            self._block_of[page] = block
        if fresh and self._recorder is not None:
            parent = path[num_known - 1].block_hash if num_known else None
            tokens_of_fresh = token_ids[num_known * self.page_size : len(given) * self.page_size]
            self._recorder.store(
                [each.block_hash for each in path[num_known:]], tokens_of_fresh, parent, namespace=space
            )
        for page in reversed(given):
            if not self._references[page]:
                self._evictable[page] = None
                self._evictable.move_to_end(page)
        return self._match(given, path[-1] if path else None)

    def lock(self, node: TableMatch) -> None:
        """Add a reference to each page of a match, so that none is evicted. The empty match is valid.

        Raises:
            CacheIntegrityError: a page has left the table; nothing has changed.
        """
        pages, references = node.page_array, self._references
        if pages and self._block_of[pages[-1]] is not node._end:
            raise CacheIntegrityError(f"{node} is not in the table: evicted before it was locked?")
        for page in pages:
            if not references[page]:
                del self._evictable[page]
            references[page] += 1
        self.num_locks += 1

    def unlock(self, node: TableMatch) -> None:
        """Remove a reference from each page of a match, from its end on.

        Raises:
            CacheIntegrityError: a page has no reference; nothing has changed.
        """
        pages, references = node.page_array, self._references
        if not all(map(references.__getitem__, pages)):
            raise CacheIntegrityError(f"{node} is not locked: unlocked twice?")
        for page in reversed(pages):
            references[page] -= 1
            if not references[page]:
                self._evictable[page] = None
        self.num_locks -= 1

    def allocate(self, num_pages: int) -> list[int]:
        """Allocate pages to a request: free ones first, then the least recently used ones of the table.

        Raises:
            ConfigError: ``num_pages`` is negative.
            OutOfPagesError: fewer pages are free and evictable; nothing was evicted.
        """
        num_free = self.pool.num_free
        if num_pages <= num_free:
            return self.pool.allocate(num_pages).tolist()
        lacking = num_pages - num_free
        if lacking > len(self._evictable):
            raise OutOfPagesError(num_pages, num_free + len(self._evictable))
        pages = self.pool.allocate(num_free)
        self.evict(lacking)
        return (pages + self.pool.allocate(lacking)).tolist()

    def free(self, pages: Sequence[int]) -> None:
        """Free pages that ``allocate`` returned and ``insert`` did not take over. The last one is used again first.

        Raises:
            CacheIntegrityError: a page is already free, is in the table, or is named twice; nothing has changed.
        """
        self.pool.free(self.pool.as_array(pages)[::-1])

    def evict(self, num_pages: int) -> int:
        """Free the least recently used pages of the table that have no reference.

        Returns:
            Freed pages: exactly ``num_pages``, or all evictable pages if they are fewer.
        """
        num_evicted = max(0, min(num_pages, len(self._evictable)))
        evicted = array("I", [self._evictable.popitem(last=False)[0] for _ in range(num_evicted)])
        for page in evicted:
            block = self._block_of[page]
            assert block is not None
            self._block_of[page] = None
            block.pages.remove(page)
            if not block.pages:
                del self._table[block.key]
            if self._recorder is not None:
                self._recorder.remove((block.block_hash,))
        self.pool.free_cached(evicted)
        return num_evicted

    def clear(self, weight_version: str | None = None) -> None:
        """Remove every block from the table. Requests keep the pages that they hold.

        Args:
            weight_version: version of the weights that compute all later pages: their namespace becomes that of calls
                that give none. None keeps the present one.

        Raises:
            CacheIntegrityError: a request still locks a page; nothing has changed.
        """
        if locked := self.pool.num_cached - len(self._evictable):
            raise CacheIntegrityError(f"{locked} of {self.pool.num_cached} cached pages are locked: unlock, then clear")
        for page in self._evictable:
            self._block_of[page] = None
        self.pool.free_cached(array("I", self._evictable))
        self._evictable.clear()
        self._table.clear()
        if self._recorder is not None:
            self._recorder.clear()
        if weight_version is not None:
            self.namespace = weight_namespace(weight_version)

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return the events since the last call, in order, and forget them; always empty without ``record``.

        Call it every step. A block is stored with its first copy and removed with its last one.
        """
        return self._recorder.take_events() if self._recorder is not None else ()

    def block_hashes(self) -> Iterator[int]:
        """Iterate over the hashes of all blocks of the table, parents before children."""
        return (block.block_hash for block in self._table.values())

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        """Return the hashes of all blocks, as ``HeldBlocksSource`` declares. All are on the device."""
        return {medium_group(None): array("q", self.block_hashes())}

    def references(self) -> Iterator[tuple[int, int]]:
        """Iterate over the pages of the table with their numbers of references, for checks."""
        return ((page, self._references[page]) for page, block in enumerate(self._block_of) if block is not None)

    def check_integrity(self) -> None:
        """Check table, pool and order of eviction against each other. Walks everything: for tests and diagnosis.

        Raises:
            CacheIntegrityError: naming what differs.
        """
        copies = {page: block for block in self._table.values() for page in block.pages}
        if copies != {page: block for page, block in enumerate(self._block_of) if block is not None}:
            raise CacheIntegrityError("the table and its pages name different blocks")
        self.pool.check(list(copies))
        unlocked = {page for page in copies if not self._references[page]}
        if unlocked != self._evictable.keys() or any(n for p, n in enumerate(self._references) if p not in copies):
            raise CacheIntegrityError(f"{len(unlocked)} unlocked pages, {len(self._evictable)} in the eviction order")
        turn = {page: number for number, page in enumerate(self._evictable)}
        leaves = {block: max(turn.get(page, len(turn)) for page in block.pages) for block in self._table.values()}
        for block, at in leaves.items():
            if block.parent is not None and leaves.get(block.parent, -1) < at:
                raise CacheIntegrityError(f"the parent of block {block.block_hash} is evicted before it")

    def __repr__(self) -> str:
        locked = self.pool.num_cached - len(self._evictable)
        held = self.pool.num_held - self.first_page
        return (
            f"<BlockTableCache page_size={self.page_size}, {self.num_pages} pages: {self.pool.num_free} free, "
            f"{len(self._evictable)} evictable, {locked} locked, {held} held by requests>"
        )

    def _find(self, packed: bytes, seed: bytes) -> list[_Block]:
        """Return the blocks of the table that begin these tokens."""
        table, size = self._table, self.page_size * TOKEN_BYTES
        path: list[_Block] = []
        above: _Block | bytes = seed
        for start in range(0, len(packed) - size + 1, size):
            block = table.get((above, packed[start : start + size]))
            if block is None:
                break
            path.append(block)
            above = block
        return path

    def _match(self, pages: Sequence[int], end: _Block | None) -> TableMatch:
        return TableMatch(len(pages) * self.page_size, array("I", pages), end)
