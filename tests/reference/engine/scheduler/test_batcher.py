"""Properties of admission: a refused request never fits, an accepted one always does, and order is kept."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.reference.device.model_spec import TokenSpec
from scheduler_components.reference.device.sampling import SamplingLimits
from scheduler_components.reference.engine.config import SchedulerConfig
from scheduler_components.reference.engine.scheduler.batcher import (
    check_request_fits,
    check_tokens_known,
    estimate_pages,
    estimate_pages_to_allocate,
    prefill_chunk,
    select_preemption_victim,
)
from scheduler_components.reference.engine.scheduler.request import Request
from scheduler_components.reference.engine.scheduler.request_kv_cache import pages_for

checked = settings(deadline=None, max_examples=200)

sizes = st.integers(1, 40)


def a_request(num_prompt: int, num_output: int, max_new: int) -> Request:
    request = Request("r", range(num_prompt), SamplingLimits(max_new_tokens=max_new))
    request.token_ids.extend(range(num_output))
    return request


@checked
@given(sizes, sizes, st.integers(1, 200), st.integers(1, 200))
@example(page_size=1, num_pages=1, num_input=1, max_new=1)
@example(page_size=1, num_pages=1, num_input=1, max_new=2)
def test_a_request_is_refused_exactly_when_the_whole_pool_could_not_hold_it(
    page_size: int, num_pages: int, num_input: int, max_new: int
) -> None:
    config = SchedulerConfig(page_size=page_size, kv_tokens=page_size * num_pages)
    fits = pages_for(num_input + max_new - 1, page_size) <= num_pages
    if fits:
        check_request_fits(config, num_input, max_new)
        return
    with pytest.raises(ConfigError) as refusal:
        check_request_fits(config, num_input, max_new)
    assert refusal.value.field == "input_ids"
    room = config.kv_tokens - num_input + 1
    if room >= 1:  # the hint is exact: one token more does not fit
        assert f"at most {room} new tokens" in refusal.value.hint
        check_request_fits(config, num_input, room)
        with pytest.raises(ConfigError):
            check_request_fits(config, num_input, room + 1)
    else:
        assert f"at most {config.kv_tokens} tokens" in refusal.value.hint
        check_request_fits(config, config.kv_tokens, 1)


@checked
@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 60))
def test_a_request_beyond_the_models_context_is_refused_with_the_room_that_is_left(
    context: int, num_input: int, max_new: int
) -> None:
    config = SchedulerConfig(page_size=1, kv_tokens=30, tokens=TokenSpec(context_tokens=context))
    most = min(30, context)
    if num_input + max_new - 1 <= most:
        check_request_fits(config, num_input, max_new)
        return
    with pytest.raises(ConfigError, match="context" if context < 30 else "pool") as refusal:
        check_request_fits(config, num_input, max_new)
    if num_input <= most:
        assert f"at most {most - num_input + 1} new tokens" in refusal.value.hint
    else:
        assert f"at most {most} tokens" in refusal.value.hint


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    config = SchedulerConfig(tokens=TokenSpec(vocab_size=320))
    check_tokens_known(config, [0, 319])
    check_tokens_known(SchedulerConfig(), [2**32 - 1])
    with pytest.raises(ConfigError, match=r"^input_ids=320: .* give ids from 0 to 319"):
        check_tokens_known(config, [5, 320, 7])


@checked
@given(sizes, sizes, st.integers(1, 100), st.integers(0, 50), st.integers(1, 50), st.floats(0, 1))
@example(page_size=1, num_pages=2, num_prompt=1, num_output=0, num_left=2, ratio=1.0)
def test_the_estimate_of_a_request_that_fits_never_exceeds_the_pool(
    page_size: int, num_pages: int, num_prompt: int, num_output: int, num_left: int, ratio: float
) -> None:
    """So a request that is alone can always be admitted, also after a retraction."""
    assume(pages_for(num_prompt + num_output + num_left - 1, page_size) <= num_pages)
    request = a_request(num_prompt, num_output, num_output + num_left)
    expected = estimate_pages(request, page_size=page_size, new_token_ratio=ratio)
    assert pages_for(num_prompt + num_output, page_size) <= expected <= num_pages


@checked
@given(st.lists(st.integers(1, 50), max_size=5), sizes, st.floats(0, 1))
def test_the_estimate_of_pages_shrinks_as_pages_are_allocated(prompts: list[int], page_size: int, ratio: float) -> None:
    requests = [a_request(num_prompt, 0, 10) for num_prompt in prompts]
    before = estimate_pages_to_allocate(requests, page_size=page_size, new_token_ratio=ratio)
    for request in requests:
        request.pages = list(range(pages_for(request.num_input_tokens, page_size)))
    after = estimate_pages_to_allocate(requests, page_size=page_size, new_token_ratio=ratio)
    assert before - after == sum(len(request.pages) for request in requests)
    assert after >= 0


@checked
@given(sizes, sizes, st.integers(0, 40))
def test_a_chunk_is_the_least_of_its_limits(left: int, chunk: int, budget: int) -> None:
    num_tokens = prefill_chunk(left, chunk_tokens=chunk, budget_tokens=budget)
    assert num_tokens <= left and num_tokens <= chunk and num_tokens <= budget
    assert num_tokens in (left, chunk, budget)


@checked
@given(st.permutations(range(5)))
def test_the_latest_arrival_is_retracted(arrivals: list[int]) -> None:
    requests = []
    for arrival in arrivals:
        requests.append(a_request(1, 0, 1))
        requests[-1].arrival = arrival
    assert select_preemption_victim(requests).arrival == 4
