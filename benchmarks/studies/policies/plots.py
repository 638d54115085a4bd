"""Draw the plots of the page as SVG: opaque, so that they are readable on light and dark pages. Needs matplotlib."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.studies.policies.findings import REPORTED_TAX
from benchmarks.studies.policies.study import RunResult, Study, encode_study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0e7490")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_GREY = "#6b7280"

_Points: TypeAlias = Sequence[tuple[float, float]]


def digest_of(study: Study) -> str:
    """Return 16 digits of the SHA-256 of a study, which each of its plots contains."""
    return hashlib.sha256(encode_study(study)).hexdigest()[:16]


def draw(name: str, study: Study) -> str:
    """Return a plot as SVG. Equal studies give equal files."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rules: dict[str, object] = {
        "svg.hashsalt": "policy-study",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.grid": True,
        "grid.color": "#e5e7eb",
        "axes.edgecolor": _GREY,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "legend.fontsize": 8,
    }
    with mpl.rc_context(rules):
        figure: Figure = Figure(figsize=(8.2, 3.3), layout="constrained", facecolor="#ffffff")
        PLOTS[name](figure, study)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Identifier": digest_of(study)})
    text = file.getvalue()
    return "\n".join(line.rstrip() for line in text[text.index("<svg") :].splitlines()) + "\n"


def _draw_lines(axes: Axes, series: Mapping[str, _Points], *, style: str = "-") -> None:
    looks = cycle(zip(_COLOURS, _MARKERS, strict=True))
    for (label, points), (colour, marker) in zip(series.items(), looks, strict=False):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, style, label=label, color=colour, marker=marker, markersize=4, linewidth=1.4)


def _label_pools(axes: Axes, runs: Sequence[RunResult]) -> None:
    """Label the x axis at the sizes of the pools."""
    sizes = sorted({int(run.varied["kv_tokens"]) for run in runs})
    axes.set_xticks(sizes, [f"{size / 1000:.3g}" for size in sizes], minor=False)
    axes.set_xticks([], minor=True)


def _points(runs: Sequence[RunResult], x: str, y: str) -> list[tuple[float, float]]:
    return [(float(run.varied[x]), run.figures[y]) for run in runs]


def _series(study: Study, factor: str, by: str, x: str, y: str, **varied: str) -> dict[str, _Points]:
    """Return a line per value of the setting ``by``."""
    names = dict.fromkeys(run.varied[by] for run in study.of(factor, **varied))
    return {str(name): _points(study.of(factor, **varied, **{by: name}), x, y) for name in names}


def _policies(figure: Figure, study: Study) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    for axes, workload in zip(panels, ("trace", "conversations"), strict=True):
        runs = study.of("policies", workload=workload)
        names = [str(run.varied["schedule_policy"]) for run in runs]
        for (figure_name, label), colour, marker in zip(
            {"ttft_p50_s": "median", "ttft_mean_s": "mean", "ttft_p99_s": "99th percentile"}.items(),
            _COLOURS,
            _MARKERS,
            strict=False,
        ):
            axes.plot([run.figures[figure_name] for run in runs], names, marker, color=colour, label=label)
        axes.set(xscale="log", xlabel="time to first token (s)", title=workload, xlim=(0.1, 50))
        axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        axes.margins(y=0.15)
    panels[0].invert_yaxis()
    panels[1].legend(loc="best")


def _load(figure: Figure, study: Study) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    for axes, group in zip(panels, ("new", "continued"), strict=True):
        _draw_lines(axes, _series(study, "load", "schedule_policy", "speed", f"{group}_queue_p50_s"))
        axes.set(xlabel="speed of the device", title=f"{group} prompts")
        axes.invert_xaxis()
    panels[0].set(ylabel="median wait for admission (s)", ylim=(0, None))
    panels[0].legend()


def _pool(figure: Figure, study: Study) -> None:
    left, right = figure.subplots(1, 2)
    _draw_lines(left, _series(study, "pool", "schedule_policy", "kv_tokens", "hit_rate"))
    shared = study.workloads["documents"].shared_share
    left.axhline(shared, color=_GREY, linestyle="--", linewidth=1, label="shared with an earlier prompt")
    left.set(xlabel="KV pool (thousand tokens)", ylabel="hit rate", xscale="log", ylim=(0, 1))
    left.legend()
    _draw_lines(right, _series(study, "pool", "schedule_policy", "kv_tokens", "ttft_mean_s"))
    right.set(xlabel="KV pool (thousand tokens)", ylabel="mean time to first token (s)", xscale="log", ylim=(0, None))
    for axes in (left, right):
        _label_pools(axes, study.of("pool"))


