"""State machines: Hypothesis tries sequences of calls on a part. Subclass one and override one method.

::

    class MyCacheMachine(PrefixCacheMachine):
        def open_cache(self, page_size, capacity_tokens, record):
            return MyCache(page_size, capacity_tokens, record)

    TestMyCache = MyCacheMachine.TestCase

- ``PrefixCacheMachine`` compares three equal caches with a model of pages.
- ``RecorderMachine`` compares a recorder of a block table with a model that counts copies.
- ``PageStoreMachine`` compares a page store with a dictionary.
- ``BatcherComparisonMachine`` serves one history with two batchers, and fails with the first batch that differs.
- ``FollowerMachine`` drives a subscriber's core on a network that loses, repeats and delays messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from scheduler_components import CacheIntegrityError, KVCacheEvent, KVEventBatch, OutOfPagesError
from scheduler_components._internal.extras import naming_extras
from scheduler_components.cache import BlockTableRecorder, PrefixNamespace, hash_pages
from scheduler_components.kv_events import BatchEncoder
from scheduler_components.kv_events.replay_messages import END_SEQ
from scheduler_components.ports import PageStore
from scheduler_components.scheduling.request_kv_cache import CachedPrefix
from scheduler_components.testing.batcher_checks import SMALL_LIMITS
from scheduler_components.testing.batcher_session import BatcherSession, OpenBatcher, PlannedRequest
from scheduler_components.testing.chain_event_generator import ChainEventGenerator
from scheduler_components.testing.event_ledger import EventLedger
from scheduler_components.testing.faulty_network import Fault, FaultyNetwork
from scheduler_components.testing.interfaces import (
    BLOCK_SIZE,
    CheckedPrefixCache,
    FollowerCore,
    page_of,
)
from scheduler_components.testing.recorder_checks import BlockLocation, CopyCountingTable
from scheduler_components.values import RequestHints

with naming_extras:
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

__all__ = [
    "BatcherComparisonMachine",
    "FollowerMachine",
    "PageStoreMachine",
    "PrefixCacheMachine",
    "PrefixCacheModel",
    "RecorderMachine",
]

# A naive model of a prefix cache: one dictionary entry per page.


ModelPrefix: TypeAlias = tuple[str, tuple[int, ...]]
"""The identity of one cached page: its tenant's salt and all tokens up to its end."""


@dataclass
class PrefixCacheModel:
    """Cached prefixes with their page indices; time is a count of calls.

    It evicts the least recently used page, the deepest page of a prefix first. For another policy, subclass it and
    override ``eviction_order``.
    """

    page_size: int
    num_pages: int
    pages: dict[ModelPrefix, int] = field(default_factory=dict)
    used_at: dict[ModelPrefix, int] = field(default_factory=dict)
    locks: Counter[ModelPrefix] = field(default_factory=Counter)
    held: set[int] = field(default_factory=set)
    clock: int = 0

    def whole(self, salt: str, tokens: Sequence[int]) -> list[ModelPrefix]:
        """Return the whole pages of a prompt, cached or not."""
        size = self.page_size
        return [(salt, tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]

    def cached(self, salt: str, tokens: Sequence[int]) -> list[ModelPrefix]:
        """Return the cached pages of a prompt."""
        return [prefix for prefix in self.whole(salt, tokens) if prefix in self.pages]

    def touch(self, prefixes: list[ModelPrefix]) -> None:
        """Mark pages as the most recently used."""
        self.clock += 1
        self.used_at.update(dict.fromkeys(prefixes, self.clock))

    def unlock(self, prefixes: list[ModelPrefix]) -> None:
        """Release a lock; pages without a lock count as used now."""
        self.locks.subtract(prefixes)
        self.touch([prefix for prefix in prefixes if not self.locks[prefix]])

    def unlocked(self) -> list[ModelPrefix]:
        """Return the evictable pages."""
        return [prefix for prefix in self.pages if not self.locks[prefix]]

    def num_free(self) -> int:
        """Return the number of pages that are neither cached nor held by a request."""
        return self.num_pages - len(self.pages) - len(self.held)

    def eviction_order(self) -> list[ModelPrefix]:
        """Return the evictable pages in the order of their eviction."""
        return sorted(self.unlocked(), key=lambda prefix: (self.used_at[prefix], -len(prefix[1])))

    def evict(self, num_pages: int) -> int:
        """Evict up to ``num_pages``, and return their number."""
        gone = self.eviction_order()[: max(0, num_pages)]
        for prefix in gone:
            del self.pages[prefix]
        return len(gone)


NAMESPACES = {"": None, "tenant": PrefixNamespace(cache_salt="tenant")}

# Two different tokens, so that prompts share prefixes.
TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=16)
SALTS = st.sampled_from(sorted(NAMESPACES))


