"""The fleet finds engines, follows their readiness and load, takes out those that are lost, and finds them again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from kit.fake_engine import FakeEngine, served_engine
from kit.proxied import following, until
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from scheduler_components import ConfigError
from scheduler_components.reference.proxy import http_fleet
from scheduler_components.reference.proxy.http_fleet import EngineState, Fleet
from scheduler_components.reference.proxy.routing_fields import RoutingFields

pytestmark = pytest.mark.sockets

UP, NOT_READY, DOWN = EngineState.UP, EngineState.NOT_READY, EngineState.DOWN
NO_FIELDS = RoutingFields()


def run(scenario: Callable[[Fleet], Awaitable[Any]], *engines: FakeEngine, **settings: Any) -> Any:
    async def with_a_fleet() -> Any:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(served_engine(engine)) for engine in engines]
            fleet = await stack.enter_async_context(following(*urls, **settings))
            return await scenario(fleet)

    return asyncio.run(asyncio.wait_for(with_a_fleet(), 60))


def states(fleet: Fleet) -> list[EngineState]:
    return [engine.state for engine in fleet.engines]


def test_engines_are_found_and_each_rank_is_a_replica() -> None:
    async def scenario(fleet: Fleet) -> list[list[int]]:
        assert fleet.place((), NO_FIELDS) is None
        await until(lambda: fleet.num_ready == 2)
        return [list(engine.replicas) for engine in fleet.engines]

    assert run(scenario, FakeEngine(dp_size=2), FakeEngine()) == [[0, 1], [0]]


def test_requests_of_one_prompt_go_to_one_replica_and_others_are_spread() -> None:
    async def scenario(fleet: Fleet) -> None:
        await until(lambda: fleet.num_ready == 2)
        placed = [fleet.place(range(first, first + 64), NO_FIELDS) for first in (0, 1000, 0, 1000)]
        numbers = [each.engine.number for each in placed if each is not None]
        assert numbers[0] != numbers[1]
        assert numbers[2:] == numbers[:2]
        assert [each.replica.stats.cached_blocks for each in placed if each is not None] == [16, 16, 16, 16]
        for each in placed:
            assert each is not None
            fleet.finish(each)

    run(scenario, FakeEngine(), FakeEngine())


def test_the_reported_load_decides_where_nothing_is_cached() -> None:
    busy = {"dp_rank": 0, "sequence": 1, "num_total_tokens": 4000, "num_waiting_uncached_tokens": 1000}
    engines = FakeEngine(loads=[busy]), FakeEngine(loads=[{"dp_rank": 0, "sequence": 1}])

    async def scenario(fleet: Fleet) -> list[int]:
        await until(lambda: fleet.num_ready == 2 and all(engine.asked.count("/v1/loads") > 1 for engine in engines))
        placed = [fleet.place([number], NO_FIELDS) for number in range(4)]
        return [each.engine.number for each in placed if each is not None]

    assert run(scenario, *engines) == [1, 1, 1, 1]


def test_a_report_counts_the_requests_that_were_sent_a_little_before_it() -> None:
    """Otherwise a request would count twice for as long as it runs."""
    engine = FakeEngine()

    async def scenario(fleet: Fleet) -> tuple[int, int]:
        await until(lambda: fleet.num_ready)
        placed = fleet.place(range(64), NO_FIELDS)
        assert placed is not None
        before = len(placed.replica.uncounted)
        engine.loads = [{"dp_rank": 0, "sequence": 2}]
        await until(lambda: not placed.replica.uncounted)
        return before, len(placed.replica.uncounted)

    assert run(scenario, engine) == (1, 0)


def test_a_request_counts_once_also_if_a_report_was_ignored_after_it() -> None:
    """An engine repeats its report while nothing changes, and the router ignores the repetition."""
    engine = FakeEngine(loads=[{"dp_rank": 0, "sequence": 1}])

    async def scenario(fleet: Fleet) -> tuple[float, int]:
        await until(lambda: fleet.num_ready)
        placed, router = fleet.place(range(64), NO_FIELDS), fleet._router
        assert placed is not None
        assert router is not None
        await until(lambda: not placed.replica.uncounted)
        num_old = router.num_old_reports
        await until(lambda: router.num_old_reports > num_old)
        engine.loads = [{"dp_rank": 0, "sequence": 2, "num_total_tokens": 64}]
        num_asked = engine.asked.count("/v1/loads")
        await until(lambda: engine.asked.count("/v1/loads") > num_asked + 1)
        [facts] = router.facts_of([placed.replica.id], (), num_tokens=0, now_s=0)
        return facts.load_blocks, router._known[placed.replica.id].to_hold.unreported_tokens

    assert run(scenario, engine) == (16, 0)


def test_an_adapter_that_is_loaded_costs_no_request_and_no_session() -> None:
    engine = FakeEngine()

    async def scenario(fleet: Fleet) -> None:
        await until(lambda: fleet.num_ready)
        [found] = fleet.engines
        placed = fleet.place(range(64), NO_FIELDS)
        assert placed is not None
        fleet.add_session("s", found)
        engine.adapters = ("poet",)
        await until(lambda: found.adapters == {"poet"})
        assert (found.num_times_lost, fleet.num_in_flight(placed.replica)) == (0, 1)
        assert fleet.place((), RoutingFields(open_session="s")) is not None

    run(scenario, engine, description_interval_s=0.02)


@pytest.mark.parametrize("path", ["/server_info", "/model_info"])
def test_a_page_that_fails_a_few_times_does_not_cost_the_engine(path: str) -> None:
    engine = FakeEngine()

    async def failing(_: Request) -> Response:
        return JSONResponse({}, 500)

    async def scenario(fleet: Fleet) -> None:
        await until(lambda: fleet.num_ready)
        [found] = fleet.engines
        num_asked = engine.asked.count(path)
        engine.pages[path] = failing
        await until(lambda: engine.asked.count(path) == num_asked + 2)
        del engine.pages[path]
        await until(lambda: engine.asked.count(path) > num_asked + 3)
        assert found.num_times_lost == 0
        engine.pages[path] = failing
        await until(lambda: found.state is DOWN)

    run(scenario, engine, description_interval_s=0.02, max_failed_polls=4)


def test_an_engine_that_describes_other_ranks_is_followed_again() -> None:
    engine = FakeEngine()

    async def scenario(fleet: Fleet) -> None:
        await until(lambda: fleet.num_ready)
        engine.dp_size = 2
        await until(lambda: list(fleet.engines[0].replicas) == [0, 1])

    run(scenario, engine, description_interval_s=0.02)


def test_the_session_that_was_not_used_for_the_longest_time_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fleet, "_MAX_SESSIONS", 2)

    async def scenario(fleet: Fleet) -> None:
        await until(lambda: fleet.num_ready)
        [engine] = fleet.engines
        assert [fleet.add_session(name, engine) for name in ("a", "b", "a", "x" * 257)] == [True, True, False, False]
        assert fleet.place((), RoutingFields(open_session="a")) is not None
        fleet.add_session("c", engine)
        assert fleet.place((), RoutingFields(open_session="a")) is not None
        with pytest.raises(ConfigError):
            fleet.place((), RoutingFields(open_session="b"))

    run(scenario, FakeEngine())


def test_an_engine_that_is_not_ready_gets_nothing_until_it_is() -> None:
    first, second = FakeEngine(), FakeEngine()

    async def scenario(fleet: Fleet) -> None:
        await until(lambda: fleet.num_ready == 2)
        first.is_ready = False
        await until(lambda: states(fleet) == [NOT_READY, UP])
        placed = [fleet.place([number], NO_FIELDS) for number in range(4)]
        assert {each.engine.number for each in placed if each is not None} == {1}
        assert not fleet.engines[0].lost.is_set()
        first.is_ready = True
        await until(lambda: states(fleet) == [UP, UP])
        placed = [fleet.place([number], NO_FIELDS) for number in range(4)]
        assert 0 in {each.engine.number for each in placed if each is not None}

    run(scenario, first, second)


def test_an_engine_without_ready_and_loads_is_asked_for_its_health() -> None:
    """vLLM and SGLang have no /ready, and vLLM has no /v1/loads."""

    async def missing(_: Request) -> Response:
        return JSONResponse({}, 404)

    async def healthy(_: Request) -> Response:
        return JSONResponse({})

    engine = FakeEngine(pages={"/ready": missing, "/v1/loads": missing, "/model_info": missing, "/health": healthy})

    async def scenario(fleet: Fleet) -> None:
        await until(lambda: fleet.num_ready)

    run(scenario, engine)


def test_an_engine_that_stops_is_taken_out_and_found_again_on_its_port() -> None:
    engine = FakeEngine()

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            running = AsyncExitStack()
            url = await running.enter_async_context(served_engine(engine))
            other = await stack.enter_async_context(served_engine(FakeEngine()))
            fleet = await stack.enter_async_context(following(url, other))
            await until(lambda: fleet.num_ready == 2)
            await running.aclose()
            await until(lambda: states(fleet) == [DOWN, UP])
            assert "does not answer" in fleet.engines[0].problem
            assert fleet.engines[0].lost.is_set()
            placed = [fleet.place([number], NO_FIELDS) for number in range(4)]
            assert {each.engine.number for each in placed if each is not None} == {1}
            await stack.enter_async_context(served_engine(engine, int(url.rpartition(":")[2])))
            await until(lambda: states(fleet) == [UP, UP])
            assert (fleet.engines[0].problem, fleet.engines[0].num_times_lost) == ("", 1)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_engine_with_another_page_size_gets_nothing_and_says_why() -> None:
    async def scenario(fleet: Fleet) -> str:
        await until(lambda: fleet.num_ready == 1 and any("page size" in engine.problem for engine in fleet.engines))
        return next(engine.problem for engine in fleet.engines if engine.problem)

    assert "start all engines with one page size" in run(scenario, FakeEngine(page_size=4), FakeEngine(page_size=8))


WRONG_ANSWERS: dict[str, tuple[str, object]] = {
    "a description that is no object": ("/server_info", [1]),
    "a page size of 0": ("/server_info", {"page_size": 0}),
    "a million ranks": ("/server_info", {"dp_size": 1_000_000}),
    "streams that cannot be dialed": ("/server_info", {"kv_events": {"endpoint_host": "x"}}),
    "adapters of another type": ("/model_info", {"adapters": [1]}),
}


@pytest.mark.parametrize("case", WRONG_ANSWERS)
def test_an_engine_with_wrong_answers_gets_nothing_and_the_others_go_on(case: str) -> None:
    path, content = WRONG_ANSWERS[case]

    async def wrong(_: Request) -> Response:
        return JSONResponse(content)

    bad = FakeEngine(pages={path: wrong})

    async def scenario(fleet: Fleet) -> None:
        await until(lambda: bad.asked.count(path) > 1 and fleet.num_ready == 1)
        assert states(fleet) == [DOWN, UP]
        assert fleet.engines[0].problem != "has not answered yet"

    run(scenario, bad, FakeEngine())


@pytest.mark.parametrize("load", [[1], [{"dp_rank": "x"}], [{"dp_rank": 7}], [{}] * 2000])
def test_wrong_loads_cost_nothing_but_themselves(load: list[object]) -> None:
    engine = FakeEngine()

    async def loads(_: Request) -> Response:
        return JSONResponse({"loads": load})

    engine.pages["/v1/loads"] = loads

    async def scenario(fleet: Fleet) -> None:
        await until(lambda: engine.asked.count("/v1/loads") > 2)
        assert states(fleet) == [UP]

    run(scenario, engine)


def test_tokens_come_from_the_engines_in_turn() -> None:
    engines = FakeEngine(tokens=[1, 2]), FakeEngine(tokens=[1, 2])
    fields = RoutingFields(tokenize_body=b'{"prompt": "a b"}')

    async def scenario(fleet: Fleet) -> list[object]:
        await until(lambda: fleet.num_ready == 2)
        return [await fleet.tokens_of(fields) for _ in range(4)]

    assert run(scenario, *engines) == [[1, 2]] * 4
    assert [engine.asked.count("/tokenize") for engine in engines] == [2, 2]


@pytest.mark.parametrize("tokens", [None, [-1], [2**32], ["a"]])
def test_a_prompt_whose_tokens_no_engine_says_is_routed_by_load(tokens: Any) -> None:
    fields = RoutingFields(tokenize_body=b'{"prompt": "a b"}')

    async def scenario(fleet: Fleet) -> tuple[object, int]:
        await until(lambda: fleet.num_ready)
        found = await fleet.tokens_of(fields)
        assert fleet.place(found, fields) is not None
        return found, fleet.num_unknown_prompts

    assert run(scenario, FakeEngine(tokens=tokens)) == ((), 1)


def test_a_question_for_tokens_is_not_repeated_at_an_engine_that_may_fail_in_the_same_way() -> None:
    never = asyncio.Event()

    async def hold(_: Request) -> Response:
        await never.wait()
        return JSONResponse({})

    engines = [FakeEngine(pages={"/tokenize": hold}) for _ in range(3)]

    async def scenario(fleet: Fleet) -> object:
        await until(lambda: fleet.num_ready == 3)
        found = await fleet.tokens_of(RoutingFields(tokenize_body=b'{"prompt": "a"}'))
        never.set()
        return found

    assert run(scenario, *engines, tokenize_timeout_s=0.1) == ()
    assert sum(engine.asked.count("/tokenize") for engine in engines) == 1


def test_no_more_of_a_prompt_is_hashed_than_the_limit_says() -> None:
    async def scenario(fleet: Fleet) -> int:
        await until(lambda: fleet.num_ready)
        placed = fleet.place(range(http_fleet.MAX_HASHED_TOKENS + 1000), NO_FIELDS)
        assert placed is not None
        return len(placed.pick.block_hashes)

    assert run(scenario, FakeEngine()) == http_fleet.MAX_HASHED_TOKENS // 4


def test_a_flood_of_tokens_is_cut_off() -> None:
    fields = RoutingFields(tokenize_body=b'{"prompt": "a"}')

    async def scenario(fleet: Fleet) -> object:
        await until(lambda: fleet.num_ready)
        return await fleet.tokens_of(fields)

    assert run(scenario, FakeEngine(tokens=[2**31] * 100_000)) == ()


def test_a_model_that_is_an_adapter_counts_as_one() -> None:
    engines = FakeEngine(adapters=("poet",)), FakeEngine(adapters=("poet",))

    async def scenario(fleet: Fleet) -> list[int]:
        await until(lambda: fleet.num_ready == 2)
        placed = [fleet.place([number], RoutingFields(model="poet")) for number in range(4)]
        return [each.engine.number for each in placed if each is not None]

    assert len(set(run(scenario, *engines))) == 1, "the adapter is loaded where it was used first"


def test_the_sessions_of_an_engine_end_with_it() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            running = AsyncExitStack()
            urls = [await running.enter_async_context(served_engine(FakeEngine()))]
            urls.append(await stack.enter_async_context(served_engine(FakeEngine())))
            fleet = await stack.enter_async_context(following(*urls))
            await until(lambda: fleet.num_ready == 2)
            for name, engine in zip("ab", fleet.engines, strict=True):
                fleet.add_session(name, engine)
            await running.aclose()
            await until(lambda: fleet.num_ready == 1)
            with pytest.raises(ConfigError):
                fleet.place((), RoutingFields(open_session="a"))
            assert fleet.place((), RoutingFields(open_session="b")) is not None

    asyncio.run(asyncio.wait_for(scenario(), 60))
