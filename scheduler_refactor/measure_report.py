"""A measurement as text, JSON, a Mermaid graph or an SVG picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape

import msgspec

from scheduler_refactor.host_access import Access, AccessKind
from scheduler_refactor.leave_order import LeavePlan, MethodGroup, PortMember, group_methods, plan_leaving
from scheduler_refactor.measurement import Measurement, MethodUse

_KINDS: tuple[tuple[str, AccessKind], ...] = (
    ("reads", "read"),
    ("rebinds", "rebind"),
    ("mutates", "mutate"),
    ("calls", "call"),
    ("invokes", "invoke"),
    ("deletes", "delete"),
)


class MeasureReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known about a host. Its JSON is the output for programs.

    Args:
        measurement: every use.
        leave_order: what each part needs to leave, the cheapest first.
        groups: methods that belong together.
    """

    measurement: Measurement
    leave_order: tuple[LeavePlan, ...]
    groups: tuple[MethodGroup, ...]

    @classmethod
    def of(cls, measurement: Measurement) -> MeasureReport:
        """Derive plans and groups from a measurement."""
        return cls(measurement=measurement, leave_order=plan_leaving(measurement), groups=group_methods(measurement))


def part_edges(report: MeasureReport) -> dict[tuple[str, str], list[str]]:
    """Return which members a part uses of another one, by both: the host's classes and components that hold it."""
    measurement = report.measurement
    owners = {use.name: part.name for part in reversed(list(measurement.own_parts())) for use in part.methods}
    uses = [(plan.part, need.origin, need.name) for plan in report.leave_order for need in plan.needs]
    for part in measurement.own_parts():
        if part.role == "host":
            names = {access.attribute for use in part.methods for access in use.accesses}
            uses += [(part.name, owners[name], name) for name in names & owners.keys()]
    found: dict[tuple[str, str], set[str]] = {}
    for user, owner, name in uses:
        if owner and owner != user:
            found.setdefault((user, owner), set()).add(name)
    return {parts: sorted(members) for parts, members in sorted(found.items())}


def render_text(report: MeasureReport, only: str = "") -> Iterator[str]:
    """Yield the lines of the report.

    Args:
        report: the report.
        only: name of one part, to list only its methods; empty for all.
    """
    measurement = report.measurement
    yield f"{measurement.host} ({measurement.path})"
    yield ""
    yield from _parts_table(measurement)
    for base in measurement.unknown_bases:
        yield f"unknown base: {base}. What it defines and uses is not measured."
    yield ""
    yield "Order in which parts can leave, the cheapest first"
    for number, plan in enumerate(report.leave_order, 1):
        yield from _plan_lines(number, plan)
    yield ""
    yield "Methods that belong together"
    for group in report.groups:
        shared = f"; state {', '.join(group.state)}" if group.state else ""
        yield f"  {group.part}: {', '.join(group.methods)} ({group.num_lines} lines{shared})"
    yield ""
    yield "Names with several definitions"
    for override in measurement.overrides:
        yield f"  {override.name}: {', '.join(override.parts)}{' (calls super)' if override.calls_super else ''}"
    yield ""
    yield "Methods that are reached without a plain call"
    for reach in measurement.reached:
        yield f"  {reach.path}:{reach.line}: {reach.name} ({reach.how})"
    yield ""
    yield "Initialisation order"
    for step in measurement.init_order:
        through = f" in {' > '.join(step.through)}" if step.through else ""
        yield f"  {step.path}:{step.line}: {step.attribute}{through}{' (conditional)' if step.is_conditional else ''}"
    for step in measurement.read_before_bound:
        yield f"  {step.path}:{step.line}: {step.attribute} is used before it is bound"
    for part in measurement.parts:
        if not only or part.name == only:
            yield ""
            yield f"{part.name} ({part.role}, {part.path}:{part.line})"
            for use in part.methods:
                yield from _method_lines(use)


def render_mermaid(report: MeasureReport) -> Iterator[str]:
    """Yield the lines of a Mermaid flow chart: one arrow per user and owner, with the number of members."""
    names = _graph_names(report)
    yield "flowchart LR"
    for name, number in names.items():
        yield f'    p{number}["{name}"]'
    for (user, owner), members in part_edges(report).items():
        yield f"    p{names[user]} -->|{len(members)}| p{names[owner]}"