@dataclass
class _Request:
    """A request between its match and its end, with one node for each cache."""

    salt: str
    tokens: list[int]
    locked: list[ModelPrefix]
    nodes: list[Any]
    cached_pages: list[int]
    own_pages: list[int]


class PrefixCacheMachine(RuleBasedStateMachine):
    """Compares a prefix cache with a model of pages.

    Subclass it and override ``open_cache``, and ``model_type`` for another order of eviction. After every step:

    - the cache holds the pages of the model under the same page indices, and evicts in the same order;
    - the recorded events break no rule of the wire and rebuild exactly the cached blocks;
    - a second cache with the same calls behaves in the same way, and so does a cache that records nothing;
    - free, evictable and used tokens add up to the capacity.
    """

    model_type: ClassVar[type[PrefixCacheModel]] = PrefixCacheModel

    def open_cache(self, page_size: int, capacity_tokens: int, record: bool) -> CheckedPrefixCache:
        """Open the cache under test; without ``record`` it returns no events."""
        raise TypeError(f"{type(self).__name__} has no cache: override open_cache")

    @initialize(page_size=st.integers(1, 3), num_pages=st.integers(1, 24), spare=st.integers(0, 2), drain=st.booleans())
    def start(self, page_size: int, num_pages: int, spare: int, drain: bool) -> None:
        capacity_tokens = num_pages * page_size + min(spare, page_size - 1)
        self.caches = [self.open_cache(page_size, capacity_tokens, record) for record in (True, True, False)]
        self.model = self.model_type(page_size, num_pages)
        self.ledger = EventLedger(block_size=page_size)
        self.drain_every_step = drain
        self.requests: list[_Request] = []

    def on_each(self, method: str, *args: Any) -> Any:
        """Make the same call on every cache; the results must be equal."""
        answers = [getattr(cache, method)(*args) for cache in self.caches]
        assert answers[0] == answers[1] == answers[2], f"{method}{args}: equal caches return {answers}"
        return answers[0]

    def matches(self, method: str, *args: Any) -> list[CachedPrefix[Any]]:
        """Make the same call on every cache, if the results have nodes of the caches."""
        answers: list[CachedPrefix[Any]] = [getattr(cache, method)(*args) for cache in self.caches]
        assert len({(match.num_tokens, tuple(match.page_array)) for match in answers}) == 1
        assert answers[0].num_tokens == len(answers[0].page_array) * self.model.page_size
        return answers

    def refuse(self, error: type[Exception], call: Callable[[CheckedPrefixCache], object]) -> None:
        """Expect every cache to raise ``error``."""
        for cache in self.caches:
            try:
                answer = call(cache)
            except error:
                continue
            raise AssertionError(f"expected {error.__name__}, and the cache returned {answer!r}")

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
        assert list(found.page_array) == [self.model.pages[prefix] for prefix in cached]

    @precondition(lambda self: len(self.requests) < 3)
    @rule(salt=SALTS, tokens=TOKENS, keep=st.booleans())
    def serve(self, salt: str, tokens: list[int], keep: bool) -> None:
        """Run a request from its match to its end without other calls."""
        before = len(self.requests)
        self.begin(salt, tokens)
        if len(self.requests) > before:
            self.finish(before, keep)

    @precondition(lambda self: len(self.requests) < 3)
    @rule(salt=SALTS, tokens=TOKENS)
    def begin(self, salt: str, tokens: list[int]) -> None:
        """Start a request: match, lock, and allocate the missing pages."""
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
        self.requests.append(_Request(salt, tokens, cached, nodes, list(found[0].page_array), own))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 7), keep=st.booleans())
    def finish(self, which: int, keep: bool) -> None:
        """Cache the prompt of a request; with ``keep`` the request continues and locks the longer prefix."""
        request = self.requests.pop(which % len(self.requests))
        pages = request.cached_pages + request.own_pages
        inserted = self.matches("insert", request.tokens, pages, NAMESPACES[request.salt])
        prefixes = self.model.whole(request.salt, request.tokens)
        for prefix, page in zip(prefixes, pages, strict=True):
            self.model.pages.setdefault(prefix, page)
        self.model.held.difference_update(request.own_pages)
        self.model.touch(prefixes)
        assert list(inserted[0].page_array) == [self.model.pages[prefix] for prefix in prefixes]
        nodes = [match.node for match in inserted]
        if keep:
            self.lock(nodes, prefixes)
            kept = _Request(request.salt, request.tokens, prefixes, nodes, list(inserted[0].page_array), own_pages=[])
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
        assert self.published_prefixes() == set(self.model.pages)
        assert self.ledger.hashes() == set(self.caches[0].block_hashes())
        assert not self.caches[0].take_events()

    def published_prefixes(self) -> set[ModelPrefix]:
        """Return the prefixes in a reader's view, as the model identifies them."""
        published = ((self.ledger.identity(each)[2], self.ledger.prefix(each)) for each in self.ledger.hashes())
        return {(str(salt or ""), tokens) for salt, tokens in published}

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
        if not hasattr(self, "model"):  # open_cache raised an error.
            return
        for _ in range(len(self.requests)):
            self.abort(0)
        self.take_events()
        self.caches_agree_with_the_model()


