"""Held ends are bounded in number and bytes, every lost token is counted, and the oldest lose theirs first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.output_streamer import FinalDeltaBuffer
from scheduler_components.values import OutputDelta, TokenOutput


def end(number: int, num_tokens: int, hidden_bytes: int = 0) -> OutputDelta:
    hidden_states = (bytes(hidden_bytes),) if hidden_bytes else None
    return OutputDelta(
        str(number), 0, num_tokens, "stop", TokenOutput(tuple(range(num_tokens)), 7, 3, 1, None, hidden_states)
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 400))), st.integers(1, 6), st.integers(1, 1000))
def test_bounds_hold_and_every_loss_is_counted(sizes: list[tuple[int, int]], max_ends: int, max_bytes: int) -> None:
    held = FinalDeltaBuffer(max_ends=max_ends, max_bytes=max_bytes)
    for number, (num_tokens, hidden_bytes) in enumerate(sizes):
        held.add(end(number, num_tokens, hidden_bytes))
        assert len(held) <= max_ends
        assert held.num_bytes <= max_bytes
    kept = held.deltas
    assert [int(delta.rid) for delta in kept] == list(range(len(sizes) - len(kept), len(sizes)))
    assert len(kept) + held.ends_dropped == len(sizes)
    kept_tokens = sum(len(delta.output.token_ids) for delta in kept)
    assert kept_tokens + held.tokens_dropped == sum(num_tokens for num_tokens, _ in sizes)
    has_lost = [not delta.output.token_ids for delta in kept if delta.num_output_tokens]
    assert has_lost == sorted(has_lost, reverse=True), "a younger one lost its tokens before an older one"
    assert all(delta.finish_reason == "stop" and delta.output.num_prompt_tokens == 7 for delta in kept)
    held.drop_all()
    assert (len(held), held.num_bytes, held.ends_dropped) == (0, 0, len(sizes))


def test_accepted_deltas_are_not_counted_as_lost() -> None:
    held = FinalDeltaBuffer()
    held.add(end(0, 5))
    held.clear()
    held.drop_all()
    assert (held.deltas, held.num_bytes, held.tokens_dropped) == ((), 0, 0)


def test_top_logprobs_count_for_the_size_and_are_dropped_with_their_token() -> None:
    top = (((1, -0.5), (2, -1.0)),)
    delta = OutputDelta("r", 0, 1, "stop", TokenOutput((1,), 7, logprobs=(-0.5,), top_logprobs=top))
    held = FinalDeltaBuffer(max_bytes=200)
    held.add(delta)
    (kept,) = held.deltas
    assert (kept.output.top_logprobs, kept.output.logprobs, held.num_bytes) == (None, None, 0)


@pytest.mark.parametrize("name", ["max_ends", "max_bytes"])
def test_a_bound_below_one_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        FinalDeltaBuffer(**{name: 0})
