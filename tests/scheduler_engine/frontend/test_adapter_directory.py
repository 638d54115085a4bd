"""The directory names the adapters that all replicas have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from scheduler_components import ConfigError
from scheduler_components.values import ControlReply
from scheduler_components.waiting.lora_queue import LoraLimits
from scheduler_engine.engine.config import AdapterSpec, LoraConfig
from scheduler_engine.engine.messages import (
    HEARTBEAT_INTERVAL_S,
    ControlCompleted,
    LoadAdapter,
    RankCommand,
    RankHeartbeat,
    UnloadAdapter,
    decode_command,
)
from scheduler_engine.frontend import control_queue
from scheduler_engine.frontend.adapter_directory import AdapterDirectory
from scheduler_engine.frontend.control_queue import ControlFailedError, ControlQueue
from scheduler_engine.frontend.dispatcher import LoadDispatcher, ReplicaLoad
from scheduler_engine.frontend.errors import EngineFailedError, RankSilentError
from scheduler_engine.frontend.frontend import Frontend
from scheduler_engine.frontend.heartbeat_monitor import HeartbeatMonitor

DEFAULT = LoraConfig()
POEMS = AdapterSpec(name="poems", path="/poems")


class Replica:
    """A replica whose loads fail with ``problem_of``. A stopped one replies when it goes on."""

    def __init__(self, number: int, frontend: Callable[[], Frontend], problem_of: Callable[[int], str]) -> None:
        self.number, self.frontend, self.problem_of = number, frontend, problem_of
        self.commands: list[RankCommand] = []
        self.names: set[str] = set()
        self.is_stopped = False
        self.late: list[ControlCompleted] = []

    def send(self, frame: bytes, flags: int = 0) -> None:
        command = decode_command(frame)
        self.commands.append(command)
        if isinstance(command, LoadAdapter | UnloadAdapter):
            reply = ControlCompleted(self.number, ControlReply(command.request_id, self.carry_out(command)))
            if self.is_stopped:
                self.late.append(reply)
            else:
                asyncio.get_running_loop().call_soon(self.frontend().receive, reply)

    def carry_out(self, command: LoadAdapter | UnloadAdapter) -> str:
        """Register or unregister as ``LoraQueue`` does; return the problem."""
        is_loaded = command.name in self.names
        self.names.discard(command.name)
        if isinstance(command, UnloadAdapter):
            return "" if is_loaded else "is no loaded adapter"
        if is_loaded:
            self.names.add(command.name)
            return "is loaded already"
        problem = self.problem_of(self.number)
        if not problem:
            self.names.add(command.name)
        return problem

    def go_on(self) -> None:
        self.is_stopped = False
        for reply in self.late:
            self.frontend().receive(reply)


class Bench:
    def __init__(self, problem_of: Callable[[int], str] = lambda _: "", config: LoraConfig | None = DEFAULT) -> None:
        self.replicas = [Replica(number, lambda: self.frontend, problem_of) for number in range(2)]
        dispatcher = LoadDispatcher(replicas=[ReplicaLoad() for _ in self.replicas])
        heartbeats = HeartbeatMonitor(timeout_s=2 * HEARTBEAT_INTERVAL_S)
        self.frontend = Frontend(leaders=self.replicas, dispatcher=dispatcher, heartbeats=heartbeats)  # type: ignore[arg-type]  # no sockets
        self.directory = AdapterDirectory(
            control=ControlQueue(frontend=self.frontend), config=config, model_name="base"
        )


async def test_an_adapter_is_named_once_all_replicas_have_loaded_it_and_until_it_is_unloaded() -> None:
    bench = Bench()
    await bench.directory.load(POEMS)
    assert bench.directory.adapters == {"poems": POEMS}
    with pytest.raises(ConfigError, match="is loaded already"):
        await bench.directory.load(POEMS)
    with pytest.raises(ConfigError, match="is the name of the model"):
        await bench.directory.load(AdapterSpec(name="base", path="/base"))
    await bench.directory.unload("poems")
    assert bench.directory.adapters == {}
    with pytest.raises(ConfigError, match="is no loaded adapter"):
        await bench.directory.unload("poems")


async def test_a_load_that_fails_on_one_replica_is_undone_on_the_other() -> None:
    bench = Bench(lambda number: "no such file" if number else "")
    with pytest.raises(ControlFailedError, match="replica 1: no such file"):
        await bench.directory.load(POEMS)
    assert bench.directory.adapters == {}
    kinds = [[type(command) for command in replica.commands] for replica in bench.replicas]
    assert kinds == [[LoadAdapter, UnloadAdapter], [LoadAdapter]]


def cancel(_: Bench, load: asyncio.Future[None]) -> None:
    load.cancel()


def fall_silent(bench: Bench, _: asyncio.Future[None]) -> None:
    bench.frontend.receive(RankHeartbeat("rank 1", 1))
    for _ in range(3):
        bench.frontend.tick()


def wait_in_vain(_: Bench, __: asyncio.Future[None]) -> None:
    """Its time is over soon."""


@pytest.mark.parametrize(
    ("end", "error"),
    [(cancel, asyncio.CancelledError), (fall_silent, RankSilentError), (wait_in_vain, EngineFailedError)],
)
async def test_a_load_that_is_given_up_leaves_the_name_free(
    end: Callable[[Bench, asyncio.Future[None]], None], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replica 1 is stopped while it loads, and goes on later."""
    if end is wait_in_vain:
        monkeypatch.setattr(control_queue, "REPLY_TIMEOUT_S", 0.0)
    bench = Bench(config=LoraConfig(limits=LoraLimits(max_wait_s=0.01 if end is wait_in_vain else 60.0)))
    stopped = bench.replicas[1]
    stopped.is_stopped = True
    load = asyncio.ensure_future(bench.directory.load(POEMS))
    while not stopped.commands:
        await asyncio.sleep(0)
    end(bench, load)
    with pytest.raises(error):
        await load
    assert bench.directory.adapters == {}
    stopped.go_on()
    bench.frontend.receive(RankHeartbeat("rank 1", 1))
    await bench.directory.load(POEMS)
    assert bench.directory.adapters == {"poems": POEMS}
    assert [replica.names for replica in bench.replicas] == [{"poems"}] * 2
    assert not bench.frontend.replies.commands.controls


def test_an_engine_without_adapters_refuses_to_load_one_and_another_begins_with_its_own() -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match="--enable-lora"):
            await Bench(config=None).directory.load(POEMS)

    asyncio.run(run())
    assert Bench(config=LoraConfig(adapters=(POEMS,))).directory.adapters == {"poems": POEMS}
