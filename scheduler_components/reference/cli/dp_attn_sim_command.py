"""The command ``dp-attn-sim``: what it buys, and costs, to let the prefills of replicas wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import attrs
from cyclopts import Parameter
from cyclopts.validators import Number

from scheduler_components.reference.cli.run_reporter import print_lines
from scheduler_components.reference.cli.workload_driver import percentile
from scheduler_components.reference.engine.dp_attn_sim import DpSimConfig, DpSimReport, simulate_dp_attn

__all__ = ["dp_attn_sim", "format_dp_report"]


def dp_attn_sim(
    *,
    dp_size: Annotated[int, Parameter(validator=Number(gte=2), help="Replicas.")] = 4,
    requests: Annotated[int, Parameter(validator=Number(gte=1), help="In all.")] = 400,
    rate: Annotated[float, Parameter(validator=Number(gt=0), help="Arrivals per second in all.")] = 20.0,
    prompt_tokens: Annotated[int, Parameter(validator=Number(gte=1), help="Of a prompt, on average.")] = 500,
    output_tokens: Annotated[int, Parameter(validator=Number(gte=1), help="Of an answer, on average.")] = 100,
    delay_steps: Annotated[int, Parameter(validator=Number(gte=1), help="Prefills wait so long at most.")] = 10,
    seed: Annotated[int, Parameter(help="Of arrivals and lengths.")] = 0,
) -> int:
    """Serve the same requests with and without the delay of prefill under DP attention, in simulated time."""
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
    """Lines that say what came of one run."""
    stats = report.stats[0]
    waits = f"prefills wait {delay_steps} steps at most" if delay_steps else "prefills wait for nobody"
    yield f"{waits}: {report.num_tokens:,} tokens in {report.makespan_s:.1f} s"
    for what, values in (("between tokens", report.inter_token_s), ("to the first token", report.first_token_s)):
        p50, p90, p99 = (1e3 * percentile(values, share) for share in (0.5, 0.9, 0.99))
        yield f"  {what}: p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms"
    padded = sum(each.padded_tokens for each in report.stats)
    yield f"  {stats.eager_steps:,} of {stats.steps:,} steps without a graph, {padded:,} tokens of padding"
