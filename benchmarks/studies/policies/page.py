"""Write what the page says in figures: the tables, and the sentences of each finding, between marks of the page.

A finding is text made from the results, with a condition that the results must fulfil for the text to be true.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.studies.policies.findings import FINDINGS, Finding
from benchmarks.studies.policies.study import RunResult, Study

_WIDTH = 120
_BLOCK = re.compile(r"(?s)(<!-- study: ([\w-]+) -->\n).*?(<!-- /study -->)")


def with_blocks(page: str, study: Study) -> str:
    """Return ``page`` with new text between its marks: ``<!-- study: NAME -->`` and ``<!-- /study -->``.

    Raises:
        KeyError: a mark names no block.
    """
    return _BLOCK.sub(lambda found: f"{found[1]}\n{_text(BLOCKS[found[2]](study))}\n\n{found[3]}", page)


def broken_findings(page: str, study: Study) -> list[str]:
    """Return the names of the findings of a page that the results do not show."""
    blocks = {found[2]: BLOCKS[found[2]](study) for found in _BLOCK.finditer(page)}
    return [name for name, block in blocks.items() if isinstance(block, Finding) and not block.holds]


def _text(block: str | Finding) -> str:
    return (
        textwrap.fill(" ".join(block.text.split()), _WIDTH, break_long_words=False, break_on_hyphens=False)
        if isinstance(block, Finding)
        else block
    )


_Column = tuple[str, Callable[[Mapping[str, float]], str]]


def _seconds(name: str) -> Callable[[Mapping[str, float]], str]:
    return lambda figures: f"{figures[name]:.3g}"


def _milliseconds(name: str) -> Callable[[Mapping[str, float]], str]:
    return lambda figures: f"{1e3 * figures[name]:.3g}"


def _percent(name: str) -> Callable[[Mapping[str, float]], str]:
    return lambda figures: f"{figures[name]:.1%}"


def _number(name: str) -> Callable[[Mapping[str, float]], str]:
    return lambda figures: f"{figures[name]:,.0f}"


def _table(runs: Iterable[RunResult], varied: Mapping[str, str], columns: Sequence[_Column]) -> str:
    """Return a table with a row per run: what varied, by its heading, then the columns."""
    heads = [*varied.values(), *(name for name, _ in columns)]
    lines = [
        f"| {' | '.join(heads)} |",
        f"| {' | '.join('---' for _ in varied)} | {' | '.join('---:' for _ in columns)} |",
    ]
    for run in runs:
        cells = [_value(run.varied[name]) for name in varied] + [write(run.figures) for _, write in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _value(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _workloads(study: Study) -> str:
    lines = [
        "| workload | requests | until the last arrival (s) | prompt tokens, mean / largest | output tokens, mean "
        "| shared with an earlier prompt | requests that continue one |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, facts in study.workloads.items():
        if ":" not in name:
            lines.append(
                f"| `{name}` | {facts.num_requests:,} | {facts.duration_s:,.0f} "
                f"| {facts.mean_prompt_tokens:,.0f} / {facts.max_prompt_tokens:,} | {facts.mean_output_tokens:,.0f} "
                f"| {facts.shared_share:.1%} | {facts.continued_share:.1%} |"
            )
    return "\n".join(lines)


def _settings(study: Study) -> str:
    lines = ["| setting | value |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {_value(value)} |" for name, value in study.standard.items())])


_TTFT: tuple[_Column, ...] = (
    ("TTFT p50 (s)", _seconds("ttft_p50_s")),
    ("mean (s)", _seconds("ttft_mean_s")),
    ("p99 (s)", _seconds("ttft_p99_s")),
)
_HIT_RATE: _Column = ("hit rate", _percent("hit_rate"))
_GOODPUT: _Column = ("within the SLO", _percent("goodput_share"))
_WAITS: tuple[_Column, ...] = (
    ("wait of new prompts p50 (s)", _seconds("new_queue_p50_s")),
    ("longest (s)", _seconds("new_queue_max_s")),
    ("wait of continued ones p50 (s)", _seconds("continued_queue_p50_s")),
    ("longest (s)", _seconds("continued_queue_max_s")),
    ("mean TTFT (s)", _seconds("ttft_mean_s")),
)
_TIER_RATES: tuple[_Column, ...] = (_HIT_RATE, ("of it from the host", _percent("hit_rate_host")))
_STORAGE_RATES: tuple[_Column, ...] = (*_TIER_RATES, ("from storage", _percent("hit_rate_storage")))

_TABLES: dict[str, tuple[Mapping[str, str], Sequence[_Column]]] = {
    "policies": (
        {"workload": "workload", "schedule_policy": "policy"},
        (*_TTFT, _HIT_RATE, ("longest wait (s)", _seconds("queue_max_s")), _GOODPUT),
    ),
    "seeds": (
        {"workload": "workload", "schedule_policy": "policy"},
        (("mean TTFT (s)", _seconds("ttft_mean_s")), _HIT_RATE, _GOODPUT),
    ),
    "load": ({"schedule_policy": "policy", "speed": "speed"}, (*_WAITS, _HIT_RATE)),
    "pool": (
        {"schedule_policy": "policy", "kv_tokens": "pool (tokens)"},
        (_HIT_RATE, ("prefilled tokens", _number("prefill_tokens")), ("mean TTFT (s)", _seconds("ttft_mean_s"))),
    ),
    "blocking": (
        {"schedule_policy": "policy"},
        (
            ("idle share of the pools while requests wait", _percent("idle_pool_share")),
            ("most waiting", _number("peak_waiting")),
            *_TTFT,
        ),
    ),
    "preemption": (
        {"kv_tokens": "pool (tokens)", "preemption_policy": "victim"},
        (
            ("preemptions", _number("preemptions")),
            ("positions computed again", _number("recomputed_tokens")),
            ("recompute tax", _percent("recompute_tax")),
            ("time to serve all (s)", _seconds("duration_s")),
        ),
    ),
    "reservation": (
        {"reservation": "reserved for future output"},
        (
            ("preemptions", _number("preemptions")),
            ("recompute tax", _percent("recompute_tax")),
            ("time to serve all (s)", _seconds("duration_s")),
            ("mean TTFT (s)", _seconds("ttft_mean_s")),
        ),
    ),
    "routers": (
        {"workload": "workload", "router": "router"},
        (_HIT_RATE, *_TTFT, ("fairness of replicas", _seconds("replica_fairness")), _GOODPUT),
    ),
    "event-lag": (
        {"router": "router", "event_lag_s": "lag (s)"},
        (_HIT_RATE, ("mean TTFT (s)", _seconds("ttft_mean_s")), ("p99 (s)", _seconds("ttft_p99_s"))),
    ),
    "event-lag-trace": (
        {"event_lag_s": "lag (s)"},
        (_HIT_RATE, ("mean TTFT (s)", _seconds("ttft_mean_s")), ("p99 (s)", _seconds("ttft_p99_s"))),
    ),
    "prefill-delay": (
        {"rate_per_s": "requests per second", "max_delay_steps": "longest delay (steps)"},
        (
            ("time between tokens, mean (ms)", _milliseconds("itl_mean_s")),
            ("p99 (ms)", _milliseconds("itl_p99_s")),
            ("TTFT p50 (ms)", _milliseconds("ttft_p50_s")),
            ("p99 (ms)", _milliseconds("ttft_p99_s")),
            ("steps", _number("steps")),
            ("padded tokens", _number("padded_tokens")),
        ),
    ),
    "tiers": ({"workload": "workload", "host_tokens": "host (tokens)"}, (*_TIER_RATES, *_TTFT, _GOODPUT)),
    "tier-bandwidth": (
        {"load_gb_per_s": "load (GB/s)"},
        (*_TIER_RATES, ("mean TTFT (s)", _seconds("ttft_mean_s")), ("p99 (s)", _seconds("ttft_p99_s"))),
    ),
    "storage": (
        {"workload": "workload", "host_tokens": "host (tokens)", "storage_tokens": "storage (tokens)"},
        (*_STORAGE_RATES, *_TTFT, _GOODPUT),
    ),
    "storage-prefetch": ({"prefetch": "prefetch"}, (*_STORAGE_RATES, *_TTFT)),
    "storage-bandwidth": ({"storage_total_gb_per_s": "storage (GB/s; 0 is no bound)"}, (*_STORAGE_RATES, *_TTFT)),
}
"""Tables of factors: what varied, and columns."""


def _table_of(factor: str) -> Callable[[Study], str]:
    return lambda study: _table(study.of(factor), *_TABLES[factor])


BLOCKS: dict[str, Callable[[Study], str | Finding]] = {
    "workloads": _workloads,
    "settings": _settings,
    **{factor: _table_of(factor) for factor in _TABLES},
    **FINDINGS,
}
"""What is between the marks of the page, by name."""
