"""Checks of every ``StateProvider`` and every ``Profiler``.

``STATE_HOLDER_CHECKS`` take a state provider, and a valid change of some of its values. ``PROFILER_CHECKS`` take a
function that opens a profiler. A check raises ``ConformanceError`` with its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from scheduler_components.errors import ConfigError
from scheduler_components.internal_state import StateProvider, StateValue
from scheduler_components.profiler_manager import Profiler
from scheduler_components.testing.check_trace import CheckTrace

__all__ = ["PROFILER_CHECKS", "STATE_HOLDER_CHECKS"]


def check_settable_values_are_visible(holder: StateProvider, change: Mapping[str, StateValue]) -> None:
    """The names of the state never change, and include all settable names."""
    trace = CheckTrace("Settable values are visible under constant names")
    names = sorted(trace.call("state()", holder.state))
    trace.expect([], sorted(set(holder.settable) - set(names)), "settable names that are missing in state()")
    trace.expect([], sorted(set(change) - set(holder.settable)), "names of the change that are not settable")
    trace.expect(names, sorted(trace.call("state() again", holder.state)), "names")


def check_check_state_has_no_side_effects(holder: StateProvider, change: Mapping[str, StateValue]) -> None:
    """``check_state`` changes no value."""
    trace = CheckTrace("check_state() changes nothing")
    before = dict(trace.call("state()", holder.state))
    trace.call(f"check_state({dict(change)})", lambda: holder.check_state(change))
    trace.expect(before, dict(trace.call("state() again", holder.state)), "values")


def check_set_values_are_visible_and_reversible(holder: StateProvider, change: Mapping[str, StateValue]) -> None:
    """A change is visible, and the old values can be set again."""
    trace = CheckTrace("Set values are visible, and can be reversed")
    before = {name: value for name, value in holder.state().items() if name in change}
    for values in (change, before):
        trace.call(f"check_state({dict(values)})", partial(holder.check_state, values))
        trace.call(f"set_state({dict(values)})", partial(holder.set_state, values))
        shown = {name: value for name, value in holder.state().items() if name in values}
        trace.expect(dict(values), shown, "values")


def check_wrong_type_raises_config_error(holder: StateProvider, change: Mapping[str, StateValue]) -> None:
    """A value of a wrong type raises a ``ConfigError`` and no other error, because HTTP clients send any value."""
    trace = CheckTrace("A value of a wrong type raises a ConfigError")
    before = dict(trace.call("state()", holder.state))
    for name in change:
        values = {**change, name: "no such value"}
        trace.call(f"check_state({values})", partial(_check_or_refuse, holder, values))
    trace.expect(before, dict(trace.call("state() again", holder.state)), "values")


def _check_or_refuse(holder: StateProvider, values: Mapping[str, StateValue]) -> None:
    with suppress(ConfigError):
        holder.check_state(values)


STATE_HOLDER_CHECKS = (
    check_settable_values_are_visible,
    check_check_state_has_no_side_effects,
    check_set_values_are_visible_and_reversible,
    check_wrong_type_raises_config_error,
)


def check_profile_is_written_to_the_returned_path(open_profiler: Callable[[], Profiler]) -> None:
    """Two recordings are written to two files."""
    trace = CheckTrace("Each recording is written to its own file")
    profiler = trace.call("open", open_profiler)
    paths = []
    for name in ("first-rank0", "second-rank0"):
        trace.call("start()", profiler.start)
        sum(range(10_000))
        paths.append(trace.call(f"stop({name!r})", partial(profiler.stop, name)))
    trace.expect(2, len(set(paths)), "files")
    trace.expect([True, True], [Path(path).is_file() for path in paths], "files exist")
    trace.expect([True, True], [name in Path(path).name for name, path in zip(("first", "second"), paths, strict=True)])


def check_unbalanced_start_and_stop_raise(open_profiler: Callable[[], Profiler]) -> None:
    """An unbalanced call raises, and the current recording is kept."""
    trace = CheckTrace("An unbalanced start or stop raises")
    profiler = trace.call("open", open_profiler)
    trace.expect_error("stop() before start()", Exception, lambda: profiler.stop("none"))
    trace.call("start()", profiler.start)
    trace.expect_error("start() again", Exception, profiler.start)
    trace.expect(True, Path(trace.call("stop('kept')", lambda: profiler.stop("kept"))).is_file(), "the file exists")


PROFILER_CHECKS = (check_profile_is_written_to_the_returned_path, check_unbalanced_start_and_stop_raise)
