"""Measure the processor time that the batching components take of a step, on and off, at 64 running requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.bench_step import running_scheduler
from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved
from scheduler_components.agreement import ParallelGroups, SyncCall
from scheduler_components.internal_state import InternalState
from scheduler_components.load.work_counters import WorkCounters
from scheduler_components.profiler_manager import ProfilerManager
from scheduler_components.scheduling.dp_attn import BatchShape, DpBatchSync, PrefillDelayer, PrefillIntent
from scheduler_components.scheduling.dynamic_chunk_sizer import DynamicChunkSizer, PrefillLatencyModel
from scheduler_components.scheduling.new_token_ratio_tracker import NewTokenRatioTracker

NAME = "batching"
_REPLICAS = 8


class _EchoGroup:
    """Seven other replicas that decode 64 requests each, to measure the exchange without its transport."""

    ranks = tuple(range(_REPLICAS))

    def all_reduce_min(self, values: Sequence[int], call: SyncCall) -> list[int]:
        absent = 2**63 - 1
        return [64 if value == absent else value for value in values]

    def all_gather(self, values: Sequence[int], call: SyncCall) -> list[int]:
        return list(values) * _REPLICAS

    def close(self) -> None:
        pass


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peers: theirs want their engines
    """Time each component alone, next to a step of 64 running requests."""
    sync = DpBatchSync(
        groups=ParallelGroups(groups=(_EchoGroup(),)),
        num_replicas=_REPLICAS,
        delayer=PrefillDelayer(max_delay_steps=30),
    )
    shape, intent = BatchShape(0, 64, 8_192), PrefillIntent(has_work=True, is_running=True, token_usage=0.5)
    tracker, work, session = NewTokenRatioTracker(), WorkCounters(), ProfilerManager()
    sizer = DynamicChunkSizer(page_size=16)
    sized = DynamicChunkSizer(page_size=16, model=PrefillLatencyModel(5_000, 40, 20))
    with running_scheduler(64) as scheduler:
        sizes, report = scheduler.batcher.conditions.chunk_sizer, scheduler.metrics.sources["batching"]
        state = InternalState(providers=(scheduler.settings, sizes, session))
        parts: dict[str, tuple[Callable[[], object], float]] = {
            "the exchange of 8 replicas under DP attention, without its transport": (
                lambda: sync.exchange(shape, intent),
                40.0,
            ),
            "the new-token ratio": (tracker.decay_step, 1.0),
            "recording a decode step": (lambda: work.record_decode(64, 0.006, 64), 2.0),
            "a profiler that records nothing": (lambda: session.on_step_start("decode"), 0.5),
            "dynamic chunk size, with a model": (lambda: sized.chunk_tokens(30_000, 2_048), 3.0),
            "dynamic chunk size, without a model": (lambda: sizer.chunk_tokens(30_000, 2_048), 0.5),
            "batch counters, every 16 steps": (report.stats, 3.0),
            "the internal state, per query": (state.get, 200.0),
        }
        calls = {name: call for name, (call, _) in parts.items()}
        us = _us(_measured({**calls, "a batch": scheduler.batcher.next_batch}, scale, 2_000))
    return [
        Measurement(NAME, name, "us", us[name], {"a batch of 64": us["a batch"]}, Goal(goal_us))
        for name, (_, goal_us) in parts.items()
    ]


def _measured(calls: Mapping[str, Callable[[], object]], scale: Scale, number: int) -> dict[str, list[float]]:
    return measure_interleaved(calls, turns=scale.turns, number=scale.of(number), clock_ns=time.thread_time_ns)


def _us(found: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
