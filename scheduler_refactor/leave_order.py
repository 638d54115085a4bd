"""From a measurement: what each part needs of the rest, which methods belong together, and which part leaves first.

The cost of a part is the number of decisions that its move asks of a person: one per port member, two more per member
that the part rebinds, one per member that others use of it, and three per obstacle, which must go first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from scheduler_refactor.host_access import Access
from scheduler_refactor.measurement import Measurement, MethodUse, Part

NeedKind: TypeAlias = Literal["fact", "late", "written", "method", "property", "unknown"]

_REBINDING_COST = 2
_OBSTACLE_COST = 3
_MOST_SHARERS = 3
"""A group shares state that few methods use. What more methods use belongs to the whole part."""
_MOST_STEPS = 3
"""A method that alone calls more methods than this is a sequence of steps, and these are no group."""


class PortMember(msgspec.Struct, frozen=True, kw_only=True):
    """One member of the host that a part needs and does not have itself.

    Args:
        name: the member.
        kind: ``fact`` is bound once, in the constructor, so it can be passed; ``late`` is rebound by others, so it must
            be read late; ``written`` is rebound by the part itself; ``method`` and ``property`` belong to another part;
            the definition of ``unknown`` was not found.
        origin: the part that defines or binds it; empty if unknown.
        num_uses: places in the part that use it.
        is_mutated: whether the part changes it in place.
    """

    name: str
    kind: NeedKind
    origin: str
    num_uses: int
    is_mutated: bool


class LeavePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to turn a part into a component.

    Args:
        part: the part.
        cost: the number of decisions; see the top of this module.
        num_lines: its lines.
        num_methods: its methods.
        own_state: attributes that only its methods bind; they move with it.
        shared_state: those of them that others use, with the number of places.
        entries: its methods that others call or reference, with the number of places.
        needs: members that a port or a constructor argument must give it.
        obstacles: what must be decided first, each as one sentence with its place.
    """

    part: str
    cost: int
    num_lines: int
    num_methods: int
    own_state: tuple[str, ...]
    shared_state: dict[str, int]
    entries: dict[str, int]
    needs: tuple[PortMember, ...]
    obstacles: tuple[str, ...]


class MethodGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Methods of one part that share state which few others use, or of which one alone calls the other.

    Args:
        part: the part.
        methods: the methods, in order.
        state: the state that they share.
        num_lines: their lines.
    """

    part: str
    methods: tuple[str, ...]
    state: tuple[str, ...]
    num_lines: int


def plan_leaving(measurement: Measurement) -> tuple[LeavePlan, ...]:
    """Return a plan for each mixin and base, the cheapest first, then for each component that holds the host."""
    facts = _Facts(measurement)
    own = [part for part in measurement.parts if part.role in ("mixin", "base")]
    held = [part for part in measurement.parts if part.role == "component"]
    plans = sorted((facts.plan(part) for part in own), key=lambda plan: (plan.cost, plan.part))
    return (*plans, *sorted((facts.plan(part) for part in held), key=lambda plan: (plan.cost, plan.part)))


def group_methods(measurement: Measurement) -> tuple[MethodGroup, ...]:
    """Return the groups of each of the host's classes, the largest first. A method alone is no group."""
    groups = [group for part in measurement.own_parts() for group in _groups_of(part, measurement)]
    return tuple(sorted(groups, key=lambda group: (-group.num_lines, group.part, group.methods)))


def rebindings_after_start(measurement: Measurement) -> dict[str, Access]:
    """Return, for each attribute that is bound again after the construction, one place that does so."""
    return _Facts(measurement).rebound_later


