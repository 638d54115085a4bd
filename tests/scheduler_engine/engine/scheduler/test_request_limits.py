"""Requests that can never be served are refused, with the largest that could."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import ConfigError
from scheduler_components.scheduling.request_kv_cache import pages_for
from scheduler_components.values import GrammarKey
from scheduler_engine.device.model_spec import TokenSpec
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import GrammarConfig, SchedulerConfig
from scheduler_engine.engine.scheduler.request_limits import (
    check_grammar_served,
    check_request_fits,
    check_tokens_known,
    fitting_limits,
)

checked = settings(deadline=None, max_examples=num_examples(4))

sizes = st.integers(1, 40)


@pytest.mark.soak
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


@pytest.mark.soak
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


@pytest.mark.soak
@checked
@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 60))
def test_a_default_length_is_lowered_to_what_fits_and_a_given_one_is_kept(
    context: int, num_input: int, max_new: int
) -> None:
    config = SchedulerConfig(page_size=1, kv_tokens=30, tokens=TokenSpec(context_tokens=context))
    given_one = SamplingLimits(max_new, (7,), ignore_eos=True)
    assert fitting_limits(config, num_input, given_one) == given_one
    default = SamplingLimits(max_new, (7,), ignore_eos=True, is_default=True)
    fitting = fitting_limits(config, num_input, default)
    assert (fitting.stop_token_ids, fitting.ignore_eos, fitting.is_default) == ((7,), True, False)
    most = min(30, context)
    assert fitting.max_new_tokens == max(1, min(max_new, most - num_input + 1))
    if num_input <= most:
        check_request_fits(config, num_input, fitting.max_new_tokens)


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    config = SchedulerConfig(tokens=TokenSpec(vocab_size=320))
    check_tokens_known(config, [0, 319])
    check_tokens_known(SchedulerConfig(), [2**32 - 1])
    with pytest.raises(ConfigError, match=r"^input_ids=320: .* give ids from 0 to 319"):
        check_tokens_known(config, [5, 320, 7])


def test_a_grammar_that_nothing_compiles_is_refused() -> None:
    """Also where a request reaches a scheduler without the frontend, because its output would be any text."""
    key = GrammarKey("regex", "a+")
    check_grammar_served(SchedulerConfig(), None)
    check_grammar_served(SchedulerConfig(grammar=GrammarConfig()), key)
    with pytest.raises(ConfigError, match=r"^regex='a\+': needs a grammar backend"):
        check_grammar_served(SchedulerConfig(), key)
