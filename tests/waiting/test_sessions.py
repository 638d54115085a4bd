"""Sessions keep pages between turns, within bounds, and never leak one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.searches import num_examples
from kit.session_driver import CAPACITY_TOKENS, LIMITS, NUM_PAGES, PAGE_SIZE, SessionDriver, Table, Turn
from kit.variants import found, instead_of, variants

from scheduler_components import ConfigError
from scheduler_components.cache import DEFAULT_NAMESPACE, RadixCache, RadixNode
from scheduler_components.values import FinishReason, SessionParams
from scheduler_components.waiting.sessions import SessionLimits, SessionTable

CALLS = 100


def served(driver: SessionDriver, params: SessionParams, tokens: list[int], output: list[int], rid: str) -> Turn:
    """Serve one turn from its begin to its end."""
    whole = driver.table.extend(params, tokens)
    assert driver.table.begin_turn(params, rid) == ()
    turn = Turn(rid, whole, params.id)
    driver._run(turn)
    for token in output:
        assert driver.kv.grow(turn, 1)
        turn.token_ids.append(token)
        turn.num_computed_tokens += 1
    driver._finish(turn, FinishReason.LENGTH)
    driver.check()
    return turn


def opened(*, is_streaming: bool = False, capacity_tokens: int = 40) -> SessionDriver:
    driver = SessionDriver()
    driver.table.open("a", capacity_tokens=capacity_tokens, is_streaming=is_streaming)
    return driver


# Bounds and owners, whatever is called.


@settings(max_examples=num_examples(1), deadline=None)
@given(st.integers(0, 2**32))
def test_every_page_has_one_owner_and_every_bound_holds(seed: int) -> None:
    random, driver = Random(seed), SessionDriver()
    for _ in range(CALLS):
        driver.do(random)
    driver.finish()


@settings(max_examples=max(5, num_examples(1) // 8), deadline=None)
@given(st.integers(0, 2**32))
def test_ranks_with_equal_calls_and_times_have_equal_sessions(seed: int) -> None:
    ranks = [SessionDriver(), SessionDriver()]
    for rank in ranks:
        random = Random(seed)
        for _ in range(CALLS):
            rank.do(random)
    assert ranks[0].log == ranks[1].log
    assert ranks[0].table.stats() == ranks[1].table.stats()


# Broken variants: each of them fails the properties above.


class BrokenTable(Table):
    @instead_of("_remove")
    def keeps_the_lock_of_a_closed_session(self, session):
        session.node, session.pages = None, ()
        super()._remove(session)

    @instead_of("_hold")
    def keeps_the_earlier_lock(self, session, token_ids, namespace):
        session.node = None
        super()._hold(session, token_ids, namespace)

    @instead_of("_release")
    def counts_only_new_pages(self, session):
        had = session.node is not None
        super()._release(session)
        self._counts["held_pages"] += had

    @instead_of("_hold")
    def locks_nothing(self, session, token_ids, namespace):
        match = self.cache.match_prefix(token_ids, namespace)
        session.node, session.pages = match.node, match.page_array
        self._holding[session.session_id] = session
        self._counts["held_pages"] += len(match.page_array)

    @instead_of("close")
    def closes_under_a_turn(self, session_id):
        session = self._find(session_id)
        self._counts["closed"] += 1
        session.in_flight.clear()
        self._remove(session)
        session.in_flight["r0"] = None
        self._sessions[session_id] = session

    releases_nothing_for_requests = found(release_next=lambda self, num_missing=1: False)

    @instead_of("_hold")
    def has_no_limit_of_pages(self, session, token_ids, namespace):
        limits, self.limits = self.limits, SessionLimits(max_pages=10_000)
        super()._hold(session, token_ids, namespace)
        self.limits = limits

    @instead_of("open")
    def has_no_limit_of_sessions(self, session_id, **given):
        limits, self.limits = self.limits, SessionLimits(max_sessions=10_000)
        try:
            super().open(session_id, **given)
        finally:
            self.limits = limits

    @instead_of("end_turn")
    def has_no_limit_of_text(self, *given, **named):
        limits, self.limits = self.limits, attrs.evolve(self.limits, max_text_tokens=10_000)
        super().end_turn(*given, **named)
        self.limits = limits

    @instead_of("begin_turn")
    def keeps_counting_forgotten_text(self, params, rid):
        session = self._find(params.id)
        counted = session.num_text_tokens
        replaced = super().begin_turn(params, rid)
        self._counts["text_tokens"] += counted - session.num_text_tokens
        return replaced

    @instead_of("_remove")
    def keeps_counting_the_text_of_closed_sessions(self, session):
        session.num_text_tokens = 0
        session.turns.clear()
        super()._remove(session)


BROKEN = variants(BrokenTable)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_found(name: str) -> None:
    [variant] = BROKEN[name]

    def is_sound(seed: int) -> bool:
        random, driver = Random(seed), SessionDriver(lambda cache: variant(cache=cache, limits=LIMITS))
        try:
            for _ in range(CALLS):
                driver.do(random)
            driver.finish()
        except Exception:  # noqa: BLE001 - an assertion, or an error of the cache
            return False
        return True

    assert not all(map(is_sound, range(20)))


def test_a_table_that_reaps_by_the_clock_of_its_rank_parts_from_the_others() -> None:
    """SGLang 0.5.23 does this. The property of equal ranks finds it."""

    class OwnClock(Table):
        def step(self, now_s: float) -> tuple[str, ...]:
            return super().step(now_s + self.own.random())

        own = Random(1)

    def logs_are_equal(seed: int) -> bool:
        ranks = [SessionDriver(), SessionDriver(lambda cache: OwnClock(cache=cache, limits=LIMITS))]
        for rank in ranks:
            random = Random(seed)
            for _ in range(CALLS):
                rank.do(random)
        return ranks[0].log == ranks[1].log

    assert not all(map(logs_are_equal, range(20)))


# Which tokens a turn continues.


def test_a_turn_continues_the_text_of_an_earlier_one_and_its_pages() -> None:
    driver = opened()
    served(driver, SessionParams("a"), [1, 2, 3, 4], [5, 6, 7], "r0")
    held = driver.table.num_held_pages
    turn = served(driver, SessionParams("a", rid="r0"), [8], [9], "r1")
    assert list(turn.token_ids) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert turn.num_cached_tokens >= held * PAGE_SIZE > 0


def test_pages_of_an_idle_session_survive_an_eviction_of_everything_else() -> None:
    driver = opened()
    served(driver, SessionParams("a"), [1, 2, 3, 4], [5], "r0")
    driver.cache.evict(NUM_PAGES)
    assert driver.cache.match_prefix([1, 2, 3, 4]).num_tokens == 4
    driver.table.close("a")
    driver.cache.evict(NUM_PAGES)
    assert driver.cache.match_prefix([1, 2, 3, 4]).num_tokens == 0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SessionParams("a"), [9]),
        (SessionParams("a", rid="r0"), [1, 2, 3, 4, 5, 9]),
        (SessionParams("a", rid="r0", drop_previous_output=True), [1, 2, 3, 9]),
        (SessionParams("a", rid="r0", offset=2), [1, 2, 9]),
        (SessionParams("a", rid="r0", offset=0), [1, 2, 3, 4, 5, 9]),
        (SessionParams("a", rid="r0", replace=True), [1, 2, 3, 4, 5, 9]),
        (SessionParams("a", replace=True), [9]),
    ],
)
def test_session_params_mean_what_they_mean_in_sglang(params: SessionParams, expected: list[int]) -> None:
    driver = opened()
    served(driver, SessionParams("a"), [1, 2, 3], [4, 5], "r0")
    assert list(driver.table.extend(params, [9])) == expected


def test_replace_forgets_the_turns_after_its_turn_and_names_those_in_flight() -> None:
    driver = opened()
    table = driver.table
    served(driver, SessionParams("a"), [1, 2], [3], "r0")
    served(driver, SessionParams("a", rid="r0"), [4], [5], "r1")
    table.begin_turn(SessionParams("a", rid="r1"), "r2")
    assert table.begin_turn(SessionParams("a", rid="r0", replace=True), "r3") == ("r2",)
    with pytest.raises(ConfigError, match="is no turn of 'a'"):
        table.extend(SessionParams("a", rid="r1"), [1])
    assert list(table.extend(SessionParams("a", rid="r0"), [9])) == [1, 2, 3, 9]


def test_a_streaming_session_continues_its_last_turn_one_at_a_time() -> None:
    driver = opened(is_streaming=True)
    served(driver, SessionParams("a"), [1, 2], [3], "r0")
    served(driver, SessionParams("a"), [4], [5], "r1")
    assert list(driver.table.extend(SessionParams("a"), [6])) == [1, 2, 3, 4, 5, 6]
    driver.table.begin_turn(SessionParams("a"), "r2")
    with pytest.raises(ConfigError, match="one at a time"):
        driver.table.extend(SessionParams("a"), [7])


def test_an_aborted_turn_of_a_streaming_session_leaves_the_one_before() -> None:
    driver = opened(is_streaming=True)
    served(driver, SessionParams("a"), [1, 2], [3], "r0")
    params = SessionParams("a")
    turn = Turn("r1", driver.table.extend(params, [4]), "a")
    driver.table.begin_turn(params, "r1")
    driver._run(turn)
    driver._finish(turn, FinishReason.ABORT)
    assert list(driver.table.extend(params, [6])) == [1, 2, 3, 6]


def test_a_turn_in_flight_cannot_be_continued() -> None:
    driver = opened()
    driver.table.begin_turn(SessionParams("a"), "r0")
    with pytest.raises(ConfigError, match="still in flight"):
        driver.table.extend(SessionParams("a", rid="r0"), [1])


# Time.


def test_a_session_is_closed_when_it_was_idle_for_its_timeout_by_agreed_time() -> None:
    table = SessionTable[RadixNode](cache=RadixCache(page_size=2, capacity_tokens=8))
    table.step(100.0)
    table.open("a", capacity_tokens=8, timeout_s=10.0)
    assert table.step(1_000.0) == ()  # the replica was idle for long: the session counts from this step on
    assert table.next_deadline_s == 1_010.0
    assert table.step(1_009.9) == ()
    assert table.step(1_010.0) == ("a",)
    assert table.next_deadline_s == float("inf")


def test_a_session_with_a_turn_in_flight_is_not_closed_for_idleness() -> None:
    table = SessionTable[RadixNode](cache=RadixCache(page_size=2, capacity_tokens=8))
    table.open("a", capacity_tokens=8, timeout_s=1.0)
    table.begin_turn(SessionParams("a"), "r0")
    table.step(0.0)
    assert table.step(100.0) == ()
    table.cancel_turn("a", "r0")
    assert table.step(101.0) == ()
    assert table.step(102.0) == ("a",)


def test_a_closed_session_with_a_turn_in_flight_ends_with_the_turn() -> None:
    driver = opened()
    params = SessionParams("a")
    turn = Turn("r0", driver.table.extend(params, [1, 2, 3]), "a")
    driver.table.begin_turn(params, "r0")
    driver._run(turn)
    driver.table.close("a")
    assert "a" in driver.table
    with pytest.raises(ConfigError, match="is not open"):
        driver.table.extend(params, [1])
    driver._finish(turn, FinishReason.LENGTH)
    assert "a" not in driver.table
    assert driver.cache.num_locks == 0


# Pressure.


def test_the_least_recently_used_session_loses_its_pages_first_and_stays_open() -> None:
    driver = SessionDriver()
    for name in "abc":
        driver.table.open(name, capacity_tokens=40)
    served(driver, SessionParams("a"), [1, 2, 3, 4], [], "r0")
    served(driver, SessionParams("b"), [5, 6, 7, 8], [], "r1")
    served(driver, SessionParams("a", rid="r0"), [9], [], "r2")
    assert not driver.table.release_next(100)
    assert driver.table.release_next(1)
    assert [each.holder for each in driver.table.holdings()] == ["a"]
    assert list(driver.table.extend(SessionParams("b", rid="r1"), [1])) == [5, 6, 7, 8, 1]


# Text.


def test_texts_of_all_sessions_have_one_bound_and_a_turn_beyond_it_is_refused_with_one_sentence() -> None:
    driver = SessionDriver(lambda cache: Table(cache=cache, limits=attrs.evolve(LIMITS, max_text_tokens=12)))
    for name in "ab":
        driver.table.open(name, capacity_tokens=CAPACITY_TOKENS)
    served(driver, SessionParams("a"), [1, 2, 3, 4], [5, 6], "r0")
    with pytest.raises(ConfigError) as refused:
        driver.table.extend(SessionParams("b"), [1] * 7)
    assert str(refused.value) == (
        "input_ids='7 tokens': with the 6 that sessions keep are more than the 12 allowed; "
        "close a session, or try again later"
    )
    assert driver.table.stats().refused == 1
    driver.table.close("a")
    served(driver, SessionParams("b"), [1] * 7, [], "r1")
    assert driver.table.stats().text_tokens == 7


def test_a_turn_whose_output_makes_the_texts_too_long_costs_the_first_turns_of_its_session() -> None:
    driver = SessionDriver(lambda cache: Table(cache=cache, limits=attrs.evolve(LIMITS, max_text_tokens=12)))
    driver.table.open("a", capacity_tokens=CAPACITY_TOKENS)
    served(driver, SessionParams("a"), [1, 2, 3, 4], [], "r0")
    served(driver, SessionParams("a"), [5, 6, 7, 8], [9] * 6, "r1")
    with pytest.raises(ConfigError, match="'r0': is no turn of 'a'; continue one of the last turns"):
        driver.table.extend(SessionParams("a", rid="r0"), [1])
    assert driver.table.stats().text_tokens == 10


def test_a_streaming_session_replaces_its_text() -> None:
    driver = SessionDriver(lambda cache: Table(cache=cache, limits=attrs.evolve(LIMITS, max_text_tokens=12)))
    driver.table.open("a", capacity_tokens=CAPACITY_TOKENS, is_streaming=True)
    served(driver, SessionParams("a"), [1] * 8, [], "r0")
    served(driver, SessionParams("a"), [2] * 3, [], "r1")
    assert driver.table.stats().text_tokens == 11
    with pytest.raises(ConfigError, match="13 tokens"):
        driver.table.extend(SessionParams("a"), [3] * 2)


# Refusals.


def test_each_refusal_names_its_field_and_is_counted() -> None:
    table = SessionTable[RadixNode](cache=RadixCache(page_size=2, capacity_tokens=8), limits=LIMITS)
    table.open("a", capacity_tokens=4)
    refusals: list[tuple[str, Callable[[], object]]] = [
        ("session_id", lambda: table.open("", capacity_tokens=4)),
        ("session_id", lambda: table.open("a", capacity_tokens=4)),
        ("capacity_of_str_len", lambda: table.open("b", capacity_tokens=0)),
        ("timeout", lambda: table.open("b", capacity_tokens=4, timeout_s=0.0)),
        ("timeout", lambda: table.open("b", capacity_tokens=4, timeout_s=float("nan"))),
        ("session_id", lambda: table.close("x")),
        ("session_id", lambda: table.extend(SessionParams("x"), [1])),
        ("session_params.rid", lambda: table.extend(SessionParams("a", rid="x"), [1])),
        ("input_ids", lambda: table.extend(SessionParams("a"), [])),
        ("input_ids", lambda: table.extend(SessionParams("a"), [1] * 5)),
    ]
    for name, call in refusals:
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.field == name
    assert table.stats().refused == len(refusals)


def test_an_end_without_a_session_changes_nothing() -> None:
    table = SessionTable[RadixNode](cache=RadixCache(page_size=2, capacity_tokens=8))
    table.end_turn("x", "r0", [1, 2], num_input_tokens=1, reason=FinishReason.STOP, namespace=DEFAULT_NAMESPACE)
    table.cancel_turn("x", "r0")
    assert table.stats().turns == 0


@pytest.mark.parametrize("name", ["max_sessions", "max_turns", "max_text_tokens", "idle_timeout_s"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SessionLimits(**{name: 0})
