"""A prefix cache against a model that knows pages only, in every order of calls that Hypothesis finds.

Properties, after every step:

- what is cached, under which page index, is what the model says, the order of eviction included;
- the recorded events break no rule of the wire and rebuild exactly the cached blocks;
- a second cache that gets the same calls does the same, and so does one that records nothing;
- the cache's own arithmetic adds up.

For a cache of your own::

    class MyCacheMachine(PrefixCacheMachine):
        def open_cache(self, page_size, capacity_tokens, record):
            return MyCache(page_size, capacity_tokens, record)

    TestMyCache = MyCacheMachine.TestCase
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_components.cache.namespace import PrefixNamespace
from scheduler_components.errors import CacheIntegrityError, OutOfPagesError
from scheduler_components.testing.ledger import EventLedger
from scheduler_components.testing.parts import CachedPrefix, PrefixCache
from scheduler_components.testing.prefix_cache_model import ModelPrefix, PrefixCacheModel

__all__ = ["PrefixCacheMachine"]

NAMESPACES = {"": None, "tenant": PrefixNamespace(cache_salt="tenant")}

# Two tokens only, so that prefixes meet, part and end inside each other.
TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=16)
SALTS = st.sampled_from(sorted(NAMESPACES))


@dataclass
class _Request:
    """A request between its match and its end, once for each cache under test."""

    salt: str
    tokens: list[int]
    locked: list[ModelPrefix]
    nodes: list[Any]
    cached_pages: list[int]
    own_pages: list[int]


class PrefixCacheMachine(RuleBasedStateMachine):
    """Subclass it and override ``open_cache``; ``model_type`` too, for another order of eviction."""

    model_type: ClassVar[type[PrefixCacheModel]] = PrefixCacheModel

    def open_cache(self, page_size: int, capacity_tokens: int, record: bool) -> PrefixCache:  # noqa: ARG002 - an example of the signature
        """Make the cache under test; one that does not record gives no events."""
        raise TypeError(f"{type(self).__name__} does not say which cache it drives: override open_cache")

    @initialize(page_size=st.integers(1, 3), num_pages=st.integers(1, 24), spare=st.integers(0, 2), drain=st.booleans())
    def start(self, page_size: int, num_pages: int, spare: int, drain: bool) -> None:
        capacity_tokens = num_pages * page_size + min(spare, page_size - 1)
        self.caches = [self.open_cache(page_size, capacity_tokens, record) for record in (True, True, False)]
        self.model = self.model_type(page_size, num_pages)
        self.ledger = EventLedger(block_size=page_size)
        self.drain_every_step = drain
        self.requests: list[_Request] = []

    def on_each(self, method: str, *args: Any) -> Any:
        """Make the same call on every cache; the answers must be the same."""
        answers = [getattr(cache, method)(*args) for cache in self.caches]
        assert answers[0] == answers[1] == answers[2], f"{method}{args}: equal caches answer {answers}"
        return answers[0]

    def matches(self, method: str, *args: Any) -> list[CachedPrefix]:
        """The same, for calls that answer with a node of the cache's own."""
        answers: list[CachedPrefix] = [getattr(cache, method)(*args) for cache in self.caches]
        assert len({(match.num_tokens, tuple(match.pages)) for match in answers}) == 1
        assert answers[0].num_tokens == len(answers[0].pages) * self.model.page_size
        return answers

    def refuse(self, error: type[Exception], call: Callable[[PrefixCache], object]) -> None:
        """Every cache must refuse a call."""
        for cache in self.caches:
            try:
                answer = call(cache)
            except error:
                continue
            raise AssertionError(f"{error.__name__} expected, and it answered {answer!r}")

    def lock(self, nodes: list[Any], prefixes: list[ModelPrefix]) -> None:
        for cache, node in zip(self.caches, nodes, strict=True):
            cache.lock(node)
        self.model.locks.update(prefixes)

    def unlock(self, nodes: list[Any], prefixes: list[ModelPrefix]) -> None:
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
        if lacking > self.model.num_free() + len(self.model.unlocked()):
            self.refuse(OutOfPagesError, lambda cache: cache.allocate(lacking))
            self.unlock(nodes, cached)
            return
        own: list[int] = self.on_each("allocate", lacking)
        self.model.evict(lacking - self.model.num_free())
        assert len(set(own)) == lacking
        assert self.model.held.isdisjoint(own)
        assert set(self.model.pages.values()).isdisjoint(own)
        self.model.held.update(own)
        self.requests.append(_Request(salt, tokens, cached, nodes, list(found[0].pages), own))

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
            kept = _Request(request.salt, request.tokens, prefixes, nodes, list(inserted[0].pages), own_pages=[])
            self.requests.append(kept)
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
            self.refuse(CacheIntegrityError, lambda cache: cache.clear())
            return
        self.on_each("clear")
        self.model.pages.clear()

    @rule()
    def take_events(self) -> None:
        events = tuple(self.caches[0].take_events())
        assert events == tuple(self.caches[1].take_events())
        assert not self.caches[2].take_events()
        broken = self.ledger.apply_all(events)
        assert not broken, broken
        assert self.told_prefixes() == set(self.model.pages)
        assert self.ledger.hashes() == set(self.caches[0].block_hashes())
        assert not self.caches[0].take_events()

    def told_prefixes(self) -> set[ModelPrefix]:
        """What a reader of the events knows, as the model names it."""
        told = ((self.ledger.identity(each)[2], self.ledger.prefix(each)) for each in self.ledger.hashes())
        return {ModelPrefix(str(salt or ""), tokens) for salt, tokens in told}

    @invariant()
    def caches_agree_with_the_model(self) -> None:
        model = self.model
        hashes: list[Sequence[int]] = [list(cache.block_hashes()) for cache in self.caches]
        assert hashes[0] == hashes[1] == hashes[2]
        assert len(set(hashes[0])) == len(hashes[0]) == len(model.pages)
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
        if not hasattr(self, "model"):  # the cache could not even be opened
            return
        for _ in range(len(self.requests)):
            self.abort(0)
        self.take_events()
        self.caches_agree_with_the_model()
