"""InternalState sets only settable values, and a change is atomic."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.internal_state import InternalState, StateValue


@dataclass
class Sizes:
    """A ``StateProvider``: ``a`` may not be above ``b``; ``shown`` cannot be set."""

    a: int = 1
    b: int = 5
    shown: str = "x"
    breaks_on: int | None = None
    names: tuple[str, ...] = ("a", "b")
    prefix: str = ""
    writes: list[dict[str, StateValue]] = field(default_factory=list)

    @property
    def settable(self) -> Collection[str]:
        return [self.prefix + name for name in self.names]

    def state(self) -> Mapping[str, StateValue]:
        return {f"{self.prefix}a": self.a, f"{self.prefix}b": self.b, f"{self.prefix}shown": self.shown}

    def check_state(self, changes: Mapping[str, StateValue]) -> None:
        merged = {**self.state(), **changes}
        a, b = merged[f"{self.prefix}a"], merged[f"{self.prefix}b"]
        if not isinstance(a, int) or not isinstance(b, int) or a > b:
            raise ConfigError("a", a, f"is above {b}", "give less")

    def set_state(self, changes: Mapping[str, StateValue]) -> None:
        self.writes.append(dict(changes))
        for name, value in changes.items():
            if value == self.breaks_on:
                raise RuntimeError("broken")
            setattr(self, name.removeprefix(self.prefix), value)


names = st.sampled_from(["a", "b", "shown", "y_a", "y_b", "y_shown", "other"])
values = st.integers(0, 9) | st.text(max_size=1) | st.none()


@settings(deadline=None)
@given(st.lists(st.dictionaries(names, values, max_size=4), max_size=8))
def test_a_change_is_atomic(changes: list[dict[str, StateValue]]) -> None:
    parts = Sizes(), Sizes(prefix="y_")
    state = InternalState(providers=parts)
    for change in changes:
        before = state.get()
        try:
            changed = state.set(change)
        except ConfigError:
            assert state.get() == before
            assert change
        else:
            assert state.get() == {**before, **change}
            assert changed == change
            assert set(change) <= set(state.settable)
        assert all(part.a <= part.b and part.shown == "x" for part in parts)


def test_settable_names_are_listed_and_a_typo_gets_a_hint() -> None:
    state = InternalState(providers=(Sizes(), Sizes(prefix="y_")))
    assert state.settable == ("a", "b", "y_a", "y_b")
    for name, problem, hint in (
        ("shown", "can be read but not set", "set one of a, b, y_a, y_b"),
        ("y_c", "is no value", "did you mean y_b?"),
        ("__class__", "is no value", "set one of"),
    ):
        with pytest.raises(ConfigError) as refusal:
            state.set({name: 1})
        assert refusal.value.field == name
        assert problem in str(refusal.value)
        assert hint in refusal.value.hint or "did you mean y_a?" in refusal.value.hint


def test_values_are_restored_when_a_later_component_fails() -> None:
    first, second = Sizes(), Sizes(prefix="y_", breaks_on=4)
    state = InternalState(providers=(first, second))
    with pytest.raises(RuntimeError):
        state.set({"a": 3, "y_a": 4})
    assert (first.a, second.a) == (1, 1)


@pytest.mark.parametrize(
    "parts", [(Sizes(), Sizes()), (Sizes(names=("a", "hidden")),)], ids=["one name twice", "set and not shown"]
)
def test_contradicting_components_are_rejected(parts: tuple[Sizes, ...]) -> None:
    with pytest.raises(ValueError, match=r"'a'|'hidden'"):
        InternalState(providers=parts)
