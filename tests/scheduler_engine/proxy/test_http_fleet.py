"""The fleet finds engines, follows their readiness and load, takes out those that are lost, and finds them again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any

import pytest
from kit.fake_engine import FakeEngine, holds, says, served_engine
from kit.proxied import following, until
from kit.waiting import DEADLINE_S

from observability.routing import HashedPrompt, LockedListener, RouterListener, hashed_prompt
from scheduler_components import AllBlocksCleared, BlockStored, ConfigError
from scheduler_components.cache import DEFAULT_NAMESPACE, PrefixNamespace, hash_pages
from scheduler_components.cache.block_hash import weight_namespace
from scheduler_components.kv_events import DecodedBatch, EventBatch, KVEventsConfig, ZmqEventPublisher
from scheduler_engine.proxy import http_fleet
from scheduler_engine.proxy.answer_memory import HeldAnswer
from scheduler_engine.proxy.http_fleet import EngineState, Fleet, RequestRoute
from scheduler_engine.proxy.http_replica import EngineClient, EngineDownError
from scheduler_engine.proxy.routing_fields import MAX_HASHED_TOKENS, RoutingFields, read_routing_fields

pytestmark = pytest.mark.sockets

UP, NOT_READY, DOWN = EngineState.UP, EngineState.NOT_READY, EngineState.DOWN
NO_FIELDS = RoutingFields()


def run(scenario: Callable[[Fleet], Awaitable[Any]], *engines: FakeEngine, waits: bool = True, **settings: Any) -> Any:
    """Run a scenario when all engines are ready, or immediately."""

    async def with_a_fleet() -> Any:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(served_engine(engine)) for engine in engines]
            fleet = await stack.enter_async_context(following(*urls, **settings))
            await until(lambda: not waits or fleet.num_ready == len(engines))
            return await scenario(fleet)

    return asyncio.run(asyncio.wait_for(with_a_fleet(), 60))


async def becomes_ready(_: Fleet) -> None:
    """A scenario of which the beginning is all."""


async def place(fleet: Fleet, tokens: Sequence[int], fields: RoutingFields) -> RequestRoute | None:
    return await fleet.place(HashedPrompt(token_ids=tokens, page_size=4), fields)


def states(fleet: Fleet) -> list[EngineState]:
    return [engine.state for engine in fleet.engines]


def test_engines_are_found_and_each_rank_is_a_replica() -> None:
    async def scenario(fleet: Fleet) -> list[list[int]]:
        assert await place(fleet, (), NO_FIELDS) is None
        await until(lambda: fleet.num_ready == 2)
        return [list(engine.replicas) for engine in fleet.engines]

    assert run(scenario, FakeEngine(dp_size=2), FakeEngine(), waits=False) == [[0, 1], [0]]


def test_requests_of_one_prompt_go_to_one_replica_and_others_are_spread() -> None:
    async def scenario(fleet: Fleet) -> None:
        placed = [await place(fleet, range(first, first + 64), NO_FIELDS) for first in (0, 1000, 0, 1000)]
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
        placed = [await place(fleet, [number], NO_FIELDS) for number in range(4)]
        return [each.engine.number for each in placed if each is not None]

    assert run(scenario, *engines, waits=False) == [1, 1, 1, 1]


def test_a_report_counts_the_requests_that_were_sent_a_little_before_it() -> None:
    """Otherwise a request would count twice for as long as it runs."""
    engine = FakeEngine()

    async def scenario(fleet: Fleet) -> tuple[int, int]:
        placed = await place(fleet, range(64), NO_FIELDS)
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
        placed, router = await place(fleet, range(64), NO_FIELDS), fleet._router
        assert placed is not None
        assert router is not None
        await until(lambda: not placed.replica.uncounted)
        num_old = router.num_old_reports
        await until(lambda: router.num_old_reports > num_old)
        engine.loads = [{"dp_rank": 0, "sequence": 2, "num_total_tokens": 64}]
        num_asked = engine.asked.count("/v1/loads")
        await until(lambda: engine.asked.count("/v1/loads") > num_asked + 1)
        [found] = router.candidates([placed.replica.id], HashedPrompt(token_ids=(), page_size=4), now_s=0)
        return found.load_blocks, router._known[placed.replica.id].to_hold.unreported_tokens

    assert run(scenario, engine) == (16, 0)


def test_an_adapter_that_is_loaded_costs_no_request_and_no_session() -> None:
    engine = FakeEngine()

    async def scenario(fleet: Fleet) -> None:
        [found] = fleet.engines
        placed = await place(fleet, range(64), NO_FIELDS)
        assert placed is not None
        fleet.add_session("s", found)
        engine.adapters = ("poet",)
        await until(lambda: found.adapters == {"poet"})
        assert (found.num_times_lost, fleet.num_in_flight(placed.replica)) == (0, 1)
        assert await place(fleet, (), RoutingFields(open_session="s")) is not None

    run(scenario, engine, description_interval_s=0.02)


def test_an_engine_whose_models_cannot_be_listed_serves_all_the_same() -> None:
    engine = FakeEngine()

    async def scenario(fleet: Fleet) -> None:
        [found] = fleet.engines
        listed = dict(found.models)
        num_asked = engine.asked.count("/v1/models")
        engine.pages["/v1/models"] = says({}, 500)
        await until(lambda: engine.asked.count("/v1/models") > num_asked + 4)
        assert (found.state, found.num_times_lost, dict(found.models)) == (UP, 0, listed)

    run(scenario, engine, description_interval_s=0.02, max_failed_polls=2)
    run(becomes_ready, FakeEngine(pages={"/v1/models": says({}, 500)}))


@pytest.mark.parametrize("path", ["/server_info", "/model_info"])
def test_a_page_that_fails_a_few_times_does_not_cost_the_engine(path: str) -> None:
    engine = FakeEngine()

    async def scenario(fleet: Fleet) -> None:
        [found] = fleet.engines
        num_asked = engine.asked.count(path)
        engine.pages[path] = says({}, 500)
        await until(lambda: engine.asked.count(path) == num_asked + 2)
        del engine.pages[path]
        await until(lambda: engine.asked.count(path) > num_asked + 3)
        assert found.num_times_lost == 0
        engine.pages[path] = says({}, 500)
        await until(lambda: found.state is DOWN)

    run(scenario, engine, description_interval_s=0.02, max_failed_polls=4)


def test_an_engine_that_describes_other_ranks_is_followed_again() -> None:
    engine = FakeEngine()

    async def scenario(fleet: Fleet) -> None:
        engine.dp_size = 2
        await until(lambda: list(fleet.engines[0].replicas) == [0, 1])

    run(scenario, engine, description_interval_s=0.02)


def test_the_session_that_was_not_used_for_the_longest_time_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fleet, "_MAX_SESSIONS", 2)

    async def scenario(fleet: Fleet) -> None:
        [engine] = fleet.engines
        assert [fleet.add_session(name, engine) for name in ("a", "b", "a", "x" * 257)] == [True, True, False, False]
        assert await place(fleet, (), RoutingFields(open_session="a")) is not None
        fleet.add_session("c", engine)
        assert await place(fleet, (), RoutingFields(open_session="a")) is not None
        with pytest.raises(ConfigError):
            await place(fleet, (), RoutingFields(open_session="b"))

    run(scenario, FakeEngine())


def test_an_engine_that_is_not_ready_gets_nothing_until_it_is() -> None:
    first, second = FakeEngine(), FakeEngine()

    async def scenario(fleet: Fleet) -> None:
        first.is_ready = False
        await until(lambda: states(fleet) == [NOT_READY, UP])
        placed = [await place(fleet, [number], NO_FIELDS) for number in range(4)]
        assert {each.engine.number for each in placed if each is not None} == {1}
        assert not fleet.engines[0].lost.is_set()
        first.is_ready = True
        await until(lambda: states(fleet) == [UP, UP])
        placed = [await place(fleet, [number], NO_FIELDS) for number in range(4)]
        assert 0 in {each.engine.number for each in placed if each is not None}

    run(scenario, first, second)


def test_an_engine_without_ready_and_loads_is_asked_for_its_health() -> None:
    """vLLM and SGLang have no /ready, and vLLM has no /v1/loads."""
    missing = says({}, 404)
    engine = FakeEngine(pages={"/ready": missing, "/v1/loads": missing, "/model_info": missing, "/health": says({})})

    run(becomes_ready, engine)


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
            placed = [await place(fleet, [number], NO_FIELDS) for number in range(4)]
            assert {each.engine.number for each in placed if each is not None} == {1}
            await stack.enter_async_context(served_engine(engine, int(url.rpartition(":")[2])))
            await until(lambda: states(fleet) == [UP, UP])
            assert (fleet.engines[0].problem, fleet.engines[0].num_times_lost) == ("", 1)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_engine_with_another_page_size_gets_nothing_and_says_why() -> None:
    async def scenario(fleet: Fleet) -> str:
        await until(lambda: fleet.num_ready == 1 and any("page size" in engine.problem for engine in fleet.engines))
        return next(engine.problem for engine in fleet.engines if engine.problem)

    assert "start all engines with one page size" in run(
        scenario, FakeEngine(page_size=4), FakeEngine(page_size=8), waits=False
    )


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

    bad = FakeEngine(pages={path: says(content)})

    async def scenario(fleet: Fleet) -> None:
        await until(lambda: bad.asked.count(path) > 1 and fleet.num_ready == 1)
        assert states(fleet) == [DOWN, UP]
        assert fleet.engines[0].problem != "has not answered yet"

    run(scenario, bad, FakeEngine(), waits=False)


@pytest.mark.parametrize("load", [[1], [{"dp_rank": "x"}], [{"dp_rank": 7}], [{}] * 2000])
def test_wrong_loads_cost_nothing_but_themselves(load: list[object]) -> None:
    engine = FakeEngine(pages={"/v1/loads": says({"loads": load})})

    async def scenario(fleet: Fleet) -> None:
        await until(lambda: engine.asked.count("/v1/loads") > 2)
        assert states(fleet) == [UP]

    run(scenario, engine, waits=False)


def test_tokens_come_from_the_engines_in_turn() -> None:
    engines = FakeEngine(tokens=[1, 2]), FakeEngine(tokens=[1, 2])
    fields = RoutingFields(tokenize_body=b'{"prompt": "a b"}')

    async def scenario(fleet: Fleet) -> list[object]:
        return [await fleet.tokens_of(fields) for _ in range(4)]

    assert [list(tokens) for tokens in run(scenario, *engines)] == [[1, 2]] * 4
    assert [engine.asked.count("/tokenize") for engine in engines] == [2, 2]


@pytest.mark.parametrize("tokens", [None, [-1], [2**32], ["a"]])
def test_a_prompt_whose_tokens_no_engine_says_is_routed_by_load(tokens: Any) -> None:
    fields = RoutingFields(tokenize_body=b'{"prompt": "a b"}')

    async def scenario(fleet: Fleet) -> tuple[object, int]:
        found = await fleet.tokens_of(fields)
        assert await place(fleet, found, fields) is not None
        return found, fleet.num_unknown_prompts

    assert run(scenario, FakeEngine(tokens=tokens)) == ((), 1)


def test_a_question_for_tokens_is_not_repeated_at_an_engine_that_may_fail_in_the_same_way() -> None:
    never = asyncio.Event()

    engines = [FakeEngine(pages={"/tokenize": holds(never)}) for _ in range(3)]

    async def scenario(fleet: Fleet) -> object:
        found = await fleet.tokens_of(RoutingFields(tokenize_body=b'{"prompt": "a"}'))
        never.set()
        return found

    assert run(scenario, *engines, tokenize_timeout_s=0.1) == ()
    assert sum(engine.asked.count("/tokenize") for engine in engines) == 1


@pytest.mark.parametrize("field", ["input_ids", "prompt"])
def test_no_more_of_a_prompt_is_kept_than_counts(field: str) -> None:
    fields = read_routing_fields(json.dumps({field: [7] * (MAX_HASHED_TOKENS + 1000)}).encode())
    assert fields.token_ids is not None
    assert len(fields.token_ids) == MAX_HASHED_TOKENS


def test_a_text_of_any_length_is_not_tokenized() -> None:
    engine = FakeEngine(tokens=[1])

    async def scenario(fleet: Fleet) -> tuple[int, int]:
        prompt = await fleet.prompt_of(RoutingFields(tokenize_body=b" " * (4 * 2**20 + 1)))
        return len(prompt.token_ids), fleet.num_unknown_prompts

    assert run(scenario, engine) == (0, 1)
    assert "/tokenize" not in engine.asked


def test_a_flood_of_tokens_is_cut_off() -> None:
    fields = RoutingFields(tokenize_body=b'{"prompt": "a"}')

    async def scenario(fleet: Fleet) -> object:
        return await fleet.tokens_of(fields)

    assert run(scenario, FakeEngine(tokens=[2**31] * 100_000)) == ()


def test_a_model_that_is_an_adapter_counts_as_one() -> None:
    engines = FakeEngine(adapters=("poet",)), FakeEngine(adapters=("poet",))

    async def scenario(fleet: Fleet) -> list[int]:
        placed = [await place(fleet, [number], RoutingFields(model="poet")) for number in range(4)]
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
                await place(fleet, (), RoutingFields(open_session="a"))
            assert await place(fleet, (), RoutingFields(open_session="b")) is not None

    asyncio.run(asyncio.wait_for(scenario(), 60))


class Patient:
    """The client of an engine, with which no tokens come and no limit of its own ends the wait."""

    def __init__(self, inner: EngineClient) -> None:
        self._inner, self.num_asked = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def tokenize(self, body: bytes, held: HeldAnswer) -> Sequence[int]:
        self.num_asked += 1
        if self.num_asked > 1:
            await asyncio.Event().wait()
        raise EngineDownError("refused", is_refused=True)


def test_all_questions_for_the_tokens_of_a_prompt_have_one_limit_of_time() -> None:
    """Each engine may refuse late, and there may be 256 of them."""

    async def scenario(fleet: Fleet) -> tuple[object, int, int]:
        client = Patient(fleet.engines[0].client)
        for engine in fleet.engines:
            engine.client = client  # type: ignore[assignment]
        found = await fleet.tokens_of(RoutingFields(tokenize_body=b"{}"))
        return found, client.num_asked, fleet.num_unknown_prompts

    engines = [FakeEngine() for _ in range(3)]
    assert run(scenario, *engines, tokenize_timeout_s=0.1) == ((), 2, 1)


def test_tokens_for_which_there_is_no_memory_are_unknown() -> None:
    async def scenario(fleet: Fleet) -> tuple[object, int, int]:
        fields = RoutingFields(tokenize_body=b'{"prompt": "a"}')
        with fleet.answers.open() as other:
            other.resize(2**16 + 1)
            found = await fleet.tokens_of(fields)
        return found, fleet.num_unknown_prompts, fleet.answers.held_bytes

    assert run(scenario, FakeEngine(tokens=[7] * 60_000), max_answer_bytes=1) == ((), 1, 0)


@pytest.mark.threads
def test_a_long_prompt_is_hashed_while_others_are_placed_and_events_are_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its hashing waits for all that. It would wait forever with the router's lock, or on the event loop."""
    has_begun, may_end, hash_pages = threading.Event(), threading.Event(), hashed_prompt.hash_pages

    def slow(tokens: Sequence[int], page_size: int, seed: bytes) -> tuple[int, ...]:
        if len(tokens) > 2**14:
            has_begun.set()
            assert may_end.wait(DEADLINE_S)
        return hash_pages(tokens, page_size, seed)

    monkeypatch.setattr(hashed_prompt, "hash_pages", slow)

    async def scenario(fleet: Fleet) -> int:
        router = fleet._router
        assert router is not None
        placing = asyncio.create_task(place(fleet, range(2**14 + 4), NO_FIELDS))
        await until(has_begun.is_set)
        assert await place(fleet, range(64), NO_FIELDS) is not None
        listener = LockedListener(RouterListener(router=router, replicas={0: 0}, clock=fleet.clock), fleet._lock)
        events = (BlockStored((1, 2), None, (), 4, None),)
        await asyncio.to_thread(listener.on_batch_applied, 0, 1, DecodedBatch(0.0, events, 0), replayed=False)
        assert router.view.block_count(0) == 2
        assert not placing.done()
        may_end.set()
        placed = await placing
        assert placed is not None
        return len(placed.pick.block_hashes)

    assert run(scenario, FakeEngine()) == 2**12 + 1


