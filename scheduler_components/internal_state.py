"""InternalState: read and set named values of a running scheduler."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Protocol, TypeAlias

from scheduler_components.errors import ConfigError

__all__ = ["InternalState", "StateProvider", "StateValue"]

_MAX_SHOWN_NAMES = 12

StateValue: TypeAlias = int | float | bool | str | None
"""A value of the internal state: any JSON value without nesting."""


class StateProvider(Protocol):
    """A component that shows values, some of which can be set. `InternalState` calls it between two steps."""

    @property
    def settable(self) -> Collection[str]:
        """Names of the values that can be set. They never change, and `state()` has all of them."""
        ...

    def state(self) -> Mapping[str, StateValue]:
        """Return the current values by name. The names never change."""
        ...

    def check_state(self, changes: Mapping[str, StateValue]) -> None:
        """Validate values for names of `settable`, all together, without setting any.

        The component tries them as its steps will use them: no values that it accepts make a later step raise.

        Raises:
            ConfigError: naming the invalid value.
        """
        ...

    def set_state(self, changes: Mapping[str, StateValue]) -> None:
        """Set values that passed `check_state`."""
        ...


@dataclass(slots=True, kw_only=True)
class InternalState:
    """Reads and sets the values of a scheduler's components, as SGLang's `/get_internal_state` and its setter do.

    A component declares which values it shows and which can be set (`StateProvider`); nothing is reached by attribute
    name. A change is atomic: every value is validated before the first is set, and if setting one fails, the values set
    before it are restored.

    The result depends on the calls only, so it is the same on every rank that gets the same calls. The leading rank of
    a replica sends a change to all ranks before one step.

    Attributes:
        providers: the components; no two of them show the same name.

    Raises:
        ValueError: two components show one name, or a component allows setting a value that it does not show.
    """

    providers: Sequence[StateProvider]
    _provider_of: dict[str, StateProvider] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        shown: set[str] = set()
        for provider in self.providers:
            values = provider.state()
            if twice := shown & values.keys():
                raise ValueError(f"two components show {sorted(twice)[0]!r}")
            if hidden := set(provider.settable) - values.keys():
                raise ValueError(f"{sorted(hidden)[0]!r} can be set but not read")
            shown |= values.keys()
            self._provider_of.update((name, provider) for name in provider.settable)

    @property
    def settable(self) -> tuple[str, ...]:
        """Names of the values that can be set, sorted."""
        return tuple(sorted(self._provider_of))

    def get(self) -> dict[str, StateValue]:
        """Return every current value by name."""
        return {name: value for provider in self.providers for name, value in provider.state().items()}

    def set(self, changes: Mapping[str, StateValue]) -> dict[str, StateValue]:
        """Set values; return them as their components show them now.

        Raises:
            ConfigError: a name is unknown or cannot be set, or a value is invalid. Names the first one; nothing is
                changed.
        """
        parts = self._validated_by_provider(changes)
        undo: list[tuple[StateProvider, dict[str, StateValue]]] = []
        try:
            for provider, values in parts:
                before = provider.state()
                undo.append((provider, {name: before[name] for name in values}))
                provider.set_state(values)
        except BaseException:
            for provider, values in reversed(undo):
                provider.set_state(values)
            raise
        return {name: value for name, value in self.get().items() if name in changes}

    def _validated_by_provider(
        self, changes: Mapping[str, StateValue]
    ) -> list[tuple[StateProvider, dict[str, StateValue]]]:
        """Split a change by component, and let each component validate its part."""
        parts: dict[int, tuple[StateProvider, dict[str, StateValue]]] = {}
        for name, value in changes.items():
            provider = self._provider_of.get(name)
            if provider is None:
                raise self._not_settable(name, value)
            parts.setdefault(id(provider), (provider, {}))[1][name] = value
        for provider, values in parts.values():
            provider.check_state(values)
        return list(parts.values())

    def _not_settable(self, name: str, value: StateValue) -> ConfigError:
        if name in self.get():
            return ConfigError(name, value, "can be read but not set", self._hint(name))
        return ConfigError(name, value, "is no value of this scheduler", self._hint(name))

    def _hint(self, name: str) -> str:
        close = get_close_matches(name, self.settable, 1)
        if close and close[0] != name:
            return f"did you mean {close[0]}?"
        if not self.settable:
            return "this scheduler has no value that can be set"
        return f"set one of {', '.join(self.settable[:_MAX_SHOWN_NAMES])}"
