"""ControlQueue over fake replicas: all execute a control request, or all roll it back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from scheduler_components.values import (
    BeginWeightUpdate,
    CheckWeights,
    ContinueGeneration,
    ControlReply,
    ControlRequest,
    EndWeightUpdate,
    FlushCache,
    LoadWeights,
    PauseGeneration,
    PauseMode,
    RollBackWeights,
)
from scheduler_engine.engine.messages import (
    HEARTBEAT_INTERVAL_S,
    ControlCompleted,
    RankHeartbeat,
    SubmitControl,
    decode_command,
)
from scheduler_engine.frontend.control_queue import ControlFailedError, ControlQueue
from scheduler_engine.frontend.dispatcher import LoadDispatcher, ReplicaLoad
from scheduler_engine.frontend.errors import EngineFailedError, RankSilentError
from scheduler_engine.frontend.frontend import Frontend
from scheduler_engine.frontend.heartbeat_monitor import HeartbeatMonitor

T = TypeVar("T")


class PlayedReplicas:
    """Leader sockets that reply immediately with ``problems`` and ``checksums``; those in ``deaf`` do not reply."""

    def __init__(self) -> None:
        self.received: list[list[ControlRequest]] = [[], []]
        self.problems: dict[tuple[int, type[ControlRequest]], str] = {}
        self.checksums = [5, 5]
        self.deaf: set[int] = set()
        self.frontend = Frontend(
            leaders=[_Leader(self, 0), _Leader(self, 1)],  # type: ignore[list-item]  # a socket's send is all it needs
            dispatcher=LoadDispatcher(replicas=[ReplicaLoad(), ReplicaLoad()]),
            heartbeats=HeartbeatMonitor(timeout_s=2 * HEARTBEAT_INTERVAL_S),
        )
        self.control = ControlQueue(frontend=self.frontend)

    def take(self, replica: int, command: SubmitControl) -> None:
        request = command.request
        self.received[replica].append(request)
        problem = self.problems.get((replica, type(request)), "")
        checksum = self.checksums[replica] if isinstance(request, CheckWeights) else 0
        if replica not in self.deaf:
            self.frontend.receive(ControlCompleted(replica, ControlReply(command.request_id, problem, 3, checksum)))

    def kinds(self, replica: int) -> list[type[ControlRequest]]:
        return [type(request) for request in self.received[replica]]


class _Leader:
    def __init__(self, replicas: PlayedReplicas, replica: int) -> None:
        self.replicas, self.replica = replicas, replica

    def send(self, frame: bytes, flags: int) -> None:
        command = decode_command(frame)
        assert isinstance(command, SubmitControl)
        self.replicas.take(self.replica, command)


def run(work: Callable[[], Awaitable[T]]) -> T:
    return asyncio.run(asyncio.wait_for(work(), timeout=30))


SESSION = [BeginWeightUpdate, LoadWeights, LoadWeights, CheckWeights]
PARTS = {"a": b"1", "b": b"2"}


def test_a_weight_update_is_one_session_on_all_replicas() -> None:
    replicas = PlayedReplicas()
    assert run(lambda: replicas.control.update_weights("v2", PARTS)) == 5
    for replica in (0, 1):
        assert replicas.kinds(replica) == [*SESSION, EndWeightUpdate]
        assert replicas.received[replica][-1] == EndWeightUpdate(5)
    assert replicas.control.weight_version == "v2"
    assert not replicas.frontend.replies.commands.controls


@pytest.mark.parametrize(
    ("checksums", "expected", "words"),
    [
        ([5, 6], None, "replica 1: the weights have checksum 0000000000000006, not 0000000000000005"),
        ([6, 6], 5, "replica 0: the weights have checksum 0000000000000006, not 0000000000000005; replica 1: "),
    ],
)
def test_replicas_with_different_checksums_roll_back(checksums: list[int], expected: int | None, words: str) -> None:
    replicas = PlayedReplicas()
    replicas.checksums = checksums
    with pytest.raises(ControlFailedError, match=words):
        run(lambda: replicas.control.update_weights("v2", PARTS, checksum=expected))
    assert [replicas.kinds(replica) for replica in (0, 1)] == [[*SESSION, RollBackWeights]] * 2
    assert replicas.control.weight_version == "default"


@pytest.mark.parametrize("request_type", [BeginWeightUpdate, LoadWeights, CheckWeights])
def test_a_failure_on_one_replica_is_rolled_back_on_all(request_type: type[ControlRequest]) -> None:
    replicas = PlayedReplicas()
    replicas.problems[1, request_type] = "rank 3 could not"
    with pytest.raises(ControlFailedError, match="replica 1: rank 3 could not"):
        run(lambda: replicas.control.update_weights("v2", PARTS))
    assert replicas.kinds(0)[-1] is replicas.kinds(1)[-1] is RollBackWeights
    assert EndWeightUpdate not in replicas.kinds(0)
    assert replicas.control.weight_version == "default"


def test_a_partial_commit_fails_the_engine_and_a_refused_one_does_not() -> None:
    replicas = PlayedReplicas()
    replicas.problems = dict.fromkeys([(0, EndWeightUpdate), (1, EndWeightUpdate)], "given up at its deadline")
    with pytest.raises(ControlFailedError):
        run(lambda: replicas.control.update_weights("v2", PARTS))
    assert replicas.kinds(1)[-1] is RollBackWeights
    assert replicas.frontend.replies.failure is None
    del replicas.problems[0, EndWeightUpdate]
    with pytest.raises(ControlFailedError, match="replica 1: given up"):
        run(lambda: replicas.control.update_weights("v2", PARTS))
    assert "replicas have different weights" in str(replicas.frontend.replies.failure)


def test_a_pause_that_fails_on_one_replica_pauses_none() -> None:
    replicas = PlayedReplicas()
    assert run(lambda: replicas.control.pause(PauseMode.ABORT, 0.0)) == 6
    replicas.problems[0, PauseGeneration] = "given up at its deadline"
    with pytest.raises(ControlFailedError, match="pause generation: replica 0: given up"):
        run(lambda: replicas.control.pause(PauseMode.FINISH, 0.0))
    assert [replicas.received[replica][-1] for replica in (0, 1)] == [ContinueGeneration()] * 2


def test_a_silent_or_dead_rank_ends_the_control_request() -> None:
    async def hang() -> None:
        replicas.frontend.receive(RankHeartbeat("rank 7", 1))
        pending = asyncio.ensure_future(replicas.control.send(FlushCache(3600.0)))
        while not replicas.received[1]:
            await asyncio.sleep(0)
        for _ in range(3):
            replicas.frontend.tick()
        await pending

    async def die() -> None:
        pending = asyncio.ensure_future(replicas.control.send(FlushCache(3600.0)))
        while not replicas.received[1]:
            await asyncio.sleep(0)
        replicas.frontend.fail(EngineFailedError("rank 7 was killed by signal 9"))
        await pending

    replicas = PlayedReplicas()
    replicas.deaf = {1}
    with pytest.raises(RankSilentError, match="rank 7 has sent no heartbeat"):
        run(hang)
    replicas = PlayedReplicas()
    replicas.deaf = {1}
    with pytest.raises(EngineFailedError, match="flush cache: rank 7 was killed by signal 9"):
        run(die)


async def given_up(replicas: PlayedReplicas, work: Awaitable[object], *, is_cancelled: bool) -> None:
    """Do a control request of which replica 1 carries out the last part and does not reply."""
    replicas.frontend.receive(RankHeartbeat("rank 7", 1))
    replicas.deaf = {1}
    pending = asyncio.ensure_future(work)
    while not replicas.received[1]:
        await asyncio.sleep(0)
    if is_cancelled:
        pending.cancel()
    else:
        for _ in range(3):
            replicas.frontend.tick()
    replicas.deaf = set()
    with pytest.raises(asyncio.CancelledError if is_cancelled else RankSilentError):
        await pending


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_pause_that_is_given_up_pauses_none(is_cancelled: bool) -> None:
    replicas = PlayedReplicas()
    run(lambda: given_up(replicas, replicas.control.pause(PauseMode.ABORT, 0.0), is_cancelled=is_cancelled))
    assert [replicas.received[replica][-1] for replica in (0, 1)] == [ContinueGeneration()] * 2
    assert not replicas.frontend.replies.commands.controls


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_weight_update_that_is_given_up_is_rolled_back(is_cancelled: bool) -> None:
    replicas = PlayedReplicas()
    run(lambda: given_up(replicas, replicas.control.update_weights("v2", PARTS), is_cancelled=is_cancelled))
    assert [replicas.received[replica][-1] for replica in (0, 1)] == [RollBackWeights()] * 2
    assert not replicas.frontend.replies.commands.controls


def test_a_pause_does_not_wait_for_an_update_that_waits_for_an_idle_engine() -> None:
    replicas = PlayedReplicas()
    held: list[SubmitControl] = []
    take = replicas.take

    def take_all_but_the_begin(replica: int, command: SubmitControl) -> None:
        if isinstance(command.request, BeginWeightUpdate):
            held.append(command)
        else:
            take(replica, command)

    replicas.take = take_all_but_the_begin  # type: ignore[method-assign]

    async def work() -> int:
        update = asyncio.create_task(replicas.control.update_weights("v2", PARTS, deadline_s=60.0))
        while len(held) < 2:
            await asyncio.sleep(0)
        num_requests = await replicas.control.pause(PauseMode.ABORT, 0.0)
        assert not update.done()
        for replica, command in enumerate(held):
            take(replica, command)
        await update
        return num_requests

    assert run(work) == 6
    assert replicas.control.weight_version == "v2"
