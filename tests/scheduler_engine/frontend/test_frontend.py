"""Frontend: a request is dispatched once, gets all its deltas, and is aborted when its client closes it early."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from kit.recording_leader import RecordingLeader

from scheduler_components import ConfigError
from scheduler_components.values import FinishReason, LoadSnapshot, OutputBatch, OutputDelta, TokenOutput
from scheduler_engine.device.sampling import SamplingLimits, SamplingParams
from scheduler_engine.engine.messages import (
    FRONTEND_DISPATCHER,
    HEARTBEAT_INTERVAL_S,
    AbortRequest,
    LoadReport,
    RankHeartbeat,
    RequestRefused,
    SubmitRequest,
    pack_tokens,
)
from scheduler_engine.frontend.dispatcher import LoadDispatcher, ReplicaLoad
from scheduler_engine.frontend.errors import (
    EngineFailedError,
    RankSilentError,
    RequestFailedError,
    RequestRefusedError,
    TooBusyError,
)
from scheduler_engine.frontend.frontend import Frontend, GenerateReqInput


def make_front(num_replicas: int = 1, **settings: Any) -> tuple[Frontend, list[RecordingLeader]]:
    leaders = [RecordingLeader() for _ in range(num_replicas)]
    dispatcher = LoadDispatcher(replicas=[ReplicaLoad() for _ in leaders])
    return Frontend(leaders=leaders, dispatcher=dispatcher, **settings), leaders  # type: ignore[arg-type]


def make_request(rid: str | None = None, num_tokens: int = 3) -> GenerateReqInput:
    return GenerateReqInput(rid=rid, input_ids=pack_tokens(range(num_tokens)), limits=SamplingLimits(max_new_tokens=2))


def output(rid: str, token: int, reason: FinishReason | None = None) -> OutputDelta:
    return OutputDelta(rid, 0, 1, reason, TokenOutput((token,), 3))


def load(sequence: int, *, seen: int = 0, running: int = 0) -> LoadSnapshot:
    return LoadSnapshot(
        sequence=sequence, num_running_reqs=running, dispatched_watermarks=((FRONTEND_DISPATCHER, seen),)
    )


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, timeout=10))


async def test_a_request_is_submitted_once_and_gets_its_deltas_in_order() -> None:
    frontend, (leader,) = make_front()
    async with frontend.open_request(make_request("a")) as first, frontend.open_request(make_request("b")) as second:
        frontend.process_outputs(OutputBatch(0, (output("a", 1), output("b", 2))))
        frontend.process_outputs(OutputBatch(0, (output("a", 3, FinishReason.LENGTH),)))
        frontend.process_outputs(OutputBatch(0, (output("b", 4, FinishReason.STOP),)))
        assert [stream.output.token_ids for stream in [each async for each in first]] == [(1,), (3,)]
        assert [stream.output.token_ids for stream in [each async for each in second]] == [(2,), (4,)]
    assert [command.rid for command in leader.commands if isinstance(command, SubmitRequest)] == ["a", "b"]
    assert not any(isinstance(command, AbortRequest) for command in leader.commands)
    assert frontend.num_open_requests == 0


async def test_a_sampled_request_gets_a_seed_unless_it_has_one() -> None:
    frontend, (leader,) = make_front()
    asked = (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, seed=0),
    )
    for sampling in asked:
        async with frontend.open_request(msgspec.structs.replace(make_request(), sampling=sampling)):
            pass
    sent = [command.sampling for command in leader.commands if isinstance(command, SubmitRequest)]
    assert (sent[0], sent[3]) == (asked[0], asked[3])
    assert None not in (sent[1].seed, sent[2].seed)
    assert sent[1].seed != sent[2].seed


async def test_a_client_that_leaves_early_aborts_its_request() -> None:
    frontend, (leader,) = make_front()
    async with frontend.open_request(make_request("a")):
        pass
    assert leader.commands[-1] == AbortRequest("a")
    frontend.process_outputs(OutputBatch(0, (output("a", 1),)))  # was in flight when the client closed the request
    assert frontend.num_open_requests == 1
    frontend.process_outputs(OutputBatch(0, (output("a", 1, FinishReason.ABORT),)))
    assert frontend.num_open_requests == 0


async def test_a_chosen_id_never_collides_with_one_that_a_client_gave() -> None:
    frontend, _ = make_front()
    async with frontend.open_request(make_request("request-0")), frontend.open_request(make_request()) as second:
        assert second.rid != "request-0"


async def test_an_id_stays_in_use_until_the_end_of_its_request_is_reported() -> None:
    """Otherwise the late abort of the first owner would end the second one's request."""
    frontend, (leader,) = make_front()
    async with frontend.open_request(make_request("a")):
        pass
    with pytest.raises(ConfigError, match="open request"):
        frontend.open_request(make_request("a"))
    assert [type(command) for command in leader.commands] == [SubmitRequest, AbortRequest]
    frontend.process_outputs(OutputBatch(0, (output("a", 1, FinishReason.ABORT),)))
    async with frontend.open_request(make_request("a")) as stream:
        frontend.process_outputs(OutputBatch(0, (output("a", 2, FinishReason.STOP),)))
        assert [each.output.token_ids async for each in stream] == [(2,)]


async def test_requests_beyond_the_limit_are_refused() -> None:
    frontend, _ = make_front(max_open_requests=1)
    async with frontend.open_request(make_request()):
        with pytest.raises(TooBusyError):
            frontend.open_request(make_request())


