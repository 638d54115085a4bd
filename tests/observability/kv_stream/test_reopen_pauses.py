"""Pauses between attempts to connect double up to a bound, until a batch comes."""

from __future__ import annotations

from observability.kv_stream.reopen_pauses import FIRST_REOPEN_S, LAST_REOPEN_S, ReopenPauses


def test_pauses_double_up_to_a_bound_until_a_batch_comes() -> None:
    pauses = ReopenPauses()
    assert [pauses.take() for _ in range(8)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    pauses.reset()
    assert [pauses.take(), pauses.take()] == [FIRST_REOPEN_S, 2 * FIRST_REOPEN_S]
    assert pauses.next_s < LAST_REOPEN_S
