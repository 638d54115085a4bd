"""A proposal's one MIN reduction answers every question as if each rank's values had been looked at together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import SyncCall
from scheduler_components.hicache import Proposal, elementwise_min
from scheduler_components.hicache.agreement import BLOCK_INTS
from scheduler_components.values import RECORD_INTS

INT64 = st.integers(-(2**63), 2**63 - 1)
KINDS = ("min", "max", "all", "any", "equal")


def filled(kinds: list[str], values: list[int], operation: str = "step", step: int = 3) -> Proposal:
    proposal = Proposal(operation, step=step)
    for at, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        getattr(proposal, kind)(f"slot {at}", value % 2 == 1 if kind in ("all", "any") else value)
    return proposal


@settings(deadline=None, max_examples=150)
@given(data=st.data(), kinds=st.lists(st.sampled_from(KINDS), max_size=12), num_ranks=st.integers(1, 5))
def test_outcome_is_the_reduction_of_all_ranks_values(data: st.DataObject, kinds: list[str], num_ranks: int) -> None:
    columns = [
        data.draw(st.lists(st.sampled_from([0, 1, 7]) | INT64, min_size=num_ranks, max_size=num_ranks)) for _ in kinds
    ]
    proposals = [filled(kinds, [column[rank] for column in columns]) for rank in range(num_ranks)]
    reduced = elementwise_min([proposal.pack(0) for proposal in proposals])
    assert Proposal.header_agrees(reduced)
    for proposal in proposals:
        agreed = proposal.open(reduced)
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
def test_another_question_shows_in_the_header(other: Proposal, call_number: int) -> None:
    reduced = elementwise_min([filled(["min"], [1]).pack(0), other.pack(call_number)])
    assert not Proposal.header_agrees(reduced)


def test_proposals_of_any_size_share_a_first_block_of_fixed_length() -> None:
    small, large = filled([], []), filled(["min"] * 1000, [5] * 1000)
    assert len(small.pack(0)) == BLOCK_INTS
    assert len(large.pack(0)) > BLOCK_INTS
    assert not Proposal.header_agrees(elementwise_min([small.pack(0), large.pack(0)[:BLOCK_INTS]]))
    assert large.open(large.pack(0)).numbers["slot 999"] == 5


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
@given(rank=INT64, number=INT64, step=INT64, operation=st.text(st.characters(exclude_characters="\0"), max_size=16))
def test_a_call_survives_its_record(rank: int, number: int, step: int, operation: str) -> None:
    call = SyncCall(rank, number, step, operation)
    assert len(call.to_ints()) == RECORD_INTS
    assert SyncCall.from_ints(call.to_ints()) == call


@settings(deadline=None)
@given(st.lists(INT64, min_size=RECORD_INTS, max_size=RECORD_INTS))
def test_any_record_can_be_printed(record: list[int]) -> None:
    assert "call" in str(SyncCall.from_ints(record))
