"""The tests that catch a planted bug by an explicit trace, which fails with the bug and passes without it.

Some are registered next to the model that runs the trace, with ``caught_by``. The others are tests of the cores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REGISTERED = {
    "observability/relay/test_source_merger.py::test_a_broken_merger_is_caught": "BROKEN",
    "observability/kv_stream/test_log_cursor.py::test_a_broken_core_is_caught": "MUTANTS",
}
"""Tests that take a bug and its trace from a list, by the name of the list in their module. They check both ways."""

_BY_FILE = {
    "kv_events/test_handover.py": {
        "a_late_thread_is_counted_on": "test_a_thread_that_was_late_or_is_overdue_is_not_counted_on"
    },
    "kv_events/test_replay.py": {
        "a_plain_answer_at_the_edge_of_the_buffer_gets_the_snapshot_again": (
            "test_a_plain_client_gets_the_snapshot_at_most_once_more_however_slow_it_is"
        ),
        "a_slow_answer_is_never_cut": "test_only_clients_that_are_too_slow_are_cut",
        "a_snapshot_is_sent_twice": "test_a_plain_answer_contains_everything_from_start",
        "answers_hold_nothing": (
            "test_the_stream_keeps_the_batches_of_an_answer_until_they_are_sent_or_its_client_leaves"
        ),
        "batches_of_open_answers_are_not_kept": (
            "test_the_stream_keeps_the_batches_of_an_answer_until_they_are_sent_or_its_client_leaves"
        ),
        "buffer_is_off_by_one": "test_a_plain_client_overtaken_by_the_replay_buffer_gets_the_snapshot",
        "every_answer_behind_the_buffer_is_cut": (
            "test_the_buffer_and_the_batches_of_open_answers_have_at_most_twice_the_bounds"
        ),
        "holds_are_never_released": (
            "test_the_stream_keeps_the_batches_of_an_answer_until_they_are_sent_or_its_client_leaves"
        ),
        "kept_batches_have_no_bound": "test_only_clients_that_are_too_slow_are_cut",
        "lost_chunks_not_counted": "test_a_replayed_snapshot_reports_its_number_of_chunks",
        "plain_snapshot_without_its_clear": "test_only_the_first_chunk_of_a_snapshot_clears",
        "snapshot_is_folded_while_it_is_planned": (
            "test_a_snapshot_is_pinned_while_it_is_cut_into_chunks_or_until_its_client_leaves"
        ),
        "snapshot_is_not_folded": "test_a_plain_answer_contains_everything_from_start",
        "the_base_does_not_begin_with_a_clear": "test_only_the_first_chunk_of_a_snapshot_clears",
    },
    "kv_events/test_sequence_floor.py": {"a_truncated_floor_is_believed": "test_a_torn_floor_is_refused"},
    "kv_events/test_stream.py": {"a_drain_folds_one_batch": "test_one_drain_folds_what_a_pin_has_held_back"},
    "kv_events/test_stream_drain.py": {
        "clients_that_are_gone_keep_their_answers": "test_a_client_that_is_gone_loses_its_answer"
    },
    "observability/jetstream/test_log_ownership.py": {
        "a_late_answer_looks_like_another_writer": (
            "test_an_answer_that_comes_after_the_own_pointer_names_no_third_writer"
        ),
        "a_log_that_lost_its_end_is_not_noticed": "test_a_lost_pointer_and_a_shorter_log_cause_a_snapshot",
        "a_lost_pointer_is_not_noticed": "test_a_lost_pointer_and_a_shorter_log_cause_a_snapshot",
        "a_replaced_writer_goes_on": "test_a_replaced_writer_stops",
        "a_revision_alone_identifies_a_pointer": (
            "test_a_pointer_of_another_bucket_is_not_the_own_one_because_of_its_revision"
        ),
        "every_other_writer_stops": "test_a_writer_that_begins_replaces_an_older_one",
        "the_snapshot_overwrites_the_one_in_use": ("test_a_snapshot_goes_to_the_object_that_the_pointer_does_not_name"),
    },
    "observability/kv_stream/test_digest_cursor.py": {
        "a_gap_costs_a_snapshot": "test_a_gap_requests_batches_from_the_position_of_the_view",
        "a_gap_is_never_asked_about": "test_a_gap_requests_batches_from_the_position_of_the_view",
        "answers_to_older_requests_accepted": "test_each_batch_is_counted_once",
        "digest_is_not_compared": "test_a_wrong_digest_at_the_end_requests_a_snapshot",
        "duplicate_applied": "test_live_batches_are_applied_and_duplicates_are_counted",
        "end_not_checked": "test_a_wrong_digest_at_the_end_requests_a_snapshot",
        "epoch_not_compared_in_a_status": "test_another_epoch_replaces_the_view_by_a_snapshot",
        "future_frame_causes_no_request": "test_a_gap_requests_batches_from_the_position_of_the_view",
        "future_frame_kept": "test_a_gap_requests_batches_from_the_position_of_the_view",
        "gap_without_credit_forgotten": "test_a_gap_without_credit_is_requested_when_credit_is_available",
        "holes_in_the_chunks_accepted": ("test_an_answer_without_its_snapshot_is_requested_again_and_is_no_splice"),
        "holes_inside_an_answer_accepted": "test_a_snapshot_with_a_hole_is_discarded",
        "live_batches_are_dropped_during_an_answer": "test_a_frame_dropped_during_an_answer_is_requested",
        "neither_epoch_nor_digest_compared": "test_a_wrong_digest_at_the_end_requests_a_snapshot",
        "probe_never": "test_a_status_is_compared_with_the_position_of_its_request",
        "retry_never": "test_a_cut_answer_is_continued_from_the_last_applied_batch",
        "status_compared_with_the_digest_at_answer_time": (
            "test_a_status_is_compared_with_the_position_of_its_request"
        ),
        "truncated_answer_accepted_as_complete": "test_a_cut_answer_is_continued_from_the_last_applied_batch",
    },
    "observability/kv_stream/test_frames.py": {"topic_not_compared": "test_a_live_message_needs_the_exact_topic"},
    "observability/kv_stream/test_plain_cursor.py": {
        "a_plain_gap_is_never_asked_about": "test_a_gap_is_requested_from_the_held_number",
        "plain_payload_not_compared": "test_another_payload_under_the_held_number_is_a_restart",
    },
    "observability/kv_stream/test_stream_cursor.py": {
        "the_extension_is_looked_for_once": (
            "test_a_silent_publisher_is_probed_for_the_extension_soon_because_it_may_be_slow"
        )
    },
    "observability/kv_stream/test_view.py": {
        "snapshot_applied_without_clear": "test_locations_are_looked_up_again_after_a_clear_or_a_replacement"
    },
    "observability/relay/test_source_merger.py": {
        "partial_is_published_as_whole": "test_the_stream_has_the_state_of_its_least_trusted_source",
        "the_best_source_sets_the_state": "test_the_stream_has_the_state_of_its_least_trusted_source",
    },
    "observability/relay/test_stream.py": {
        "a_clear_after_a_restart_is_forgotten": (
            "test_a_view_that_was_cleared_is_cleared_for_readers_and_a_flush_sends"
        ),
        "a_cut_snapshot_stays": "test_a_snapshot_replaces_what_was_published_if_it_is_used",
        "the_begin_of_a_snapshot_is_ignored": "test_a_snapshot_replaces_what_was_published_if_it_is_used",
        "the_end_of_a_doubt_is_not_published": "test_readers_hear_of_each_doubt_and_of_its_end",
    },
}

TESTS = {bug: f"{path}::{test}" for path, tests in _BY_FILE.items() for bug, test in tests.items()}
"""Tests that need no fixture, by bug. They check the unchanged cores; with the bug they fail in one case at least."""

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


def _cases(test: Callable[..., None]) -> list[dict[str, Any]]:
    """Return the arguments of each case of a test that may be parametrized."""
    cases: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args
            names = [each.strip() for each in names.split(",")] if isinstance(names, str) else names
            rows = [value if len(names) > 1 else (value,) for value in values]
            cases = [case | dict(zip(names, row, strict=True)) for case in cases for row in rows]
    return cases


def check_trace(bug: str, plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Check that the test of a bug in ``TESTS`` passes, and that a case of it fails with the bug.

    Raises:
        AssertionError: it does not.
    """
    module, name = _named(TESTS[bug])
    trace = getattr(module, name)

    def run() -> None:
        for case in _cases(trace):
            trace(**case)

    run()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises((AssertionError, LookupError, ValueError, pytest.fail.Exception)):
            run()
