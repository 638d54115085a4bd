"""The tests that catch a planted bug by an explicit trace, which fails with the bug and passes without it.

Most are registered next to the model that runs the trace, with ``caught_by``. Others are tests without arguments.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

REGISTERED = {
    "worlds/test_recovery_model.py::test_a_broken_core_is_caught": "MUTANTS",
    "worlds/test_traffic_model.py::test_a_broken_core_is_caught": "BROKEN",
    "observability/relay/test_stream_model.py::test_a_broken_relay_is_caught": "BROKEN",
    "observability/relay/test_source_merger.py::test_a_broken_merger_is_caught": "BROKEN",
    "observability/kv_stream/test_log_cursor.py::test_a_broken_core_is_caught": "MUTANTS",
}
"""Tests that take a bug and its trace from a list, by the name of the list in their module. They check both ways."""

_OWNERSHIP = "observability/jetstream/test_log_ownership.py"

TESTS = {
    "a_replaced_writer_goes_on": f"{_OWNERSHIP}::test_a_replaced_writer_stops",
    "every_other_writer_stops": f"{_OWNERSHIP}::test_a_writer_that_begins_replaces_an_older_one",
    "a_log_that_lost_its_end_is_not_noticed": f"{_OWNERSHIP}::test_a_lost_pointer_and_a_shorter_log_cause_a_snapshot",
    "a_lost_pointer_is_not_noticed": f"{_OWNERSHIP}::test_a_lost_pointer_and_a_shorter_log_cause_a_snapshot",
    "the_snapshot_overwrites_the_one_in_use": (
        f"{_OWNERSHIP}::test_a_snapshot_goes_to_the_object_that_the_pointer_does_not_name"
    ),
    "a_revision_alone_identifies_a_pointer": (
        f"{_OWNERSHIP}::test_a_pointer_of_another_bucket_is_not_the_own_one_because_of_its_revision"
    ),
    "a_late_answer_looks_like_another_writer": (
        f"{_OWNERSHIP}::test_an_answer_that_comes_after_the_own_pointer_names_no_third_writer"
    ),
    "a_late_thread_is_counted_on": (
        "kv_events/test_handover.py::test_a_thread_that_was_late_or_is_overdue_is_not_counted_on"
    ),
    "clients_that_are_gone_keep_their_answers": (
        "kv_events/test_stream_drain.py::test_a_client_that_is_gone_loses_its_answer"
    ),
    "a_truncated_floor_is_believed": "kv_events/test_sequence_floor.py::test_a_torn_floor_is_refused",
}
"""Tests without arguments, by bug."""

ENDLESS = ("a_drain_folds_one_batch",)
"""Bugs that no world is searched for, because an action would never end: no time passes in the middle of one."""

WHY_NO_WORLD = {
    "a_drain_folds_one_batch": "Not searched: no time passes in the middle of a drain, and it would never end.",
    "a_late_answer_looks_like_another_writer": "The answer must come in the milliseconds in which a pointer is stored.",
    "a_late_thread_is_counted_on": "The number and the age of the waiting batches have bounds too.",
    "a_lost_pointer_is_not_noticed": "The next snapshot finds another revision, and is stored again.",
    "a_plain_answer_at_the_edge_of_the_buffer_gets_the_snapshot_again": (
        "A batch must leave the buffer before a plain answer has come to it."
    ),
    "a_revision_alone_identifies_a_pointer": "Two writers must have stored equally many pointers, in two buckets.",
    "answers_hold_nothing": "The buffer must move on during the chunks of each answer that a reader requests.",
    "answers_to_older_requests_accepted": "The digest at the end refuses a mixture, unless only chunks are mixed.",
    "batches_of_open_answers_are_not_kept": (
        "The buffer must move on during the chunks of each answer that a reader requests."
    ),
    "gap_without_credit_forgotten": "The next batch shows the gap again.",
    "snapshot_is_folded_while_it_is_planned": "The batches after the snapshot repeat what was folded into it.",
    "the_snapshot_overwrites_the_one_in_use": "A reader compares the snapshot with its pointer, and reads both again.",
}
"""Why the worlds that were searched do not show a bug."""

_TESTS_DIRECTORY = Path(__file__).parents[1]


@cache
def _load(path: str) -> ModuleType:
    name = "traces_of_" + path.removesuffix(".py").replace("/", "_")
    spec = spec_from_file_location(name, _TESTS_DIRECTORY / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _named(test: str) -> tuple[ModuleType, str]:
    path, _, name = test.partition("::")
    return _load(path), name


@cache
def registered() -> dict[str, str]:
    """Return the tests that take bug and trace from a list, by bug."""
    found: dict[str, str] = {}
    for test, variants in REGISTERED.items():
        module, name = _named(test)
        assert callable(getattr(module, name))
        found |= {each.id: f"{test}[{each.id}]" for each in getattr(module, variants)}
    return found


def catching_test(bug: str) -> str | None:
    """Return the test that catches a bug by a trace; None without one."""
    return TESTS.get(bug) or registered().get(bug)


def check_trace(bug: str, plant: object) -> None:
    """Check that the test of a bug in ``TESTS`` passes, and that it fails with the bug.

    Raises:
        AssertionError: it does not.
    """
    assert callable(plant)
    module, name = _named(TESTS[bug])
    trace = getattr(module, name)
    trace()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            trace()
