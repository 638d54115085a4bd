"""Draw costs by tree size as SVG: two logarithmic axes and a line per operation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from benchmarks.measure import Measurement

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 110, 40, 48
_COLOURS = {"match": "#1b7f5c", "insert": "#2a5db0", "evict": "#b0522a"}
_GROWTH_ROW = re.compile(r"(match|insert|evict) per page, tree of ([\d,]+) pages")


def draw_scaling_plot(rows: Sequence[Measurement]) -> str:
    """Draw microseconds per page against pages in the tree from the cache section's rows; empty axes without rows."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if found := _GROWTH_ROW.fullmatch(row.what):
            lines.setdefault(found[1], []).append((float(found[2].replace(",", "")), row.value))
    points = [point for line in lines.values() for point in line]
    x_decades = _decades([x for x, _ in points] or [1e3, 1e6])
    y_decades = _decades([y for _, y in points] or [0.01, 10.0])
    body = [_axes(x_decades, y_decades)]
    for operation, line in lines.items():
        body.append(_line(operation, [(_x(x, x_decades), _y(y, y_decades)) for x, y in line], line[-1][1]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _decades(values: Sequence[float]) -> range:
    """Return the powers of ten that enclose ``values``."""
    return range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)


def _x(value: float, decades: range) -> float:
    share = (math.log10(value) - decades[0]) / max(1, decades[-1] - decades[0])
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, decades: range) -> float:
    share = (math.log10(value) - decades[0]) / max(1, decades[-1] - decades[0])
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _axes(x_decades: range, y_decades: range) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="22" font-size="14">Radix cache: cost of a page, by pages in the tree</text>']
    for power in x_decades:
        x = _x(10.0**power, x_decades)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{10**power:,}</text>')
    for power in y_decades:
        y = _y(10.0**power, y_decades)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">pages in the tree</text>')
    parts.append(f'<text x="16" y="{_TOP - 8}">us per page</text>')
    return "\n".join(parts)


def _line(operation: str, places: Sequence[tuple[float, float]], last: float) -> str:
    colour = _COLOURS[operation]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)
    x, y = places[-1]
    label = f'<text x="{x + 10:.1f}" y="{y + 4:.1f}" fill="{colour}">{operation} {last:.2g} us</text>'
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}{label}'
