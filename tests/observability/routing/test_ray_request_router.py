"""``KvRequestRouter`` in Ray Serve's own routing loop, with replicas of the test: which one gets which request.

Ray is not installed in the environment of the suite: ``make engines ENGINES=ray`` installs it and runs this file.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
from kit.waiting import DEADLINE_S

from scheduler_components import BlockStored, ConfigError
from scheduler_components.cache import DEFAULT_NAMESPACE, hash_pages

pytest.importorskip("ray.serve")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from observability.kv_stream import Subscriber
from observability.routing import LockedListener, ray_request_router
from observability.routing.ray_request_router import KvRequestRouter, token_ids_of
from scheduler_components.kv_events import DecodedBatch, EventBatch, KVEventsConfig, ZmqEventPublisher

pytestmark = [pytest.mark.engine, pytest.mark.sockets, pytest.mark.threads]

DEPLOYMENT = DeploymentID(name="llm", app_name="app")
PROMPT = list(range(64))


class FakeReplica:
    """The part of ``RunningReplica`` that Ray's routing loop uses."""

    def __init__(self, name: str, **stats: object) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.routing_stats, self.max_ongoing_requests = stats, 10
        self.multiplexed_model_ids: set[str] = set()
        self.node_id, self.availability_zone = "node", None
        self.num_ongoing = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.num_ongoing


def make_router(**options: Any) -> KvRequestRouter:
    router = KvRequestRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    router.initialize_state(**{"page_size": 4, **options})
    return router


def pending(number: int, *arguments: object, **named: object) -> PendingRequest:
    return PendingRequest(args=list(arguments), kwargs=named, metadata=RequestMetadata(f"r{number}", f"i{number}"))


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


async def route(router: KvRequestRouter, number: int, tokens: list[int]) -> str:
    """Let Ray's loop choose a replica, and say that it has accepted the request."""
    request = pending(number, {"prompt_token_ids": tokens})
    replica = await router._choose_replica_for_request(request)
    router.on_request_routed(request, replica.replica_id, None)
    return str(replica.replica_id.unique_id)


async def complete(router: KvRequestRouter, number: int, tokens: list[int]) -> str:
    """Route a request, and end it."""
    name = await route(router, number, tokens)
    router.on_request_completed(ReplicaID(name, DEPLOYMENT), f"i{number}")
    return name


def test_requests_of_one_prompt_go_to_one_replica_and_others_are_spread() -> None:
    async def scenario() -> list[str]:
        router = make_router()
        router.update_replicas([FakeReplica("a"), FakeReplica("b")])
        prompts = [PROMPT, list(range(100, 164))] * 3
        return [await complete(router, number, prompt) for number, prompt in enumerate(prompts)]

    first, second, *others = run(scenario)
    assert {first, second} == {"a", "b"}
    assert others == [first, second] * 2


def test_requests_without_tokens_are_spread_by_what_was_sent() -> None:
    async def scenario() -> list[str]:
        router = make_router()
        router.update_replicas([FakeReplica("a"), FakeReplica("b")])
        return [await route(router, number, []) for number in range(4)]

    assert sorted(run(scenario)) == ["a", "a", "b", "b"]


def test_a_full_replica_is_passed_over() -> None:
    async def scenario() -> str:
        router = make_router()
        full, other = FakeReplica("a"), FakeReplica("b")
        router.update_replicas([full, other])
        first = await route(router, 0, PROMPT)
        busy = full if first == "a" else other
        busy.num_ongoing = busy.max_ongoing_requests
        second = await route(router, 1, PROMPT)
        return f"{first}{second}"

    assert run(scenario) in ("ab", "ba")


def test_blocks_that_a_replica_publishes_count_before_any_request(stack: ExitStack) -> None:
    """The stream is that of a real publisher, which the replica names in its statistics."""
    publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=KVEventsConfig(bind=True))
    stack.callback(publisher.shutdown)
    stored = BlockStored(hash_pages(PROMPT, 4), None, tuple(PROMPT), 4, None, "GPU")
    publisher.publish(EventBatch(1.0, [stored]))
    publisher.idle()
    described = {"publishers": [{"dp_rank": 0, "endpoint": publisher.endpoint}], "block_size": 4}
    described["publishers"][0]["replay_endpoint"] = publisher.replay_endpoint

    async def scenario() -> list[str]:
        router = make_router()
        stack.callback(router.close)
        router.update_replicas([FakeReplica("a"), FakeReplica("b", kv_events=described, host="127.0.0.1")])
        while not router._kv.view.match_lengths(hash_pages(PROMPT, 4)):
            await asyncio.sleep(0.005)
        chosen = [await complete(router, number, PROMPT) for number in range(2)]
        router.update_replicas([FakeReplica("a")])
        return [*chosen, await route(router, 3, PROMPT)]

    assert run(scenario) == ["b", "b", "a"]


