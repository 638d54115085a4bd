"""What queues, batcher and KV cache read of a request follows from its tokens and its computed positions."""

from __future__ import annotations

from scheduler_components.cache import RadixNode
from scheduler_components.scheduling.request import OutputLength, Request
from scheduler_components.values import CachedTokens


def counts(request: Request[RadixNode]) -> tuple[int, ...]:
    return (
        request.num_input_tokens,
        request.num_output_tokens,
        request.num_output_tokens_left,
        request.num_uncomputed_tokens,
        request.num_prefill_tokens_left,
    )


def test_the_counts_follow_from_tokens_and_positions() -> None:
    request = Request[RadixNode]("r", [1, 2, 3, 4], OutputLength(5))
    assert counts(request) == (4, 0, 5, 4, 0)
    request.prefill_end = 4
    request.num_computed_tokens = 3
    assert counts(request) == (4, 0, 5, 1, 1)
    request.num_computed_tokens = 4
    request.token_ids.append(9)
    assert counts(request) == (5, 1, 4, 1, 0)


def test_the_cached_part_of_the_prompt_is_kept_as_it_was_at_the_first_admission() -> None:
    request = Request[RadixNode]("r", [1, 2, 3, 4], OutputLength(5))
    request.num_cached_tokens = 2
    request.record_cached_prompt(CachedTokens(device=2))
    request.num_cached_tokens = 4
    assert (request.cached_prompt, request.num_cached_prompt_tokens) == (CachedTokens(device=2), 2)
