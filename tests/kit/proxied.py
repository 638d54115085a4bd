"""A proxy in front of fake engines, all in this process and event loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from kit.fake_engine import FakeEngine, served_engine
from kit.waiting import DEADLINE_S
from observability.routing import KvRouter, PickerName, make_picker
from scheduler_engine.frontend.access import AccessPolicy
from scheduler_engine.frontend.http_body import BodyReceiver
from scheduler_engine.frontend.http_server import STALL_TIMEOUT_S, bind_http, open_http_server
from scheduler_engine.proxy.config import ProxyConfig
from scheduler_engine.proxy.http_app import make_proxy_app
from scheduler_engine.proxy.http_fleet import Fleet, open_fleet
from scheduler_engine.proxy.http_proxy import ProxyEndpoint
from scheduler_engine.proxy.prometheus_proxy import ProxyCollector

__all__ = ["PROMPT", "Proxied", "ask", "following", "proxied", "run_proxied", "until"]

PROMPT = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 4}
_QUICK = {"poll_interval_s": 0.02, "retry_min_s": 0.02, "retry_max_s": 0.05}


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until ``condition`` holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass(slots=True, kw_only=True)
class Proxied:
    """A running proxy.

    Attributes:
        fleet, endpoint: its parts.
        client: sends requests to it.
    """

    fleet: Fleet
    endpoint: ProxyEndpoint
    client: httpx.AsyncClient


@asynccontextmanager
async def following(*urls: str, picker: PickerName = "least-cost", **settings: object) -> AsyncIterator[Fleet]:
    """Follow engines at these URLs, with short intervals."""

    def make_router(page_size: int) -> KvRouter:
        return KvRouter(page_size=page_size, picker=make_picker(picker, random.Random(0)))

    config = ProxyConfig(urls=urls, **{**_QUICK, **settings})  # type: ignore[arg-type]  # as a test gives them
    async with open_fleet(config, make_router=make_router) as fleet:
        yield fleet


@asynccontextmanager
async def proxied(
    *engines: FakeEngine,
    access: AccessPolicy | None = None,
    picker: PickerName = "least-cost",
    bodies: BodyReceiver | None = None,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    **settings: object,
) -> AsyncIterator[Proxied]:
    """Serve a proxy in front of engines, and wait until it has found those that are ready."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served_engine(engine)) for engine in engines]
        fleet = await stack.enter_async_context(following(*urls, picker=picker, **settings))
        endpoint, registry = ProxyEndpoint(fleet=fleet, bodies=bodies or BodyReceiver()), CollectorRegistry()
        ProxyCollector(registry, endpoint)
        listener = stack.enter_context(bind_http("127.0.0.1", 0))
        app = make_proxy_app(endpoint, registry, access=access)
        server = await stack.enter_async_context(open_http_server(app, listener, stall_timeout_s=stall_timeout_s))
        opened = httpx.AsyncClient(
            base_url=server.url, timeout=DEADLINE_S, verify=False
        )  # reading certificates takes 20 ms
        client = await stack.enter_async_context(opened)
        await until(lambda: fleet.num_ready == sum(engine.is_ready for engine in engines))
        yield Proxied(fleet=fleet, endpoint=endpoint, client=client)


def run_proxied(scenario: Callable[[Proxied], Awaitable[Any]], *engines: FakeEngine, **settings: Any) -> Any:
    """Run a scenario with a proxy in front of engines, and return what it returns."""

    async def with_a_proxy() -> Any:
        async with proxied(*engines, **settings) as running:
            return await scenario(running)

    return asyncio.run(asyncio.wait_for(with_a_proxy(), 60))


def ask(
    *engines: FakeEngine,
    path: str = "/generate",
    body: object = PROMPT,
    headers: Mapping[Any, Any] | None = None,
    **settings: Any,
) -> httpx.Response:
    """Send one request to a proxy in front of engines."""

    async def scenario(running: Proxied) -> httpx.Response:
        return await running.client.post(path, json=body, headers=headers)

    answer = run_proxied(scenario, *engines, **settings)
    assert isinstance(answer, httpx.Response)
    return answer