def test_reported_loads_decide_where_nothing_is_cached() -> None:
    async def scenario() -> list[str]:
        router = make_router()
        busy = {"sequence": 1, "num_total_tokens": 4000, "num_waiting_uncached_tokens": 1000}
        router.update_replicas([FakeReplica("a", load=busy), FakeReplica("b", load={"sequence": 1})])
        return [await route(router, number, [number]) for number in range(3)]

    assert run(scenario) == ["b", "b", "b"]


@pytest.mark.parametrize("stats", [{"load": {"sequence": "x"}}, {"kv_events": {"endpoint_host": 7}}, {"kv_events": 5}])
def test_wrong_stats_of_a_replica_cost_nothing_but_themselves(stats: dict[str, object]) -> None:
    async def scenario() -> str:
        router = make_router()
        router.update_replicas([FakeReplica("a", **stats)])
        return await route(router, 0, PROMPT)

    assert run(scenario) == "a"


def test_a_replica_that_died_gets_nothing_more() -> None:
    async def scenario() -> set[str]:
        router = make_router()
        router.update_replicas([FakeReplica("a"), FakeReplica("b")])
        dead = await route(router, 0, PROMPT)
        router.on_replica_actor_died(ReplicaID(dead, DEPLOYMENT))
        return {dead} & {await route(router, number, PROMPT) for number in range(1, 4)}

    assert run(scenario) == set()


class _Body:
    prompt_token_ids = (1, 2)


@pytest.mark.parametrize(
    ("request_of", "tokens"),
    [
        (lambda: pending(0), ()),
        (lambda: pending(0, "text", {"prompt": "text"}), ()),
        (lambda: pending(0, {"prompt_token_ids": [1, 2]}), [1, 2]),
        (lambda: pending(0, _Body()), (1, 2)),
        (lambda: pending(0, "text", body={"input_ids": [3]}), [3]),
    ],
)
def test_tokens_are_found_in_any_argument(request_of: Callable[[], PendingRequest], tokens: object) -> None:
    async def scenario() -> object:
        return token_ids_of(request_of())

    assert run(scenario) == tokens


def test_a_function_of_the_user_finds_tokens_and_a_missing_one_is_refused() -> None:
    router = make_router(tokens_of="observability.routing.ray_request_router:token_ids_of")
    assert router._tokens_of is token_ids_of
    for path in ("nowhere:f", "json:nothing", ""):
        if path:
            with pytest.raises(ConfigError, match="module:function"):
                make_router(tokens_of=path)


@pytest.mark.parametrize("tokens", [[[1, 2]], ["a"], [-1], [2**32], [True], [1.0], "ab", b"ab"])
def test_tokens_that_have_no_hashes_are_unknown(tokens: object) -> None:
    async def scenario() -> object:
        return token_ids_of(pending(0, {"input_ids": tokens}))

    assert run(scenario) == ()


def test_a_replica_that_is_gone_takes_its_picks_with_it() -> None:
    async def scenario() -> int:
        router = make_router()
        router.update_replicas([FakeReplica("a")])
        await route(router, 0, PROMPT)
        router.update_replicas([])
        return len(router._picks)

    assert run(scenario) == 0


def test_a_replica_is_forgotten_without_waiting_for_the_thread_that_follows_it(
    monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    """The thread is stuck until the event loop, which forgets the replica, has gone on."""
    may_end, listeners = threading.Event(), list[LockedListener]()

    def stuck(subscriber: Subscriber, stop: threading.Event) -> None:
        with subscriber:
            assert may_end.wait(DEADLINE_S)
            assert stop.is_set()
            late = DecodedBatch(0.0, (BlockStored((1,), None, (), 4, None),), 0)
            listeners[0].on_batch_applied(0, 1, late, replayed=False)

    monkeypatch.setattr(ray_request_router, "_poll", stuck)
    described = {"publishers": [{"dp_rank": 0, "endpoint": "tcp://127.0.0.1:1"}], "block_size": 4}

    async def scenario() -> tuple[int, int]:
        router = make_router()
        stack.callback(router.close)
        router.update_replicas([FakeReplica("a", kv_events=described)])
        [followed] = router._followed.values()
        listeners.append(followed.listener)
        router.update_replicas([FakeReplica("a")])
        [thread] = router._ending
        assert thread.is_alive()
        may_end.set()
        while thread.is_alive():
            await asyncio.sleep(0.005)
        return router._kv.view.block_count(0), len(router._followed)

    assert run(scenario) == (0, 1), "what the thread says later is of a replica that has gone"


def test_a_prompt_is_hashed_once_for_a_request() -> None:
    async def scenario() -> tuple[int, int]:
        router = make_router()
        router.update_replicas([FakeReplica("a")])
        request = pending(0, {"prompt_token_ids": PROMPT})
        await router._choose_replica_for_request(request)
        [prompt] = router._prompts.values()
        router.on_request_routed(request, ReplicaID("a", DEPLOYMENT), None)
        [pick] = router._picks.values()
        assert pick.block_hashes is prompt.hashes_in(DEFAULT_NAMESPACE)
        return len(router._prompts), len(pick.block_hashes)

    assert run(scenario) == (0, 16)
