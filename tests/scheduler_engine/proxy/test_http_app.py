"""The routes of a proxy: who may call them, and what they say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from kit.fake_engine import FakeEngine, says
from kit.proxied import PROMPT, Proxied, ask, run_proxied, until

from scheduler_engine.frontend.access import AccessPolicy

pytestmark = pytest.mark.sockets


def test_the_models_are_those_of_all_engines_and_unknown_paths_are_not_forwarded() -> None:
    engines = FakeEngine(name="m"), FakeEngine(name="n"), FakeEngine(name="m"), FakeEngine(name="away", is_ready=False)

    async def scenario(running: Proxied) -> None:
        get = running.client.get
        listed = (await get("/v1/models")).json()
        assert (listed["object"], [each["id"] for each in listed["data"]]) == ("list", ["m", "n"])
        assert (await get("/v1/models/n")).json() == {"id": "n"}
        for missing in ("x", "away"):
            answer = await get(f"/v1/models/{missing}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
        for path in ("/flush_cache", "/pause_generation", "/update_weights", "/anything"):
            answer = await running.client.post(path, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
        assert (await get("/generate")).status_code == 405

    run_proxied(scenario, *engines)
    assert "/flush_cache" not in engines[0].asked


def test_asking_for_models_asks_no_engine() -> None:
    """Otherwise each request of a client without limits would be one per engine."""
    engine = FakeEngine()

    async def scenario(running: Proxied) -> int:
        before = engine.asked.count("/v1/models")
        for _ in range(5):
            await running.client.get("/v1/models")
        return engine.asked.count("/v1/models") - before

    assert run_proxied(scenario, engine) == 0


async def raw_request(url: httpx.URL, method: str, target: str, host: str = "127.0.0.1") -> tuple[int, bytes]:
    """Send a request whose target is not changed by any client. Return the status and all that was answered."""
    body = b'{"prompt": [1, 2, 3]}' if method == "POST" else b""
    head = f"{method} {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(head.encode("latin-1") + body)
        answer = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    return int(answer.split(b" ", 2)[1]), answer


DESCRIBING_PATHS = {"/server_info", "/model_info", "/v1/models", "/ready", "/v1/loads"}

OTHER_PATHS = (
    "/v1/models/../../flush_cache",
    "/v1/models/%2e%2e/%2e%2e/flush_cache",
    "/v1/models/..%2f..%2fflush_cache",
    "/v1/models/x/../../../flush_cache",
    "/v1/models/./x",
    "/v1/models/",
    "/v1/models//x",
    "/v1/models/a%0ab",
    "/v1/models/a%00b",
    "/v1/models/a%0d",
)


def test_a_model_cannot_name_another_route_of_an_engine() -> None:
    engine = FakeEngine(name="m")

    async def scenario(running: Proxied) -> list[int]:
        url = running.client.base_url
        return [(await raw_request(url, "GET", target))[0] for target in OTHER_PATHS]

    assert run_proxied(scenario, engine) == [404] * len(OTHER_PATHS)
    assert set(engine.asked) <= DESCRIBING_PATHS


NAMES = {"org/name.v1..2": "org/name.v1..2", "a%20b": "a b", "%252e%252e": "%2e%2e", "m?x=/flush_cache": "m"}


def test_a_model_is_found_by_its_name() -> None:
    models = says({"data": [{"id": name} for name in NAMES.values()]})

    async def scenario(running: Proxied) -> None:
        for target, name in NAMES.items():
            status, answer = await raw_request(running.client.base_url, "GET", f"/v1/models/{target}")
            assert (status, json.loads(answer.partition(b"\r\n\r\n")[2])) == (200, {"id": name})

    run_proxied(scenario, FakeEngine(pages={"/v1/models": models}))


def test_neither_a_host_header_nor_a_line_break_chooses_the_route_of_an_engine() -> None:
    engine = FakeEngine()
    hosts = ("127.0.0.1", "127.0.0.1/flush_cache?", "127.0.0.1/flush_cache#", "[::1]/flush_cache")

    async def scenario(running: Proxied) -> None:
        for host in hosts:
            for target in ("/generate", "/generate%0a", "/close_session%0a"):
                status, _ = await raw_request(running.client.base_url, "POST", target, host)
                assert status in ({404, 403} if "%" in target else {200, 403}), (host, target)

    run_proxied(scenario, engine)
    assert set(engine.asked) <= {*DESCRIBING_PATHS, "/generate"}


def test_a_proxy_with_a_key_wants_it_for_all_but_probes() -> None:
    async def scenario(running: Proxied) -> None:
        for path in ("/health", "/ready", "/metrics"):
            assert (await running.client.get(path)).status_code == 200
        for path in ("/status", "/v1/models"):
            assert (await running.client.get(path)).status_code == 401
        assert (await running.client.post("/generate", json=PROMPT)).status_code == 401
        headers = {"authorization": "Bearer key"}
        assert (await running.client.post("/generate", json=PROMPT, headers=headers)).status_code == 200

    run_proxied(scenario, FakeEngine(), access=AccessPolicy(api_key="key"))


def test_a_page_of_another_origin_is_refused() -> None:
    engine = FakeEngine()

    assert ask(engine, headers={"origin": "http://evil.example"}).status_code == 403
    assert engine.received == []


def test_the_status_names_engines_their_problems_and_their_requests() -> None:
    engine = FakeEngine(adapters=("poet",))

    async def scenario(running: Proxied) -> Any:
        await running.client.post("/generate", json=PROMPT)
        await running.client.post("/generate", json=PROMPT)
        return (await running.client.get("/status")).json()

    status = run_proxied(scenario, engine)
    assert (status["requests"], status["open"], status["retried"], status["is_draining"]) == (2, 0, 0, False)
    [found] = status["engines"]
    assert (found["engine"], found["state"], found["problem"], found["adapters"]) == (0, "up", None, ["poet"])
    [replica] = found["replicas"]
    counts = {name: replica[name] for name in ("picks", "prompt_blocks", "cached_blocks", "failures", "load_blocks")}
    assert counts == {"picks": 2, "prompt_blocks": 2, "cached_blocks": 1, "failures": 0, "load_blocks": 0}


def test_a_proxy_is_ready_while_one_engine_is() -> None:
    engines = FakeEngine(is_ready=False), FakeEngine()

    async def scenario(running: Proxied) -> list[int]:
        found = [(await running.client.get("/ready")).status_code]
        engines[1].is_ready = False
        await until(lambda: not running.fleet.num_ready)
        found.append((await running.client.get("/ready")).status_code)
        found.append((await running.client.get("/health")).status_code)
        found.append((await running.client.get("/v1/models")).status_code)
        return found

    assert run_proxied(scenario, *engines) == [200, 503, 200, 200]
