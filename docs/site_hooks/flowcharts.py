"""Draw the Mermaid flowcharts of a page as inline SVG while the site is built, so that a page loads no script.

A forge renders the same text. The hook knows the part of Mermaid that the pages use: ``flowchart LR`` or ``TD``, one
edge per line, labels of nodes in ``["..."]``, labels of edges in ``|...|``, dotted edges. The drawing follows the usual
steps for layered graphs: turn back edges, layer by the longest path, order by the neighbours, straighten.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NODE = r"(\w+)(?:\[\"([^\"]+)\"\])?"
EDGE = re.compile(rf"^{NODE} (-->|-\.->)(?:\|([^|]+)\|)? {NODE}$")
ALONE = re.compile(rf"^{NODE}$")

CHARACTER, PADDING, HEIGHT = 7.4, 12.0, 34.0
GAP_ACROSS = 16.0
"""Pixels at a font of 13: width of a character, space next to a label, height of a box, space between boxes."""
SWEEPS = 12


class FlowchartError(ValueError):
    """A line of a flowchart is not in the part of Mermaid that this hook draws."""


@dataclass(slots=True)
class Edge:
    """One arrow. ``is_back`` marks an arrow against the direction of the chart."""

    source: str
    target: str
    label: str
    is_dotted: bool
    is_back: bool = False


@dataclass(slots=True)
class Box:
    """A node, or a bend of a long edge, whose label is empty. ``along`` and ``across`` are the centre."""

    label: str
    rank: int = 0
    along: float = 0.0
    across: float = 0.0
    neighbours: list[str] = field(default_factory=list)

    @property
    def width(self) -> float:
        return len(self.label) * CHARACTER + 2 * PADDING if self.label else 0.0


@dataclass(slots=True)
class Flowchart:
    """A parsed chart and its layout."""

    is_horizontal: bool
    boxes: dict[str, Box] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    bends: dict[int, list[str]] = field(default_factory=dict)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace each flowchart by its drawing. MkDocs calls this hook."""
    del kwargs
    return FENCE.sub(lambda block: draw(block[1]), markdown)


def draw(text: str) -> str:
    """Return a flowchart as HTML."""
    chart = parse(text)
    _turn_back_edges(chart)
    _set_ranks(chart)
    _split_long_edges(chart)
    _place(chart)
    return _render(chart)


def parse(text: str) -> Flowchart:
    """Read the text of a flowchart.

    Raises:
        FlowchartError: a line is not understood.
    """
    first, *lines = [line.strip() for line in text.strip().splitlines()]
    if first not in ("flowchart LR", "flowchart TD"):
        raise FlowchartError(f"{first!r} is neither 'flowchart LR' nor 'flowchart TD'")
    chart = Flowchart(first.endswith("LR"))
    for line in filter(None, lines):
        if found := EDGE.match(line):
            source, source_label, arrow, label, target, target_label = found.groups()
            _add_box(chart, source, source_label)
            _add_box(chart, target, target_label)
            chart.edges.append(Edge(source, target, label or "", arrow == "-.->"))
        elif found := ALONE.match(line):
            _add_box(chart, found[1], found[2])
        else:
            raise FlowchartError(f"cannot read {line!r}")
    return chart


def _add_box(chart: Flowchart, name: str, label: str | None) -> None:
    box = chart.boxes.setdefault(name, Box(name))
    if label:
        box.label = label


def _turn_back_edges(chart: Flowchart) -> None:
    """Mark the edges that close a circle, found by a depth-first search in the order of the text."""
    finished: set[str] = set()
    open_names: list[str] = []

    def visit(name: str) -> None:
        open_names.append(name)
        for edge in chart.edges:
            if edge.source == name and edge.target in open_names:
                edge.is_back = True
            elif edge.source == name and edge.target not in finished:
                visit(edge.target)
        finished.add(open_names.pop())

    for name in chart.boxes:
        if name not in finished:
            visit(name)


def _set_ranks(chart: Flowchart) -> None:
    """Give each box the length of the longest path to it, then move sources next to their first target."""
    forward = [edge for edge in chart.edges if not edge.is_back]
    for _ in chart.boxes:
        for edge in forward:
            source, target = chart.boxes[edge.source], chart.boxes[edge.target]
            target.rank = max(target.rank, source.rank + 1)
    targets = {edge.target for edge in forward}
    for name, box in chart.boxes.items():
        following = [chart.boxes[edge.target].rank for edge in forward if edge.source == name]
        if name not in targets and following:
            box.rank = min(following) - 1


def _split_long_edges(chart: Flowchart) -> None:
    """Give an edge over several ranks a bend on each rank between."""
    for number, edge in enumerate(chart.edges):
        start, end = chart.boxes[edge.source].rank, chart.boxes[edge.target].rank
        names = [edge.source]
        if not edge.is_back:
            for rank in range(start + 1, end):
                names.append(f"{edge.source}-{edge.target}-{rank}")
                chart.boxes[names[-1]] = Box("", rank)
        names.append(edge.target)
        chart.bends[number] = names
        for one, other in pairwise(names):
            chart.boxes[one].neighbours.append(other)
            chart.boxes[other].neighbours.append(one)


