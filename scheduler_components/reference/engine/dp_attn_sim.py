"""Replicas under DP attention in simulated time: what it buys to let prefills wait for each other.

Each replica is a whole reference scheduler on a thread of its own, and all take every step together. Nothing sleeps:
a step moves every clock by what the simulated device charges, which is the longest of the replicas' batches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import attrs
import msgspec

from scheduler_components import OutputBatch, ParallelState
from scheduler_components.dp_attn import BatchShape, DpBatchSync, DpStats, PrefillDelayer, dp_rank_groups
from scheduler_components.reference.device.device import SimulatedDevice
from scheduler_components.reference.device.sampling import SamplingLimits
from scheduler_components.reference.engine.config import SchedulerConfig
from scheduler_components.reference.engine.scheduler.request import Request
from scheduler_components.reference.engine.scheduler.scheduler import Clocks, Scheduler, SchedulerSinks
from scheduler_components.testing.thread_ranks import ThreadSyncHub
from scheduler_components.validators import integer_validator, number_validator

__all__ = ["Arrival", "DpSimConfig", "DpSimReport", "make_arrivals", "simulate_dp_attn"]

_PATIENCE_S = 20.0  # of real time, for a thread that others wait for


@attrs.frozen(kw_only=True)
class DpSimConfig:
    """What to simulate.

    Attributes:
        dp_size: replicas, 2 or more.
        num_requests: in all, dealt out in turn.
        rate_per_s: arrivals per second in all, at random times.
        prompt_tokens, output_tokens: of each request; lengths vary by half to either side.
        max_delay_steps, low_usage: of the ``PrefillDelayer``.
        seed: of arrivals and lengths.

    Raises:
        ConfigError: naming the value that cannot work.
    """

    dp_size: int = attrs.field(default=4, validator=integer_validator("is not a number of replicas", at_least=2))
    num_requests: int = attrs.field(default=400, validator=integer_validator())
    rate_per_s: float = attrs.field(default=40.0, validator=number_validator("is not a rate"))
    prompt_tokens: int = attrs.field(default=500, validator=integer_validator())
    output_tokens: int = attrs.field(default=100, validator=integer_validator())
    max_delay_steps: int = attrs.field(default=0, validator=integer_validator("is not a number of steps", at_least=0))
    low_usage: float = 0.0
    seed: int = 0


class Arrival(msgspec.Struct, frozen=True):
    """One request: when it comes, to whom, and how long it is."""

    at_s: float
    replica: int
    prompt_tokens: int
    output_tokens: int


class DpSimReport(msgspec.Struct, frozen=True):
    """What came of it; times are simulated.

    Attributes:
        makespan_s: from the first arrival to the last token.
        first_token_s: from arrival to first token, of each request, sorted.
        inter_token_s: between tokens, of each token but the first, sorted.
        stats: of each replica.
        shapes: of all steps, as every replica saw them.
        num_tokens: generated in all.
    """

    makespan_s: float
    first_token_s: list[float]
    inter_token_s: list[float]
    stats: list[DpStats]
    shapes: list[tuple[BatchShape, ...]]
    num_tokens: int


def make_arrivals(config: DpSimConfig) -> list[Arrival]:
    """Return the requests in order of arrival; the same for equal seeds."""
    draw = random.Random(config.seed)  # noqa: S311  a workload, not a secret

    def near(mean: int) -> int:
        return max(1, draw.randint(mean - mean // 2, mean + mean // 2))

    now_s, arrivals = 0.0, []
    for number in range(config.num_requests):
        now_s += draw.expovariate(config.rate_per_s)
        arrivals.append(Arrival(now_s, number % config.dp_size, near(config.prompt_tokens), near(config.output_tokens)))
    return arrivals


def simulate_dp_attn(config: DpSimConfig, arrivals: Sequence[Arrival] | None = None) -> DpSimReport:
    """Serve the arrivals, and report."""
    arrivals = make_arrivals(config) if arrivals is None else arrivals
    parallels = [
        ParallelState.from_tp_rank(rank, tp_size=config.dp_size, attn_dp_size=config.dp_size)
        for rank in range(config.dp_size)
    ]
    hub = ThreadSyncHub(
        {rank: dp_rank_groups(each).reduce_groups for rank, each in enumerate(parallels)}, timeout_s=_PATIENCE_S
    )
    replicas = [_Replica.make(config, each, hub) for each in parallels]
    with ThreadPoolExecutor(config.dp_size) as threads:
        for done in [threads.submit(each.run, arrivals) for each in replicas]:
            done.result()
    firsts = sorted(value for each in replicas for value in each.tokens.first_token_s)
    between = sorted(value for each in replicas for value in each.tokens.inter_token_s)
    return DpSimReport(
        makespan_s=max(each.clock.now_s for each in replicas) - (arrivals[0].at_s if arrivals else 0.0),
        first_token_s=firsts,
        inter_token_s=between,
        stats=[each.scheduler.batcher.budget.dp.stats for each in replicas],
        shapes=replicas[0].shapes,
        num_tokens=len(firsts) + len(between),
    )


class _Clock:
    """Simulated seconds of one replica; the device moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass(slots=True, kw_only=True)
