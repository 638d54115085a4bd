"""Sampling parameters: invalid values are refused, and valid ones are encoded."""

from __future__ import annotations

import math

import msgspec
import pytest

from scheduler_components import ConfigError
from scheduler_components.values import GrammarKey
from scheduler_engine.device.sampling import MAX_GRAMMAR_CHARACTERS, MAX_TOP_LOGPROBS, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", -1),
        ("logprobs", MAX_TOP_LOGPROBS + 1),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, math.nan),)),
        ("regex", ""),
        ("json_schema", "x" * (MAX_GRAMMAR_CHARACTERS + 1)),
    ],
)
def test_an_invalid_sampling_parameter_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}="):
        SamplingParams(**{field: value})


def test_the_limits_themselves_are_valid_and_encodable() -> None:
    for params in (
        SamplingParams(),
        SamplingParams(temperature=2, top_p=1, top_k=1, min_p=1, seed=2**63 - 1, logprobs=MAX_TOP_LOGPROBS),
        SamplingParams(temperature=1e-4, top_p=1e-6, seed=0, logprobs=0),
        SamplingParams(logit_bias=((0, -100.0), (2**32 - 1, 100.0))),
        SamplingParams(json_schema="x" * MAX_GRAMMAR_CHARACTERS),
        SamplingParams(regex="x" * MAX_GRAMMAR_CHARACTERS),
    ):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert SamplingParams().is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy


def test_an_output_has_at_most_one_grammar() -> None:
    assert SamplingParams().grammar_key is None
    assert SamplingParams(regex="a").grammar_key == GrammarKey("regex", "a")
    assert SamplingParams(json_schema="{}").grammar_key == GrammarKey("json_schema", "{}")
    with pytest.raises(ConfigError, match=r"^regex=.*cannot be combined with json_schema"):
        SamplingParams(json_schema="{}", regex="a")
