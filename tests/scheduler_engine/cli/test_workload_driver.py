"""A replayed trace continues when a request fails and counts the failure with its reason."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

import pytest

from scheduler_engine.cli.workload_driver import ChatDriver, ScheduleLag, TraceDriver, WorkloadCounters
from scheduler_engine.device.workload import Chat, TraceRequest, Turn
from scheduler_engine.engine.messages import RankHeartbeat
from scheduler_engine.frontend.dispatcher import LoadDispatcher, ReplicaLoad
from scheduler_engine.frontend.frontend import Frontend

pytestmark = pytest.mark.sockets


class FullLeader:
    """A leader's socket that takes every request and answers none."""

    def send(self, frame: bytes, flags: int) -> None:
        pass


class NoLeader:
    """A leader's socket of which nothing is expected."""

    def send(self, frame: bytes, flags: int) -> None:
        raise AssertionError("nothing is sent to a silent replica")


def test_requests_that_no_rank_accepts_are_counted_as_failed() -> None:
    frontend = Frontend(leaders=[NoLeader()], dispatcher=LoadDispatcher(replicas=[ReplicaLoad()]))  # type: ignore[list-item]
    frontend.receive(RankHeartbeat("dp0", 0))
    while not frontend.heartbeats.silent_replicas():
        frontend.tick()
    driver = TraceDriver(frontend=frontend, speed=1.0, counters=WorkloadCounters())
    requests = [
        TraceRequest(index=index, arrival_s=0.0, input_length=4, output_length=2, hash_ids=(1,)) for index in range(2)
    ]
    asyncio.run(asyncio.wait_for(driver.run(requests), timeout=10))
    problem = "rank dp0 has sent no heartbeat for 10.5 s"
    assert driver.counters.failed.reasons == [f"request 0: {problem}", f"request 1: {problem}"]


async def test_the_delay_of_sending_is_measured_while_it_is_blocked() -> None:
    frontend = Frontend(leaders=[FullLeader()], dispatcher=LoadDispatcher(replicas=[ReplicaLoad()]))  # type: ignore[list-item]
    counters, lag, now_s = WorkloadCounters(), ScheduleLag(), 0.0
    driver = TraceDriver(frontend=frontend, speed=1.0, counters=counters, lag=lag, clock=lambda: now_s)
    requests = [
        TraceRequest(index=index, arrival_s=0.0, input_length=4, output_length=2, hash_ids=(1,))
        for index in range(513)  # one more than may be open
    ]
    replay = asyncio.create_task(driver.run(requests))
    async with asyncio.timeout(30):
        while counters.sent < 512:
            await asyncio.sleep(0)
    now_s = 7.0
    assert lag.lag_s(now_s) == 7.0
    replay.cancel()
    await asyncio.gather(replay, return_exceptions=True)


def test_a_cut_connection_is_reported_with_its_cause() -> None:
    """What the client raises then has no message of its own."""

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        with_reset = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, with_reset)
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()

    turn = Turn(think_s=0.0, message_ids=(1, 2), output_tokens=1)
    chat = Chat(chat_id="chat", start_s=0.0, system_ids=(), turns=(turn,))

    async def scenario() -> WorkloadCounters:
        async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            driver = ChatDriver(url=f"http://{host}:{port}", speed=1.0, counters=WorkloadCounters())
            await driver.run([chat])
            return driver.counters

    counters = asyncio.run(asyncio.wait_for(scenario(), timeout=20))
    assert counters.failed.reasons == ["chat: ReadError"]