def render_svg(report: MeasureReport) -> str:
    """Return a picture of the same graph: the host in the middle, the parts around it."""
    names = [name for name in _graph_names(report) if name != report.measurement.host]
    size, radius = 900, 330
    places = {report.measurement.host: (size / 2, size / 2)}
    for number, name in enumerate(names):
        angle = 2 * math.pi * number / max(len(names), 1) - math.pi / 2
        places[name] = (size / 2 + radius * math.cos(angle), size / 2 + radius * math.sin(angle))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    lines += [_svg_edge(*parts, members, places) for parts, members in part_edges(report).items()]
    lines += [_svg_node(name, place) for name, place in places.items()]
    return "\n".join([*lines, "</svg>", ""])


def _svg_edge(user: str, owner: str, members: list[str], places: dict[str, tuple[float, float]]) -> str:
    (x1, y1), (x2, y2) = places[user], places[owner]
    width = 1 + math.log2(len(members))
    x, y = x1 + 0.3 * (x2 - x1), y1 + 0.3 * (y2 - y1)  # nearer to the user: two edges of a pair have two numbers
    title = escape(f"{user} uses of {owner}: {', '.join(members)}")
    return (
        f'<g><title>{title}</title><line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="#8aa" '
        f'stroke-width="{width:.1f}"/><text x="{x:.0f}" y="{y:.0f}" fill="#255">{len(members)}</text></g>'
    )


def _svg_node(name: str, place: tuple[float, float]) -> str:
    x, y = place
    width = 7.5 * len(name) + 16
    return (
        f'<rect x="{x - width / 2:.0f}" y="{y - 13:.0f}" width="{width:.0f}" height="26" rx="5" fill="#eef6f6" '
        f'stroke="#255"/><text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle">{escape(name)}</text>'
    )


def _graph_names(report: MeasureReport) -> dict[str, int]:
    parts = [part.name for part in report.measurement.parts if part.role in ("host", "mixin", "base", "component")]
    return {name: number for number, name in enumerate(dict.fromkeys(parts))}


def _parts_table(measurement: Measurement) -> Iterator[str]:
    yield f"{'part':42} {'role':10} {'lines':>6} {'methods':>7} " + " ".join(f"{word:>8}" for word, _ in _KINDS)
    for part in measurement.parts:
        counts = Counter(access.kind for use in part.methods for access in use.accesses)
        numbers = " ".join(f"{counts[kind]:8}" for _, kind in _KINDS)
        yield f"{part.name[-42:]:42} {part.role:10} {part.num_lines:6} {len(part.methods):7} {numbers}"


def _plan_lines(number: int, plan: LeavePlan) -> Iterator[str]:
    yield f"  {number}. {plan.part}: cost {plan.cost}, {plan.num_methods} methods, {plan.num_lines} lines"
    kinds: dict[str, list[PortMember]] = {}
    for need in plan.needs:
        kinds.setdefault(need.kind, []).append(need)
    for kind, needs in sorted(kinds.items()):
        yield f"     {kind}: {', '.join(f'{each.name}{_origin(each)}' for each in needs)}"
    if plan.own_state:
        yield f"     own state: {', '.join(plan.own_state)}"
    for word, counts in (("others call", plan.entries), ("others use the state", plan.shared_state)):
        if counts:
            yield f"     {word}: {', '.join(f'{name} {count}' for name, count in counts.items())}"
    for obstacle in plan.obstacles:
        yield f"     first: {obstacle}"


def _origin(member: PortMember) -> str:
    return f" ({member.origin})" if member.origin else ""


def _method_lines(use: MethodUse) -> Iterator[str]:
    said = [f"{word} {', '.join(names)}" for word, kind in _KINDS if (names := _names(use.accesses, kind))]
    yield f"  {use.name}: {'; '.join(said) or 'uses nothing of the host'}"
    for unnamed in use.indirect:
        yield f"    unknown: {unnamed.text} (line {unnamed.line})"
    for place in use.escapes:
        yield f"    the whole host: {place.how} {place.callee} (line {place.line})".rstrip()


def _names(accesses: Iterable[Access], kind: AccessKind) -> list[str]:
    found: dict[str, bool] = {}
    for access in accesses:
        if access.kind == kind:
            known = found.get(access.attribute, False)
            found[access.attribute] = known or access.is_certain
    return [name if certain else f"{name} (perhaps)" for name, certain in sorted(found.items())]
