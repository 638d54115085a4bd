"""The radix cache against a model that knows pages only, in every order of calls that Hypothesis finds.

Properties, after every step:
- what is cached, under which page index, is what the model says, least-recently-used order included;
- replaying the recorded events rebuilds exactly the cached blocks, each parent known before its children;
- a second cache that gets the same calls does the same, and so does one that records nothing;
- the cache's own arithmetic adds up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_components.cache.radix_cache import PrefixMatch, PrefixNamespace, RadixCache
from scheduler_components.cache.radix_tree import RadixNode
from scheduler_components.errors import CacheIntegrityError, OutOfPagesError
from scheduler_components.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

NAMESPACES = {"": None, "tenant": PrefixNamespace(cache_salt="tenant")}

# Two tokens only, so that prefixes meet, part and end inside each other.
TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=16)
SALTS = st.sampled_from(sorted(NAMESPACES))


class Prefix(NamedTuple):
    salt: str
    tokens: tuple[int, ...]


@lru_cache(maxsize=100_000)
def block_hash(prefix: Prefix, page_size: int) -> int:
    """The chain, written down once more and slowly."""
    namespace = NAMESPACES[prefix.salt]
    digest = namespace.seed() if namespace else b""
    for start in range(0, len(prefix.tokens), page_size):
        page = prefix.tokens[start : start + page_size]
        digest = sha256(digest + b"".join(token.to_bytes(4, "little") for token in page)).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


@dataclass
class Model:
    """Cached prefixes, one entry a page; time is a count of calls."""

    page_size: int
    num_pages: int
    pages: dict[Prefix, int] = field(default_factory=dict)
    used_at: dict[Prefix, int] = field(default_factory=dict)
    locks: Counter[Prefix] = field(default_factory=Counter)
    held: set[int] = field(default_factory=set)
    clock: int = 0

    def whole(self, salt: str, tokens: list[int]) -> list[Prefix]:
        size = self.page_size
        return [Prefix(salt, tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]

    def cached(self, salt: str, tokens: list[int]) -> list[Prefix]:
        return [prefix for prefix in self.whole(salt, tokens) if prefix in self.pages]

    def touch(self, prefixes: list[Prefix]) -> None:
        self.clock += 1
        self.used_at.update(dict.fromkeys(prefixes, self.clock))

    def unlock(self, prefixes: list[Prefix]) -> None:
        self.locks.subtract(prefixes)
        self.touch([prefix for prefix in prefixes if not self.locks[prefix]])

    def unlocked(self) -> list[Prefix]:
        return [prefix for prefix in self.pages if not self.locks[prefix]]

    def num_free(self) -> int:
        return self.num_pages - len(self.pages) - len(self.held)

    def evict(self, num_pages: int) -> int:
        # The oldest use first; of one prefix the deepest page first.
        victims = sorted(self.unlocked(), key=lambda prefix: (self.used_at[prefix], -len(prefix.tokens)))
        victims = victims[: max(0, num_pages)]
        for prefix in victims:
            del self.pages[prefix]
        return len(victims)


@dataclass
class View:
    """What a reader of the events knows: the whole prefix behind each block hash."""

    page_size: int
    blocks: dict[int, Prefix] = field(default_factory=dict)

    def apply(self, event: KVCacheEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
        elif isinstance(event, BlockRemoved):
            for removed in event.block_hashes:
                gone = self.blocks.pop(removed)
                depth = len(gone.tokens)
                below = [p for p in self.blocks.values() if p.salt == gone.salt and p.tokens[:depth] == gone.tokens]
                assert not below, "a parent was removed before its children"
        else:
            assert isinstance(event, BlockStored)
            assert event.block_size == self.page_size
            assert len(event.token_ids) == len(event.block_hashes) * self.page_size
            prefix = Prefix(event.cache_salt or "", ())
            if event.parent_block_hash is not None:
                prefix = self.blocks[event.parent_block_hash]  # KeyError: an orphan
                assert prefix.salt == (event.cache_salt or "")
            for index, stored in enumerate(event.block_hashes):
                page = event.token_ids[index * self.page_size : (index + 1) * self.page_size]
                prefix = Prefix(prefix.salt, prefix.tokens + page)
                assert stored == block_hash(prefix, self.page_size)
                assert stored not in self.blocks, "stored twice"
                self.blocks[stored] = prefix


@dataclass
class Request:
    """A request between its match and its end, once for each cache under test."""

    salt: str
    tokens: list[int]
    locked: list[Prefix]
    nodes: list[RadixNode]
    cached_pages: list[int]
    own_pages: list[int]


class RadixCacheMachine(RuleBasedStateMachine):
    @initialize(page_size=st.integers(1, 3), num_pages=st.integers(1, 24), spare=st.integers(0, 2), drain=st.booleans())
    def start(self, page_size: int, num_pages: int, spare: int, drain: bool) -> None:
        capacity_tokens = num_pages * page_size + min(spare, page_size - 1)
        self.caches = [
            RadixCache(page_size=page_size, capacity_tokens=capacity_tokens, record=record)
            for record in (True, True, False)
        ]
        self.model = Model(page_size, num_pages)
        self.view = View(page_size)
        self.drain_every_step = drain
        self.requests: list[Request] = []

    def on_each(self, method: str, *args: Any) -> Any:
        """Make the same call on every cache; the answers must be the same."""
        answers = [getattr(cache, method)(*args) for cache in self.caches]
        assert answers[0] == answers[1] == answers[2]
        return answers[0]

    def matches(self, method: str, *args: Any) -> list[PrefixMatch]:
        """The same, for calls that answer with a node of the cache's own."""
        answers: list[PrefixMatch] = [getattr(cache, method)(*args) for cache in self.caches]
        assert len({(match.num_tokens, match.pages) for match in answers}) == 1
        assert answers[0].num_tokens == len(answers[0].pages) * self.model.page_size
        return answers

    def lock(self, nodes: list[RadixNode], prefixes: list[Prefix]) -> None:
        for cache, node in zip(self.caches, nodes, strict=True):
            cache.lock(node)
        self.model.locks.update(prefixes)

    def unlock(self, nodes: list[RadixNode], prefixes: list[Prefix]) -> None:
        for cache, node in zip(self.caches, nodes, strict=True):
            cache.unlock(node)
        self.model.unlock(prefixes)

    @rule(salt=SALTS, tokens=TOKENS)
    def match(self, salt: str, tokens: list[int]) -> None:
        found = self.matches("match_prefix", tokens, NAMESPACES[salt])[0]
        cached = self.model.cached(salt, tokens)
        self.model.touch(cached)
        assert list(found.pages) == [self.model.pages[prefix] for prefix in cached]

    @precondition(lambda self: len(self.requests) < 3)
    @rule(salt=SALTS, tokens=TOKENS, keep=st.booleans())
    def serve(self, salt: str, tokens: list[int], keep: bool) -> None:
        """A request from its match to its end, nothing between."""
        before = len(self.requests)
        self.begin(salt, tokens)
        if len(self.requests) > before:
            self.finish(before, keep)

    @precondition(lambda self: len(self.requests) < 3)
    @rule(salt=SALTS, tokens=TOKENS)
    def begin(self, salt: str, tokens: list[int]) -> None:
        """A request matches, locks, and allocates what its prompt lacks."""
        found = self.matches("match_prefix", tokens, NAMESPACES[salt])
        nodes, cached = [match.node for match in found], self.model.cached(salt, tokens)
        self.model.touch(cached)
        self.lock(nodes, cached)
        lacking = len(self.model.whole(salt, tokens)) - len(cached)
        obtainable = self.model.num_free() + len(self.model.unlocked())
        if lacking > obtainable:
            for cache in self.caches:
                with pytest.raises(OutOfPagesError, match=f"^{lacking} pages wanted, {obtainable} free$"):
                    cache.allocate(lacking)
            self.unlock(nodes, cached)
            return
        own = self.on_each("allocate", lacking)
        self.model.evict(lacking - self.model.num_free())
        assert len(set(own)) == lacking
        assert self.model.held.isdisjoint(own)
        assert set(self.model.pages.values()).isdisjoint(own)
        self.model.held.update(own)
        self.requests.append(Request(salt, tokens, cached, nodes, list(found[0].pages), own))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 7), keep=st.booleans())
    def finish(self, which: int, keep: bool) -> None:
        """A request caches its prompt; with ``keep`` it goes on and locks the longer prefix."""
        request = self.requests.pop(which % len(self.requests))
        pages = request.cached_pages + request.own_pages
        inserted = self.matches("insert", request.tokens, pages, NAMESPACES[request.salt])
        prefixes = self.model.whole(request.salt, request.tokens)
        for prefix, page in zip(prefixes, pages, strict=True):
            self.model.pages.setdefault(prefix, page)
        self.model.held.difference_update(request.own_pages)
        self.model.touch(prefixes)
        assert list(inserted[0].pages) == [self.model.pages[prefix] for prefix in prefixes]
        nodes = [match.node for match in inserted]
        if keep:
            self.lock(nodes, prefixes)
            self.requests.append(
                Request(request.salt, request.tokens, prefixes, nodes, list(inserted[0].pages), own_pages=[])
            )
        self.unlock(request.nodes, request.locked)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        request = self.requests.pop(which % len(self.requests))
        self.on_each("free", request.own_pages)
        self.model.held.difference_update(request.own_pages)
        self.unlock(request.nodes, request.locked)

    @rule(num_pages=st.integers(-1, 3))
    def evict(self, num_pages: int) -> None:
        assert self.on_each("evict", num_pages) == self.model.evict(num_pages)

    @precondition(lambda self: len(self.model.pages) > 2)
    @rule()
    def clear(self) -> None:
        if any(self.model.locks.values()):
            for cache in self.caches:
                with pytest.raises(CacheIntegrityError, match="locked"):
                    cache.clear()
            return
        self.on_each("clear")
        self.model.pages.clear()

    @rule()
    def take_events(self) -> None:
        events = self.caches[0].take_events()
        assert events == self.caches[1].take_events()
        assert self.caches[2].take_events() == ()
        for event in events:
            self.view.apply(event)
        assert self.view.blocks == {block_hash(p, self.model.page_size): p for p in self.model.pages}
        assert self.caches[0].take_events() == ()

    @invariant()
    def caches_agree_with_the_model(self) -> None:
        model = self.model
        hashes = [list(cache.block_hashes()) for cache in self.caches]
        assert hashes[0] == hashes[1] == hashes[2]
        assert len(set(hashes[0])) == len(hashes[0])
        assert set(hashes[0]) == {block_hash(prefix, model.page_size) for prefix in model.pages}
        for cache in self.caches:
            cache.check_integrity()
            assert cache.free_tokens == model.num_free() * model.page_size
            assert cache.evictable_tokens == len(model.unlocked()) * model.page_size
            assert cache.used_tokens + cache.free_tokens + cache.evictable_tokens == cache.capacity_tokens
            assert cache.capacity_tokens == model.num_pages * model.page_size

    @invariant()
    def events_rebuild_the_contents(self) -> None:
        if self.drain_every_step:
            self.take_events()

    def teardown(self) -> None:
        for _ in range(len(self.requests)):
            self.abort(0)
        self.take_events()
        self.caches_agree_with_the_model()


TestRadixCacheMachine = RadixCacheMachine.TestCase
TestRadixCacheMachine.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
