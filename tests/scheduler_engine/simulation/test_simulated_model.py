"""A larger batch never costs less, and a token depends on its text and position alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.values import BatchShape
from scheduler_engine.simulation.simulated_model import CostModel, SimulatedModel

checked = settings(deadline=None)

rids = st.text(min_size=1, max_size=8)
positions = st.integers(1, 10_000)
counts = st.integers(0, 10_000)


def shape(num_prefill: int, num_decode: int, num_more_context: int = 0) -> BatchShape:
    return BatchShape(num_prefill, num_decode, 10 + num_more_context)


@checked
@given(counts, counts)
def test_more_tokens_never_cost_less(one: int, more: int) -> None:
    cost = CostModel()
    base_s = cost.shape_s(shape(one, one))
    assert cost.shape_s(shape(one + more, one)) >= base_s
    assert cost.shape_s(shape(one, one + more)) >= base_s
    assert cost.shape_s(shape(one, one, more)) >= base_s


@checked
@given(rids, positions, st.integers(1, 2**32))
def test_tokens_are_of_the_vocabulary(rid: str, position: int, vocab_size: int) -> None:
    assert 0 <= SimulatedModel(vocab_size=vocab_size).next_token(rid, position) < vocab_size


def test_two_seeds_give_two_texts() -> None:
    texts = [[SimulatedModel(seed=seed).next_token("r", position) for position in range(64)] for seed in (0, 1)]
    assert texts[0] != texts[1]
    assert len(set(texts[0])) > 32


def test_the_end_of_sequence_token_has_about_its_mean_distance() -> None:
    model = SimulatedModel(eos_token_id=99_999, mean_output_tokens=50)
    num_ends = sum(model.next_token("r", position) == 99_999 for position in range(50_000))
    assert 800 < num_ends < 1200


def test_without_an_end_of_sequence_token_none_is_emitted() -> None:
    model = SimulatedModel(vocab_size=10)
    assert {model.next_token("r", position) for position in range(1000)} == set(range(10))


@pytest.mark.parametrize(("field", "value"), [("base_ms", -1.0), ("prefill_us_per_token", float("nan"))])
def test_an_invalid_cost_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        CostModel(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("vocab_size", 0), ("vocab_size", 2**32 + 1), ("mean_output_tokens", 0)])
def test_an_invalid_model_is_refused(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field):
        SimulatedModel(**{field: value})
