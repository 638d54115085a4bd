"""Counts of a pool, and the sentences of its records."""

from __future__ import annotations

from scheduler_components.values import AllocationRecord, PoolCount, StallReport


def test_a_sound_pool_misses_no_page_and_an_unsound_one_says_how_many() -> None:
    sound = PoolCount("full", 20, 5, 4, 3, 2, 5, 1)
    assert (sound.num_missing, sound.num_used, sound.usage) == (0, 11, 0.55)
    assert PoolCount("full", 20, 5, 4, 3, 2, 4, 1).num_missing == 1
    assert PoolCount("full", 20, 6, 4, 3, 2, 5, 1).num_missing == -1, "a page is in two terms"


def test_a_pool_without_pages_is_not_used() -> None:
    assert PoolCount("mamba", 0, 0).usage == 0.0


def test_a_count_and_a_record_are_sentences() -> None:
    assert str(PoolCount("swa", 7, 1, 2, 3, 0, 1)) == (
        "[swa] total=7, available=1, evictable=2, protected=3, session_held=0, uncached=1, in_transfer=0"
    )
    record = AllocationRecord(4, "results", "RequestKvCache.free", "freed", "r1", "full", (1, 2))
    assert str(record) == "freed by r1 in step 4 (RequestKvCache.free, results)"


def test_a_stall_names_its_request_if_it_has_one() -> None:
    assert str(StallReport("dp0", 3, "forward", "", 2.04)) == (
        "rank dp0 has made no progress for 2.0 s in step 3, phase forward"
    )
    assert str(StallReport("dp0", 3, "results", "r1", 2.0, is_resolved=True)) == (
        "rank dp0 continued after 2.0 s in step 3, phase results, request r1"
    )
