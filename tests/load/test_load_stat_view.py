"""For samples in any order, the view keeps each rank's newest, and an old epoch never replaces a new one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components.load.load_stat import LoadStat, LoadView


def sample(sequence: int, *, rank: int | None = 0, epoch: int = 1) -> LoadStat:
    return LoadStat(0, 0, 0, 0, rank, sequence=sequence, epoch=epoch)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50))))
def test_the_newest_of_each_rank_is_kept(arrivals: list[tuple[int, int]]) -> None:
    view = LoadView()
    newest: dict[int, int] = {}
    outdated = 0
    for rank, sequence in arrivals:
        is_new = sequence > newest.get(rank, -1)
        assert view.update(sample(sequence, rank=rank), 0.0) == is_new
        if is_new:
            newest[rank] = sequence
        outdated += not is_new
    assert {rank: entry.stat.sequence for rank, entry in view.samples.items()} == newest
    assert view.outdated == outdated


def test_a_gap_is_seen() -> None:
    view = LoadView()
    view.update(sample(4), 0.0)
    assert view.samples[0].missed == 0
    view.update(sample(7), 0.0)
    assert view.samples[0].missed == 2


def test_a_restart_starts_a_new_epoch_and_late_samples_of_the_old_one_are_dropped() -> None:
    view = LoadView()
    view.update(sample(900, epoch=1), 0.0)
    assert view.update(sample(2, epoch=2), 0.0)
    assert view.samples[0].missed == 2
    assert not view.update(sample(901, epoch=1), 0.0)
    assert view.update(sample(3, epoch=2), 0.0)
    assert view.outdated == 1


def test_ranks_are_bounded_and_a_null_rank_is_rank_zero() -> None:
    view = LoadView(max_ranks=2)
    assert view.update(sample(0, rank=None), 0.0)
    assert not view.update(sample(0, rank=2), 0.0)
    assert (list(view.samples), view.refused) == ([0], 1)


def test_the_age_of_a_sample_is_never_negative() -> None:
    view = LoadView()
    view.update(sample(0, rank=0), 10.0)
    assert view.samples[0].age_s(15.0) == 5.0
    assert view.samples[0].age_s(5.0) == 0.0
