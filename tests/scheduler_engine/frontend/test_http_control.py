"""Control requests to an engine of processes: after each of them, the subscribers' views equal the ranks' caches."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import attrs
import httpx
import pytest
from kit.asgi import ask
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Route

from observability.kv_stream import open_async_subscriber, parse_addresses, parse_worker_url
from scheduler_components.values import BeginWeightUpdate, FlushCache, PauseMode
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import EngineConfig, SchedulerConfig
from scheduler_engine.engine.engine import Engine, open_engine
from scheduler_engine.engine.free_ports import default_kv_events
from scheduler_engine.engine.http_app import EngineStatus, make_app
from scheduler_engine.engine.messages import pack_tokens, unpack_hashes
from scheduler_engine.frontend.control_queue import ControlQueue
from scheduler_engine.frontend.dispatcher import LoadDispatcher
from scheduler_engine.frontend.errors import EngineFailedError
from scheduler_engine.frontend.frontend import Frontend, GenerateReqInput
from scheduler_engine.frontend.http_body import MAX_CONTROL_BYTES, BodyReceiver
from scheduler_engine.frontend.http_control import control_routes

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

SMALL = EngineConfig(
    dp_size=2, attn_cp_size=1, attn_tp_size=2, scheduler=SchedulerConfig(page_size=4, kv_tokens=1024), speed=20.0
)


def run_engine(config: EngineConfig, scenario: Callable[[Engine], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with open_engine(config, show=lambda _: None) as engine:
            await scenario(engine)

    asyncio.run(asyncio.wait_for(whole(), timeout=60))


async def generate(engine: Engine, rid: str, max_new_tokens: int = 6) -> list[int]:
    limits = SamplingLimits(max_new_tokens=max_new_tokens)
    asked = GenerateReqInput(rid=rid, input_ids=pack_tokens(range(64)), limits=limits)
    async with engine.frontend.open_request(asked) as stream:
        return [token async for delta in stream for token in delta.output.token_ids]


class EngineBench:
    """An engine, a client of its routes, and a reader of its streams."""

    def __init__(self, engine: Engine, app: Starlette, client: httpx.AsyncClient, reader: object) -> None:
        self.engine, self.app, self.client, self.reader = engine, app, client, reader

    @classmethod
    @asynccontextmanager
    async def open(cls, engine: Engine) -> AsyncIterator[EngineBench]:
        app = make_app(engine, CollectorRegistry())
        addresses = parse_addresses(
            dict(EngineStatus(engine=engine).server_info()), parse_worker_url("http://127.0.0.1:1")
        )
        async with (
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
            open_async_subscriber(addresses) as reader,
        ):
            yield cls(engine, app, client, reader)

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.client.post(path, content=json.dumps(body), timeout=40)

    async def done(self, path: str, **body: object) -> str:
        answer = await self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.text

    async def state(self) -> tuple[bool, bool]:
        """Return ``is_paused`` and ``is_sleeping``."""
        info = (await self.client.get("/server_info")).json()
        return info["is_paused"], info["is_sleeping"]

    async def probes(self) -> tuple[int, int, str]:
        """Return the status of ``/health`` and ``/ready``, and why the engine is not ready."""
        alive, ready = await self.client.get("/health"), await self.client.get("/ready")
        return alive.status_code, ready.status_code, ready.json().get("problem", "")

    async def generate_on_all(self, name: str) -> list[list[int]]:
        asked = [generate(self.engine, f"{name}-{number}") for number in range(4)]
        return await asyncio.gather(*asked)

    async def routed_blocks(self) -> list[frozenset[int]]:
        """Each replica's blocks as the reader knows them, which are those that both of its ranks hold."""
        dumps = await self.engine.dump_caches()
        found = []
        for rank in (0, 1):
            leader, follower = dumps[2 * rank], dumps[2 * rank + 1]
            assert (leader.block_hashes, leader.digest) == (follower.block_hashes, follower.digest)
            assert await self.reader.wait_until(rank, leader.last_sequence, 20)
            found.append(self.reader.blocks(rank))
            assert found[-1] == unpack_hashes(leader.block_hashes)
        return found


async def expect_that_a_rank_that_dies_in_an_update_is_named(engine: Engine) -> None:
    """Kill a follower. The engine fails."""
    await engine.control.pause(PauseMode.RETRACT, 0.0)
    await engine.control.send(BeginWeightUpdate("v2"))
    os.kill(engine.ranks[1].process.pid, signal.SIGKILL)
    with pytest.raises(EngineFailedError, match=r"flush cache: rank .*tp1.* was killed by signal 9"):
        while True:  # the engine notices the death a moment later
            await engine.control.send(FlushCache(20.0))


