"""Numbers and digests of a stream: bytes made by hand, and that no change of a history keeps its digest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components.kv_events import EventStream, chain_after, chain_at_start
from scheduler_components.testing.golden import DigestVector, digest_vectors

HISTORIES = st.lists(st.binary(max_size=6), min_size=1, max_size=6)


def digest_of(payloads: list[bytes], *, epoch: bytes = bytes(16), first_sequence: int = 0) -> bytes:
    chain = chain_at_start(epoch)
    for sequence, payload in enumerate(payloads, start=first_sequence):
        chain = chain_after(chain, sequence, payload)
    return chain


@pytest.mark.parametrize("vector", digest_vectors(), ids=str)
def test_digests_are_the_golden_bytes(vector: DigestVector) -> None:
    first = vector.first_sequence
    stream = EventStream(epoch=bytes.fromhex(vector.epoch), max_steps=10, max_bytes=10**6, first_sequence=first)
    sequences = [stream.append(bytes.fromhex(payload)) for payload in vector.payloads]
    assert sequences == list(range(first, first + len(vector.payloads)))
    chains = [stream.chain_before(sequence).hex() for sequence in range(first, stream.next_sequence + 1)]
    assert chains == list(vector.chains)


@given(payloads=HISTORIES, others=HISTORIES)
def test_different_histories_have_different_digests(payloads: list[bytes], others: list[bytes]) -> None:
    """So a lost, a repeated, a swapped and a spliced batch all show."""
    assert (digest_of(payloads) == digest_of(others)) == (payloads == others)


@given(payloads=HISTORIES, epoch=st.binary(min_size=16, max_size=16), first_sequence=st.integers(0, 2**62))
def test_another_life_or_other_numbers_have_another_digest(
    payloads: list[bytes], epoch: bytes, first_sequence: int
) -> None:
    same = epoch == bytes(16) and first_sequence == 0
    assert (digest_of(payloads, epoch=epoch, first_sequence=first_sequence) == digest_of(payloads)) == same


@pytest.mark.parametrize("sequence", [-1, 2, 3, 8, 9])
def test_what_has_left_the_window_or_not_come_yet_is_an_error(sequence: int) -> None:
    stream = EventStream(epoch=bytes(16), max_steps=4, max_bytes=10**6)
    for _ in range(8):
        stream.append(b"\x93\xcb" + bytes(8) + b"\x90\x00")
        stream.fold_some()
    assert (stream.first, stream.next_sequence) == (4, 8)
    with pytest.raises(LookupError, match=f"batch {sequence} is not in the window of 4 to 7"):
        stream.payload(sequence)