def _place(chart: Flowchart) -> None:
    boxes = chart.boxes
    ranks = [
        [box for box in boxes.values() if box.rank == rank] for rank in range(max(b.rank for b in boxes.values()) + 1)
    ]
    for layer in ranks:
        for place, box in enumerate(layer):
            box.across = (place - (len(layer) - 1) / 2) * (_extent(chart, box) + GAP_ACROSS)
    for sweep in range(SWEEPS):
        for layer in ranks if sweep % 2 == 0 else reversed(ranks):
            wanted = {id(box): _mean([boxes[name].across for name in box.neighbours], box.across) for box in layer}
            layer.sort(key=lambda box: wanted[id(box)])
            _spread(chart, layer, wanted)
    at = 0.0
    for rank, layer in enumerate(ranks):
        depth = max(box.width if chart.is_horizontal else HEIGHT for box in layer)
        for box in layer:
            box.along = at + depth / 2
        at += depth + _gap_after(chart, rank)


def _extent(chart: Flowchart, box: Box) -> float:
    """Return the size of a box across the direction of the chart."""
    if not box.label:
        return 10.0
    return HEIGHT if chart.is_horizontal else box.width


def _spread(chart: Flowchart, layer: list[Box], wanted: dict[int, float]) -> None:
    """Put the boxes of one rank near their wanted places, in order and without overlap."""
    for box in layer:
        box.across = wanted[id(box)]
    for _ in range(SWEEPS):
        for one, other in pairwise(layer):
            needed = (_extent(chart, one) + _extent(chart, other)) / 2 + GAP_ACROSS
            short = needed - (other.across - one.across)
            if short > 0:
                one.across -= short / 2
                other.across += short / 2


def _gap_after(chart: Flowchart, rank: int) -> float:
    """Return the space between two ranks, wide enough for the labels of edges."""
    if not chart.is_horizontal:
        return 30.0
    labels = [
        len(edge.label)
        for edge in chart.edges
        if edge.label and rank in (chart.boxes[edge.source].rank, chart.boxes[edge.target].rank - (not edge.is_back))
    ]
    return max(34.0, max(labels, default=0) * 6.4 + 22)


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _render(chart: Flowchart) -> str:
    points = [_corner(chart, box, sign) for box in chart.boxes.values() for sign in (-1, 1)]
    left, top = min(x for x, _ in points) - 4, min(y for _, y in points) - 16
    width, height = max(x for x, _ in points) + 4 - left, max(y for _, y in points) + 16 - top
    parts = [_arrow(chart, number, edge) for number, edge in enumerate(chart.edges)]
    parts += [_box(chart, box) for box in chart.boxes.values() if box.label]
    labels = [box.label for box in chart.boxes.values() if box.label]
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="Flowchart: {html.escape(", ".join(labels))}" '
        f'viewBox="{left:.0f} {top:.0f} {width:.0f} {height:.0f}" style="max-width: {width * 1.05:.0f}px">'
        '<defs><marker id="flow-arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>{"".join(parts)}</svg>'
    )
    return f'<figure class="flowchart">{svg}</figure>\n'


def _corner(chart: Flowchart, box: Box, sign: int) -> tuple[float, float]:
    x, y = _centre(chart, box.along, box.across)
    return x + sign * box.width / 2, y + sign * HEIGHT / 2


def _centre(chart: Flowchart, along: float, across: float) -> tuple[float, float]:
    return (along, across) if chart.is_horizontal else (across, along)


def _box(chart: Flowchart, box: Box) -> str:
    x, y = _centre(chart, box.along, box.across)
    return (
        f'<rect x="{x - box.width / 2:.1f}" y="{y - HEIGHT / 2:.1f}" width="{box.width:.1f}" height="{HEIGHT}" rx="5"/>'
        f'<text x="{x:.1f}" y="{y + 4.5:.1f}">{html.escape(box.label)}</text>'
    )


def _arrow(chart: Flowchart, number: int, edge: Edge) -> str:
    """Draw one edge: a smooth line through its bends, and its label in the first gap."""
    boxes = [chart.boxes[name] for name in chart.bends[number]]
    twins = any(one.source == edge.target and one.target == edge.source for one in chart.edges)
    shift = (9.0 if edge.is_back else -9.0) if twins else 0.0
    sign = -1 if edge.is_back else 1
    depth = [(box.width if chart.is_horizontal else HEIGHT if box.label else 0.0) / 2 for box in boxes]
    path, middle = "", (0.0, 0.0)
    for place, (one, other) in enumerate(pairwise(boxes)):
        start = (one.along + sign * depth[place], one.across + shift)
        end = (other.along - sign * (depth[place + 1] + (1 if other.label else 0)), other.across + shift)
        half = (start[0] + end[0]) / 2
        curve = [start, (half, start[1]), (half, end[1]), end]
        xy = [_centre(chart, *point) for point in curve]
        path += (
            ("" if place else f"M{xy[0][0]:.1f} {xy[0][1]:.1f}") + "C" + " ".join(f"{x:.1f} {y:.1f}" for x, y in xy[1:])
        )
        if place == 0:  # near the end that fewer edges share
            nearer = 0.2 if edge.is_back else 0.8
            middle = _centre(chart, half, start[1] + nearer * (end[1] - start[1]))
    dotted = ' stroke-dasharray="4 4"' if edge.is_dotted else ""
    line = f'<path class="edge" d="{path}"{dotted} marker-end="url(#flow-arrow)"/>'
    offset = 14.0 if edge.is_back else -5.0
    label = f'<text class="label" x="{middle[0]:.1f}" y="{middle[1] + offset:.1f}">{html.escape(edge.label)}</text>'
    return line + (label if edge.label else "")
