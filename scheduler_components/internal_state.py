"""InternalState: what may be read and set in a running scheduler, by name; nothing else can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from scheduler_components.errors import ConfigError
from scheduler_components.ports import StateProvider, StateValue

__all__ = ["InternalState"]

_SHOWN_NAMES = 12


@dataclass(slots=True, kw_only=True)
class InternalState:
    """Reads and sets values that belong to the parts of a scheduler. No part is reached by an attribute's name: each
    says itself what it shows and what it lets others set (``StateProvider``).

    A change is made whole or not at all. Every value is looked at before the first is set. Should setting one fail
    after all, those before it get their old values again.

    What follows from the calls alone is the same on every rank that is called alike: a scheduler of several ranks has
    its leader send a change to all of them, before one step.

    Attributes:
        holders: the parts; no two of them have a value of one name.
        num_changes: changes made since the start.

    Raises:
        ValueError: two parts show one name, or a part lets a value be set that it does not show.
    """

    providers: Sequence[StateProvider]
    num_changes: int = field(default=0, init=False)
    _holder_of: dict[str, StateProvider] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        shown: set[str] = set()
        for holder in self.providers:
            values = holder.state()
            if twice := shown & values.keys():
                raise ValueError(f"two parts show {sorted(twice)[0]!r}")
            if hidden := set(holder.settable) - values.keys():
                raise ValueError(f"{sorted(hidden)[0]!r} can be set and not read")
            shown |= values.keys()
            self._holder_of.update((name, holder) for name in holder.settable)

    @property
    def settable(self) -> tuple[str, ...]:
        """Names of the values that can be set, sorted."""
        return tuple(sorted(self._holder_of))

    def get(self) -> dict[str, StateValue]:
        """Return every value of this moment, by name."""
        return {name: value for holder in self.providers for name, value in holder.state().items()}

    def check(self, changes: Mapping[str, StateValue]) -> None:
        """Look at a change, and make none.

        Raises:
            ConfigError: a name is unknown or cannot be set, or its part refuses the value. The first that is wrong is
                named.
        """
        self._by_holder(changes)

    def set(self, changes: Mapping[str, StateValue]) -> dict[str, StateValue]:
        """Make a change; returns the values that were set, as the parts show them now.

        Raises:
            ConfigError: as with ``check``; nothing is changed.
        """
        parts = self._by_holder(changes)
        undo: list[tuple[StateProvider, dict[str, StateValue]]] = []
        try:
            for holder, values in parts:
                before = holder.state()
                undo.append((holder, {name: before[name] for name in values}))
                holder.set_state(values)
        except BaseException:
            for holder, values in reversed(undo):
                holder.set_state(values)
            raise
        self.num_changes += bool(changes)
        return {name: value for name, value in self.get().items() if name in changes}

    def _by_holder(self, changes: Mapping[str, StateValue]) -> list[tuple[StateProvider, dict[str, StateValue]]]:
        """Say which part gets which values, after each has looked at its own."""
        parts: dict[int, tuple[StateProvider, dict[str, StateValue]]] = {}
        for name, value in changes.items():
            holder = self._holder_of.get(name)
            if holder is None:
                raise self._refusal(name, value)
            parts.setdefault(id(holder), (holder, {}))[1][name] = value
        for holder, values in parts.values():
            holder.check_state(values)
        return list(parts.values())

    def _refusal(self, name: str, value: StateValue) -> ConfigError:
        if name in self.get():
            return ConfigError(name, value, "can be read and not set", self._hint(name))
        return ConfigError(name, value, "is no value of this scheduler", self._hint(name))

    def _hint(self, name: str) -> str:
        close = get_close_matches(name, self.settable, 1)
        if close and close[0] != name:
            return f"did you mean {close[0]}?"
        return f"set one of {', '.join(self.settable[:_SHOWN_NAMES])}" if self.settable else "nothing can be set here"
