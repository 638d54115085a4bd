"""Sizes change between two batches, all of them or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_components import ConfigError


def test_a_value_is_refused_before_any_component_changes(make_bench: Callable) -> None:
    settings = make_bench(kv_tokens=256).scheduler.settings
    with pytest.raises(ConfigError, match="give at most 64"):
        settings.check_state({"max_running_requests": 65})
    with pytest.raises(ConfigError, match="give at most 64"):
        settings.set_state({"max_running_requests": 65, "chunk_tokens": 7})
    assert settings.batcher.limits.chunk_tokens == settings.config.chunk_tokens == 2048


def test_the_next_batch_has_the_new_sizes(make_bench: Callable) -> None:
    bench = make_bench(kv_tokens=256)
    tracker = bench.scheduler.batcher.conditions.new_token_ratio
    bench.scheduler.settings.set_state({"chunk_tokens": 7})
    bench.submit("r", range(20))
    assert [result.num_prefill_tokens for result in bench.drain()] == [7, 7, 6]
    assert bench.scheduler.batcher.conditions.new_token_ratio is tracker
    bench.scheduler.settings.set_state({"new_token_ratio": 0.5})
    assert bench.scheduler.batcher.conditions.new_token_ratio.current == 0.5
