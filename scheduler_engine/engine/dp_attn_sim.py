"""Simulate replicas under DP attention, to measure what delaying prefills gains.

Each replica is a complete reference scheduler on a separate thread, and all replicas take every step together. No
thread sleeps. A step advances every clock by the simulated duration of the longest batch of all replicas.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import attrs
import msgspec

from scheduler_components import ParallelState
from scheduler_components._internal.validators import integer_validator, number_validator
from scheduler_components.agreement.thread_sync import ThreadSyncHub
from scheduler_components.scheduling.composition import Clocks, SchedulerSinks
from scheduler_components.scheduling.dp_attn import BatchShape, DpBatchSync, DpStats, PrefillDelayer, dp_rank_groups
from scheduler_components.values import OutputBatch
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

__all__ = ["Arrival", "DpSimConfig", "DpSimReport", "make_arrivals", "simulate_dp_attn"]

_SYNC_TIMEOUT_S = 20.0  # real seconds, for a thread that others wait for


@attrs.frozen(kw_only=True)
class DpSimConfig:
    """Parameters of a simulation.

    Attributes:
        dp_size: number of replicas, 2 or more.
        num_requests: total number of requests, assigned to replicas in turn.
        rate_per_s: mean arrivals per second over all replicas; arrival times are random.
        prompt_tokens, output_tokens: mean lengths of a request; lengths vary by half in both directions.
        max_delay_steps, low_usage: parameters of the ``PrefillDelayer``.
        seed: seed of arrival times and lengths.

    Raises:
        ConfigError: a value is invalid; the error names it.
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
    """One request: its arrival time, its replica and its lengths."""

    at_s: float
    replica: int
    prompt_tokens: int
    output_tokens: int


class DpSimReport(msgspec.Struct, frozen=True):
    """Results of a simulation, in simulated seconds.

    Attributes:
        makespan_s: time from the first arrival to the last token.
        first_token_s: time from arrival to first token of each request, sorted.
        inter_token_s: time since the previous token, of each token but the first of a request, sorted.
        stats: statistics of each replica.
        shapes: the batch shapes of all replicas in each step.
        num_tokens: total number of generated tokens.
    """

    makespan_s: float
    first_token_s: list[float]
    inter_token_s: list[float]
    stats: list[DpStats]
    shapes: list[tuple[BatchShape, ...]]
    num_tokens: int


def make_arrivals(config: DpSimConfig) -> list[Arrival]:
    """Return the requests in order of arrival. Equal seeds give equal requests."""
    draw = random.Random(config.seed)

    def near(mean: int) -> int:
        return max(1, draw.randint(mean - mean // 2, mean + mean // 2))

    now_s, arrivals = 0.0, []
    for number in range(config.num_requests):
        now_s += draw.expovariate(config.rate_per_s)
        arrivals.append(Arrival(now_s, number % config.dp_size, near(config.prompt_tokens), near(config.output_tokens)))
    return arrivals


def simulate_dp_attn(config: DpSimConfig, arrivals: Sequence[Arrival] | None = None) -> DpSimReport:
    """Serve the arrivals and return the results."""
    arrivals = make_arrivals(config) if arrivals is None else arrivals
    parallels = [
        ParallelState.from_tp_rank(rank, tp_size=config.dp_size, attn_dp_size=config.dp_size)
        for rank in range(config.dp_size)
    ]
    hub = ThreadSyncHub(
        {rank: dp_rank_groups(each).reduce_groups for rank, each in enumerate(parallels)}, timeout_s=_SYNC_TIMEOUT_S
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
        stats=[each.scheduler.batcher.conditions.dp.stats for each in replicas],
        shapes=replicas[0].shapes,
        num_tokens=len(firsts) + len(between),
    )


class _Clock:
    """The simulated time of one replica, which its device advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass(slots=True, kw_only=True)
class _TokenTimes:
    """An ``OutputSink`` that records the latency of tokens."""

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
    """One scheduler, its clock, and the latencies of its tokens."""

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
        """Step until all requests of all replicas are served. All replicas end after the same step."""
        num_arrived = 0
        while True:
            while num_arrived < len(arrivals) and arrivals[num_arrived].at_s <= self.clock.now_s:
                self._submit(num_arrived, arrivals[num_arrived])
                num_arrived += 1
            self.scheduler.step()
            step = self.scheduler.batcher.conditions.dp.last
            self.shapes.append(step.shapes)
            if not step.any_work:
                if num_arrived == len(arrivals):
                    return
                self.clock.now_s = max(self.clock.now_s, arrivals[num_arrived].at_s)

    def _submit(self, number: int, arrival: Arrival) -> None:
        if arrival.replica == self.index:
            rid = f"r{number}"
            self.tokens.arrived_s[rid] = arrival.at_s
            first = number * 100_000  # no two prompts share a prefix
            limits = SamplingLimits(max_new_tokens=arrival.output_tokens, ignore_eos=True)
            self.scheduler.submit(EngineRequest(rid, range(first, first + arrival.prompt_tokens), limits))
