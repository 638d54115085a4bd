"""The directory names the adapters that all replicas have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from scheduler_components import ConfigError
from scheduler_components.reference.engine.config import AdapterSpec, LoraConfig
from scheduler_components.reference.engine.frontend.adapter_directory import AdapterDirectory
from scheduler_components.reference.engine.frontend.control_queue import ControlFailedError, ControlQueue
from scheduler_components.reference.engine.frontend.dispatcher import LoadDispatcher, ReplicaLoad
from scheduler_components.reference.engine.frontend.frontend import Frontend
from scheduler_components.reference.engine.messages import (
    ControlCompleted,
    LoadAdapter,
    RankCommand,
    UnloadAdapter,
    decode_command,
)
from scheduler_components.values import ControlReply

DEFAULT = LoraConfig()
POEMS = AdapterSpec(name="poems", path="/poems")


class Replica:
    """A replica that answers each command about adapters with ``problem_of``."""

    def __init__(self, number: int, frontend: Callable[[], Frontend], problem_of: Callable[[int], str]) -> None:
        self.number, self.frontend, self.problem_of = number, frontend, problem_of
        self.commands: list[RankCommand] = []

    def send(self, frame: bytes, flags: int = 0) -> None:
        command = decode_command(frame)
        self.commands.append(command)
        if isinstance(command, LoadAdapter | UnloadAdapter):
            problem = self.problem_of(self.number) if isinstance(command, LoadAdapter) else ""
            reply = ControlCompleted(self.number, ControlReply(command.request_id, problem))
            asyncio.get_running_loop().call_soon(self.frontend().receive, reply)


class Bench:
    def __init__(self, problem_of: Callable[[int], str] = lambda _: "", config: LoraConfig | None = DEFAULT) -> None:
        self.replicas = [Replica(number, lambda: self.frontend, problem_of) for number in range(2)]
        dispatcher = LoadDispatcher(replicas=[ReplicaLoad() for _ in self.replicas])
        self.frontend = Frontend(leaders=self.replicas, dispatcher=dispatcher)  # type: ignore[arg-type]  # no sockets
        self.directory = AdapterDirectory(
            control=ControlQueue(frontend=self.frontend), config=config, model_name="base"
        )


def test_an_adapter_is_named_once_all_replicas_have_loaded_it_and_until_it_is_unloaded() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_a_load_that_fails_on_one_replica_is_undone_on_the_other() -> None:
    async def run() -> None:
        bench = Bench(lambda number: "no such file" if number else "")
        with pytest.raises(ControlFailedError, match="replica 1: no such file"):
            await bench.directory.load(POEMS)
        assert bench.directory.adapters == {}
        kinds = [[type(command) for command in replica.commands] for replica in bench.replicas]
        assert kinds == [[LoadAdapter, UnloadAdapter], [LoadAdapter]]

    asyncio.run(run())


def test_an_engine_without_adapters_refuses_to_load_one_and_another_begins_with_its_own() -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match="--enable-lora"):
            await Bench(config=None).directory.load(POEMS)

    asyncio.run(run())
    assert Bench(config=LoraConfig(adapters=(POEMS,))).directory.adapters == {"poems": POEMS}
