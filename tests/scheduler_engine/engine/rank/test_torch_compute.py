"""A rank with a model: its configuration is enough to compute what ``generate`` does."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from scheduler_components import ConfigError, ParallelState
from scheduler_engine.cli.engine_commands import (
    EngineOptions,
    HiCacheOptions,
    ModelOptions,
    engine_config,
)
from scheduler_engine.device.model_spec import ModelSpec
from scheduler_engine.device.torch_model import inspect_model
from scheduler_engine.engine.config import DpAttentionConfig, EngineConfig
from scheduler_engine.engine.rank.torch_compute import rank_torch_device

pytestmark = [pytest.mark.model, pytest.mark.processes]


@pytest.fixture(scope="module")
def spec(model_folder: Path) -> ModelSpec:
    return inspect_model(model_folder)


def test_ranks_that_a_model_does_not_support_are_refused(spec: ModelSpec) -> None:
    whole = EngineConfig(model=spec, dp_size=2, attn_cp_size=1, attn_tp_size=1)
    with pytest.raises(ConfigError, match=r"^pp_size=2: is not supported with a real model"):
        attrs.evolve(whole, pp_size=2)
    with pytest.raises(ConfigError, match=r"^attn_tp_size=3: does not divide the 2 parts"):
        attrs.evolve(whole, attn_tp_size=3)
    assert attrs.evolve(whole, attn_tp_size=2, attn_cp_size=2).world_size == 8
    with pytest.raises(ConfigError, match=r"^dp_attention="):
        attrs.evolve(whole, dp_attention=DpAttentionConfig())


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("cpu", ["cpu"] * 4),
        ("cuda", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("cuda:2", [f"cuda:{n}" for n in range(2, 6)]),
    ],
)
def test_each_rank_has_its_own_cuda_device(first: str, expected: list[str]) -> None:
    ranks = [
        ParallelState.from_tp_rank(tp_rank, tp_size=2, dp_rank=dp_rank, dp_size=2)
        for dp_rank in range(2)
        for tp_rank in range(2)
    ]
    assert [rank_torch_device(first, parallel) for parallel in ranks] == expected


def test_a_pool_beyond_the_memory_starts_no_process(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^kv_tokens=.*needs .* GB"):
        engine_config(EngineOptions(kv_tokens=2**40), HiCacheOptions(), ModelOptions(model=model_folder))


def test_a_steps_limits_are_those_of_a_slow_device(spec: ModelSpec) -> None:
    """Seconds in which a chunk is computed are not silence."""
    whole = EngineConfig(model=spec, dp_size=1, attn_cp_size=1, attn_tp_size=1)
    assert whole.relative_speed < EngineConfig().relative_speed == 1.0
    assert EngineConfig(speed=4.0).relative_speed == 1.0
    assert EngineConfig(speed=0.25).relative_speed == 0.25
