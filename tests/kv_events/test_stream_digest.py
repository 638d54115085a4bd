"""Every change of a history changes its digest."""

from __future__ import annotations

from hashlib import blake2b
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components.kv_events import stream_digest
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


@pytest.mark.parametrize("num_bytes", [0, 1, 5 * 1024, 5 * 1024 + 1, 40_000])
def test_the_digest_of_a_long_payload_is_computed_with_the_gil(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """zlib releases the GIL for more than 5 KiB, and the publisher's thread would lose it with the sockets."""
    payload = bytes(index % 251 for index in range(num_bytes))
    lengths: list[int] = []

    def noted(piece: bytes, value: int = 0) -> int:
        lengths.append(len(piece))
        return crc32(piece, value)

    monkeypatch.setattr(stream_digest, "crc32", noted)
    expected = blake2b(bytes(8) + (7).to_bytes(8, "big") + crc32(payload).to_bytes(4, "big"), digest_size=8).digest()
    assert digest_after(bytes(8), 7, payload) == expected
    assert max(lengths) <= 5 * 1024
