"""A rank with a model: its configuration is enough to compute what ``generate`` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

from scheduler_components import ConfigError, ParallelState
from scheduler_components.reference.cli.engine_commands import (
    EngineOptions,
    HiCacheOptions,
    ModelOptions,
    engine_config,
)
from scheduler_components.reference.device.model_spec import ModelSpec
from scheduler_components.reference.device.sampling import SamplingLimits
from scheduler_components.reference.device.torch_model import inspect_model
from scheduler_components.reference.engine.config import DpAttentionConfig, EngineConfig, EnginePaths, RankConfig
from scheduler_components.reference.engine.rank.compute import open_rank_device
from scheduler_components.reference.engine.rank.torch_compute import rank_torch_device
from scheduler_components.reference.engine.scheduler.request import Request
from scheduler_components.reference.engine.scheduler.scheduler import Scheduler
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier

pytestmark = [pytest.mark.model, pytest.mark.processes]


@pytest.fixture(scope="module")
def spec(model_folder: Path) -> ModelSpec:
    return inspect_model(model_folder)


def test_a_rank_serves_the_model_that_the_command_line_names(model_folder: Path, judge: GreedyTextVerifier) -> None:
    options = EngineOptions(kv_tokens=1024, kv_events_config='{"publisher": "null"}')
    engine = engine_config(options, HiCacheOptions(), ModelOptions(model=model_folder))
    config = RankConfig.from_json(RankConfig(engine, 0, EnginePaths("nowhere")).to_json())
    assert config.engine == engine
    parallel = config.engine.parallel(0)
    threads = torch.get_num_threads()
    try:
        device = open_rank_device(config.engine, parallel)
    finally:
        torch.set_num_threads(threads)
    assert device.pool is not None
    assert device.pool.num_pages == engine.scheduler.kv_pages
    scheduler = Scheduler.compose(config.engine.scheduler, parallel, device.device)
    request = Request("r", range(6, 50), SamplingLimits(8, ignore_eos=True))
    scheduler.submit(request)
    for _ in scheduler.drain():
        pass
    judge.expect(request.input_ids, request.output_ids, num_tokens=8)
    assert engine.model_name == model_folder.name
    with pytest.raises(ConfigError, match="context has 512"):
        scheduler.submit(Request("long", range(6, 300), SamplingLimits(220)))
    with pytest.raises(ConfigError, match="not a token of the model"):
        scheduler.submit(Request("strange", [320]))


@pytest.mark.parametrize("field", ["attn_cp_size", "pp_size"])
def test_ranks_along_other_dimensions_of_a_model_are_refused(spec: ModelSpec, field: str) -> None:
    whole = EngineConfig(model=spec, dp_size=2, attn_cp_size=1, attn_tp_size=1)
    with pytest.raises(ConfigError, match=rf"^{field}=2: cannot cut"):
        attrs.evolve(whole, **{field: 2})
    with pytest.raises(ConfigError, match=r"^attn_tp_size=3: does not divide the 2 parts"):
        attrs.evolve(whole, attn_tp_size=3)
    assert attrs.evolve(whole, attn_tp_size=2).world_size == 4
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


def test_an_engine_without_a_model_imports_no_torch() -> None:
    """Neither the frontend nor a rank imports it."""
    script = (
        "import sys;"
        "from scheduler_components.reference.cli.engine_commands import engine_config, EngineOptions, HiCacheOptions;"
        "from scheduler_components.reference.engine.rank import process;"
        "from scheduler_components.reference.engine.rank.compute import open_rank_device;"
        "config = engine_config(EngineOptions(), HiCacheOptions());"
        "open_rank_device(config, config.parallel(0));"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'gguf'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