class _TokenTimes:
    """An ``OutputSink`` that notes when tokens come."""

    clock: _Clock
    arrived_s: dict[str, float] = field(default_factory=dict)
    last_s: dict[str, float] = field(default_factory=dict)
    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)

    def is_ready(self) -> bool:
        return True

    def send(self, batch: OutputBatch) -> bool:
        now_s = self.clock.now_s
        for delta in batch.deltas:
            for _ in delta.output.token_ids:
                if delta.rid in self.last_s:
                    self.inter_token_s.append(now_s - self.last_s[delta.rid])
                else:
                    self.first_token_s.append(now_s - self.arrived_s[delta.rid])
                self.last_s[delta.rid] = now_s
        return True

    def close(self) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class _Replica:
    """One scheduler, its clock, and what its clients saw."""

    index: int
    scheduler: Scheduler  # noqa: SCH001 drives the scheduler from above, which does not know it
    clock: _Clock
    tokens: _TokenTimes
    shapes: list[tuple[BatchShape, ...]] = field(default_factory=list)

    @classmethod
    def make(cls, config: DpSimConfig, parallel: ParallelState, hub: ThreadSyncHub) -> _Replica:
        clock = _Clock()
        tokens = _TokenTimes(clock=clock)
        dp = DpBatchSync(
            groups=hub.parallel_groups(parallel.tp_rank),
            replica=parallel.attn_dp_rank,
            num_replicas=parallel.attn_dp_size,
            delayer=PrefillDelayer(max_delay_steps=config.max_delay_steps, low_usage=config.low_usage),
        )
        scheduler = Scheduler.compose(
            SchedulerConfig(),
            parallel,
            SimulatedDevice(clock=clock, sleep=clock.sleep),
            sinks=SchedulerSinks(outputs=tokens),
            clocks=Clocks(wall=clock, monotonic=clock),
            dp=dp,
        )
        return cls(index=parallel.attn_dp_rank, scheduler=scheduler, clock=clock, tokens=tokens)

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Step until everything is served, everywhere: all replicas come to the same end after the same steps."""
        num_come = 0
        while True:
            while num_come < len(arrivals) and arrivals[num_come].at_s <= self.clock.now_s:
                self._submit(num_come, arrivals[num_come])
                num_come += 1
            self.scheduler.step()
            step = self.scheduler.batcher.budget.dp.last
            self.shapes.append(step.shapes)
            if not step.any_work:
                if num_come == len(arrivals):
                    return
                self.clock.now_s = max(self.clock.now_s, arrivals[num_come].at_s)

    def _submit(self, number: int, arrival: Arrival) -> None:
        if arrival.replica == self.index:
            rid = f"r{number}"
            self.tokens.arrived_s[rid] = arrival.at_s
            first = number * 100_000  # no two prompts share a prefix
            limits = SamplingLimits(max_new_tokens=arrival.output_tokens, ignore_eos=True)
            self.scheduler.submit(Request(rid, range(first, first + arrival.prompt_tokens), limits))
