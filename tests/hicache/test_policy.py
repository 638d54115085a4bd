"""The policy of a hierarchical cache computes its timeout and refuses invalid values."""

from __future__ import annotations

import math

import pytest

from scheduler_components import ConfigError
from scheduler_components.hicache import HiCachePolicy


@pytest.mark.parametrize(("num_tokens", "max_wait_s"), [(0, 1.5), (1024, 1.75), (4096, 2.5)])
def test_a_timeout_grows_with_the_tokens_that_are_read(num_tokens: int, max_wait_s: float) -> None:
    policy = HiCachePolicy(prefetch="timeout", prefetch_timeout_s=1.5, prefetch_timeout_s_per_ki_token=0.25)
    assert policy.prefetch_max_wait_s(num_tokens) == max_wait_s
    assert HiCachePolicy(prefetch="best_effort").prefetch_max_wait_s(num_tokens) == math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("write", "write_around"),
        ("prefetch", "never"),
        ("load", "by_page"),
        ("write_threshold_hits", 0),
        ("clean_ahead_pages", 0),
        ("prefetch_retry_steps", -1),
        ("prefetch_timeout_s", math.inf),
        ("prefetch_timeout_s_per_ki_token", -0.1),
        ("prefetch_threshold_pages", 0),
        ("load_threshold_pages", True),
        ("prefetch_max_retries", 0.5),
    ],
)
def test_an_invalid_value_is_refused_by_its_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        HiCachePolicy(**{field: value})  # type: ignore[arg-type]
    assert (refusal.value.field, refusal.value.value) == (field, value)