# A recorder of a block table.

_SHORT_PROMPTS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4).map(
    lambda blocks: tuple(token for token in blocks for _ in range(BLOCK_SIZE))
)
"""Whole blocks of two kinds, so that prompts share prefixes."""


def _in_form(hashes: Sequence[int], form: str) -> list[int | bytes]:
    if form == "bytes":
        return [bytes(24) + (each % 2**64).to_bytes(8, "big") for each in hashes]
    return [each % 2**64 if form == "unsigned" else each for each in hashes]


class RecorderMachine(RuleBasedStateMachine):
    """Makes the same calls on a recorder and a ``CopyCountingTable``, and applies the events to a ledger.

    Attributes:
        places: media and groups of the calls.
    """

    places: ClassVar[tuple[BlockLocation, ...]] = ((None, None), ("CPU", None), (None, 1))

    def open_recorder(self) -> BlockTableRecorder:
        """Open an empty recorder of blocks of ``BLOCK_SIZE`` tokens; override it."""
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.recorder, self.table = self.open_recorder(), CopyCountingTable()
        self.ledger = EventLedger(block_size=BLOCK_SIZE)

    @rule(
        prompt=_SHORT_PROMPTS,
        first=st.integers(0, 3),
        place=st.integers(0, 2),
        form=st.sampled_from(["signed", "unsigned", "bytes"]),
        num_copies=st.integers(1, 2),
    )
    def store(self, prompt: tuple[int, ...], first: int, place: int, form: str, num_copies: int) -> None:
        """Store a whole prompt, or its end after blocks that may be missing, in one or two copies."""
        medium, group_idx = at = self.places[place % len(self.places)]
        whole = hash_pages(prompt, BLOCK_SIZE)
        first = min(first, len(whole) - 1)
        parent = whole[first - 1] if first else None
        hashes = _in_form(whole, form)
        tokens = prompt[first * BLOCK_SIZE :]
        above = hashes[first - 1] if first else None
        for _ in range(num_copies):
            self.table.store(whole[first:], parent, at)
            self.recorder.store(hashes[first:], tokens, above, medium=medium, group_idx=group_idx)

    @rule(prompt=_SHORT_PROMPTS, data=st.data(), place=st.integers(0, 2))
    def remove(self, prompt: tuple[int, ...], data: st.DataObject, place: int) -> None:
        """Remove some blocks of a prompt in any order, stored or not."""
        medium, group_idx = at = self.places[place % len(self.places)]
        whole = hash_pages(prompt, BLOCK_SIZE)
        gone = data.draw(st.permutations(whole))[: data.draw(st.integers(1, len(whole)))]
        self.table.remove(gone, at)
        self.recorder.remove(gone, medium=medium, group_idx=group_idx)

    @rule()
    def clear(self) -> None:
        self.table.copies.clear()
        self.recorder.clear()

    @rule()
    def take(self) -> None:
        self.read(self.recorder.take_events())

    def read(self, events: Sequence[KVCacheEvent]) -> None:
        """Apply events: they break no rule and add up to the reachable blocks of the table."""
        assert self.ledger.apply_all(events) == []
        for place in self.places:
            assert self.ledger.hashes(*place) == self.table.reachable_hashes(place)

    def teardown(self) -> None:
        """Read the events of the last calls."""
        self.take()


