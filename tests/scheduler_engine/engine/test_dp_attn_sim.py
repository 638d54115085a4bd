"""Whole schedulers under DP attention: everything is served, steps cost what the longest batch costs, waiting pays."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components.scheduling.dp_attn import BatchShape
from scheduler_engine.device.device import CostModel, ScheduledBatch
from scheduler_engine.engine.dp_attn_sim import (
    Arrival,
    DpSimConfig,
    DpSimReport,
    make_arrivals,
    simulate_dp_attn,
)

BUSY = DpSimConfig(dp_size=3, num_requests=60, rate_per_s=30.0, prompt_tokens=400, output_tokens=40)

arrivals = st.lists(
    st.builds(Arrival, st.floats(0, 2), st.integers(0, 2), st.integers(1, 5_000), st.integers(1, 12)), max_size=12
).map(lambda found: sorted(found, key=lambda arrival: arrival.at_s))


def percentile(values: list[float], share: float) -> float:
    return values[int(len(values) * share)]


@settings(deadline=None, max_examples=15)
@given(arrivals, st.integers(2, 3), st.integers(0, 6))
def test_every_arrival_is_served_completely(found: list[Arrival], dp_size: int, max_delay_steps: int) -> None:
    served = [Arrival(each.at_s, each.replica % dp_size, each.prompt_tokens, each.output_tokens) for each in found]
    config = DpSimConfig(dp_size=dp_size, num_requests=max(1, len(found)), max_delay_steps=max_delay_steps)
    report = simulate_dp_attn(config, served)
    assert report.num_tokens == sum(arrival.output_tokens for arrival in served)
    assert len(report.first_token_s) == len(served)
    prefilled = sum(shape.num_prefill_tokens for step in report.shapes for shape in step)
    assert prefilled == sum(arrival.prompt_tokens for arrival in served)


def test_delayed_prefills_leave_the_decodes_of_other_replicas_alone() -> None:
    free = simulate_dp_attn(BUSY)
    together = simulate_dp_attn(attrs.evolve(BUSY, max_delay_steps=10))
    assert together.num_tokens == free.num_tokens
    assert together.stats[0].eager_steps < 0.7 * free.stats[0].eager_steps
    assert percentile(together.inter_token_s, 0.9) < 0.5 * percentile(free.inter_token_s, 0.9)
    assert percentile(together.first_token_s, 0.5) > percentile(free.first_token_s, 0.5)  # what it costs
    assert together.stats[0].prefills_delayed > 0 == free.stats[0].prefills_delayed


def test_all_replicas_count_the_same_steps_and_equal_seeds_give_equal_runs() -> None:
    report = simulate_dp_attn(attrs.evolve(BUSY, max_delay_steps=5))
    for name in ("steps", "eager_steps", "prefills_delayed", "prefills_forced"):
        assert len({getattr(stats, name) for stats in report.stats}) == 1
    again: DpSimReport = simulate_dp_attn(attrs.evolve(BUSY, max_delay_steps=5))
    assert again == report
    assert make_arrivals(BUSY) == make_arrivals(BUSY)


def test_a_step_takes_as_long_as_the_longest_batch_and_longer_without_a_graph() -> None:
    cost = CostModel()
    decode, prefill, idle = BatchShape(0, 8, 800), BatchShape(1_000, 0, 1_000, False), BatchShape()
    alone = cost.batch_s(ScheduledBatch(num_prefill_tokens=1_000, num_context_tokens=1_000))
    for own in (decode, prefill, idle):
        batch = ScheduledBatch(num_decode_tokens=own.num_decode_tokens, replicas=(decode, prefill, idle))
        assert cost.batch_s(batch) == pytest.approx(alone + cost.eager_ms * 1e-3)
    graphs = ScheduledBatch(num_decode_tokens=8, num_context_tokens=800, replicas=(decode, idle))
    assert cost.batch_s(graphs) == cost.batch_s(ScheduledBatch(num_decode_tokens=8, num_context_tokens=800))
    assert graphs.has_work and ScheduledBatch(replicas=(decode, idle)).has_work
    assert not ScheduledBatch(replicas=(idle, idle)).has_work
