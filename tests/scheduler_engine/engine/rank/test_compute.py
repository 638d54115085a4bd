"""A rank opens the device that its configuration names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit.reference_scheduler import drain

from scheduler_components import ConfigError
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_engine.cli.engine_commands import (
    EngineOptions,
    HiCacheOptions,
    ModelOptions,
    engine_config,
)
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import EnginePaths, RankConfig
from scheduler_engine.engine.rank.compute import open_rank_device
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

pytestmark = [pytest.mark.model, pytest.mark.processes]


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
    request = EngineRequest("r", range(6, 50), SamplingLimits(8, ignore_eos=True))
    drain(scheduler, request)
    judge.expect(request.input_ids, request.output_ids, num_tokens=8)
    assert engine.model_name == model_folder.name
    with pytest.raises(ConfigError, match="context has 512"):
        scheduler.submit(EngineRequest("long", range(6, 300), SamplingLimits(220)))
    with pytest.raises(ConfigError, match="not a token of the model"):
        scheduler.submit(EngineRequest("strange", [320]))


def test_an_engine_without_a_model_imports_no_torch() -> None:
    """Neither the frontend nor a rank imports it."""
    script = (
        "import sys;"
        "from scheduler_engine.cli.engine_commands import engine_config, EngineOptions, HiCacheOptions;"
        "from scheduler_engine.engine.rank import process;"
        "from scheduler_engine.engine.rank.compute import open_rank_device;"
        "config = engine_config(EngineOptions(), HiCacheOptions());"
        "open_rank_device(config, config.parallel(0));"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'gguf'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