# A page store.

_KEYS = st.lists(st.sampled_from(["a", "b", "c/d", "c-d", "../e"]), max_size=5)


class PageStoreMachine(RuleBasedStateMachine):
    """Compares a page store with a dictionary. Subclass it and override ``open_store``.

    A store with ``loses_pages = True`` may lose a page, which is a miss. No store may return a wrong or deleted page,
    or count a missing page in the length of a prefix.
    """

    loses_pages: ClassVar[bool] = False

    def open_store(self) -> PageStore:
        """Open an empty store under test."""
        raise TypeError(f"{type(self).__name__} has no store: override open_store")

    def __init__(self) -> None:
        super().__init__()
        self.store = self.open_store()  # noqa: SCH008 Hypothesis creates a machine per example
        self.held: set[str] = set()

    @rule(keys=_KEYS)
    def set_pages(self, keys: list[str]) -> None:
        answers = self.store.batch_set(keys, [page_of(key) for key in keys])
        assert len(answers) == len(keys)
        assert self.loses_pages or all(answers), f"{keys}: {answers}"
        self.held.update(key for key, held in zip(keys, answers, strict=True) if held)

    @rule(keys=_KEYS)
    def get_pages(self, keys: list[str]) -> None:
        pages = self.store.batch_get(keys)
        assert len(pages) == len(keys)
        for key, page in zip(keys, pages, strict=True):
            assert page is None or key in self.held, f"{key!r} is not held, but a page was returned"
            assert page is None or bytes(page) == page_of(key), f"a wrong page was returned for {key!r}"
            assert self.loses_pages or page is not None or key not in self.held, f"the page of {key!r} was lost"

    @rule(keys=_KEYS)
    def count_prefix(self, keys: list[str]) -> None:
        longest = next((at for at, key in enumerate(keys) if key not in self.held), len(keys))
        found = self.store.batch_exists(keys)
        assert 0 <= found <= longest, f"{found} of {keys} reported, at most {longest} are held"
        assert self.loses_pages or found == longest

    @rule(keys=_KEYS)
    def delete_pages(self, keys: list[str]) -> None:
        removed = self.store.delete(keys)
        assert removed <= len(self.held & set(keys))
        assert self.loses_pages or removed == len(self.held & set(keys))
        self.held.difference_update(keys)

    def teardown(self) -> None:
        self.store.close()


_HEALING_ROUNDS = 12
_REQUESTS_PER_ROUND = 4
_ROUND_S = 30.0
"""Longer than any pause or probe interval of a subscriber under test."""


