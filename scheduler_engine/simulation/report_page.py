"""Draw reports as one HTML page: a table of the runs next to each other, and plots of all of them. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from scheduler_components._internal.extras import require_modules
from scheduler_engine.simulation.report import Distribution, SimulationReport, TenantReport, TimelinePoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_TENANTS = 20  # rows of a page; the report has all
_CAUSES = ("preemption", "migration")
_COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0e7490", "#be185d", "#4b5563")
_STYLE = """
body { font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #111827; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: 0.25rem 0.75rem; border-bottom: 1px solid #e5e7eb; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
summary { cursor: pointer; }
svg { width: 100%; max-width: 70rem; height: auto; }
"""


def check_can_draw() -> None:
    """Check that matplotlib is installed, before a simulation takes a minute.

    Raises:
        StartError: it is not; the error names the extra.
    """
    require_modules("matplotlib", otherwise="leave --report out")


def render_page(reports: Sequence[SimulationReport]) -> str:
    """Return one HTML page about all runs. Equal reports give equal pages.

    Raises:
        StartError: matplotlib is not installed.
    """
    check_can_draw()
    titles = "".join(f"<th>{escape(report.title)}</th>" for report in reports)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for name, *values in _rows(reports)
    )
    different, equal = _setting_rows(reports)
    settings = _table("setting", titles, different) if different else ""
    tenants = _tenant_rows(reports)
    of_tenants = (
        "<h2>Tenants</h2>\n<p>Requests; mean and 99th percentile of the time to the first token, mean end to end, in "
        f"seconds.</p>\n{_table('tenant', titles, tenants)}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Simulated runs</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>Simulated runs</h1>\n"
        f"<table><thead><tr><th>run</th>{titles}</tr></thead><tbody>{rows}</tbody></table>\n{_draw(reports)}\n"
        f"{of_tenants if tenants else ''}<h2>Settings</h2>\n{settings}"
        f"<details{'' if different else ' open'}><summary>Equal in all runs</summary>\n"
        f"{_table('setting', '<th>value</th>', equal)}</details>\n"
        "</body></html>\n"
    )


def _table(head: str, titles: str, rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(f"<tr><td>{escape(name)}</td>{cells}</tr>" for name, cells in rows)
    return f"<table><thead><tr><th>{head}</th>{titles}</tr></thead><tbody>{body}</tbody></table>\n"


def _rows(reports: Sequence[SimulationReport]) -> list[tuple[str, ...]]:
    def row(name: str, *values: str) -> tuple[str, ...]:
        return (name, *values)

    def times(name: str, distributions: Sequence[Distribution]) -> tuple[str, ...]:
        return row(
            f"{name}, p50 / p90 / p99 (ms)",
            *(" / ".join(_milliseconds(value) for value in (each.p50, each.p90, each.p99)) for each in distributions),
        )

    return [
        row("requests finished", *(f"{each.num_finished:,} of {each.num_requests:,}" for each in reports)),
        times("time to first token", [each.ttft_s for each in reports]),
        times("time per output token", [each.tpot_s for each in reports]),
        times("end to end", [each.e2e_s for each in reports]),
        times("in the queue", [each.queue_s for each in reports]),
        row("output tokens per second", *(f"{each.output_tokens_per_s:,.0f}" for each in reports)),
        row("within the SLO", *(f"{each.goodput_share:.1%}, {each.goodput_per_s:.2f}/s" for each in reports)),
        row("hit rate", *(", ".join(f"{tier} {rate:.1%}" for tier, rate in each.hit_rate.items()) for each in reports)),
        row(
            "positions computed again after a preemption, after a failure",
            *(", ".join(f"{each.recomputed_by_cause[cause]:,}" for cause in _CAUSES) for each in reports),
        ),
        row("preemptions, migrations", *(f"{each.num_retractions:,}, {each.num_migrations:,}" for each in reports)),
        row("fairness among replicas", *(f"{each.replica_fairness:.3f}" for each in reports)),
        row("fairness among tenants", *(f"{each.tenant_fairness:.3f}" for each in reports)),
        row("first token before the deadline", *(f"{each.deadline_share:.1%}" for each in reports)),
    ]


def _milliseconds(value_s: float) -> str:
    value_ms = 1e3 * value_s
    return f"{value_ms:.1f}" if value_ms < 100 else f"{value_ms:,.0f}"


def _tenant_rows(reports: Sequence[SimulationReport]) -> list[tuple[str, str]]:
    """Return a row of cells per tenant, for the tenants with the most requests."""
    sizes: dict[str, int] = {}
    for report in reports:
        for tenant in report.tenants:
            sizes[tenant.name] = max(sizes.get(tenant.name, 0), tenant.num_requests)
    names = sorted(sizes, key=lambda name: (-sizes[name], name))[:_MAX_TENANTS]
    by_name = [{tenant.name: tenant for tenant in report.tenants} for report in reports]
    return [(name, "".join(_tenant_cell(tenants.get(name)) for tenants in by_name)) for name in names]


def _tenant_cell(tenant: TenantReport | None) -> str:
    if tenant is None:
        return "<td></td>"
    times = f"{tenant.mean_ttft_s:.3f} / {tenant.p99_ttft_s:.3f} / {tenant.mean_e2e_s:.3f}"
    return f"<td>{tenant.num_requests:,}; {times}</td>"


def _setting_rows(reports: Sequence[SimulationReport]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the rows of the settings that differ, with a cell per run, and of those that are equal, with one cell."""
    different, equal = list[tuple[str, str]](), list[tuple[str, str]]()
    for name in dict.fromkeys(name for report in reports for name in report.settings):
        cells = [f"<td>{escape(str(report.settings.get(name, '')))}</td>" for report in reports]
        if len(set(cells)) > 1:
            different.append((name, "".join(cells)))
        else:
            equal.append((name, cells[0]))
    return different, equal


def _draw(reports: Sequence[SimulationReport]) -> str:
    """Return the plots as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "simulate-trace", "svg.fonttype": "none"}):  # the same runs, the same page
        figure: Figure = Figure(figsize=(11, 12), layout="constrained")
        ttft, tpot, e2e, running, waiting, usage, queues, hits = figure.subplots(4, 2).flat
        for axes, name, title in (
            (ttft, "ttft_s", "Time to first token (s)"),
            (tpot, "tpot_s", "Time per output token (s)"),
            (e2e, "e2e_s", "End to end (s)"),
        ):
            _draw_distribution(axes, [(each.title, getattr(each, name)) for each in reports], title)
        for axes, at, title in (
            (running, 1, "Running requests"),
            (waiting, 2, "Waiting requests"),
            (usage, 3, "Share of the pools in use"),
        ):
            _draw_timeline(axes, [(each.title, each.timeline) for each in reports], at, title)
        _draw_queues(queues, reports)
        _draw_hit_rates(hits, reports)
        figure.legend(*ttft.get_legend_handles_labels(), loc="outside upper left", ncols=4, frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _draw_distribution(axes: Axes, runs: Sequence[tuple[str, Distribution]], title: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for number, ((name, values), colour) in enumerate(zip(runs, _colours(len(runs)), strict=True)):
        width = 3.2 - 2 * number / max(1, len(runs) - 1)  # the first ones show where later ones lie on top of them
        axes.plot(values.percentiles, range(len(values.percentiles)), label=name, color=colour, linewidth=width)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(ylabel="percentile", ylim=(0, 100))
    _style(axes, title)


def _draw_timeline(axes: Axes, runs: Sequence[tuple[str, Sequence[TimelinePoint]]], at: int, title: str) -> None:
    for (_, points), colour in zip(runs, _colours(len(runs)), strict=True):
        values = [(point.time_s, (point.num_running, point.num_waiting, point.token_usage)[at - 1]) for point in points]
        axes.plot([time for time, _ in values], [value for _, value in values], color=colour, linewidth=0.9)
    axes.set(xlabel="virtual time (s)", ylim=(0, None), xlim=(0, None))
    _style(axes, title)


def _draw_queues(axes: Axes, reports: Sequence[SimulationReport]) -> None:
    """Draw the longest and the shortest queue of a replica over time."""
    for report, colour in zip(reports, _colours(len(reports)), strict=True):
        times = [point.time_s for point in report.timeline]
        queues = list(zip(*(replica.waiting for replica in report.replicas), strict=True))
        axes.plot(times, [max(lengths) for lengths in queues], color=colour, linewidth=0.9)
        axes.plot(times, [min(lengths) for lengths in queues], color=colour, linewidth=0.9, linestyle=":")
    axes.set(xlabel="virtual time (s)", ylim=(0, None), xlim=(0, None))
    _style(axes, "Longest and shortest (dotted) queue of a replica")


def _draw_hit_rates(axes: Axes, reports: Sequence[SimulationReport]) -> None:
    """Draw a bar per run: the share of the prompt tokens that each tier held."""
    names = [report.title for report in reports]
    left = [0.0] * len(reports)
    for tier, alpha in (("device", 1.0), ("host", 0.6), ("storage", 0.3)):
        rates = [report.hit_rate.get(tier, 0.0) for report in reports]
        bars = axes.barh(range(len(names)), rates, left=left, color=_colours(len(names)), alpha=alpha)
        if any(rates):
            axes.bar_label(bars, [tier if rate > 0.05 else "" for rate in rates], label_type="center", fontsize="small")
        left = [before + rate for before, rate in zip(left, rates, strict=True)]
    axes.set(yticks=range(len(names)), yticklabels=names, xlim=(0, 1))
    axes.invert_yaxis()
    _style(axes, "Share of the prompt tokens found in each tier")


def _colours(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    axes.grid(axis="y", color="#e5e7eb")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
