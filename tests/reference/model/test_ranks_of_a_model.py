"""A model cut among the rank processes of an engine: its tokens are those of the whole, before and after an update."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from scheduler_components.reference.device import inspect_model
from scheduler_components.reference.engine import (
    Engine,
    EngineConfig,
    GenerateRequest,
    SamplingLimits,
    SchedulerConfig,
    make_app,
    open_engine,
    pack_tokens,
)
from scheduler_components.testing import GenerateJudge

PROMPTS = [tuple(range(6, 6 + length)) for length in (3, 17, 60, 90)]
NUM_NEW = 10


async def generate(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    limits = SamplingLimits(max_new_tokens=NUM_NEW, ignore_eos=True)
    async with engine.front.open_request(GenerateRequest(input_ids=pack_tokens(prompt), limits=limits)) as news:
        return [token async for delta in news for token in delta.output.token_ids]


async def expect_tokens_of(judge: GenerateJudge, engine: Engine) -> None:
    served = await asyncio.gather(*(generate(engine, prompt) for prompt in PROMPTS))
    for prompt, tokens in zip(PROMPTS, served, strict=True):
        judge.expect(prompt, tokens, num_tokens=NUM_NEW)


def judge_of(folder: Path) -> GenerateJudge:
    return GenerateJudge.over(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def test_two_ranks_serve_one_model_and_take_new_weights_over_http(
    model_folder: Path, judge: GenerateJudge, make_model_folder: Callable[..., Path]
) -> None:
    other_folder = make_model_folder(seed=7)
    other = AutoModelForCausalLM.from_pretrained(other_folder, dtype=torch.float32)
    parts = {name: tensor.numpy().tobytes() for name, tensor in other.state_dict().items()}
    spec = inspect_model(model_folder)
    config = EngineConfig(
        model=spec,
        dp_size=1,
        attn_cp_size=1,
        attn_tp_size=2,
        scheduler=SchedulerConfig(page_size=4, kv_tokens=1024, chunk_tokens=32, tokens=spec.tokens),
    )

    async def scenario(engine: Engine) -> None:
        app = httpx.ASGITransport(app=make_app(engine, CollectorRegistry()))
        async with httpx.AsyncClient(transport=app, base_url="http://engine", timeout=60) as client:

            async def post(path: str, body: dict[str, Any]) -> httpx.Response:
                return await client.post(path, content=json.dumps(body))

            def update(version: str, content: dict[str, bytes]) -> dict[str, Any]:
                encoded = {name: base64.b64encode(each).decode() for name, each in content.items()}
                return {"weight_version": version, "parts": encoded, "timeout": 30}

            await expect_tokens_of(judge, engine)
            name = "model.layers.0.mlp.down_proj.weight"
            refused = await post("/update_weights", update("v2", {name: parts[name], "lm_head.bias": b"1"}))
            assert refused.status_code == 400 and "is no tensor of this model" in refused.text
            refused = await post("/update_weights", update("v2", {name: parts[name][:-4]}))
            assert refused.status_code == 400 and "is not 32768 bytes, torch.float32 of (64, 128)" in refused.text
            await expect_tokens_of(judge, engine)  # nothing of it has stayed

            done = await post("/update_weights", update("v2", parts))
            assert done.status_code == 200, done.text
            assert (await client.get("/server_info")).json()["weight_version"] == "v2"
            await expect_tokens_of(judge_of(other_folder), engine)
            dumps = await engine.dump_caches()
            assert dumps[0].digest == dumps[1].digest
            assert dumps[0].block_hashes == dumps[1].block_hashes

    async def whole() -> None:
        async with open_engine(config, show=lambda _: None) as engine:
            await scenario(engine)

    asyncio.run(asyncio.wait_for(whole(), timeout=180))
