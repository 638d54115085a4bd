"""Real schedulers behind a real frontend, in this process, for the tests of clients of the text routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.applications import Starlette

from kit.rid_model import RidModel
from scheduler_components import ConfigError, ParallelState
from scheduler_components.scheduling.composition import SchedulerSinks
from scheduler_components.values import OutputBatch
from scheduler_engine.device.device import CostModel, SimulatedDevice
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.http_app import text_routes
from scheduler_engine.engine.messages import (
    AbortRequest,
    RankCommand,
    RequestRefused,
    SubmitRequest,
    decode_command,
    decode_outputs,
    encode_outputs,
    unpack_tokens,
)
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler
from scheduler_engine.frontend.dispatcher import LoadDispatcher, ReplicaLoad
from scheduler_engine.frontend.frontend import Frontend
from scheduler_engine.frontend.text_frontend import TextFrontend
from scheduler_engine.text.text_tokenizer import TextTokenizer
from scheduler_engine.text.word_tokenizer import WordTokenizer

MODEL = RidModel()
FREE = CostModel(base_ms=0, prefill_us_per_token=0, decode_us_per_request=0, context_us_per_1k_tokens=0, eager_ms=0)
_STEP_S = 0.0005  # other tasks run meanwhile, as while a device computes


class ServedReplica:
    """A scheduler that receives commands like a socket and steps while it has work."""

    def __init__(self, frontend: Callable[[], Frontend], rank: int, num_replicas: int) -> None:
        self._frontend = frontend
        self.commands: list[RankCommand] = []
        self.is_stepping = False
        self.scheduler = Scheduler.compose(
            SchedulerConfig(page_size=4, kv_tokens=8192),
            ParallelState.from_tp_rank(rank, tp_size=num_replicas, attn_dp_size=num_replicas),
            SimulatedDevice(model=MODEL, cost=FREE),
            sinks=SchedulerSinks(outputs=self),
        )

    def send(self, frame: bytes | OutputBatch, flags: int = 0) -> bool:
        """Receive a command of the frontend, or outputs of the scheduler."""
        if isinstance(frame, OutputBatch):
            self._frontend().process_outputs(decode_outputs(encode_outputs(frame)))
            return True
        command = decode_command(frame)
        self.commands.append(command)
        if isinstance(command, SubmitRequest):
            self._submit(command)
        elif isinstance(command, AbortRequest):
            self.scheduler.abort(command.rid)
        if not self.is_stepping:
            self.is_stepping = True
            asyncio.get_running_loop().call_soon(self._step)
        return True

    def _submit(self, command: SubmitRequest) -> None:
        tokens = unpack_tokens(command.input_ids)
        interval, sampling = command.stream_interval, command.sampling
        request = EngineRequest(command.rid, tokens, command.limits, sampling=sampling, stream_interval=interval)
        try:
            self.scheduler.submit(request)
        except ConfigError as error:
            refused = RequestRefused(command.rid, str(error))
            asyncio.get_running_loop().call_soon(self._frontend().receive, refused)

    def _step(self) -> None:
        self.is_stepping = self.scheduler.has_work
        if self.is_stepping:
            self.scheduler.step()
            asyncio.get_running_loop().call_later(_STEP_S, self._step)

    def is_ready(self) -> bool:
        return True

    def close(self) -> None:
        pass

    @property
    def submitted(self) -> list[SubmitRequest]:
        return [command for command in self.commands if isinstance(command, SubmitRequest)]

    @property
    def aborted(self) -> list[str]:
        return [command.rid for command in self.commands if isinstance(command, AbortRequest)]


class Served:
    """Replicas, their frontend, and the application that serves it."""

    def __init__(self, num_replicas: int = 1, codec: TextTokenizer | None = None) -> None:
        self.codec = codec if codec is not None else WordTokenizer()
        self.replicas = [ServedReplica(lambda: self.frontend, rank, num_replicas) for rank in range(num_replicas)]
        dispatcher = LoadDispatcher(replicas=[ReplicaLoad() for _ in self.replicas], affinity_tokens=1000)
        self.frontend = Frontend(leaders=self.replicas, dispatcher=dispatcher)  # type: ignore[arg-type]  # no sockets
        self.app = Starlette(routes=text_routes(TextFrontend(frontend=self.frontend, codec=self.codec), "simulated"))

    @property
    def scheduler(self) -> Scheduler:
        return self.replicas[0].scheduler

    @staticmethod
    def expected_tokens(rid: str, num_prompt_tokens: int, num_tokens: int) -> list[int]:
        """Return the tokens that the simulated model generates."""
        return [MODEL.next_token(rid, num_prompt_tokens + place) for place in range(num_tokens)]


@pytest.fixture
def make_served() -> Callable[..., Served]:
    """``make_served(num_replicas=1, codec=None)``."""
    return Served
