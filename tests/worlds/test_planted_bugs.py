"""Each planted bug is found by a world that is sound without it, or caught by a trace.

``kit/planted_bugs.py`` has the search; ``make soak`` repeats it for every stored seed.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from kit.planted_bugs import CRASH, PLANTED, broken_promise, table
from kit.planted_seeds import FOUND
from kit.planted_traces import TESTS, catching_test, check_trace

import worlds
from worlds import Violation, run_world

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "simulated-delivery.md"
UNTRACED = [name for name in PLANTED if catching_test(name) is None]
"""Bugs that only a world finds."""


def check_found(name: str) -> None:
    kind, seed, promise = FOUND[name]
    violation = PLANTED[name].run(kind, seed).violation
    assert violation is not None and broken_promise(violation) == promise, (name, violation)
    assert run_world(seed, kind=kind).violation is None, "the world breaks a promise without the bug"


@pytest.mark.soak
@pytest.mark.broken_variants
@pytest.mark.timeout(900)
def test_a_world_finds_each_bug_by_the_promise_that_it_breaks(soaking: bool) -> None:
    for name in FOUND if soaking else UNTRACED:
        check_found(name)


@pytest.mark.broken_variants
def test_the_search_finds_the_stored_world() -> None:
    name = "batches_before_the_buffer_are_skipped"
    assert PLANTED[name].search(FOUND[name][1] + 1) == FOUND[name]


def test_every_bug_is_found_by_a_world_or_caught_by_a_trace() -> None:
    assert FOUND.keys() <= PLANTED.keys()
    assert FOUND.keys() >= set(UNTRACED)


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", TESTS)
def test_a_trace_fails_with_the_bug_only(name: str) -> None:
    check_trace(name, PLANTED[name].plant)


def test_each_stored_promise_is_one_that_worlds_judge() -> None:
    """A promise that was renamed, or a part that fails under its name, would otherwise look like a finding."""
    judged = {
        node.value
        for path in Path(worlds.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    promises = {promise for _, _, promise in FOUND.values() if not promise.startswith(CRASH)}
    assert promises <= judged - {"no part fails"}


def test_a_part_that_fails_breaks_no_promise() -> None:
    violation = Violation(1.0, "calm", "no part fails", "LookupError: batch 7 is gone", ())
    assert broken_promise(violation) == "crash: LookupError"
    kept = Violation(1.0, "calm", "memory is bounded", "the stream keeps 9 batches of 4", ())
    assert broken_promise(kept) == "memory is bounded"


def test_the_page_lists_every_bug() -> None:
    assert table() in PAGE.read_text()
