"""Measure what the agreement of each step costs a replica of one rank and one of two ranks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec
import zmq

from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved
from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.ports import NullDecisionLog
from scheduler_components.waiting.agreed_queue import AgreedQueue
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.rank.zmq_sync import open_zmq_sync_hub
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

NAME = "agreement"
_ROOT = Path(__file__).parent.parent
_PATIENCE_S = 120
_NUM_RANKS = 2
_STEPS_PER_TURN = 200
_AGREEMENTS_PER_TURN = 2_000


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peers: theirs want their engines
    """Time one rank by its processor time, and two processes over the reference engine's sockets by the wall."""
    return [*_one_rank(scale), *_two_ranks(scale)]


def _one_rank(scale: Scale) -> Iterator[Measurement]:
    groups, numbers = ParallelGroups(), count(1)
    for num_waiting in (0, 100):
        agreement = make_agreement(groups, num_waiting=num_waiting)
        us = _us({"ours": lambda agreement=agreement: agreement.step(next(numbers))}, scale, _AGREEMENTS_PER_TURN)  # type: ignore[misc]
        what = f"an agreement, three queues, {num_waiting} requests wait in each, 1 rank"
        yield Measurement(NAME, what, "us", us["ours"], {}, Goal(40.0))
    num_steps = scale.of(_STEPS_PER_TURN) * (scale.turns + 1)
    on, off = make_scheduler(groups, num_steps), make_scheduler(groups, num_steps)
    off.agreement = NoAgreement()
    us = _us({"on": on.step, "off": off.step}, scale, _STEPS_PER_TURN)
    compared = {"no agreement": us["off"]}
    yield Measurement(
        NAME, f"a step, {NUM_RUNNING} running, 1 rank", "us", us["on"], compared, Goal(1.1, "no agreement")
    )


def _two_ranks(scale: Scale) -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
        processes = []
        try:
            for rank in range(_NUM_RANKS):
                spec = AgreementSpec(
                    rank=rank,
                    num_ranks=_NUM_RANKS,
                    folder=folder,
                    num_turns=scale.turns,
                    num_steps=scale.of(_STEPS_PER_TURN),
                )
                command = [sys.executable, "-m", "benchmarks.bench_agreement", msgspec.json.encode(spec).decode()]
                processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, cwd=_ROOT))
            answers = [process.communicate(timeout=_PATIENCE_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    results = [msgspec.json.decode(answer.splitlines()[-1], type=AgreementResult) for answer in answers]
    slowest = max(results, key=lambda result: result.on)
    yield Measurement(NAME, "an agreement, three queues, none waits, 2 ranks, zmq", "us", slowest.agreement)
    compared = {"no agreement": slowest.off}
    yield Measurement(NAME, f"a step, {NUM_RUNNING} running, 2 ranks, zmq", "us", slowest.on, compared)


def _us(calls: dict[str, Callable[[], object]], scale: Scale, number: int) -> dict[str, list[float]]:
    found = measure_interleaved(calls, turns=scale.turns, number=scale.of(number), clock_ns=time.thread_time_ns)
    return {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}


# --- the process of one rank ---


NUM_RUNNING = 64
_QUEUES = ("grammar", "lora", "transfer")
_WARM_UP_STEPS = 50


class AgreementSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a rank: ``num_steps`` per turn and form."""

    rank: int
    num_ranks: int
    folder: str
    num_turns: int
    num_steps: int


class AgreementResult(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds, one value per turn.

    Attributes:
        agreement: of an agreement alone, with three queues in which no request waits.
        on, off: of a step of a scheduler, with its agreement and without.
    """

    agreement: list[float]
    on: list[float]
    off: list[float]


@dataclass(slots=True, kw_only=True)
class NoAgreement(StepAgreement):
    """The agreement of a scheduler that has none."""

    def step(self, step: int) -> None:
        pass


def make_agreement(groups: ParallelGroups, *, num_waiting: int = 0) -> StepAgreement:
    """Make an agreement of three queues, in each of which so many requests wait for ever."""
    queues = [AgreedQueue[str](name=name) for name in _QUEUES]
    for queue in queues:
        for number in range(num_waiting):
            queue.add(str(number), "a request")
    return StepAgreement(groups=groups, parts=queues, leads=not groups.rank)


def make_scheduler(groups: ParallelGroups, num_steps: int) -> Scheduler:
    """Make a reference scheduler with 64 requests that decode for ``num_steps``. It keeps no log of its decisions."""
    scheduler = Scheduler.compose(
        SchedulerConfig(page_size=16, kv_tokens=1 << 20, max_running_requests=NUM_RUNNING, max_prefill_tokens=1 << 17),
        ParallelState.from_tp_rank(groups.rank, tp_size=max(1, 2 * len(groups.groups))),
        SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None),
        groups=groups,
        decisions=NullDecisionLog(),
    )
    limits = SamplingLimits(max_new_tokens=num_steps + _WARM_UP_STEPS + 50, ignore_eos=True)
    for number in range(NUM_RUNNING):
        scheduler.submit(EngineRequest(f"r{number}", range(100 * number, 100 * number + 100), limits))
    for _ in range(_WARM_UP_STEPS):
        scheduler.step()
    return scheduler


def _open_groups(spec: AgreementSpec) -> ParallelGroups:
    world = world_rank_groups(ParallelState.from_tp_rank(0, tp_size=spec.num_ranks))

    def wait(socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
        socket.poll(timeout_ms, event)
        return True

    hub = open_zmq_sync_hub(
        zmq.Context(),
        rank=spec.rank,
        reduce_groups=world[spec.rank].reduce_groups,
        address_of=lambda rank: f"ipc://{spec.folder}/{rank}",
        wait_for=wait,
        timeout_s=60,
    )
    return hub.parallel_groups(world[spec.rank].reduce_groups)


def _us(step: Callable[[], object], num_steps: int) -> float:
    begun = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - begun) * 1e6 / num_steps


def main() -> None:
    """Run the turns: the agreement, a step with it and a step without it, alternating."""
    spec = msgspec.json.decode(sys.argv[1], type=AgreementSpec)
    groups = _open_groups(spec)
    agreement, numbers = make_agreement(groups), count(1)
    num_steps = spec.num_turns * spec.num_steps
    with_it, without = make_scheduler(groups, num_steps), make_scheduler(groups, num_steps)
    without.agreement = NoAgreement()
    found = AgreementResult(agreement=[], on=[], off=[])
    for turn in range(spec.num_turns):
        groups.barrier("turn", step=turn)
        found.agreement.append(_us(lambda: agreement.step(next(numbers)), spec.num_steps))
        for samples, scheduler in ((found.on, with_it), (found.off, without))[:: 1 if turn % 2 else -1]:
            groups.barrier("form", step=turn)
            samples.append(_us(scheduler.step, spec.num_steps))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    sys.stdout.flush()
    groups.barrier("end", step=0)
    groups.close()


if __name__ == "__main__":
    main()