def test_after_each_control_request_subscribers_know_the_caches_and_a_dead_rank_is_named() -> None:
    none = [frozenset()] * 2

    async def scenario(engine: Engine) -> None:
        async with EngineBench.open(engine) as bench:
            old = await bench.generate_on_all("r")
            plain = await bench.routed_blocks()
            assert all(plain)

            # Pause and abort: running requests end, later requests wait.
            running = [asyncio.ensure_future(generate(engine, f"long-{number}", 900)) for number in range(2)]
            while engine.frontend.is_idle or not all(
                stats.load.num_running_reqs for stats in engine.stats.read().values()
            ):
                await asyncio.sleep(0.01)
            assert json.loads(await bench.done("/pause_generation", mode="abort"))["num_requests"] == 2
            assert all(len(tokens) < 900 for tokens in await asyncio.gather(*running))
            assert all(await bench.routed_blocks())
            waiting = asyncio.ensure_future(bench.generate_on_all("r"))
            assert (await bench.client.get("/flush_cache?timeout=20")).text == "Cache flushed.\n"
            assert await bench.routed_blocks() == none
            assert not waiting.done()
            assert (await bench.state()) == (True, False)
            assert await bench.probes() == (200, 503, "generation is paused")

            # Other weights while requests wait: they are computed by these, and no old block is found again.
            parts = {"layer.0": base64.b64encode(b"new").decode(), "layer.1": base64.b64encode(b"newer").decode()}
            refused = await bench.post("/update_weights", weight_version="v2", parts=parts, checksum=f"{1:016x}")
            assert refused.status_code == 400 and "check weights: replica 0: the weights have checksum" in refused.text
            assert (await bench.client.get("/server_info")).json()["weight_version"] == "default"
            info = json.loads(await bench.done("/update_weights", weight_version="v2", parts=parts))
            for path in ("/server_info", "/model_info"):
                assert (await bench.client.get(path)).json()["weight_version"] == "v2"
            await bench.done("/update_weights", weight_version="v2", parts=parts, checksum=info["checksum"])
            assert await bench.routed_blocks() == none
            assert not waiting.done()
            await bench.done("/continue_generation")
            assert all(new != tokens for new, tokens in zip(await waiting, old, strict=True))
            renamed = await bench.routed_blocks()
            assert all(renamed) and not any(new & was for new, was in zip(renamed, plain, strict=True))

            # Release and resume: the cache is gone, requests wait, and all is as before.
            await engine.wait_until_idle()
            await bench.done("/release_memory_occupation")
            assert (await bench.post("/release_memory_occupation")).status_code == 400
            assert await bench.routed_blocks() == none
            assert (await bench.state()) == (False, True)
            assert await bench.probes() == (200, 503, "the engine is asleep (weights_offloaded)")
            assert (await bench.client.get("/server_info")).json()["engine_sleep_state"] == "weights_offloaded"
            sleeping = asyncio.ensure_future(bench.generate_on_all("r"))
            await bench.done("/resume_memory_occupation", tags=["weights"])
            assert not sleeping.done()
            assert await bench.probes() == (200, 503, "the engine is asleep (memory_released)")
            await bench.done("/resume_memory_occupation", tags=["kv_cache"])
            assert await sleeping == await waiting
            assert (await bench.state()) == (False, False)
            assert await bench.probes() == (200, 200, "")
            assert await bench.routed_blocks() == renamed

            for path, body, problem in (
                ("/pause_generation", {"mode": "gently"}, "Invalid enum value 'gently'"),
                ("/pause_generation", {"timeout": -1}, "timeout"),
                ("/release_memory_occupation", {"tags": ["cuda_graph"]}, "cuda_graph"),
                ("/resume_memory_occupation", {"tags": ["weights"]}, "weights: not released"),
                ("/update_weights", {"weight_version": "v3", "parts": {"x": ""}}, "rank 0 could not load weights"),
                ("/update_weights", {"weight_version": "v3", "parts": {}}, "parts"),
            ):
                answer = await bench.post(path, **body)
                assert answer.status_code == 400 and problem in answer.text, answer.text
            assert (await bench.client.get("/flush_cache?timeout=soon")).status_code == 400
            described = (await bench.client.get("/openapi.json")).json()["paths"]
            router = bench.app.router.routes
            assert {each.path_format for each in router if isinstance(each, Route)} == set(described)
        await expect_that_a_rank_that_dies_in_an_update_is_named(engine)

    run_engine(attrs.evolve(SMALL, kv_events=default_kv_events(SMALL)), scenario)


# --- bodies, without an engine ---


def post_body(path: str, body: bytes | AsyncIterator[bytes], timeout_s: float = 30.0) -> httpx.Response:
    control = ControlQueue(frontend=Frontend(leaders=[], dispatcher=LoadDispatcher(replicas=[])))
    return ask(Starlette(routes=control_routes(control, None, BodyReceiver(timeout_s=timeout_s))), path, content=body)


def test_only_a_weight_update_may_have_a_large_body() -> None:
    large = b" " * (MAX_CONTROL_BYTES + 1)
    for path in ("/pause_generation", "/release_memory_occupation", "/update_weights_from_disk"):
        answer = post_body(path, large)
        assert (answer.status_code, "65536 bytes" in answer.json()["error"]["message"]) == (413, True)
    assert post_body("/update_weights", large).status_code == 400


def test_the_body_of_a_control_request_has_a_deadline() -> None:
    """Found with connections that sent half of 64 MiB and stayed."""

    async def half() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    answer = post_body("/update_weights", half(), timeout_s=0.05)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        408,
        "body: is incomplete after 0.05 s (1 bytes)",
    )


def test_a_simulated_model_has_no_files() -> None:
    answer = post_body("/update_weights_from_disk", b'{"model_path": "/etc/passwd"}')
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "model_path"
