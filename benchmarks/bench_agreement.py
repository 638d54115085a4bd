"""Measure what the agreement of each step costs a replica of one rank and one of two ranks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec

from benchmarks.agreement_process import (
    NUM_RUNNING,
    AgreementResult,
    AgreementSpec,
    NoAgreement,
    make_agreement,
    make_scheduler,
)
from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved
from scheduler_components.agreement import ParallelGroups

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
                command = [sys.executable, "-m", "benchmarks.agreement_process", msgspec.json.encode(spec).decode()]
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
