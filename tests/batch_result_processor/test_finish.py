"""A request ends at its first stop token or at its length, and for the reason that came first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from scheduler_components.batch_result_processor import check_finished
from scheduler_components.values import FinishReason

EOS = frozenset({2})


@dataclass
class Limits:
    max_new_tokens: int = 3
    stop_token_ids: tuple[int, ...] = (9,)
    ignore_eos: bool = False


@pytest.mark.parametrize(
    ("token", "num_output_tokens", "ignore_eos", "reason"),
    [
        (5, 1, False, None),
        (5, 3, False, FinishReason.LENGTH),
        (9, 1, False, FinishReason.STOP),
        (9, 3, True, FinishReason.STOP),  # a stop wins over the length
        (2, 1, False, FinishReason.STOP),
        (2, 1, True, None),
        (2, 3, True, FinishReason.LENGTH),
        (5, 4, False, FinishReason.LENGTH),
    ],
)
def test_rules(token: int, num_output_tokens: int, ignore_eos: bool, reason: FinishReason | None) -> None:
    assert check_finished(token, num_output_tokens, Limits(ignore_eos=ignore_eos), EOS) is reason


def test_an_eos_that_is_also_a_stop_token_stops_even_when_eos_is_ignored() -> None:
    assert check_finished(2, 1, Limits(stop_token_ids=(2,), ignore_eos=True), EOS) is FinishReason.STOP


def test_the_first_values_are_the_peers() -> None:
    assert [str(reason) for reason in FinishReason][:4] == ["length", "stop", "abort", "error"]
