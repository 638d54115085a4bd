"""Draw reports as one HTML page: a table of the runs next to each other, and plots of all of them. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from scheduler_components._extras import require_modules
from scheduler_components.simulation.report import Distribution, SimulationReport, TimelinePoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_can_draw", "render_page"]

_COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0e7490", "#be185d", "#4b5563")
_STYLE = """
body { font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #111827; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: 0.25rem 0.75rem; border-bottom: 1px solid #e5e7eb; text-align: right; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
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
    settings = "".join(f"<tr><td>{escape(name)}</td>{cells}</tr>" for name, cells in _setting_rows(reports))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Simulated runs</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>Simulated runs</h1>\n"
        f"<table><thead><tr><th>run</th>{titles}</tr></thead><tbody>{rows}</tbody></table>\n{_draw(reports)}\n"
        f"<h2>Settings</h2>\n<table><thead><tr><th>setting</th>{titles}</tr></thead><tbody>{settings}</tbody></table>\n"
        "</body></html>\n"
    )


def _rows(reports: Sequence[SimulationReport]) -> list[tuple[str, ...]]:
    def row(name: str, *values: str) -> tuple[str, ...]:
        return (name, *values)

    def times(name: str, distributions: Sequence[Distribution]) -> tuple[str, ...]:
        return row(
            f"{name}, p50 / p90 / p99 (s)",
            *(f"{each.p50:.3f} / {each.p90:.3f} / {each.p99:.3f}" for each in distributions),
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
        row("positions computed again", *(f"{each.recomputed_tokens:,}" for each in reports)),
        row("preemptions, migrations", *(f"{each.num_retractions:,}, {each.num_migrations:,}" for each in reports)),
        row("fairness among replicas", *(f"{each.replica_fairness:.3f}" for each in reports)),
        row("fairness among tenants", *(f"{each.tenant_fairness:.3f}" for each in reports)),
    ]


def _setting_rows(reports: Sequence[SimulationReport]) -> list[tuple[str, str]]:
    names = dict.fromkeys(name for report in reports for name in report.settings)
    return [
        (name, "".join(f"<td>{escape(str(report.settings.get(name, '')))}</td>" for report in reports))
        for name in names
    ]


def _draw(reports: Sequence[SimulationReport]) -> str:
    """Return the plots as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "simulate-trace", "svg.fonttype": "none"}):  # the same runs, the same page
        figure: Figure = Figure(figsize=(11, 9), layout="constrained")
        ttft, tpot, e2e, running, waiting, usage = figure.subplots(3, 2).flat
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
        ttft.legend(frameon=False, loc="lower right", fontsize="small")
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _draw_distribution(axes: Axes, runs: Sequence[tuple[str, Distribution]], title: str) -> None:
    for (name, values), colour in zip(runs, _colours(len(runs)), strict=True):
        axes.plot(values.percentiles, range(len(values.percentiles)), label=name, color=colour)
    axes.set_xscale("symlog", linthresh=0.01)
    axes.set(ylabel="percentile", ylim=(0, 100), xlim=(0, None))
    _style(axes, title)


def _draw_timeline(axes: Axes, runs: Sequence[tuple[str, Sequence[TimelinePoint]]], at: int, title: str) -> None:
    for (_, points), colour in zip(runs, _colours(len(runs)), strict=True):
        values = [(point.time_s, (point.num_running, point.num_waiting, point.token_usage)[at - 1]) for point in points]
        axes.plot([time for time, _ in values], [value for _, value in values], color=colour, linewidth=0.9)
    axes.set(xlabel="virtual time (s)", ylim=(0, None), xlim=(0, None))
    _style(axes, title)


def _colours(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    axes.grid(axis="y", color="#e5e7eb")
    axes.spines[["top", "right"]].set_visible(False)
