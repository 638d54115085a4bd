"""What every ``StateProvider`` and every ``Profiler`` must do: run the checks on parts of your own.

``STATE_HOLDER_CHECKS`` take a holder, and a change of some of its values that works and differs from what they are.
``PROFILER_CHECKS`` take a function that opens a profiler. A check raises ``ConformanceError`` with its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from scheduler_components.errors import ConfigError
from scheduler_components.internal_state import StateProvider, StateValue
from scheduler_components.profiler_manager import Profiler
from scheduler_components.testing.check_trace import CheckTrace

__all__ = ["PROFILER_CHECKS", "STATE_HOLDER_CHECKS"]


def check_settable_values_are_visible(holder: StateProvider, change: Mapping[str, StateValue]) -> None:
    """Names are the same at every look, and those that can be set are among them."""
    trace = CheckTrace("What can be set is shown, under names that stay")
    names = sorted(trace.call("state()", holder.state))
    trace.expect([], sorted(set(holder.settable) - set(names)), "names that can be set and are not shown")
    trace.expect([], sorted(set(change) - set(holder.settable)), "names of the change that cannot be set")
    trace.expect(names, sorted(trace.call("state() again", holder.state)), "names")


def check_check_state_has_no_side_effects(holder: StateProvider, change: Mapping[str, StateValue]) -> None:
    """``check_state`` only looks."""
    trace = CheckTrace("check_state() changes nothing")
    before = dict(trace.call("state()", holder.state))
    trace.call(f"check_state({dict(change)})", lambda: holder.check_state(change))
    trace.expect(before, dict(trace.call("state() again", holder.state)), "values")


def check_set_values_are_visible_and_reversible(holder: StateProvider, change: Mapping[str, StateValue]) -> None:
    """A change shows, and its old values can be set again."""
    trace = CheckTrace("What was set is shown, and can be taken back")
    before = {name: value for name, value in holder.state().items() if name in change}
    for values in (change, before):
        trace.call(f"check_state({dict(values)})", partial(holder.check_state, values))
        trace.call(f"set_state({dict(values)})", partial(holder.set_state, values))
        shown = {name: value for name, value in holder.state().items() if name in values}
        trace.expect(dict(values), shown, "values")


def check_wrong_type_raises_config_error(holder: StateProvider, change: Mapping[str, StateValue]) -> None:
    """What comes over HTTP is anything: a part refuses it with a ``ConfigError``, and raises nothing else."""
    trace = CheckTrace("Values of another kind are refused with a ConfigError")
    before = dict(trace.call("state()", holder.state))
    for name in change:
        values = {**change, name: "no such value"}
        trace.call(f"check_state({values})", partial(_refused, holder, values))
    trace.expect(before, dict(trace.call("state() again", holder.state)), "values")


def _refused(holder: StateProvider, values: Mapping[str, StateValue]) -> bool:
    try:
        holder.check_state(values)
    except ConfigError:
        return True
    return False


STATE_HOLDER_CHECKS = (
    check_settable_values_are_visible,
    check_check_state_has_no_side_effects,
    check_set_values_are_visible_and_reversible,
    check_wrong_type_raises_config_error,
)


def check_profile_is_written_to_the_returned_path(open_profiler: Callable[[], Profiler]) -> None:
    """Two recordings, one after the other, under two names."""
    trace = CheckTrace("Each recording is written to a file of its own")
    profiler = trace.call("open", open_profiler)
    paths = []
    for name in ("first-rank0", "second-rank0"):
        trace.call("start()", profiler.start)
        sum(range(10_000))
        paths.append(trace.call(f"stop({name!r})", partial(profiler.stop, name)))
    trace.expect(2, len(set(paths)), "files")
    trace.expect([True, True], [Path(path).is_file() for path in paths], "are there")
    trace.expect([True, True], [name in Path(path).name for name, path in zip(("first", "second"), paths, strict=True)])


def check_unbalanced_start_and_stop_raise(open_profiler: Callable[[], Profiler]) -> None:
    """They raise, and the recording under way is not lost."""
    trace = CheckTrace("A start or stop too many raises")
    profiler = trace.call("open", open_profiler)
    trace.expect(True, trace.call("stop() before start()", lambda: _raises(lambda: profiler.stop("none"))), "raised")
    trace.call("start()", profiler.start)
    trace.expect(True, trace.call("start() again", lambda: _raises(profiler.start)), "raised")
    trace.expect(True, Path(trace.call("stop('kept')", lambda: profiler.stop("kept"))).is_file(), "it is there")


def _raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001 - whatever it is: the session counts it
        return True
    return False


PROFILER_CHECKS = (check_profile_is_written_to_the_returned_path, check_unbalanced_start_and_stop_raise)
