"""Measure the cost of receiving requests in a step: on and off at 64 running, alone and with follower ranks.

The figures are the processor time of the leading rank's thread. The sockets of the other ranks use ipc, as in the
reference engine. No process reads them, so the figures exclude the cost on the other ranks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import zmq

from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved
from scheduler_components import ParallelState
from scheduler_components.input_blocker import InputBlocker
from scheduler_components.receiving.recv_skipper import RecvSkipper
from scheduler_components.receiving.zmq_input_relay import IdleSleeper, ZmqInputSource, ZmqLeaderRelay
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.values import ForwardMode
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.messages import RankCommand, SubmitRequest, encode, pack_tokens
from scheduler_engine.engine.rank.loop import CommandDecoder
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

NAME = "intake"
_RUNNING = 64
_STEPS_PER_TURN = 200
_SKIPS = 8  # decode steps per receive, in the rows that skip
_PROMPT = pack_tokens(range(1000))


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peers: SGLang's wants its whole scheduler
    """Time a step with and without a receive, and the parts of a receive."""
    return [*_steps(scale), *_receives(scale)]


def _steps(scale: Scale) -> Iterator[Measurement]:
    for num_others in (0, 3):
        with _leader(num_others) as leader, _scheduler(scale) as scheduler:
            before: dict[str, Callable[[], object]] = {
                "off": lambda: None,
                "sends": leader.telling(),
                "on": leader.receiving(1),
                "skips": leader.receiving(_SKIPS),
            }
            steps = {name: _then(call, scheduler.step) for name, call in before.items()}
            us = _us(steps, scale, scale.of(_STEPS_PER_TURN))
        what = f"a step, {_RUNNING} running, input from a socket, {num_others} other ranks"
        beside = {"without input": us["off"], "with a poll and the sends alone": us["sends"]}
        goal = Goal(1.05, "with a poll and the sends alone")
        yield Measurement(NAME, what, "us", us["on"], beside, goal)
        what += f", input after {_SKIPS} decode steps"
        yield Measurement(NAME, what, "us", us["skips"], beside, Goal(1.1, "without input"))


def _then(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _receives(scale: Scale) -> Iterator[Measurement]:
    for num_others in (0, 1, 3, 7):
        with _leader(num_others) as leader:
            us = _us({"ours": leader.receiving(1), "poll": leader.look}, scale, scale.of(5_000))
        what = f"a receive without input, {num_others} other ranks"
        yield Measurement(NAME, what, "us", us["ours"], {"one poll of the socket": us["poll"]})
    with _leader(3) as leader:
        us = _us({"ours": leader.taking_in(), "sent": leader.sending()}, scale, scale.of(500))
    what = "a receive of one request of 1,000 tokens, 3 other ranks"
    yield Measurement(NAME, what, "us", us["ours"], {"its four sends and a recv alone": us["sent"]})


@contextmanager
def _scheduler(scale: Scale) -> Iterator[Scheduler]:
    """Make a reference scheduler with this many requests that decode throughout the measurement."""
    scheduler = Scheduler.compose(
        SchedulerConfig(page_size=16, kv_tokens=1 << 20, max_running_requests=_RUNNING, max_prefill_tokens=1 << 17),
        ParallelState.trivial(),
        SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None),
    )
    limits = SamplingLimits(max_new_tokens=4 * (scale.turns + 1) * _STEPS_PER_TURN + 50, ignore_eos=True)
    for number in range(_RUNNING):
        scheduler.submit(EngineRequest(f"r{number}", range(100 * number, 100 * number + 100), limits))
    for _ in range(20):
        scheduler.step()
    yield scheduler
    scheduler.close()


@dataclass(slots=True, kw_only=True)
class _Leader:
    """The sockets of the leading rank."""

    frontend: zmq.Socket[bytes]
    commands: zmq.Socket[bytes]
    others: list[zmq.Socket[bytes]]
    sleeper: IdleSleeper
    _numbers: count[int] = field(default_factory=count)

    def look(self) -> None:
        self.sleeper.sleep(0)

    def telling(self) -> Callable[[], object]:
        """Return the least work of a leading rank: poll for input and broadcast that there is none."""
        frame = bytes(12)

        def tell() -> None:
            self.look()
            for other in self.others:
                other.send(frame, zmq.DONTWAIT)

        return tell

    def receiving(self, recv_interval: int) -> Callable[[], object]:
        """Return the work of a busy leading rank before a decode step without new messages."""
        receiver, numbers = self._intake(recv_interval), count()

        def receive() -> None:
            receiver.receive(next(numbers), 0, ForwardMode.DECODE)

        return receive

    def taking_in(self) -> Callable[[], object]:
        """Return a receive with one new request."""
        receiver, numbers = self._intake(1), count()

        def receive() -> None:
            self._submit()
            assert len(receiver.receive(next(numbers), 0, ForwardMode.DECODE)) == 1

        return receive

    def sending(self) -> Callable[[], object]:
        """Return the least work for a request: receive it and send it to each other rank."""

        def send() -> None:
            self._submit()
            frame = self.commands.recv()
            for other in self.others:
                other.send(frame, zmq.DONTWAIT)

        return send

    def _submit(self) -> None:
        number = next(self._numbers)
        self.frontend.send(encode(SubmitRequest(f"r{number}", _PROMPT, SamplingLimits(max_new_tokens=1), 1, number)))
        self.commands.poll()

    def _intake(self, recv_interval: int) -> RequestReceiver[RankCommand]:
        return RequestReceiver(
            rank="leader",
            reader=CommandDecoder(),
            source=ZmqInputSource(socket=self.commands),
            relay=ZmqLeaderRelay(followers=self.others, wait_for=lambda *_: True),
            blocker=InputBlocker(),
            recv_skipper=RecvSkipper(recv_interval=recv_interval),
        )


@contextmanager
def _leader(num_others: int) -> Iterator[_Leader]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="intake-") as folder:
        pairs = [_pair(context, f"ipc://{Path(folder) / str(number)}") for number in range(num_others + 1)]
        (frontend, commands), *others = pairs
        try:
            yield _Leader(
                frontend=frontend,
                commands=commands,
                others=[push for push, _ in others],
                sleeper=IdleSleeper([commands]),
            )
        finally:
            context.destroy(linger=0)


def _pair(context: zmq.Context[zmq.Socket[bytes]], address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.sndhwm = pull.rcvhwm = 0
    pull.bind(address)
    push.connect(address)
    return push, pull


def _us(calls: dict[str, Callable[[], object]], scale: Scale, number: int) -> dict[str, list[float]]:
    found = measure_interleaved(calls, turns=scale.turns, number=number, clock_ns=time.thread_time_ns)
    return {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
