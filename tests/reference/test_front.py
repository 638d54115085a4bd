"""The front: what is opened is dispatched once, told everything, and aborted when its client leaves early."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from scheduler_components.errors import ConfigError
from scheduler_components.load.snapshot import LoadSnapshot
from scheduler_components.metrics.stats import SchedulerStats
from scheduler_components.reference.batch import RequestOutput
from scheduler_components.reference.dispatch import LoadDispatcher, ReplicaLoad
from scheduler_components.reference.front import (
    EngineFailedError,
    Front,
    GenerateRequest,
    RequestRefusedError,
    TooBusyError,
)
from scheduler_components.reference.messages import (
    AbortRequest,
    Command,
    RequestRefused,
    StatsReport,
    StepOutputs,
    SubmitRequest,
    decode_command,
    pack_tokens,
)
from scheduler_components.reference.request import FinishReason, SamplingLimits


class Leader:
    """A leader's socket that keeps what it was sent."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def send(self, frame: bytes, flags: int) -> None:
        self.commands.append(decode_command(frame))


class Metrics:
    def __init__(self) -> None:
        self.reports: list[SchedulerStats] = []

    def record(self, stats: SchedulerStats) -> None:
        self.reports.append(stats)


def make_front(num_replicas: int = 1, **settings: Any) -> tuple[Front, list[Leader], Metrics]:
    leaders, metrics = [Leader() for _ in range(num_replicas)], Metrics()
    dispatcher = LoadDispatcher(replicas=[ReplicaLoad() for _ in leaders])
    return Front(leaders=leaders, dispatcher=dispatcher, metrics=metrics, **settings), leaders, metrics  # type: ignore[arg-type]


def wanted(rid: str | None = None, num_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=pack_tokens(range(num_tokens)), limits=SamplingLimits(max_new_tokens=2))


def output(rid: str, token: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(rid, (token,), reason, 3, 1, 0)


def stats(sequence: int, *, running: int = 0) -> SchedulerStats:
    load = LoadSnapshot(sequence=sequence, num_running_reqs=running)
    return SchedulerStats(labels=(("dp_rank", "0"),), load=load)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, timeout=10))


def test_a_request_is_submitted_once_and_gets_its_own_news_in_order() -> None:
    async def scenario() -> None:
        front, (leader,), _ = make_front()
        async with front.open_request(wanted("a")) as first, front.open_request(wanted("b")) as second:
            front.receive(StepOutputs((output("a", 1), output("b", 2))))
            front.receive(StepOutputs((output("a", 3, FinishReason.LENGTH),)))
            front.receive(StepOutputs((output("b", 4, FinishReason.STOP),)))
            assert [news.token_ids for news in [each async for each in first]] == [(1,), (3,)]
            assert [news.token_ids for news in [each async for each in second]] == [(2,), (4,)]
        assert [command.rid for command in leader.commands if isinstance(command, SubmitRequest)] == ["a", "b"]
        assert not any(isinstance(command, AbortRequest) for command in leader.commands)
        assert front.num_open_requests == 0

    run(scenario())


def test_a_client_that_leaves_early_aborts_its_request() -> None:
    async def scenario() -> None:
        front, (leader,), _ = make_front()
        async with front.open_request(wanted("a")):
            pass
        assert leader.commands[-1] == AbortRequest("a")
        front.receive(StepOutputs((output("a", 1),)))  # on its way when the client left: nobody minds

    run(scenario())


def test_requests_without_an_id_get_different_ones() -> None:
    async def scenario() -> None:
        front, _, _ = make_front()
        async with front.open_request(wanted()) as first, front.open_request(wanted()) as second:
            assert first.rid != second.rid

    run(scenario())


def test_an_id_in_use_is_refused_and_can_be_used_again_later() -> None:
    async def scenario() -> None:
        front, (leader,), _ = make_front()
        async with front.open_request(wanted("a")):
            with pytest.raises(ConfigError, match="open request"):
                front.open_request(wanted("a"))
            assert len(leader.commands) == 1
        async with front.open_request(wanted("a")):
            pass

    run(scenario())


def test_requests_beyond_the_limit_are_turned_away() -> None:
    async def scenario() -> None:
        front, _, _ = make_front(max_open_requests=1)
        async with front.open_request(wanted()):
            with pytest.raises(TooBusyError):
                front.open_request(wanted())

    run(scenario())


def test_a_refusal_reaches_its_author_and_is_not_aborted() -> None:
    async def scenario() -> None:
        front, (leader,), _ = make_front()
        with pytest.raises(RequestRefusedError, match="too long"):
            async with front.open_request(wanted("a")) as news:
                front.receive(RequestRefused("a", "too long"))
                await anext(news)
        assert not any(isinstance(command, AbortRequest) for command in leader.commands)

    run(scenario())


def test_a_failed_engine_tells_everybody() -> None:
    async def scenario() -> None:
        front, _, _ = make_front()
        async with front.open_request(wanted("a")) as news:
            front.fail(EngineFailedError("rank 3 died"))
            with pytest.raises(EngineFailedError, match="rank 3"):
                await anext(news)
        with pytest.raises(EngineFailedError):
            front.open_request(wanted("b"))

    run(scenario())


def test_requests_go_to_the_replica_with_the_least_load() -> None:
    async def scenario() -> None:
        front, leaders, _ = make_front(2)
        async with front.open_request(wanted(num_tokens=100)), front.open_request(wanted(num_tokens=10)):
            async with front.open_request(wanted(num_tokens=10)) as third:
                assert third.replica == 1
        assert [sum(isinstance(each, SubmitRequest) for each in leader.commands) for leader in leaders] == [1, 2]

    run(scenario())


def test_idle_means_that_every_replica_said_so_after_its_last_request() -> None:
    async def scenario() -> None:
        front, _, metrics = make_front()
        assert front.is_idle
        async with front.open_request(wanted("a")):
            front.receive(StatsReport(0, 0, stats(1)))
            assert not front.is_idle
        front.receive(StatsReport(0, 0, stats(2)))
        assert not front.is_idle  # the replica had not seen the request yet
        front.receive(StatsReport(0, 1, stats(3, running=1)))
        assert not front.is_idle
        front.receive(StatsReport(0, 1, stats(4)))
        assert front.is_idle
        assert len(metrics.reports) == 4

    run(scenario())


def test_a_waiter_is_woken_by_the_report_that_it_waits_for() -> None:
    async def scenario() -> None:
        front, _, _ = make_front()
        waiting = asyncio.create_task(front.board.wait_until(lambda: 0 in front.board.stats))
        await asyncio.sleep(0)
        assert not waiting.done()
        front.receive(StatsReport(0, 0, stats(1)))
        await waiting

    run(scenario())
