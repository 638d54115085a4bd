"""The description of a collective call survives its encoding."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components.agreement import SyncCall
from scheduler_components.agreement.sync import SYNC_CALL_INTS, pack_call, unpack_call

INT64 = st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None)
@given(
    rank=INT64,
    number=INT64,
    step=INT64,
    operation=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=16),
)
def test_a_call_survives_encoding(rank: int, number: int, step: int, operation: str) -> None:
    call = SyncCall(rank, number, step, operation)
    assert len(pack_call(call)) == SYNC_CALL_INTS
    assert unpack_call(pack_call(call)) == call


@settings(deadline=None)
@given(st.lists(INT64, min_size=SYNC_CALL_INTS, max_size=SYNC_CALL_INTS))
def test_any_record_can_be_printed(record: list[int]) -> None:
    assert "call" in str(unpack_call(record))
