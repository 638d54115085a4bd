"""The reserved share of output stays within its bounds and follows the running requests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import ConfigError
from scheduler_components.scheduling.new_token_ratio_tracker import NewTokenRatioTracker

shares = st.floats(0, 1)


@dataclass
class Decoding:
    num_output_tokens: int
    num_output_tokens_left: int


decoding = st.lists(st.builds(Decoding, st.integers(0, 5_000), st.integers(0, 5_000)), max_size=8)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(4))
@given(shares, shares, st.lists(st.none() | decoding, max_size=60))
def test_the_share_decays_to_its_minimum_and_a_retraction_keeps_it_within_bounds(
    one: float, other: float, steps: list[list[Decoding] | None]
) -> None:
    tracker = NewTokenRatioTracker(initial=max(one, other), minimum=min(one, other), decay_steps=10)
    for still_running in steps:
        before = tracker.current
        if still_running is None:
            tracker.decay_step()
            assert tracker.current <= max(before, tracker.minimum)
        else:
            tracker.on_retract(still_running)
        assert tracker.minimum <= tracker.current <= 1.0
    tracker.reset()
    assert tracker.current == tracker.initial


def test_the_share_decays_in_the_given_number_of_steps() -> None:
    tracker = NewTokenRatioTracker()
    for _ in range(599):
        tracker.decay_step()
    assert tracker.current > tracker.minimum
    tracker.decay_step()
    assert tracker.current == pytest.approx(tracker.minimum)


@pytest.mark.parametrize(
    ("running", "share"),
    [
        ([Decoding(480, 519)], 500 / 1_000),  # (480 + 20) of 999 + 1, as SGLang's
        ([Decoding(100, 900), Decoding(300, 699)], (400 + 40) / 2_000),
        ([Decoding(999, 0)], 1.0),
        ([Decoding(0, 5_000)], 0.1),  # an estimate below the minimum counts as the minimum
        ([], 0.7),
    ],
)
def test_an_estimate_is_the_used_part_plus_some_steps(running: list[Decoding], share: float) -> None:
    tracker = NewTokenRatioTracker()
    for _ in range(300):
        tracker.decay_step()
    tracker.on_retract(iter(running))
    assert tracker.current == pytest.approx(share)


@pytest.mark.parametrize(
    ("field", "value"),
    [("initial", 1.5), ("initial", float("nan")), ("minimum", -0.1), ("minimum", 0.9), ("decay_steps", 0)],
)
def test_an_invalid_setting_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError) as refusal:
        NewTokenRatioTracker(**{field: value})  # type: ignore[arg-type]
    assert refusal.value.field == field
