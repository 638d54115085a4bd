"""A running engine of two ranks serves adapters to OpenAI's own client, and sessions over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from kit.waiting import wait_until
from prometheus_client import CollectorRegistry

from scheduler_components.waiting.lora_queue import LoraLimits
from scheduler_engine.engine.config import AdapterSpec, EngineConfig, LoraConfig, SchedulerConfig
from scheduler_engine.engine.engine import open_engine
from scheduler_engine.engine.http_app import make_app
from scheduler_engine.frontend.http_server import bind_http, open_http_server

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

LORA = LoraConfig(limits=LoraLimits(max_loaded=1), adapters=(AdapterSpec(name="poems", path="/poems"),))
CONFIG = EngineConfig(
    dp_size=1,
    attn_cp_size=1,
    attn_tp_size=2,
    scheduler=SchedulerConfig(page_size=4, kv_tokens=512, lora=LORA),
    speed=20.0,
)
PROMPT = list(range(40))


def test_adapters_and_sessions_over_http() -> None:
    async def run() -> None:
        async with open_engine(CONFIG, show=lambda _: None) as engine:
            with bind_http("127.0.0.1", 0) as listener:
                async with open_http_server(make_app(engine, CollectorRegistry()), listener) as server:
                    await asyncio.to_thread(use_adapters, server.url)
                    with httpx.Client(base_url=server.url, timeout=30) as client:
                        await asyncio.to_thread(use_sessions, client)
                        await asyncio.to_thread(see_loads, client)

    asyncio.run(asyncio.wait_for(run(), timeout=120))


def use_adapters(url: str) -> None:
    """Each model name has its own text. Two adapters take turns in the only slot."""
    import openai

    def text(model: str) -> str:
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=5, temperature=0)
        assert answer.model == model
        return answer.choices[0].text

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=30, max_retries=0) as client:
        base = "simulated-8b"
        loaded = httpx.post(f"{url}/load_lora_adapter", json={"lora_name": "prose", "lora_path": "/prose"}).json()
        assert loaded == {
            "success": True,
            "error_message": None,
            "loaded_adapters": {"poems": "/poems", "prose": "/prose"},
        }
        assert [model.id for model in client.models.list()] == [base, "poems", "prose"]
        assert client.models.retrieve("poems").id == "poems"
        texts = {name: text(name) for name in (base, "poems", "prose", "poems")}
        assert len(set(texts.values())) == 3
        assert {name: text(name) for name in texts} == texts
        unloaded = httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "prose"})
        assert unloaded.json()["loaded_adapters"] == {"poems": "/poems"}
        with pytest.raises(openai.BadRequestError, match="is neither the model nor an adapter"):
            text("prose")
        again = httpx.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "prose", "lora_path": "/other"})
        assert again.status_code == 200
        assert text("prose") not in texts.values()
        twice = httpx.post(f"{url}/load_lora_adapter", json={"lora_name": "poems", "lora_path": "/poems"})
        assert (twice.status_code, twice.json()["error"]["param"]) == (400, "lora_name")


def use_sessions(client: httpx.Client) -> None:
    """The second turn sends its new tokens only, and finds the pages of the first."""

    def generate(**fields: Any) -> httpx.Response:
        sampling = {"max_new_tokens": 6, "temperature": 0}
        return client.post("/generate", json={"sampling_params": sampling, **fields})

    session_id = client.post("/open_session", json={"capacity_of_str_len": 200}).json()
    first = generate(input_ids=PROMPT, rid="turn-1", session_params={"id": session_id}).json()
    second = generate(input_ids=[7, 8, 9], rid="turn-2", session_params={"id": session_id, "rid": "turn-1"}).json()
    assert second["meta_info"]["prompt_tokens"] == len(PROMPT) + 6 + 3
    assert second["meta_info"]["cached_tokens"] >= len(PROMPT)
    whole = [*PROMPT, *first["output_ids"], 7, 8, 9]
    assert generate(input_ids=whole).json()["output_ids"] == second["output_ids"]
    unknown = generate(input_ids=[1], session_params={"id": session_id, "rid": "turn-9"})
    assert (unknown.status_code, "is no turn of" in unknown.text) == (400, True)
    adapted = generate(input_ids=[1], lora_path="nothing")
    assert (adapted.status_code, adapted.json()["error"]["param"]) == (400, "lora_path")

    def complete(prompt: list[int], **fields: Any) -> Any:
        return client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields}).json()

    # The id of a response names the turn. A turn of the default length (16) gets what is left of the pool.
    assert client.post("/open_session", json={"capacity_of_str_len": 600, "session_id": "long"}).status_code == 200
    begun = complete([*range(480)], max_tokens=6, session_params={"id": "long"})
    ended = complete([1] * 20, session_params={"id": "long", "rid": begun["id"]})
    assert ended["usage"]["prompt_tokens"] == 480 + 6 + 20
    assert ended["usage"]["completion_tokens"] == 512 - 506 + 1
    assert client.post("/close_session", json={"session_id": "long"}).status_code == 200
    assert client.post("/open_session", json={"capacity_of_str_len": 9, "session_id": session_id}).status_code == 400
    assert client.post("/flush_cache", params={"timeout": 10}).status_code == 200, "a session keeps no page of a flush"
    assert client.post("/close_session", json={"session_id": session_id}).status_code == 200
    assert client.post("/close_session", json={"session_id": session_id}).status_code == 400
    assert generate(input_ids=[1], session_params={"id": session_id}).status_code == 400
    # The idle engine closes a session after its timeout, and the id is free again.
    short = {"capacity_of_str_len": 99, "timeout": 0.3, "session_id": "short"}
    assert [client.post("/open_session", json=short).status_code for _ in range(2)] == [200, 400]
    wait_until(lambda: client.post("/open_session", json=short).status_code == 200)


def see_loads(client: httpx.Client) -> None:
    lora = client.get("/v1/loads").json()["loads"][0]["lora"]
    assert (lora["slots_used"], lora["slots_total"]) == (1, 1)
    assert [each["name"] for each in lora["by_adapter"]] == ["poems", "prose"]
