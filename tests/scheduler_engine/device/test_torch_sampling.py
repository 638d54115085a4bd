"""Draws: each token is drawn with its probability after the cuts, and a seed determines the draw."""

from __future__ import annotations

import math
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_engine.device import torch_sampling
from scheduler_engine.device.sampling import SamplingParams
from scheduler_engine.device.torch_sampling import (
    SamplingDraw,
    choose_tokens,
    token_logprobs,
    uniform_sample,
)

pytestmark = pytest.mark.torch

checked = settings(deadline=None, max_examples=40)
cuts = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 3),
    top_p=st.floats(0.05, 1),
    top_k=st.integers(0, 20),
    min_p=st.floats(0, 0.5),
    seed=st.integers(0, 2**63 - 1),
)


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed)) * 2


def kept(logits: torch.Tensor, cut: SamplingParams) -> dict[int, float]:
    """The tokens that the cuts keep and their probabilities, by the words of ``SamplingParams``."""
    scaled = logits.double() / cut.temperature
    order = scaled.argsort(descending=True).tolist()
    if cut.top_k:
        order = order[: cut.top_k]
    chances = dict(zip(order, scaled[order].softmax(dim=0).tolist(), strict=True))
    total, nucleus = 0.0, {}
    for token, chance in chances.items():
        if total < cut.top_p:
            nucleus[token] = chance
        total += chance
    most, total = max(nucleus.values()), sum(nucleus.values())
    above = {token: chance for token, chance in nucleus.items() if chance / total >= cut.min_p * most / total}
    return {token: chance / sum(above.values()) for token, chance in above.items()}


def _moved(cut: SamplingParams, edge: float) -> SamplingParams:
    """The same cuts, keeping a little more, or less."""
    top_p, min_p = min(1.0, max(1e-6, cut.top_p + edge)), min(1.0, max(0.0, cut.min_p - edge))
    return SamplingParams(cut.temperature, top_p, cut.top_k, min_p)


@checked
@given(st.integers(0, 2**32), cuts)
def test_tokens_are_drawn_with_their_probability_and_cut_ones_never(seed: int, cut: SamplingParams) -> None:
    """By evenly spread numbers instead of random ones, so that what comes out is exact up to one grid step."""
    logits, num_points = logits_of(seed), 400
    grid = iter((point + 0.5) / num_points for point in range(num_points))
    with mock.patch.object(torch_sampling, "uniform_sample", lambda _: next(grid)):
        tokens, broken = choose_tokens(
            logits.repeat(num_points, 1), [SamplingDraw(cut, "r", at) for at in range(num_points)]
        )
    assert not broken
    expected = kept(logits[0], cut)
    edge = 1e-4  # a chance that lies on a cut itself may fall on either side
    for token in range(16):
        share = tokens.count(token) / num_points
        if abs(share - expected.get(token, 0.0)) > 2 / num_points + edge:
            loose, tight = kept(logits[0], _moved(cut, edge)), kept(logits[0], _moved(cut, -edge))
            assert loose != tight, (token, share, expected)


@checked
@given(st.integers(0, 2**32), st.lists(cuts | st.just(SamplingParams()), min_size=1, max_size=6))
def test_a_row_is_drawn_independently_of_the_others(seed: int, params: list[SamplingParams]) -> None:
    logits = logits_of(seed, len(params))
    draws = [SamplingDraw(each, f"r{row}", row + 5) for row, each in enumerate(params)]
    together, _ = choose_tokens(logits, draws)
    assert together == [choose_tokens(logits[row : row + 1], [draw])[0][0] for row, draw in enumerate(draws)]
    for row, each in enumerate(params):
        if each.is_greedy:
            assert together[row] == logits[row].argmax()


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    warm = SamplingParams(temperature=1.0, seed=3)
    assert uniform_sample(SamplingDraw(warm, "a", 7)) == uniform_sample(
        SamplingDraw(SamplingParams(temperature=2.0, seed=3), "b", 7)
    )
    numbers = [
        uniform_sample(SamplingDraw(SamplingParams(temperature=1.0, seed=seed), "a", at))
        for seed in (0, 1)
        for at in range(50)
    ]
    assert len(set(numbers)) == 100
    assert 0 <= min(numbers) < 0.1
    assert 0.9 < max(numbers) < 1
    unseeded = SamplingParams(temperature=1.0)
    assert uniform_sample(SamplingDraw(unseeded, "a", 7)) != uniform_sample(SamplingDraw(unseeded, "b", 7))


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-53, 14)])
def test_the_first_and_the_last_number_draw_no_token_that_was_cut(number: float, token: int) -> None:
    logits = torch.zeros(1, 16)
    logits[0, [0, 15]] = -9.0
    with mock.patch.object(torch_sampling, "uniform_sample", lambda _: number):
        assert choose_tokens(logits, [SamplingDraw(SamplingParams(temperature=1.0, min_p=0.5), "r", 3)]) == (
            [token],
            [],
        )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("warm", [SamplingParams(), SamplingParams(temperature=1.0)])
