"""A model divided among the rank processes of an engine has the tokens of the whole, before and after an update."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from kit.structured_output import expect_structured_output
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.device.torch_model import inspect_model
from scheduler_engine.engine.config import EngineConfig, GrammarConfig, HiCacheConfig, SchedulerConfig
from scheduler_engine.engine.engine import Engine, open_engine
from scheduler_engine.engine.http_app import make_app
from scheduler_engine.engine.messages import pack_tokens
from scheduler_engine.frontend.errors import EngineFailedError, RankSilentError, RequestFailedError
from scheduler_engine.frontend.frontend import GenerateReqInput
from scheduler_engine.frontend.text_frontend import open_text_codec

pytestmark = [pytest.mark.model, pytest.mark.ranks, pytest.mark.processes]

PROMPTS = [tuple(range(6, 6 + length)) for length in (17, 60, 90)]
OTHERS = [tuple(range(first, first + 110)) for first in (100, 150, 200)]  # more than the pool holds
NUM_NEW = 5


async def generate(engine: Engine, prompt: tuple[int, ...], num_new: int = NUM_NEW) -> list[int]:
    limits = SamplingLimits(max_new_tokens=num_new, ignore_eos=True)
    async with engine.frontend.open_request(GenerateReqInput(input_ids=pack_tokens(prompt), limits=limits)) as news:
        return [token async for delta in news for token in delta.output.token_ids]


async def expect_tokens_of(
    judge: GreedyTextVerifier, engine: Engine, prompts: list[tuple[int, ...]] = PROMPTS[:1]
) -> None:
    served = await asyncio.gather(*(generate(engine, prompt) for prompt in prompts))
    for prompt, tokens in zip(prompts, served, strict=True):
        judge.expect(prompt, tokens, num_tokens=NUM_NEW)


def judge_of(folder: Path) -> GreedyTextVerifier:
    return GreedyTextVerifier.over(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.mark.soak_only  # two imports of transformers; in make test, threads as ranks, and weights of a simulated model
def test_two_ranks_serve_one_model_and_take_new_weights_over_http(
    model_folder: Path, judge: GreedyTextVerifier, make_model_folder: Callable[..., Path]
) -> None:
    other_folder, larger_folder = make_model_folder(seed=7), make_model_folder(hidden_size=96, num_attention_heads=6)
    other = AutoModelForCausalLM.from_pretrained(other_folder, dtype=torch.float32)
    parts = {name: tensor.numpy().tobytes() for name, tensor in other.state_dict().items()}
    spec = inspect_model(model_folder)
    config = EngineConfig(
        model=spec,
        dp_size=1,
        attn_cp_size=1,
        attn_tp_size=2,
        scheduler=SchedulerConfig(
            page_size=4, kv_tokens=420, chunk_tokens=32, tokens=spec.tokens, grammar=GrammarConfig()
        ),
        hicache=HiCacheConfig(host_tokens=4096),
    )

    codec = open_text_codec(config)

    async def scenario(engine: Engine) -> None:
        root = Path(os.path.commonpath([model_folder, larger_folder]))
        application = make_app(engine, CollectorRegistry(), codec=codec, weights_root=root)
        app = httpx.ASGITransport(app=application)
        async with httpx.AsyncClient(transport=app, base_url="http://localhost", timeout=60) as client:

            async def post(path: str, body: dict[str, Any]) -> httpx.Response:
                return await client.post(path, content=json.dumps(body))

            def update(version: str, content: dict[str, bytes]) -> dict[str, Any]:
                encoded = {name: base64.b64encode(each).decode() for name, each in content.items()}
                return {"weight_version": version, "parts": encoded, "timeout": 30}

            for prompts in (PROMPTS[1:], OTHERS, PROMPTS[1:]):
                await expect_tokens_of(judge, engine, prompts)
            await expect_structured_output(application, engine)  # random weights, whose free text is no JSON
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

            refused = await post("/update_weights_from_disk", {"model_path": str(model_folder.parent / "none")})
            assert refused.status_code == 400 and "is not in the allowed directory" in refused.text
            refused = await post("/update_weights_from_disk", {"model_path": str(larger_folder)})
            assert refused.status_code == 400 and "is another model" in refused.text
            strict = httpx.ASGITransport(app=make_app(engine, CollectorRegistry()))  # the model's own folder only
            async with httpx.AsyncClient(transport=strict, base_url="http://localhost") as other_client:
                refused = await other_client.post("/update_weights_from_disk", json={"model_path": str(larger_folder)})
            assert refused.status_code == 400 and "is not in the allowed directory" in refused.text
            done = await post("/update_weights_from_disk", {"model_path": str(model_folder)})
            assert done.json()["weight_version"] == spec.identity, done.text
            await expect_tokens_of(judge, engine)
            dumps = await engine.dump_caches()
            assert dumps[0].digest == dumps[1].digest
            assert dumps[0].block_hashes == dumps[1].block_hashes
            tiers = dumps[0].tiers
            assert tiers is not None and tiers.pages_loaded > 0, (
                "pages of half the heads went to the host and came back"
            )

        running = asyncio.ensure_future(generate(engine, PROMPTS[0], 380))
        while not engine.stats.read()[0].load.num_running_reqs:
            await asyncio.sleep(0.01)
        os.kill(engine.ranks[1].process.pid, signal.SIGKILL)
        with pytest.raises((EngineFailedError, RequestFailedError)):  # its leader may report the lost step first
            await running
        with pytest.raises(EngineFailedError, match=r"rank .*tp1.* was killed by signal 9"):
            await engine.run(asyncio.Event().wait())

    async def whole() -> None:
        async with open_engine(config, tokenizer=codec.to_json(), show=lambda _: None) as engine:
            await scenario(engine)

    asyncio.run(asyncio.wait_for(whole(), timeout=180))


@pytest.mark.soak_only  # in make test, threads as ranks (test_torch_model_parallel)
def test_a_stop_order_reaches_a_rank_within_a_sum(model_folder: Path) -> None:
    """Its peer is stopped, so gloo would wait for two minutes. The rank exits with 0 when the order comes."""
    spec = inspect_model(model_folder)
    scheduler = SchedulerConfig(page_size=4, kv_tokens=420, chunk_tokens=32, tokens=spec.tokens)
    config = EngineConfig(model=spec, dp_size=1, attn_cp_size=1, attn_tp_size=2, scheduler=scheduler)

    async def scenario() -> list[int | None]:
        async with open_engine(config, show=lambda _: None) as engine:
            await generate(engine, PROMPTS[0])
            running = asyncio.ensure_future(generate(engine, PROMPTS[0], 380))
            while not engine.stats.read()[0].load.num_running_reqs:
                await asyncio.sleep(0.01)
            engine.frontend.heartbeats.timeout_s = 4.0
            os.kill(engine.ranks[1].process.pid, signal.SIGSTOP)
            with pytest.raises(RankSilentError, match=r"^rank .*tp1.* has sent no heartbeat"):
                await running
            ranks = engine.ranks
        return [rank.process.returncode for rank in ranks]

    assert asyncio.run(asyncio.wait_for(scenario(), timeout=120)) == [0, -signal.SIGKILL]
