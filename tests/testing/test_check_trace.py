"""A failed check reports the promise, the calls, and the expected and found values."""

from __future__ import annotations

import pytest

from scheduler_components.testing import CheckTrace, ConformanceError


def test_the_whole_story_is_in_the_error() -> None:
    trace = CheckTrace("A counter counts")
    trace.note("opened it at 1")
    assert trace.call("added 1", lambda: 3) == 3
    with pytest.raises(ConformanceError) as failed:
        trace.expect(2, 3, "the sum")
    assert str(failed.value) == (
        "A counter counts\n  1. opened it at 1\n  2. added 1\n  expected: the sum: 2\n  found:    3"
    )
    assert failed.value.steps == ("opened it at 1", "added 1")
    assert isinstance(failed.value, AssertionError)


def test_errors_of_the_part_become_the_story_and_keep_their_cause() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ConformanceError, match="found:    ValueError: no") as failed:
        CheckTrace("It works").call("called it", fail)
    assert isinstance(failed.value.__cause__, ValueError)


def test_a_refusal_must_be_the_right_one() -> None:
    def fail() -> None:
        raise ValueError("no")

    CheckTrace("It refuses").expect_error("called it", ValueError, fail)
    with pytest.raises(ConformanceError, match="expected: KeyError"):
        CheckTrace("It refuses").expect_error("called it", KeyError, fail)
    with pytest.raises(ConformanceError, match="it returned 5"):
        CheckTrace("It refuses").expect_error("called it", ValueError, lambda: 5)


def test_long_findings_are_cut() -> None:
    with pytest.raises(ConformanceError) as failed:
        CheckTrace("Short").expect("x", "y" * 10_000)
    assert len(str(failed.value)) < 600


def test_the_message_of_a_long_trace_has_its_ends() -> None:
    trace = CheckTrace("Long")
    for number in range(1, 101):
        trace.note(f"step {number}")
    failure = trace.failure("x", "y")
    assert len(failure.steps) == 100
    lines = str(failure).splitlines()
    assert lines[20:23] == ["  20. step 20", "  ... 60 steps ...", "  81. step 81"]