@dataclass(slots=True)
class _Facts:
    """Who defines, binds and uses each member of the host."""

    measurement: Measurement
    definer: dict[str, tuple[Part, MethodUse]] = field(default_factory=dict)
    binders: dict[str, set[str]] = field(default_factory=dict)
    rebound_later: dict[str, Access] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in self.measurement.own_parts():
            for use in part.methods:
                self.definer.setdefault(use.name, (part, use))
        starting = self._starting()
        for part in self.measurement.parts:
            for name in part.attributes if part.role != "component" else ():
                self.binders.setdefault(name, set()).add(part.name)
            for use in part.methods:
                for access in use.accesses:
                    if access.kind in ("rebind", "delete"):
                        self.binders.setdefault(access.attribute, set()).add(part.name)
                        if not part.is_own or use.name not in starting or access.is_deferred:
                            self.rebound_later.setdefault(access.attribute, access)

    def _starting(self) -> set[str]:
        """Return the methods that run during the construction only: all their callers do."""
        callers: dict[str, set[str]] = {}
        for part in self.measurement.parts:
            for use in part.methods:
                for access in use.accesses:
                    is_plain = part.is_own and access.kind == "call" and not access.is_deferred
                    callers.setdefault(access.attribute, set()).add(use.name if is_plain else "")
        starting, grew = {"__init__"}, True
        while grew:
            fresh = {name for name in self.definer if name not in starting and callers.get(name, {""}) <= starting}
            starting |= fresh
            grew = bool(fresh)
        return starting

    def plan(self, part: Part) -> LeavePlan:
        own_methods = {use.name for use in part.methods}
        is_component = part.role == "component"
        own_state = set() if is_component else {name for name, by in self.binders.items() if by == {part.name}}
        inside = [access for use in part.methods for access in use.accesses]
        outside = [
            access
            for other in self.measurement.parts
            if other is not part
            for use in other.methods
            for access in use.accesses
        ]
        mine = set() if is_component else own_methods | own_state
        needs = tuple(self._needs([access for access in inside if access.attribute not in mine]))
        used = Counter(access.attribute for access in outside)
        entries = {} if is_component else {name: used[name] for name in sorted(own_methods) if used[name]}
        shared = {name: used[name] for name in sorted(own_state) if used[name]}
        obstacles = tuple(self._obstacles(part))
        written = sum(need.kind == "written" for need in needs)
        asked = sum(need.kind != "fact" for need in needs)
        cost = asked + _REBINDING_COST * written + len(entries) + len(shared) + _OBSTACLE_COST * len(obstacles)
        return LeavePlan(
            part=part.name,
            cost=cost,
            num_lines=part.num_lines,
            num_methods=len(part.methods),
            own_state=tuple(sorted(own_state)),
            shared_state=shared,
            entries=entries,
            needs=needs,
            obstacles=obstacles,
        )

    def _needs(self, accesses: list[Access]) -> Iterable[PortMember]:
        by_name: dict[str, list[Access]] = {}
        for access in accesses:
            if not (access.attribute.startswith("__") and access.attribute.endswith("__")):
                by_name.setdefault(access.attribute, []).append(access)
        for name, uses in sorted(by_name.items()):
            kind, origin = self._kind(name, uses)
            mutated = any(access.kind == "mutate" for access in uses)
            yield PortMember(name=name, kind=kind, origin=origin, num_uses=len(uses), is_mutated=mutated)

    def _kind(self, name: str, uses: list[Access]) -> tuple[NeedKind, str]:
        if name in self.definer:
            part, use = self.definer[name]
            return ("property" if use.is_property else "method"), part.name
        binders = sorted(self.binders.get(name, ()))
        host = self.measurement.host
        origin = host if host in binders else next(iter(binders), "")
        if any(access.kind in ("rebind", "delete") for access in uses):
            return "written", origin
        if not binders:
            return "unknown", ""
        return ("late" if name in self.rebound_later else "fact"), origin

    def _obstacles(self, part: Part) -> Iterable[str]:
        for override in self.measurement.overrides:
            if part.name in override.parts and not (override.name.startswith("__") and override.name.endswith("__")):
                yield f"{override.name} is defined by {', '.join(override.parts)}"
        for use in part.methods:
            for access in use.accesses:
                if access.via == "super":
                    yield f"{access.path}:{access.line}: {use.name} calls super().{access.attribute}"
            for unnamed in use.indirect:
                where = f"{unnamed.path}:{unnamed.line}: {use.name}"
                yield f"{where} uses a name that the syntax does not say: {unnamed.text}"
            for escape in use.escapes if part.role != "component" else ():
                where = f"{escape.path}:{escape.line}: {use.name}"
                yield (
                    f"{where} passes the whole host to {escape.callee}" if escape.callee else f"{where} keeps the host"
                )


def _groups_of(part: Part, measurement: Measurement) -> list[MethodGroup]:
    links = _links(part, measurement)
    leader = {use.name: use.name for use in part.methods}

    def lead(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for methods in links.values():
        for other in methods[1:]:
            leader[lead(other)] = lead(methods[0])
    groups: dict[str, list[MethodUse]] = {}
    for use in part.methods:
        groups.setdefault(lead(use.name), []).append(use)
    found = []
    for uses in groups.values():
        names = tuple(dict.fromkeys(use.name for use in uses))
        if len(names) > 1:
            state = tuple(sorted(name for name, by in links.items() if by[0] in names and name not in leader))
            lines = sum(use.num_lines for use in uses)
            found.append(MethodGroup(part=part.name, methods=names, state=state, num_lines=lines))
    return found


def _links(part: Part, measurement: Measurement) -> dict[str, list[str]]:
    """Return the methods of a part that each name ties together: shared state, or a method and its only caller."""
    users: dict[str, dict[tuple[str, str], None]] = {}
    changed: set[str] = set()
    for other in measurement.parts:
        for use in other.methods:
            for access in use.accesses:
                users.setdefault(access.attribute, {})[other.name, use.name] = None
                if access.kind in ("rebind", "mutate", "delete"):
                    changed.add(access.attribute)
    defined = {use.name for own in measurement.own_parts() for use in own.methods}
    own = {use.name for use in part.methods}
    callers: dict[str, list[str]] = {}
    links: dict[str, list[str]] = {}
    for name, places in users.items():
        methods = [method for where, method in places if where == part.name and method != "__init__"]
        if name in own and len(places) == 1 and methods not in ([], [name]):
            callers.setdefault(methods[0], []).append(name)
        elif name not in defined and name in changed and len(methods) > 1 and len(places) <= _MOST_SHARERS + 1:
            links[name] = methods if len(methods) <= _MOST_SHARERS else methods[:1]
    for caller, called in callers.items():
        if len(called) <= _MOST_STEPS:
            links |= {name: [name, caller] for name in called}
    return {name: methods for name, methods in links.items() if len(methods) > 1}
