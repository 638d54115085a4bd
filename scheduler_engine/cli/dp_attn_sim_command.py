"""The command ``simulate dp-attention``: gain and cost of letting the prefills of replicas wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import attrs
from cyclopts import Parameter
from cyclopts.validators import Number

from scheduler_engine.cli.run_reporter import print_lines
from scheduler_engine.cli.workload_driver import percentile
from scheduler_engine.engine.dp_attn_sim import DpSimConfig, DpSimReport, simulate_dp_attn


def dp_attn_sim(
    *,
    dp_size: Annotated[int, Parameter(validator=Number(gte=2), help="Replicas.")] = 4,
    requests: Annotated[int, Parameter(validator=Number(gte=1), help="Number of requests.")] = 400,
    rate: Annotated[float, Parameter(validator=Number(gt=0), help="Arrivals per second, over all replicas.")] = 20.0,
    prompt_tokens: Annotated[int, Parameter(validator=Number(gte=1), help="Mean length of a prompt.")] = 500,
    output_tokens: Annotated[int, Parameter(validator=Number(gte=1), help="Mean length of an answer.")] = 100,
    delay_steps: Annotated[int, Parameter(validator=Number(gte=1), help="Longest delay of a prefill, in steps.")] = 10,
    seed: Annotated[int, Parameter(help="Seed of arrivals and lengths.")] = 0,
) -> int:
    """Serve the same requests with and without delayed prefills under DP attention, in simulated time."""
    config = DpSimConfig(
        dp_size=dp_size,
        num_requests=requests,
        rate_per_s=rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seed=seed,
    )
    for steps in (0, delay_steps):
        print_lines(format_dp_report(steps, simulate_dp_attn(attrs.evolve(config, max_delay_steps=steps))))
    return 0


def format_dp_report(delay_steps: int, report: DpSimReport) -> Iterator[str]:
    """Yield the lines that summarize one run."""
    stats = report.stats[0]
    waits = f"prefills wait at most {delay_steps} steps" if delay_steps else "prefills do not wait"
    yield f"{waits}: {report.num_tokens:,} tokens in {report.makespan_s:.1f} s"
    for what, values in (("between tokens", report.inter_token_s), ("to the first token", report.first_token_s)):
        p50, p90, p99 = (1e3 * percentile(values, share) for share in (0.5, 0.9, 0.99))
        yield f"  {what}: p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms"
    padded = sum(each.padded_tokens for each in report.stats)
    yield f"  {stats.eager_steps:,} of {stats.steps:,} steps without a graph, {padded:,} tokens of padding"
