"""Random calls of a SessionTable over a real cache of few pages, with a check of every page after each call."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from random import Random

from scheduler_components import ConfigError
from scheduler_components.cache import RadixCache, RadixNode
from scheduler_components.checks.pool_stats_observer import RadixCachePool
from scheduler_components.invariant_checker import PublishedBlocks, find_event_violations, find_pool_violations
from scheduler_components.scheduling.request import OutputLength, Request
from scheduler_components.scheduling.request_kv_cache import RequestKvCache, pages_for
from scheduler_components.values import FinishReason, HeldCount, PageHolding, SessionParams
from scheduler_components.waiting.session_kv_releaser import SessionKvReleaser
from scheduler_components.waiting.sessions import SessionLimits, SessionTable

PAGE_SIZE = 2
NUM_PAGES = 16
LIMITS = SessionLimits(max_sessions=3, max_pages=8, max_turns=3, max_text_tokens=36, idle_timeout_s=5.0)
CAPACITY_TOKENS = 24

Table = SessionTable[RadixNode]


class Turn(Request[RadixNode]):
    """A request of a session."""

    def __init__(self, rid: str, tokens: Sequence[int], session_id: str | None) -> None:
        super().__init__(rid, array("I", tokens), OutputLength(1))
        self.session_id = session_id


class SessionDriver:
    """One rank: a cache, requests in flight and a table of sessions.

    ``log`` has what each call decided, so that two drivers with equal calls can be compared.
    """

    def __init__(self, open_table: Callable[[RadixCache], Table] = lambda cache: Table(cache=cache, limits=LIMITS)):
        self.cache = RadixCache(page_size=PAGE_SIZE, capacity_tokens=NUM_PAGES * PAGE_SIZE, record=True)
        self.table = open_table(self.cache)
        self.kv = RequestKvCache[RadixNode](cache=self.cache)
        self.releaser = SessionKvReleaser(kv=self.kv, sessions=self.table)
        self.pool = RadixCachePool(cache=self.cache, requests=self, transfers=self.table)
        self.published = PublishedBlocks(source=self.cache)
        self.running: dict[str, Turn] = {}
        self.now_s = 0.0
        self.log: list[object] = []
        self.closing: set[str] = set()
        self.turns: dict[str | None, list[str]] = {}
        self.num_preemptions = 0
        self._num_turns = 0
        self.table.step(self.now_s)

    # --- a PageHolders: the requests in flight ---

    def count_held(self) -> HeldCount:
        return HeldCount(sum(len(turn.pages) - turn.num_cached_pages for turn in self.running.values()))

    def holdings(self) -> list[PageHolding]:
        return [
            PageHolding(
                each.rid, "request", each.pages[each.num_cached_pages :], each.pages[: each.num_cached_pages], each.node
            )
            for each in self.running.values()
        ]

    # --- calls ---

    def do(self, random: Random) -> None:
        """Make one random call and check everything."""
        calls = (self.open, self.close, self.begin, self.end, self.wait, self.clear)
        random.choices(calls, weights=(4, 1, 8, 6, 2, 1))[0](random)
        self.check()

    def open(self, random: Random) -> None:
        name, timeout_s = random.choice("abcd"), random.choice((None, 1.0, 9.0))
        self._note(
            "open",
            lambda: self.table.open(
                name, capacity_tokens=CAPACITY_TOKENS, timeout_s=timeout_s, is_streaming=random.random() < 0.3
            ),
        )

    def close(self, random: Random) -> None:
        self._close(random.choice("abcd"))

    def _close(self, name: str) -> None:
        if self._note("close", lambda: self.table.close(name)):
            self.closing.add(name)

    def begin(self, random: Random) -> None:
        """Begin a turn, or a request without a session, with a few tokens of a small vocabulary."""
        tokens = [random.randint(1, 3) for _ in range(random.randint(1, 8))]
        rid = f"r{self._num_turns}"
        self._num_turns += 1
        if random.random() < 0.2:
            self._run(Turn(rid, tokens, None))
            return
        name = random.choice("abc")
        earlier = random.choice([None, rid, *self.turns.get(name, [])[-3:]])
        is_plain = random.random() < 0.5
        params = SessionParams(
            name,
            rid=earlier,
            offset=None if is_plain else random.choice((None, 0, 3)),
            replace=None if is_plain else random.choice((None, True)),
            drop_previous_output=None if is_plain else random.choice((None, True)),
        )
        try:
            whole = self.table.extend(params, tokens)
        except ConfigError as error:
            self.log.append((rid, error.field))
            return
        replaced = self.table.begin_turn(params, rid)
        self.log.append((rid, tuple(whole), replaced))
        for each in replaced:
            self._finish(self.running[each], FinishReason.ABORT)
        self._run(Turn(rid, whole, params.id))

    def _run(self, turn: Turn) -> None:
        """Give a request its pages, as a batcher does: first free ones, then those of sessions, then by preemption."""
        self.kv.match(turn)
        turn.prefill_end = len(turn.token_ids)
        num_tokens = len(turn.token_ids) - turn.num_computed_tokens
        while not self.kv.grow(turn, num_tokens):
            if self.table.release_next():
                continue
            assert not list(self.table.holdings()), "a request is preempted while sessions hold pages"
            self.num_preemptions += 1
            if not self.running:
                raise AssertionError("no request runs, no session holds pages, and the pool has no room")
            self._finish(next(iter(self.running.values())), FinishReason.ABORT)
        self.running[turn.rid] = turn
        self.turns.setdefault(turn.session_id, []).append(turn.rid)
        turn.num_computed_tokens = len(turn.token_ids)
        self.kv.cache_unfinished(turn)

    def end(self, random: Random) -> None:
        """End a request with some output."""
        if not self.running:
            return
        turn = random.choice(list(self.running.values()))
        for _ in range(random.randint(0, 3)):
            if pages_for(len(turn.token_ids) + 1, PAGE_SIZE) > len(turn.pages) and not self.kv.grow(turn, 1):
                break
            turn.token_ids.append(random.randint(1, 2))
            turn.num_computed_tokens += 1
        reasons = (FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR)
        self._finish(turn, random.choice(reasons))

    def wait(self, random: Random) -> None:
        self.now_s += random.choice((0.4, 0.9, 2.0))
        self.log.append(("reaped", self.table.step(self.now_s)))

    def clear(self, random: Random) -> None:
        if random.random() < 0.2 and not self.running:
            self.table.release_all()
            self.cache.clear()

    def _finish(self, turn: Turn, reason: FinishReason) -> None:
        turn.finish_reason = reason
        del self.running[turn.rid]
        self.releaser.free(turn)

    def _note(self, call: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except ConfigError as error:
            self.log.append((call, error.field))
            return False
        self.log.append(call)
        return True

    # --- checks ---

    def check(self) -> None:
        """Every page has one owner and every lock a holder; events and bounds are right."""
        self.published.take_events()
        found = [*find_pool_violations(self.pool), *find_event_violations(self.published, self.cache)]
        assert not found, "; ".join(map(str, found))
        self.cache.check_integrity()
        stats, holdings = self.table.stats(), list(self.table.holdings())
        assert stats.held_pages == sum(len(each.shared) for each in holdings) <= LIMITS.max_pages
        assert stats.open == len(self.table) <= LIMITS.max_sessions
        kept = [turn for session in self.table._sessions.values() for turn in session.turns.values()]
        assert stats.text_tokens == sum(len(turn.tokens) for turn in kept) <= LIMITS.max_text_tokens
        self.closing = {name for name in self.closing if name in self.table}  # closed with a turn in flight
        assert stats.opened == stats.open - len(self.closing) + stats.reaped + stats.closed, stats
        locks = sum(each.node is not None for each in (*holdings, *self.holdings()))
        assert self.cache.num_locks == locks

    def finish(self) -> None:
        """End everything: then no page is held."""
        for turn in list(self.running.values()):
            self._finish(turn, FinishReason.STOP)
        for name in "abcd":
            self._close(name)
        self.check()
        assert not len(self.table)
        assert not self.table.num_text_tokens
        assert self.cache.used_tokens == 0
