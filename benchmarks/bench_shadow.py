"""Measure what a shadow adds to a step: calls of both sides with it and without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.bench_load import StaticQueues, WaitingRequest
from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved
from scheduler_components import LoadInquirer, ParallelState
from scheduler_components.load import TokenCountedQueue
from scheduler_refactor import Shadow

NAME = "shadow"
_PORTS = 4


class _Counter:
    """The smallest collaborator."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, value: int) -> int:
        self.count += value
        return self.count


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peer has a shadow
    """Time a shadowed call without and with ports, a load report, and a stopped shadow."""
    return [*_calls(scale), _load_report(scale)]


def _calls(scale: Scale) -> list[Measurement]:
    def nothing() -> None:
        return None

    stopped = Shadow("stopped")
    stopped_call = stopped.pair("call", nothing, nothing)
    stopped.stop()
    shadow = Shadow("calls")
    old, new = shadow.port("counter", _Counter(), calls=("add",))

    def over(counter: _Counter) -> Callable[[], int]:
        return lambda: sum(counter.add(1) for _ in range(_PORTS))

    plain = over(_Counter())

    def both_alone() -> None:
        plain()
        plain()

    found = measure_interleaved(
        {
            "direct": nothing,
            "stopped": stopped_call,
            "shadowed": shadow.pair("call", nothing, nothing),
            "both alone": both_alone,
            "ports": shadow.pair("ports", over(old), over(new)),
        },
        turns=scale.turns,
        number=scale.of(50_000),
    )
    direct, alone = _us(found["direct"]), _us(found["both alone"])
    added = [(ours - least) / _PORTS for ours, least in zip(_us(found["ports"]), alone, strict=True)]
    return [
        Measurement(NAME, "a stopped shadow's call", "us", _us(found["stopped"]), {"limit": direct}, Goal(0.5)),
        Measurement(NAME, "a shadowed call of nothing", "us", _us(found["shadowed"]), {"limit": direct}, Goal(2.0)),
        Measurement(NAME, "added per call of a port, both sides", "us", added, {}, Goal(2.0)),
    ]


def _load_report(scale: Scale) -> Measurement:
    """Shadow a load inquiry that counts over one that walks 1,000 waiting requests, as in the guide's last step."""
    requests = [WaitingRequest() for _ in range(1_000)]
    shadow = Shadow("load")
    old_clock, new_clock = shadow.tee("clock", lambda: 1.0, exact=False)

    def inquirer(waiting: Sequence[WaitingRequest], clock: Callable[[], float]) -> LoadInquirer:
        queues = StaticQueues(waiting)
        return LoadInquirer(parallel=ParallelState.trivial(), queues=queues, pool=queues, clock=clock)

    walked, counted = inquirer(requests, lambda: 1.0), inquirer(TokenCountedQueue(requests), lambda: 1.0)
    both = shadow.component(
        inquirer(requests, old_clock), inquirer(TokenCountedQueue(requests), new_clock), calls=("get_loads",)
    )

    def both_alone() -> None:
        walked.get_loads()
        counted.get_loads()

    calls = {"shadowed": both.get_loads, "both alone": both_alone}
    found = measure_interleaved(calls, turns=scale.turns, number=scale.of(1_000))
    assert shadow.stats().differences == 0
    alone = {"both alone": _us(found["both alone"])}
    what = "get_loads(), 1,000 waiting, walked and counted"
    return Measurement(NAME, what, "us", _us(found["shadowed"]), alone, Goal(1.25, "both alone"))


def _us(samples_ns: Sequence[float]) -> list[float]:
    return [sample / 1e3 for sample in samples_ns]
