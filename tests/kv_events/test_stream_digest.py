"""Every change of a history changes its digest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_components.kv_events.stream_digest import digest_after, initial_digest

HISTORIES = st.lists(st.binary(max_size=6), min_size=1, max_size=6)


def digest_of(payloads: list[bytes], *, epoch: bytes = bytes(16), first_sequence: int = 0) -> bytes:
    chain = initial_digest(epoch)
    for sequence, payload in enumerate(payloads, start=first_sequence):
        chain = digest_after(chain, sequence, payload)
    return chain


@given(payloads=HISTORIES, others=HISTORIES)
def test_different_histories_have_different_digests(payloads: list[bytes], others: list[bytes]) -> None:
    """So a lost, a repeated, a swapped and a spliced batch are all detected."""
    assert (digest_of(payloads) == digest_of(others)) == (payloads == others)


@given(payloads=HISTORIES, epoch=st.binary(min_size=16, max_size=16), first_sequence=st.integers(0, 2**62))
def test_another_epoch_or_other_numbers_have_another_digest(
    payloads: list[bytes], epoch: bytes, first_sequence: int
) -> None:
    same = epoch == bytes(16) and first_sequence == 0
    assert (digest_of(payloads, epoch=epoch, first_sequence=first_sequence) == digest_of(payloads)) == same