async def test_a_refusal_reaches_the_client_and_sends_no_abort() -> None:
    frontend, (leader,) = make_front()
    with pytest.raises(RequestRefusedError, match="too long"):
        async with frontend.open_request(make_request("a")) as stream:
            frontend.receive(RequestRefused("a", "too long"))
            await anext(stream)
    assert not any(isinstance(command, AbortRequest) for command in leader.commands)


async def test_a_busy_replica_refuses_with_too_busy() -> None:
    frontend, _ = make_front()
    with pytest.raises(TooBusyError, match="takes no more requests"):
        async with frontend.open_request(make_request("a")) as stream:
            frontend.receive(RequestRefused("a", "this replica takes no more requests", True))
            await anext(stream)
    assert not frontend.num_open_requests


@pytest.mark.parametrize(
    ("delta", "complaint"),
    [
        (OutputDelta("a", 0, 0, FinishReason.ERROR, TokenOutput()), "could not be computed .the engine's log says why"),
        (OutputDelta("a", 0, 0, FinishReason.ERROR, TokenOutput(problem="grammar: no room")), "(grammar: no room)"),
        (OutputDelta("a", 2, 5, FinishReason.STOP, TokenOutput()), "3 tokens .* were dropped"),
    ],
)
async def test_a_request_with_lost_tokens_fails(delta: OutputDelta, complaint: str) -> None:
    frontend, (leader,) = make_front()
    with pytest.raises(RequestFailedError, match=complaint):
        async with frontend.open_request(make_request("a")) as stream:
            frontend.process_outputs(OutputBatch(0, (delta,)))
            await anext(stream)
    assert not any(isinstance(command, AbortRequest) for command in leader.commands)
    assert frontend.num_open_requests == 0


async def test_a_failed_engine_fails_every_request() -> None:
    frontend, _ = make_front()
    async with frontend.open_request(make_request("a")) as stream:
        frontend.fail(EngineFailedError("rank 3 died"))
        with pytest.raises(EngineFailedError, match="rank 3"):
            await anext(stream)
    with pytest.raises(EngineFailedError):
        frontend.open_request(make_request("b"))


async def test_idle_means_that_every_replica_reported_it_after_its_last_request() -> None:
    frontend, _ = make_front()
    assert frontend.is_idle
    async with frontend.open_request(make_request("a")):
        frontend.receive(LoadReport(load(1)))
        assert not frontend.is_idle
        frontend.process_outputs(OutputBatch(0, (output("a", 1, FinishReason.LENGTH),)))
    frontend.receive(LoadReport(load(2)))
    assert not frontend.is_idle  # the replica had not seen the request yet
    frontend.receive(LoadReport(load(3, seen=1, running=1)))
    assert not frontend.is_idle
    frontend.receive(LoadReport(load(4, seen=1)))
    assert frontend.is_idle


async def test_a_report_wakes_the_task_that_waits_for_it() -> None:
    frontend, _ = make_front()
    replica = frontend.dispatcher.replicas[0]
    waiting = asyncio.create_task(frontend.replies.wait_until(lambda: replica.snapshot.sequence == 1))
    await asyncio.sleep(0)
    assert not waiting.done()
    frontend.receive(LoadReport(load(1)))
    await waiting


def make_silent(frontend: Frontend, *replicas: int) -> None:
    """All ranks speak; then those of ``replicas`` are silent for longer than they may be."""
    for replica in range(len(frontend.leaders)):
        frontend.receive(RankHeartbeat(f"dp{replica}", replica))
    for _ in range(round(frontend.heartbeats.timeout_s / HEARTBEAT_INTERVAL_S) + 1):
        for replica in set(range(len(frontend.leaders))) - set(replicas):
            frontend.receive(RankHeartbeat(f"dp{replica}", replica))
        frontend.tick()


async def test_requests_of_a_silent_replica_fail_and_others_continue() -> None:
    frontend, leaders = make_front(2)
    opened = [frontend.open_request(make_request()) for _ in range(2)]
    make_silent(frontend, 0)
    async with opened[0] as stream:
        with pytest.raises(RankSilentError, match=r"^rank dp0 has sent no heartbeat for 10.5 s$"):
            await anext(stream)
    assert leaders[0].commands[-1] == AbortRequest(opened[0].rid)  # so that it is free again when it goes on
    frontend.process_outputs(OutputBatch(1, (output(opened[1].rid, 1, FinishReason.LENGTH),)))
    assert (await anext(opened[1])).finish_reason == FinishReason.LENGTH


async def test_a_silent_replica_gets_no_requests_until_its_next_heartbeat() -> None:
    frontend, _ = make_front(2)
    frontend.dispatcher.affinity_tokens = 1000
    request = msgspec.structs.replace(make_request(), conversation="one")
    home = frontend.open_request(request).replica
    make_silent(frontend, home)
    assert [frontend.open_request(make_request()).replica for _ in range(3)] == [1 - home] * 3
    assert frontend.open_request(request).replica == 1 - home
    frontend.receive(RankHeartbeat(f"dp{home}", home))
    assert frontend.open_request(make_request()).replica == home


async def test_when_all_replicas_are_silent_a_request_is_refused_immediately() -> None:
    frontend, leaders = make_front(2)
    make_silent(frontend, 0, 1)
    with pytest.raises(RankSilentError, match="rank dp0"):
        frontend.open_request(make_request())
    assert not any(leader.commands for leader in leaders)
