"""Each planted bug is found by the world that found it first, which is sound without the bug.

``kit/planted_bugs.py`` has the search; ``make soak`` repeats a part of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.planted_bugs import PLANTED, cut_small, table
from kit.planted_seeds import FOUND, NOT_FOUND

from observability.simulation import run_world

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "simulated-delivery.md"
QUICK = (
    "a_deleted_bucket_is_not_created_again",
    "replays_starve_while_batches_are_published",
    "snapshot_is_not_folded",
    "the_begin_of_a_snapshot_is_ignored",
)
"""Bugs of three kinds of worlds, two defects of 0.4 among them."""


def check_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, seed = FOUND[name]
    assert PLANTED[name].run(kind, seed).violation is not None
    cut_small(monkeypatch)
    assert run_world(seed, kind=kind).violation is None, "the world breaks a promise without the bug"


@pytest.mark.soak
@pytest.mark.broken_variants
@pytest.mark.timeout(900)
def test_a_world_finds_each_bug(soaking: bool) -> None:
    for name in FOUND if soaking else QUICK:
        with pytest.MonkeyPatch.context() as patch:
            check_found(name, patch)


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", ["a_clear_after_a_restart_is_forgotten", "snapshot_is_not_folded"])
def test_the_search_finds_the_stored_seed(name: str) -> None:
    assert PLANTED[name].search(FOUND[name][1] + 1) == FOUND[name]


def test_the_page_lists_every_bug() -> None:
    assert {*FOUND, *NOT_FOUND} == set(PLANTED) and not set(FOUND) & set(NOT_FOUND)
    assert table() in PAGE.read_text()