def test_nan_rows_are_reported_and_change_no_other_row(value: float, warm: SamplingParams) -> None:
    logits = logits_of(1, 3)
    draws = [SamplingDraw(warm, f"r{row}", 5) for row in range(3)]
    whole, _ = choose_tokens(logits, draws)
    logits[1, 4] = value
    tokens, broken = choose_tokens(logits, draws)
    assert broken == [1]
    assert (tokens[0], tokens[2]) == (whole[0], whole[2])


@checked
@given(st.integers(0, 2**32), st.integers(0, 15), st.integers(0, 20))
def test_logprobs_are_of_the_model_before_any_cut(seed: int, token: int, num_top: int) -> None:
    logits = logits_of(seed)[0]
    reported = token_logprobs(logits, token, num_top)
    expected = logits.log_softmax(dim=0)
    assert reported.logprob == pytest.approx(expected[token].item())
    assert [each for each, _ in reported.top] == expected.argsort(descending=True)[:num_top].tolist()
    assert [value for _, value in reported.top] == pytest.approx([expected[each].item() for each, _ in reported.top])


biases = st.dictionaries(st.integers(0, 15), st.floats(-100, 100, width=32), max_size=4)


@checked
@given(st.integers(0, 2**32), st.lists(st.tuples(biases, cuts | st.just(SamplingParams())), min_size=1, max_size=4))
def test_a_bias_is_added_to_the_logits_of_its_own_row(
    seed: int, rows: list[tuple[dict[int, float], SamplingParams]]
) -> None:
    """The same tokens as from logits that have the bias already; the given logits stay for log probabilities."""
    logits = logits_of(seed, len(rows))
    given, added = logits.clone(), logits.clone()
    draws = []
    for row, (bias, cut) in enumerate(rows):
        for token, number in bias.items():
            added[row, token] += number
        draws.append(SamplingDraw(msgspec.structs.replace(cut, logit_bias=tuple(bias.items())), f"r{row}", 7))
    plain = [SamplingDraw(cut, f"r{row}", 7) for row, (_, cut) in enumerate(rows)]
    assert choose_tokens(given, draws) == choose_tokens(added, plain)
    assert torch.equal(given, logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_largest_bias_decides_and_the_smallest_excludes(temperature: float) -> None:
    for number in range(20):
        logits = logits_of(number)
        best = int(logits.argmax())
        sampling = SamplingParams(temperature=temperature, seed=number)
        always = msgspec.structs.replace(sampling, logit_bias=((3, 100.0),))
        never = msgspec.structs.replace(sampling, logit_bias=((best, -100.0),))
        assert choose_tokens(logits, [SamplingDraw(always, "r", 1)])[0] == [3]
        assert choose_tokens(logits, [SamplingDraw(never, "r", 1)])[0] != [best]


masks = st.lists(st.booleans(), min_size=16, max_size=16).filter(any)


@checked
@given(st.integers(0, 2**32), st.lists(st.tuples(cuts | st.just(SamplingParams()), st.none() | masks), min_size=1))
def test_a_grammar_leaves_the_choice_among_its_tokens(
    seed: int, rows: list[tuple[SamplingParams, list[bool] | None]]
) -> None:
    """A row with a mask gets the token that it would get if the model gave the other tokens no probability."""
    logits = logits_of(seed, len(rows))
    before = logits.clone()
    draws = [SamplingDraw(cut, f"r{row}", row) for row, (cut, _) in enumerate(rows)]
    bitmasks = {row: packed(mask) for row, (_, mask) in enumerate(rows) if mask is not None}
    chosen, broken = choose_tokens(logits, draws, bitmasks)
    for row, (_, mask) in enumerate(rows):
        if mask is not None:
            before[row, ~torch.tensor(mask)] = -1e30
            assert mask[chosen[row]]
    assert (chosen, broken) == choose_tokens(before, draws)


def packed(mask: list[bool]) -> bytes:
    return bytes(sum(mask[at * 8 + bit] << bit for bit in range(8)) for at in range(len(mask) // 8))


def test_a_mask_may_be_longer_or_shorter_than_the_vocabulary() -> None:
    """A tokenizer may know fewer tokens than the model has logits, and masks are padded to whole words."""
    logits = torch.arange(13.0).repeat(2, 1)
    draws = [SamplingDraw(SamplingParams(), "r", 1)] * 2
    assert choose_tokens(logits, draws, {0: b"\xff\xff\xff\xff", 1: b"\xff"}) == ([12, 7], [])


def test_a_mask_hides_no_broken_logits() -> None:
    """NaN and infinity fail the row also where the mask forbids them, and so does a row without an allowed token."""
    logits = logits_of(1, 5)
    logits[0, 3] = math.nan
    logits[1, 3] = math.inf
    logits[2, 8:] = -math.inf
    first_byte, last_byte = packed([True] + [False] * 15), packed([False] * 15 + [True])
    bitmasks = {0: first_byte, 1: first_byte, 2: last_byte, 3: b"\0\0"}
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        draws = [SamplingDraw(params, "r", 1)] * 5
        assert choose_tokens(logits, draws, bitmasks)[1] == [0, 1, 2, 3]
