"""A request is refused at birth when it holds what is no token, and counts its own tokens right."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.values import CachedTokens, TokenOutput
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.scheduler.request import EngineRequest

checked = settings(deadline=None)
u32 = st.integers(0, 2**32 - 1)


@checked
@given(st.lists(u32, min_size=1), st.lists(u32), st.integers(1, 1000))
def test_prompt_and_output_are_separate(prompt: list[int], output: list[int], max_new: int) -> None:
    request = EngineRequest("r", prompt, SamplingLimits(max_new_tokens=max_new))
    request.token_ids.extend(output)
    assert request.input_ids == tuple(prompt)
    assert request.output_ids == tuple(output)
    assert request.num_input_tokens == len(prompt) + len(output)
    assert request.num_output_tokens_left == max_new - len(output)


@checked
@given(st.binary(min_size=1))
def test_bytes_are_a_sequence_of_ids_and_not_raw_memory(prompt: bytes) -> None:
    assert EngineRequest("r", prompt).input_ids == tuple(prompt)


@pytest.mark.parametrize("input_ids", [[-1], [2**32], [0, 1.5], ["a"], "text", [None], []])
def test_an_invalid_token_id_is_refused(input_ids: Iterable[int]) -> None:
    with pytest.raises(ConfigError) as error:
        EngineRequest("r", input_ids)
    assert error.value.field == "input_ids"


@pytest.mark.parametrize("rid", ["", "\ud800"])
def test_an_id_that_cannot_be_encoded_is_refused(rid: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineRequest(rid, [1])
    assert error.value.field == "rid"


@pytest.mark.parametrize("max_new_tokens", [0, -1])
def test_limits_below_one_token_are_refused(max_new_tokens: int) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens"):
        SamplingLimits(max_new_tokens=max_new_tokens)


def test_limits_travel_as_messages() -> None:
    limits = SamplingLimits(max_new_tokens=3, stop_token_ids=(7,), ignore_eos=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(limits), type=SamplingLimits) == limits


def test_the_repr_of_a_request_shows_its_state() -> None:
    assert "'r7' waiting prompt=2 output=0/9" in repr(EngineRequest("r7", [1, 2], SamplingLimits(max_new_tokens=9)))


def test_output_since_any_token_has_the_counts() -> None:
    request = EngineRequest("r", [1, 2, 3], stream_interval=4)
    request.token_ids.extend([7, 8, 9])
    request.num_cached_prompt_tokens = 2
    assert request.output_since(1) == TokenOutput((8, 9), num_prompt_tokens=3, num_cached_tokens=2)
    assert request.output_since(3).token_ids == ()


def test_the_output_says_on_which_tiers_the_prompt_was_found() -> None:
    request = EngineRequest("r", range(8))
    request.num_cached_tokens = 6
    request.record_cached_prompt(CachedTokens(1, 2, 3))
    output = request.output_since(0)
    assert (output.num_cached_tokens, output.cached) == (6, CachedTokens(1, 2, 3))
