"""The Grafana dashboard of the catalogue: ``python -m observability.grafana.dashboard`` writes ``dashboard.json``.

What is drawn stands in ``rows``; unit, help and query of each metric follow from the catalogue.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from observability.catalog import EVERY_METRIC, PAGES_UNREAD, RANKS_REFUSED, SGLANG_PREFIX, Metric
from observability.grafana.rows import ROWS, Panel

__all__ = ["DASHBOARD_FILE", "render_dashboard"]

DASHBOARD_FILE = Path(__file__).with_name("dashboard.json")

Json: TypeAlias = dict[str, Any]

_METRICS = {metric.name: metric for metric in EVERY_METRIC}

_OF_NO_RANK = (RANKS_REFUSED, PAGES_UNREAD)
"""Counted by the process that is scraped, over all ranks: without the labels of one."""

_SCHEMA_VERSION = 39
"""Grafana 11's. Older dashboards are migrated when they are loaded, so newer Grafanas take it too."""

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

_UNITS = {
    "share": "percentunit",
    "seconds": "s",
    "ms": "ms",
    "microseconds": "µs",
    "bytes": "decbytes",
    "GB": "decgbytes",
    "GB/s": "GBs",
}
"""Grafana's name of a catalogue's unit; everything else is a plain number."""

_RATE_UNITS = {"bytes": "Bps"}
"""The same for what is drawn as its rate."""

_GRID_WIDTH = 24
_PANEL_HEIGHT = 8


def render_dashboard(prefix: str = SGLANG_PREFIX) -> Json:
    """Return the dashboard, as ``json.dump`` takes it.

    Args:
        prefix: of every metric's name, as the ``PrometheusSink`` has it.
    """
    return {
        "title": "Schedulers",
        "uid": "scheduler-components",
        "description": "Load, latency and KV events of schedulers, by replica.",
        "tags": ["llm", "scheduler-components"],
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": _SCHEMA_VERSION,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": list(_variables(prefix))},
        "panels": list(_panels(prefix)),
    }


def _variables(prefix: str) -> Iterator[Json]:
    yield {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"}
    for name, label in (("instance", "Engine"), ("dp_rank", "Replica")):
        scope = '{instance=~"$instance"}' if name == "dp_rank" else ""
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": f"label_values({prefix}num_running_reqs{scope}, {name})", "refId": name},
            "refresh": 2,
            "sort": 3,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def _panels(prefix: str) -> Iterator[Json]:
    """Give rows and panels, numbered and laid out from the top left; a closed row holds its panels."""
    number, top = 1, 0
    for row in ROWS:
        heading = {"id": number, "type": "row", "title": row.title, "collapsed": not row.is_open, "panels": []}
        heading["gridPos"] = {"x": 0, "y": top, "w": _GRID_WIDTH, "h": 1}
        drawn, bottom = _laid_out(row.panels, prefix, first_id=number + 1, top=top + 1)
        number += 1 + len(drawn)
        if row.is_open:
            yield heading
            yield from drawn
            top = bottom
        else:
            yield heading | {"panels": drawn}
            top += 1


def _laid_out(panels: Iterable[Panel], prefix: str, *, first_id: int, top: int) -> tuple[list[Json], int]:
    """Put panels side by side while they fit; returns them, and the line below the last."""
    drawn: list[Json] = []
    left = 0
    for number, panel in enumerate(panels, start=first_id):
        if left + panel.width > _GRID_WIDTH:
            left, top = 0, top + _PANEL_HEIGHT
        place = {"x": left, "y": top, "w": panel.width, "h": _PANEL_HEIGHT}
        drawn.append(_draw(panel, prefix) | {"id": number, "gridPos": place})
        left += panel.width
    return drawn, top + _PANEL_HEIGHT


def _draw(panel: Panel, prefix: str) -> Json:
    metrics = [_METRICS[name] for name in panel.metrics]
    targets = [target for metric in metrics for target in _targets(metric, prefix, is_alone=len(metrics) == 1)]
    units = {_unit(metric) for metric in metrics}
    defaults: Json = {
        "unit": units.pop() if len(units) == 1 else "short",
        "custom": {"drawStyle": "line", "fillOpacity": 8, "showPoints": "never", "spanNulls": False},
    }
    if panel.metrics != ("kv_events_last_sequence",):  # a clock-based sequence would be a flat line far above 0
        defaults["min"] = 0
    if defaults["unit"] == "percentunit":
        defaults["max"] = 1
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": "\n\n".join(f"{prefix}{metric.name}: {metric.help}" for metric in metrics),
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [target | {"refId": chr(ord("A") + at)} for at, target in enumerate(targets)],
    }


def _unit(metric: Metric) -> str:
    return (_RATE_UNITS if metric.kind == "counter" else _UNITS).get(metric.unit, "short")


def _targets(metric: Metric, prefix: str, *, is_alone: bool) -> Iterator[Json]:
    """A gauge as it is, a counter as its rate, a histogram as its median and its slowest hundredth."""
    chosen = '{instance=~"$instance", dp_rank=~"$dp_rank"}'
    series = f"{prefix}{metric.name}"
    legend = "{{instance}} dp{{dp_rank}}" if is_alone else f"{metric.name} {{{{instance}}}} dp{{{{dp_rank}}}}"
    if metric.kind == "gauge":
        yield _target(f"{series}{chosen}", legend)
    elif metric in _OF_NO_RANK:
        legend = legend.removesuffix(" dp{{dp_rank}}")
        yield _target(f'rate({series}{{instance=~"$instance"}}[$__rate_interval])', legend)
    elif metric.kind == "counter":
        yield _target(f"rate({series}{chosen}[$__rate_interval])", legend)
    else:
        for share, name in ((0.5, "median"), (0.99, "p99")):
            rate = f"sum by (le, instance, dp_rank) (rate({series}_bucket{chosen}[$__rate_interval]))"
            yield _target(f"histogram_quantile({share}, {rate})", f"{name} {legend}")


def _target(expression: str, legend: str) -> Json:
    return {"datasource": _SOURCE, "expr": expression, "legendFormat": legend, "editorMode": "code", "range": True}


if __name__ == "__main__":
    DASHBOARD_FILE.write_text(json.dumps(render_dashboard(), indent=2) + "\n")