def test_blocks_of_updated_weights_are_found_by_what_the_stream_says(stack: ExitStack) -> None:
    """The engine publishes a new version of its weights, and the proxy follows its real stream."""
    publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=KVEventsConfig(bind=True))
    stack.callback(publisher.shutdown)
    tokens, space = list(range(64)), weight_namespace("v2")
    streams = {"dp_rank": 0, "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    described = {"page_size": 4, "kv_events": {"publishers": [streams], "block_size": 4}}

    def publish(namespace: PrefixNamespace) -> None:
        hashes = hash_pages(tokens, 4, namespace.seed())
        keys = None if namespace.extra_key is None else ((namespace.extra_key,),) * len(hashes)
        stored = BlockStored(hashes, None, tuple(tokens), 4, None, "GPU", extra_keys=keys)
        publisher.publish(EventBatch(1.0, [AllBlocksCleared(), stored]))
        publisher.idle()

    def is_known(fleet: Fleet, hashes: tuple[int, ...]) -> bool:
        with fleet._lock:
            assert fleet._router is not None
            return bool(fleet._router.view.match_lengths(hashes))

    async def scenario(fleet: Fleet) -> list[int]:
        found: list[int] = []
        for namespace in (DEFAULT_NAMESPACE, space, weight_namespace("v3")):
            publish(namespace)
            await until(partial(is_known, fleet, hash_pages(tokens, 4, namespace.seed())))
            placed = await place(fleet, tokens, NO_FIELDS)
            assert placed is not None
            found += [placed.engine.number, placed.pick.device_blocks]
            fleet.finish(placed)
        return found

    engines = FakeEngine(), FakeEngine(pages={"/server_info": says(described)})
    assert run(scenario, *engines) == [1, 16] * 3


def test_a_request_of_an_adapter_may_go_to_an_engine_that_lists_no_adapters() -> None:
    engines = FakeEngine(adapters=("poet",)), FakeEngine(pages={"/model_info": says({}, 404)}), FakeEngine()

    async def scenario(fleet: Fleet) -> list[int]:
        prompt, fields = HashedPrompt(token_ids=[1], page_size=4), RoutingFields(lora="poet")
        placed = [await fleet.place(prompt, fields, exclude=fleet.engines[:1]) for _ in range(3)]
        return [each.engine.number for each in placed if each is not None]

    assert run(scenario, *engines) == [1, 1, 1]


def test_a_request_of_an_adapter_goes_to_an_engine_that_lists_it() -> None:
    engines = FakeEngine(), FakeEngine(adapters=("poet",)), FakeEngine()

    async def scenario(fleet: Fleet) -> list[int]:
        fields = [RoutingFields(model="poet"), RoutingFields(lora="poet"), RoutingFields(lora="unknown")] * 2
        placed = [await place(fleet, [number], each) for number, each in enumerate(fields)]
        return [each.engine.number for each in placed if each is not None]

    found = run(scenario, *engines)
    assert (len(found), found[0::3], found[1::3]) == (6, [1, 1], [1, 1])