def _preemption(figure: Figure, study: Study) -> None:
    left, right = figure.subplots(1, 2)
    _draw_lines(left, _series(study, "preemption", "preemption_policy", "kv_tokens", "recompute_tax"))
    left.plot(*zip(*REPORTED_TAX.items(), strict=True), "--", color=_GREY, marker="x", linewidth=1, label="vLLM #54644")
    left.set(xlabel="KV pool (thousand tokens)", ylabel="recomputed / all computed positions", ylim=(0, 1))
    left.legend()
    _draw_lines(right, _series(study, "preemption", "preemption_policy", "kv_tokens", "duration_s"))
    right.set(xlabel="KV pool (thousand tokens)", ylabel="time to serve 300 requests (s)", ylim=(0, None))
    for axes in (left, right):
        axes.set_xscale("log")
        _label_pools(axes, study.of("preemption"))


def _event_lag(figure: Figure, study: Study) -> None:
    panels = figure.subplots(1, 2)
    for axes, (name, label) in zip(
        panels, {"hit_rate": "hit rate", "ttft_mean_s": "mean time to first token (s)"}.items(), strict=True
    ):
        _draw_lines(axes, _series(study, "event-lag", "router", "event_lag_s", name))
        for router, style in (("round-robin", ":"), ("least-loaded", "--")):
            level = study.pick("routers", workload="conversations", router=router)[name]
            axes.axhline(level, color=_GREY, linestyle=style, linewidth=1, label=router)
        axes.set(xlabel="lag of the KV events (s)", ylabel=label, ylim=(0, None))
    panels[0].legend()


def _prefill_delay(figure: Figure, study: Study) -> None:
    panels = figure.subplots(1, 2)
    rates = dict.fromkeys(run.varied["rate_per_s"] for run in study.of("prefill-delay"))
    for axes, (name, label) in zip(
        panels,
        {"itl_mean_s": "mean time between tokens (ms)", "ttft_p50_s": "median time to first token (ms)"}.items(),
        strict=True,
    ):
        lines = {
            f"{rate:g} requests/s": [
                (x, 1e3 * y) for x, y in _points(study.of("prefill-delay", rate_per_s=rate), "max_delay_steps", name)
            ]
            for rate in rates
        }
        _draw_lines(axes, lines)
        axes.set(xlabel="longest delay of a prefill (steps)", ylabel=label, ylim=(0, None))
    panels[0].legend()


def _tiers(figure: Figure, study: Study) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    for axes, workload in zip(panels, ("trace", "conversations"), strict=True):
        rows = {"device only": study.pick("tiers", workload=workload, host_tokens=0)}
        for run in study.of("storage", workload=workload):
            host, storage = (float(run.varied[f"{tier}_tokens"]) / 1e6 for tier in ("host", "storage"))
            rows[f"host {host:.2g} M" + (f", storage {storage:.2g} M" if storage else "")] = run.figures
        left = [0.0] * len(rows)
        for (tier, share_of), colour in zip(_TIER_SHARES.items(), _COLOURS, strict=False):
            shares = [share_of(figures) for figures in rows.values()]
            axes.barh(list(rows), shares, left=left, color=colour, height=0.6, label=tier)
            left = [end + share for end, share in zip(left, shares, strict=True)]
        shared = study.workloads[workload].shared_share
        axes.axvline(shared, color=_GREY, linestyle="--", linewidth=1, label="shared with an earlier prompt")
        axes.set(xlabel="hit rate", title=workload, xlim=(0, 0.8))
        axes.set_axisbelow(True)
        axes.grid(visible=False, axis="y")
    panels[0].invert_yaxis()
    panels[0].legend(loc="lower right")


_TIER_SHARES: dict[str, Callable[[Mapping[str, float]], float]] = {
    "device": lambda figures: figures["hit_rate"] - figures["hit_rate_host"] - figures["hit_rate_storage"],
    "host": lambda figures: figures["hit_rate_host"],
    "storage": lambda figures: figures["hit_rate_storage"],
}


PLOTS: dict[str, Callable[[Figure, Study], None]] = {
    "policies": _policies,
    "load": _load,
    "pool": _pool,
    "preemption": _preemption,
    "event-lag": _event_lag,
    "tiers": _tiers,
    "prefill-delay": _prefill_delay,
}
"""Plots by name."""
