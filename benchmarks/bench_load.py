"""Measure load inquiry at several queue lengths, next to a walk over the queue as the peers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved
from scheduler_components import LoadInquirer, ParallelState
from scheduler_components.load import TokenCountedQueue
from scheduler_components.values import LoadSnapshot

NAME = "load"


class WaitingRequest(msgspec.Struct):
    """A minimal request."""

    num_input_tokens: int = 1_000
    num_cached_tokens: int = 300


@dataclass(slots=True)
class StaticQueues:
    """Queues and pool of a scheduler whose state does not change."""

    waiting: Sequence[WaitingRequest]
    running: list[int] = field(default_factory=lambda: [0] * 64)
    max_running_requests: int = 256
    num_chunked_tokens_left: int = 512
    page_size: int = 16
    capacity_tokens: int = 1 << 20
    used_tokens: int = 1 << 19


def inquirer_over(waiting: Sequence[WaitingRequest]) -> LoadInquirer:
    """Make an inquirer over ``waiting`` and a constant pool."""
    queues = StaticQueues(waiting)
    return LoadInquirer(parallel=ParallelState.trivial(), queues=queues, pool=queues)


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peers: their inquirers want their engines
    """Time ``get_loads`` at three lengths, and counting per request."""
    rows = []
    for length in (0, 1_000, 10_000):
        requests = [WaitingRequest() for _ in range(length)]
        found = measure_interleaved(
            {"limit": _one_snapshot, "counted": inquirer_over(TokenCountedQueue(requests)).get_loads},
            turns=scale.turns,
            number=scale.of(20_000),
        )
        walked = measure_interleaved(
            {"walked": inquirer_over(requests).get_loads},
            turns=scale.turns,
            number=scale.of(20_000 // (1 + length // 10)),
        )
        beside = {"limit": _us(found["limit"]), "a walk": _us(walked["walked"])}
        rows.append(
            Measurement(NAME, f"get_loads(), {length:,} waiting", "us", _us(found["counted"]), beside, Goal(1.0))
        )
    return [*rows, _upkeep(scale)]


def _one_snapshot() -> LoadSnapshot:
    """Make one struct of as many values, to measure the cost of the snapshot alone."""
    return LoadSnapshot(3, 4, 0.5, 0.5, 0.5, 0.5, 5, 6, 7, 8, 9, 10, 2, 1, 0, 0, 1.0, 0, None, None, None, None, None)


def _upkeep(scale: Scale) -> Measurement:
    counted: TokenCountedQueue[WaitingRequest] = TokenCountedQueue(WaitingRequest() for _ in range(1_000))
    plain = [WaitingRequest() for _ in range(1_000)]
    request = WaitingRequest()

    def through_counted() -> None:
        counted.append(request)
        counted.pop()

    def through_plain() -> None:
        plain.append(request)
        plain.pop()

    calls = {"counted": through_counted, "limit": through_plain}
    found = measure_interleaved(calls, turns=scale.turns, number=scale.of(50_000))
    upkeep = [(ours - least) / 1e3 for ours, least in zip(found["counted"], found["limit"], strict=True)]
    return Measurement(NAME, "cost per request, above a list's", "us", upkeep, {}, Goal(0.5))


def _us(samples_ns: Sequence[float]) -> list[float]:
    return [sample / 1e3 for sample in samples_ns]
