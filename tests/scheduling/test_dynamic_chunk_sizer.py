"""The fit recovers the model, chunks shrink along a prompt, and the error of predictions is measured."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import ConfigError
from scheduler_components.internal_state import InternalState
from scheduler_components.scheduling.dynamic_chunk_sizer import (
    DynamicChunkSizer,
    FirstTokenPredictor,
    PrefillLatencyFit,
    PrefillLatencyModel,
)
from scheduler_components.testing import VirtualClock
from scheduler_components.values import ForwardPassMetrics, ScheduledRequestMetrics

models = st.builds(PrefillLatencyModel, st.floats(0, 50_000), st.floats(0.1, 200), st.floats(0, 500))
lengths = st.integers(0, 200_000)
chunks = [(0, 2048), (2048, 2048), (8192, 1024), (0, 100), (16_384, 2048), (500, 700), (0, 1), (40_000, 512), (0, 4096)]


def observed(model: PrefillLatencyModel, times: int = 1) -> PrefillLatencyFit:
    fit = PrefillLatencyFit()
    for history, tokens in chunks * times:
        pairs = (history + tokens) ** 2 - history**2
        fit.observe(tokens, pairs, (model.base_us + model.chunk_us(history, tokens)) * 1e-6)
    return fit


@settings(deadline=None)
@given(st.builds(PrefillLatencyModel, st.floats(100, 50_000), st.floats(1, 200), st.floats(1, 500)))
def test_the_fit_recovers_the_model(model: PrefillLatencyModel) -> None:
    found = observed(model, 3).model()
    assert found is not None
    assert found.base_us == pytest.approx(model.base_us, rel=0.01, abs=20)
    assert found.token_us == pytest.approx(model.token_us, rel=0.01, abs=0.05)
    assert found.million_pairs_us == pytest.approx(model.million_pairs_us, rel=0.01, abs=0.5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 5_000), st.integers(0, 10**9), st.floats(allow_nan=True)), max_size=40))
def test_no_fitted_time_is_negative(steps: list[tuple[int, int, float]]) -> None:
    fit = PrefillLatencyFit(memory_steps=4)
    for tokens, pairs, step_s in steps:
        fit.observe(tokens, pairs, min(step_s, 1e6))
        found = fit.model()
        assert found is None or (found.token_us > 0 and found.base_us >= 0 and found.million_pairs_us >= 0)


def test_the_fit_needs_eight_steps_and_forgets_old_ones() -> None:
    fit = PrefillLatencyFit(memory_steps=16)
    for number in range(7):
        fit.observe(100 + number, 0, 0.01)
    assert fit.model() is None
    slow, fast = PrefillLatencyModel(1000, 50, 10), PrefillLatencyModel(500, 10, 2)
    for model in (slow, fast):
        for history, tokens in chunks * 30:
            pairs = (history + tokens) ** 2 - history**2
            fit.observe(tokens, pairs, (model.base_us + model.chunk_us(history, tokens)) * 1e-6)
    found = fit.model()
    assert found is not None and found.token_us == pytest.approx(fast.token_us, rel=0.05)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(4))
@given(
    models, st.integers(0, 200_000), st.integers(0, 200_000), st.integers(1, 8192), st.integers(1, 64), st.floats(0, 1)
)
@example(PrefillLatencyModel(0.0, 0.1, 500.0), 0, 200_000, 8192, 1, 1.0)
def test_chunks_shrink_along_a_prompt_and_stay_within_bounds(
    model: PrefillLatencyModel, one: int, other: int, static: int, page_size: int, smooth: float
) -> None:
    sizer = DynamicChunkSizer(page_size=page_size, smooth=smooth, model=model)
    early, late = sizer.chunk_tokens(min(one, other), static), sizer.chunk_tokens(max(one, other), static)
    assert 1 <= late <= early <= static
    assert late == static or late % page_size == 0
    assert late >= min(static, max(page_size, static // 4 - page_size + 1))
    assert DynamicChunkSizer(page_size=page_size).chunk_tokens(one, static) == static


@settings(deadline=None)
@given(models, st.integers(0, 100_000), st.integers(64, 8192))
def test_a_chunk_of_equal_duration_takes_as_long_as_the_first(
    model: PrefillLatencyModel, history: int, static: int
) -> None:
    budget_us = model.chunk_us(0, static)
    assert model.chunk_us(history, model.tokens_in(history, budget_us)) == pytest.approx(budget_us, rel=1e-6)


def test_the_model_is_set_as_a_whole_and_the_fit_is_shown() -> None:
    sizer = DynamicChunkSizer(page_size=16, fit=observed(PrefillLatencyModel(1000, 40, 20)))
    state = InternalState(providers=(sizer,))
    shown = state.get()
    assert shown["chunk_token_us"] is None
    assert shown["fitted_token_us"] == pytest.approx(40, rel=0.01)
    for changes in ({"chunk_token_us": 40.0}, dict.fromkeys(state.settable, "x"), dict.fromkeys(state.settable, -1)):
        with pytest.raises(ConfigError):
            state.set(changes)
    fitted = {name: shown[name.replace("chunk_", "fitted_")] for name in state.settable}
    assert state.set(fitted) == fitted
    assert sizer.chunk_tokens(100_000, 2048) < 2048
    state.set(dict.fromkeys(state.settable))
    assert sizer.chunk_tokens(100_000, 2048) == 2048


def test_the_error_of_predictions_is_measured() -> None:
    clock = VirtualClock(1_700_000_000.0)
    forecast = FirstTokenPredictor(fit=PrefillLatencyFit(), clock=clock)
    assert forecast.predict_s(100, tokens_ahead=0, step_tokens=2048) is None
    forecast.start("unknown", None)
    forecast.on_first_token("unknown")
    assert (forecast.num_observed, forecast.error_s(0.5)) == (0, 0.0)
    forecast = FirstTokenPredictor(fit=observed(PrefillLatencyModel(10_000, 50, 0)), clock=clock)
    predicted = forecast.predict_s(1000, tokens_ahead=3000, step_tokens=2000)
    assert predicted == pytest.approx(2 * 0.010 + 4000 * 50e-6, rel=0.01)
    for number in range(10):
        forecast.start(f"r{number}", predicted)
        clock.now_s += predicted + 0.01 * number
        forecast.on_first_token(f"r{number}")
    forecast.start("gone", predicted)
    forecast.discard("gone")
    forecast.on_first_token("gone")
    assert forecast.num_observed == 10
    assert forecast.error_s(0.5) == pytest.approx(0.04, abs=1e-5)
    assert forecast.error_s(0.9) == pytest.approx(0.08, abs=1e-5)


def noisy_step_s(rng: random.Random, model: PrefillLatencyModel, history: int, tokens: int) -> float:
    return (model.base_us + model.chunk_us(history, tokens)) * 1e-6 * rng.lognormvariate(0, 0.05)


@pytest.mark.parametrize("stall_at", [2, 7, 8, 9, 300])
@pytest.mark.parametrize("stall_s", [10.0, 1e6])
def test_one_stall_does_not_spoil_the_fit(stall_at: int, stall_s: float) -> None:
    rng, fit, true = random.Random(stall_at), PrefillLatencyFit(), PrefillLatencyModel(4000, 35, 18)
    errors = []
    for number in range(stall_at + 400):
        history, tokens = rng.choice(chunks)
        pairs = (history + tokens) ** 2 - history**2
        fit.observe(tokens, pairs, noisy_step_s(rng, true, history, tokens) + stall_s * (number == stall_at))
        found = fit.model()
        if number > max(stall_at, 20) and found is not None:
            right_us = true.base_us + true.chunk_us(history, tokens)
            errors.append(abs(found.base_us + found.chunk_us(history, tokens) - right_us) / right_us)
    assert sorted(errors)[len(errors) * 9 // 10] < 0.1


def test_the_fit_follows_steps_that_really_become_slower() -> None:
    rng, fit = random.Random(1), PrefillLatencyFit(memory_steps=64)
    fast, slow = PrefillLatencyModel(2000, 10, 5), PrefillLatencyModel(6000, 60, 40)
    for model in (fast, slow):
        for _ in range(600):
            history, tokens = rng.choice(chunks)
            fit.observe(tokens, (history + tokens) ** 2 - history**2, noisy_step_s(rng, model, history, tokens))
    found = fit.model()
    assert found is not None
    for history, tokens in chunks:
        if tokens > 100:
            right_us = slow.base_us + slow.chunk_us(history, tokens)
            assert found.base_us + found.chunk_us(history, tokens) == pytest.approx(right_us, rel=0.15)


def test_a_prediction_counts_the_history_of_the_request() -> None:
    predictor = FirstTokenPredictor(
        fit=observed(PrefillLatencyModel(1000, 40, 20)), clock=VirtualClock(1_700_000_000.0)
    )
    without, behind = (
        predictor.predict_s(1000, tokens_ahead=0, step_tokens=2048, history_tokens=history) for history in (0, 50_000)
    )
    assert without is not None and behind is not None
    assert behind - without == pytest.approx(20 * 2 * 50_000 * 1000 / 1e6 * 1e-6, rel=0.01)


def test_a_prediction_learns_what_the_fit_does_not_know() -> None:
    """Steps without prefill double each wait; with all slots in use, each request ahead adds 3 s."""
    clock = VirtualClock(1_700_000_000.0)
    predictor = FirstTokenPredictor(fit=observed(PrefillLatencyModel(10_000, 50, 0)), clock=clock)
    errors: dict[int, list[float]] = {0: [], 2: []}
    raw_s = predictor.predict_s(1000, tokens_ahead=0, step_tokens=2000)
    assert raw_s is not None
    for number in range(60):
        for slots_ahead in (0, 2):
            predicted_s = predictor.predict_s(1000, tokens_ahead=0, step_tokens=2000, slots_ahead=slots_ahead)
            assert predicted_s is not None
            predictor.start(f"r{number}", predicted_s, slots_ahead=slots_ahead)
            took_s = 2 * raw_s + 3.0 * slots_ahead
            clock.now_s += took_s * (10 if number == 30 else 1)  # one stall
            predictor.on_first_token(f"r{number}")
            errors[slots_ahead].append(abs(predicted_s - took_s) / took_s)
    for of_kind in errors.values():
        assert max(of_kind[45:]) < 0.05
        assert of_kind[0] > 0.4


def metrics_of(chunks: list[tuple[int, int]], step_s: float) -> ForwardPassMetrics:
    """The forward-pass metrics of a step with these (history, tokens) of prefills."""
    tokens, history = sum(tokens for _, tokens in chunks), sum(history for history, _ in chunks)
    scheduled = ScheduledRequestMetrics(len(chunks), tokens, sum_prefill_kv_tokens=history)
    return ForwardPassMetrics(wall_time=step_s, scheduled_requests=scheduled)


@given(st.lists(st.tuples(st.integers(0, 9_000), st.integers(1, 500), st.integers(1, 4)), min_size=16, max_size=32))
def test_a_planner_fits_equal_prefills_exactly(steps: list[tuple[int, int, int]]) -> None:
    own, planners = PrefillLatencyFit(), PrefillLatencyFit()
    for history, tokens, count in steps:
        pairs = count * ((history + tokens) ** 2 - history**2)
        step_s = 1e-6 * (500 + 20 * tokens * count + 3 * pairs / 1e6)
        own.observe(tokens * count, pairs, step_s)
        planners.observe_metrics(metrics_of([(history, tokens)] * count, step_s))
    assert planners == own


def test_a_planner_ignores_heartbeats_and_decodes() -> None:
    fit = PrefillLatencyFit()
    fit.observe_metrics(ForwardPassMetrics())
    decode = ScheduledRequestMetrics(num_decode_requests=3, sum_decode_kv_tokens=50)
    fit.observe_metrics(ForwardPassMetrics(wall_time=0.1, scheduled_requests=decode))
    fit.observe_metrics(metrics_of([(0, 10)], 0.0))
    assert fit.num_steps == 0
