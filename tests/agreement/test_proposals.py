"""Proposals and parallel groups: all ranks get the same values, or an error that names the cause."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rank_grid import grid, on_threads
from kit.searches import num_examples

from scheduler_components.agreement import BLOCK_INTS, AgreedValues, ParallelGroups, Proposal, Slots, elementwise_min
from scheduler_components.agreement.thread_sync import ThreadSyncHub
from scheduler_components.errors import SettingsDivergenceError, SyncClosedError, SyncDivergenceError, SyncTimeoutError

INT64 = st.integers(-(2**63), 2**63 - 1)
KINDS = ("min", "max", "all", "any", "equal")


def filled(kinds: list[str], values: list[int], operation: str = "step", step: int = 3) -> Proposal:
    proposal = Proposal(operation, step=step)
    for at, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        getattr(proposal, kind)(f"slot {at}", value % 2 == 1 if kind in ("all", "any") else value)
    return proposal


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(3))
@given(data=st.data(), kinds=st.lists(st.sampled_from(KINDS), max_size=12), num_ranks=st.integers(1, 5))
def test_agreed_values_are_the_reduction_of_all_ranks_values(
    data: st.DataObject, kinds: list[str], num_ranks: int
) -> None:
    columns = [
        data.draw(st.lists(st.sampled_from([0, 1, 7]) | INT64, min_size=num_ranks, max_size=num_ranks)) for _ in kinds
    ]
    proposals = [filled(kinds, [column[rank] for column in columns]) for rank in range(num_ranks)]
    reduced = elementwise_min([proposal.pack(0) for proposal in proposals])
    assert Proposal.headers_match(reduced)
    for proposal in proposals:
        agreed = proposal.unpack(reduced)
        for at, (kind, column) in enumerate(zip(kinds, columns, strict=True)):
            odd = [value % 2 == 1 for value in column]
            expected = {
                "min": min(column),
                "max": max(column),
                "all": all(odd),
                "any": any(odd),
                "equal": len(set(column)) == 1,
            }[kind]
            found = agreed.numbers if kind in ("min", "max") else agreed.flags
            assert found[f"slot {at}"] == expected


@pytest.mark.parametrize(
    ("other", "call_number"),
    [
        (filled(["min"], [1], operation="other"), 0),
        (filled(["max"], [1]), 0),
        (filled(["min", "min"], [1, 1]), 0),
        (filled(["min"], [1], step=4), 0),
        (filled(["min"], [1]), 1),
    ],
    ids=["operation", "kind", "slots", "step", "call"],
)
def test_a_different_proposal_changes_the_header(other: Proposal, call_number: int) -> None:
    reduced = elementwise_min([filled(["min"], [1]).pack(0), other.pack(call_number)])
    assert not Proposal.headers_match(reduced)


def test_proposals_of_any_size_share_a_first_block_of_fixed_length() -> None:
    small, large = filled([], []), filled(["min"] * 1000, [5] * 1000)
    assert len(small.pack(0)) == BLOCK_INTS
    assert len(large.pack(0)) > BLOCK_INTS
    assert not Proposal.headers_match(elementwise_min([small.pack(0), large.pack(0)[:BLOCK_INTS]]))
    assert large.unpack(large.pack(0)).numbers["slot 999"] == 5


def test_a_callers_mistakes_are_refused() -> None:
    proposal = Proposal("step", step=0)
    proposal.min("free pages", 1)
    with pytest.raises(ValueError, match="two slots named 'free pages'"):
        proposal.max("free pages", 1)
    with pytest.raises(ValueError, match="not a signed 64-bit"):
        proposal.equal("digest", 2**63)
    for operation in ("", "x" * 65):
        with pytest.raises(ValueError, match="1 to 64 bytes"):
            Proposal(operation, step=0)
    assert len(proposal) == 1


@settings(deadline=None)
@given(kinds=st.lists(st.sampled_from(KINDS), max_size=8), data=st.data(), cut=st.integers(0, 8))
def test_slots_filled_together_are_those_filled_one_by_one(kinds: list[str], data: st.DataObject, cut: int) -> None:
    values = [data.draw(st.booleans() if kind in ("all", "any") else INT64) for kind in kinds]
    one_by_one, together = Proposal("step", step=3), Proposal("step", step=3)
    pairs = [(kind, f"slot {at}") for at, kind in enumerate(kinds)]
    for (kind, name), value in zip(pairs, values, strict=True):
        getattr(one_by_one, kind)(name, value)
    for part in (slice(cut), slice(cut, None)):
        together.fill(Slots(*pairs[part]), values[part])  # type: ignore[arg-type]  # kinds are drawn
    assert together.pack(7) == one_by_one.pack(7)
    assert len(together) == len(one_by_one) == len(kinds)
    assert together.unpack(together.pack(7)) == one_by_one.unpack(one_by_one.pack(7))


def test_slots_that_do_not_fit_are_refused() -> None:
    proposal, slots = Proposal("step", step=0), Slots(("min", "free"), ("all", "ready"))
    with pytest.raises(ValueError, match="3 values for 2 slots, <Slots: free, ready>"):
        proposal.fill(slots, [1, 1, 1])
    with pytest.raises(ValueError, match="free=-9223372036854775809 is not a signed 64-bit"):
        proposal.fill(slots, [-(2**63) - 1, 1])
    with pytest.raises(ValueError, match=r"ready=0\.5 is not a signed 64-bit"):
        proposal.fill(slots, [1, 0.5])  # type: ignore[list-item]
    proposal.fill(slots, [1, 1])
    proposal.fill(Slots(("max", "free")), [1])
    with pytest.raises(ValueError, match="two slots named 'free'"):
        proposal.pack(0)


def ask(groups: ParallelGroups) -> AgreedValues:
    mine = groups.rank
    groups.barrier("start", step=0)
    assert groups.all_reduce_min("landed", mine + 5, step=1) == 5
    proposal = Proposal("step", step=2)
    proposal.max("wanted", mine)
    proposal.all("allocated", mine != 1)
    proposal.any("aborted", mine == 1)
    proposal.equal("tree digest", 7)
    proposal.equal("host digest", mine)
    return groups.reduce(proposal)


def expected(wanted: int, *flags: bool) -> AgreedValues:
    names = ("allocated", "aborted", "tree digest", "host digest")
    return AgreedValues({"wanted": wanted}, dict(zip(names, flags, strict=True)))


def test_one_rank_agrees_with_itself_without_a_collective() -> None:
    groups = ParallelGroups()
    assert ask(groups) == expected(0, True, False, True, True)
    assert (groups.num_calls, groups.num_collectives) == (3, 0)


@pytest.mark.parametrize(("cp", "tp"), [(2, 2), (2, 1), (1, 2), (3, 2)])
def test_threads_of_a_grid_get_the_reduction_of_the_whole_grid(cp: int, tp: int) -> None:
    last = cp * tp - 1
    assert on_threads(grid(cp, tp), ask) == [expected(last, False, True, True, False)] * (last + 1)


@pytest.mark.parametrize("num_slots", [1, 250, 251, 1000])
def test_a_long_proposal_takes_one_more_collective_per_hop(num_slots: int) -> None:
    def work(groups: ParallelGroups) -> object:
        proposal = Proposal("step", step=0)
        for slot in range(num_slots):
            proposal.min(f"operation {slot}", groups.rank + slot)
        agreed = groups.reduce(proposal)
        assert list(agreed.numbers.values()) == list(range(num_slots))
        return groups.num_collectives

    assert set(on_threads(grid(2, 2), work)) == {2 if num_slots <= 250 else 4}


@pytest.mark.parametrize("odd_rank", range(4))
def test_a_rank_that_leaves_out_a_call_is_named_on_all_ranks(odd_rank: int) -> None:
    def work(groups: ParallelGroups) -> object:
        groups.barrier("start", step=4)
        if groups.rank != odd_rank:  # the mistake: a rank-local condition in front of a collective
            groups.all_reduce_min("prefetch", 1, step=5)
        return groups.all_reduce_min("write acks", 1, step=5)

    for error in on_threads(grid(2, 2), work):
        assert isinstance(error, SyncDivergenceError)
        assert error.call == 1
        assert sorted(error.places) == [0, 1, 2, 3]
        for rank, place in error.places.items():
            assert ("write acks" if rank == odd_rank else "prefetch") in place


def test_proposals_of_different_length_diverge_in_the_first_block() -> None:
    def work(groups: ParallelGroups) -> object:
        proposal = Proposal("step", step=0)
        for slot in range(1000 if groups.rank == 2 else 3):
            proposal.min(f"operation {slot}", 1)
        return groups.reduce(proposal)

    assert all(isinstance(error, SyncDivergenceError) for error in on_threads(grid(2, 2), work))


def test_groups_repeat_their_first_error() -> None:
    def work(groups: ParallelGroups) -> object:
        if groups.rank == 1:
            return None
        for _ in range(2):
            with pytest.raises(SyncTimeoutError, match=r"'landed' at step 3: not agreed within 0\.1 s; missing.* 1"):
                groups.all_reduce_min("landed", 1, step=3)
        return groups.num_calls, groups.num_collectives

    assert on_threads(grid(2, 1), work, timeout_s=0.1) == [(1, 0), None]


def test_closed_groups_raise() -> None:
    groups = ParallelGroups()
    groups.close()
    groups.close()
    with pytest.raises(SyncClosedError, match=r"^the parallel groups are closed$"):
        groups.barrier("start", step=0)


def test_different_settings_raise_with_fields_and_ranks() -> None:
    """Rank 2 alone: found over CP, then TP. And the groups are unusable from then on."""

    def start(groups: ParallelGroups) -> None:
        settings = {"page_size": 16, "prefetch": "timeout" if groups.rank == 2 else "best_effort", "write": "w" * 70}
        with pytest.raises(SettingsDivergenceError) as raised:
            groups.check_equal("hicache settings", settings, step=0)
        with pytest.raises(SettingsDivergenceError):
            groups.barrier("step", step=1)
        raise raised.value

    errors = on_threads(grid(2, 2), start)
    assert len(errors) == 4
    for error in errors:
        assert isinstance(error, SettingsDivergenceError)
        assert error.settings == {
            "prefetch": {0: "'best_effort'", 1: "'best_effort'", 2: "'timeout'", 3: "'best_effort'"}
        }
        assert "prefetch: rank 0 has 'best_effort'" in str(error)
        assert "rank 2 has 'timeout'" in str(error)


def test_long_settings_are_shown_truncated() -> None:
    def start(groups: ParallelGroups) -> None:
        groups.check_equal("settings", {"model": "xy" + "\xe9" * 60 + str(groups.rank)}, step=0)

    for error in on_threads(grid(2, 1), start):
        assert isinstance(error, SettingsDivergenceError)
        assert str(error).startswith("settings: ")
        [values] = error.settings.values()
        assert all("'xy" + "\xe9" * 20 in text for text in values.values())
        assert sorted(values) == [0, 1]


def test_ranks_with_the_same_settings_go_on() -> None:
    def start(groups: ParallelGroups) -> int:
        groups.check_equal("hicache settings", {"page_size": 16, "prefetch": "timeout"}, step=0)
        return groups.num_collectives

    assert on_threads(grid(2, 2), start) == [2] * 4


def test_a_rank_that_makes_one_call_too_many_is_named_by_the_ranks_that_it_waited_for() -> None:
    """They are alive: their next call meets the failed one, and the error shows both."""
    hub = ThreadSyncHub({0: [(0, 1)], 1: [(0, 1)]}, timeout_s=0.01)
    with pytest.raises(SyncTimeoutError, match=r"missing ranks: 1 \(they failed, hang, or do not make this call\)"):
        hub.parallel_groups(0).all_reduce_min("once more", 1, step=7)
    with pytest.raises(SyncDivergenceError, match=r"rank 0: 'once more' at step 7, .*; rank 1: 'landed' at step 8"):
        hub.parallel_groups(1).all_reduce_min("landed", 1, step=8)