class FollowerMachine(RuleBasedStateMachine):
    """Drives a subscriber's core on a faulty network. Subclass it and override ``open_follower``.

    The publisher is a plain one as in SGLang and vLLM: it keeps every batch, replies to each replay request from a
    number, has no extension, and does not restart.

    - After every step: a core that reports live holds the publisher's state after some batch. It may be late, but not
      wrong.
    - After the faults stop and time passes, it is live and holds the current state.
    """

    def open_follower(self) -> FollowerCore:
        """Open the core under test, connected and without any message."""
        raise TypeError(f"{type(self).__name__} has no follower: override open_follower")

    def __init__(self) -> None:
        super().__init__()
        self.follower = self.open_follower()  # noqa: SCH008 Hypothesis creates a machine per example
        self.history = ChainEventGenerator()
        self.payloads: list[bytes] = []
        self.states: set[frozenset[int]] = {frozenset()}
        self.plan: list[Fault] = []
        self.network: FaultyNetwork[tuple[int, bytes]] = FaultyNetwork(self.plan)
        self.open_request: bytes | None = None

    def publish(self, event: KVCacheEvent, fault: Fault) -> None:
        """Number one batch and send its live message with a fault."""
        number = len(self.payloads)
        self.payloads.append(BatchEncoder().encode(KVEventBatch(float(number + 1), (event,)), 0))
        self.states.add(frozenset(self.history.live_hashes))
        self.plan.append(fault)
        self.deliver(self.network.send((number, self.payloads[-1])))

    def deliver(self, messages: list[tuple[int, bytes]]) -> None:
        for number, payload in messages:
            self.follower.on_live_batch(number, payload)

    @rule(token=st.integers(0, 3), fault=st.sampled_from(Fault))
    def store(self, token: int, fault: Fault) -> None:
        self.publish(self.history.store(token, token), fault)

    @precondition(lambda self: self.history.live_hashes)
    @rule(fault=st.sampled_from(Fault))
    def remove(self, fault: Fault) -> None:
        self.publish(self.history.remove(), fault)

    @rule(fault=st.sampled_from(Fault))
    def clear(self, fault: Fault) -> None:
        self.publish(self.history.clear(), fault)

    @rule(most=st.none() | st.integers(0, 3))
    def answer(self, most: int | None) -> None:
        """Reply to the open request: completely, or only with the first batches and without the end marker."""
        self.open_request = self.follower.pop_replay_request() or self.open_request
        request, self.open_request = self.open_request, None
        if request is None:
            return
        start = int.from_bytes(request, "big")  # A plain publisher reads a longer request as a huge number.
        batches = list(enumerate(self.payloads))[start:]
        for number, payload in batches[:most]:
            self.follower.on_replay_message(number.to_bytes(8, "big"), payload)
        if most is None:
            self.follower.on_replay_message(END_SEQ, b"")

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.follower.advance_time(seconds)

    @invariant()
    def is_never_live_and_wrong(self) -> None:
        if self.follower.is_live():
            blocks = frozenset(self.follower.blocks())
            assert blocks in self.states, f"live with {sorted(blocks)}, which was never the publisher's state"

    def teardown(self) -> None:
        self.deliver(self.network.flush())
        for _ in range(_HEALING_ROUNDS):
            for _ in range(_REQUESTS_PER_ROUND):  # A reply may lead to the next request.
                self.answer(None)
            self.is_never_live_and_wrong()
            self.follower.advance_time(_ROUND_S)
        for _ in range(_REQUESTS_PER_ROUND):
            self.answer(None)
        if self.payloads:
            assert self.follower.is_live(), "not live although all faults have stopped"
            assert set(self.follower.blocks()) == set(self.history.live_hashes)


# Two batchers over one history.

_HINTS = st.builds(RequestHints, priority=st.integers(-1, 1), tenant=st.sampled_from("ab"))


class BatcherComparisonMachine(RuleBasedStateMachine):
    """Serves one history with two batchers. They must make equal batches.

    Subclass it and set both functions. A failure prints the shortest history that Hypothesis finds, and both batches of
    the first step that differs.
    """

    open_first: ClassVar[OpenBatcher]
    open_second: ClassVar[OpenBatcher]

    def __init__(self) -> None:
        super().__init__()
        cls = type(self)
        self.first, self.second = (
            BatcherSession.open(name, opened, limits=SMALL_LIMITS, num_pages=24)
            for name, opened in (("The first batcher", cls.open_first), ("The second batcher", cls.open_second))
        )

    @rule(size=st.integers(1, 40), shared=st.integers(0, 12), new=st.integers(1, 40), hints=_HINTS)
    def add(self, size: int, shared: int, new: int, hints: RequestHints) -> None:
        """Add a request whose prompt shares a prefix with others."""
        number = len(self.first.requests) + 1
        prompt = (*range(min(shared, size)), *range(1000 * number, 1000 * number + max(0, size - shared)))
        for session in (self.first, self.second):
            session.add(PlannedRequest(prompt, new, hints))

    @precondition(lambda self: self.first.requests)
    @rule(number=st.integers(0, 100))
    def abort(self, number: int) -> None:
        """Abort a request, unless it has ended."""
        for session in (self.first, self.second):
            session.abort(session.requests[number % len(session.requests)])

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        """Make and compute batches, and compare them."""
        for _ in range(num_steps):
            self.first.step()
            self.second.step()
            step, one, other = len(self.first.batches), self.first.batches[-1], self.second.batches[-1]
            assert one == other, f"step {step}:\n  first:  {one}\n  second: {other}"
