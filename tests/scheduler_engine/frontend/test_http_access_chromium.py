"""A page of another origin, in a real browser, reaches no handler; the server's own pages and the address bar do."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from scheduler_engine.frontend.access import AccessPolicy, RouteAccess
from scheduler_engine.frontend.http_access import AccessGuard, ApiRoute
from scheduler_engine.frontend.http_server import bind_http, open_http_server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.sockets,
    pytest.mark.processes,
    pytest.mark.soak_only,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

ATTACKS = {"image", "form", "no-cors", "cors", "preflight", "beacon", "frame", "script"}
NAMES = ("127.0.0.1", "localhost")

ATTACK_PAGE = """<!doctype html><body><script>
const victim = 'PLACE', target = how => victim + '/flush_cache?how=' + how + '&at=' + encodeURIComponent(victim);
const ends = element => new Promise(done => {
  element.onload = element.onerror = done; document.body.append(element);
});
const make = (name, fields) => Object.assign(document.createElement(name), fields);
async function attack() {
  const sent = [
    ends(make('img', {src: target('image')})),
    ends(make('script', {src: target('script')})),
    ends(make('iframe', {src: target('frame')})),
    fetch(target('no-cors'), {method: 'POST', mode: 'no-cors', body: '{}'}),
    fetch(target('cors')),
    fetch(target('preflight'), {method: 'POST', headers: {'content-type': 'application/json'}, body: '{}'}),
  ];
  navigator.sendBeacon(target('beacon'), '{}');
  const frame = make('iframe', {name: 'result'}), loaded = ends(frame);
  const form = make('form', {method: 'POST', enctype: 'text/plain', action: target('form'), target: 'result'});
  document.body.append(form);
  await loaded;
  const answered = new Promise(done => { frame.onload = done; });
  form.submit();
  await Promise.allSettled([...sent, answered]);
  await fetch('/done');
}
attack();
</script>"""

OWN_PAGE = """<!doctype html><body><script>
fetch('/flush_cache?how=own', {method: 'POST', body: '{}'}).then(() => fetch('/done'));
</script>"""


class Victim:
    """A guarded server that records what arrives, and what reaches a handler."""

    def __init__(self) -> None:
        self.arrived: set[str] = set()
        self.reached: set[str] = set()
        self.done = asyncio.Event()
        routes = [
            ApiRoute("/flush_cache", self.flush, methods=["GET", "POST"], access=RouteAccess.ADMIN),
            Route("/own", self.own),
            Route("/done", self.finish),
        ]
        guard = Middleware(AccessGuard, policy=AccessPolicy(), routes=routes)
        self.app = Starlette(routes=routes, middleware=[guard])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        self.arrived.add(request.query_params.get("how", request.url.path))
        await self.app(scope, receive, send)

    async def flush(self, request: Request) -> Response:
        self.reached.add(request.query_params.get("how", ""))
        return PlainTextResponse("Cache flushed.\n")

    async def own(self, request: Request) -> Response:
        self.reached.add(request.query_params.get("how", "page"))
        return HTMLResponse(OWN_PAGE)

    async def finish(self, _: Request) -> Response:
        self.done.set()
        return PlainTextResponse("")


class Attacker:
    """A page on another port that attacks, and says when all its requests have ended."""

    def __init__(self, place: str) -> None:
        self.done = asyncio.Event()
        self.app = Starlette(routes=[Route("/", self.page), Route("/done", self.finish)])
        self._place = place

    async def page(self, _: Request) -> Response:
        return HTMLResponse(ATTACK_PAGE.replace("PLACE", self._place))

    async def finish(self, _: Request) -> Response:
        self.done.set()
        return PlainTextResponse("")


@asynccontextmanager
async def serving(app: object) -> AsyncIterator[str]:
    with bind_http("127.0.0.1", 0) as listener:
        async with open_http_server(app, listener) as server:  # type: ignore[arg-type]  # any ASGI application
            yield server.url


@asynccontextmanager
async def browsing(profile: Path, url: str) -> AsyncIterator[None]:
    """Show a page in a browser of its own; ``rebound.example`` is a name of loopback there."""
    assert CHROMIUM is not None
    switches = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    rules = "--host-resolver-rules=MAP rebound.example 127.0.0.1"
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *switches,
        f"--user-data-dir={profile}",
        rules,
        url,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.parametrize("name", NAMES)
async def test_no_request_of_another_origin_reaches_a_handler(name: str, tmp_path: Path) -> None:
    victim = Victim()
    async with serving(victim) as url:
        attacker = Attacker(f"http://{name}:{urlsplit(url).port}")
        async with serving(attacker.app) as page, browsing(tmp_path, page):
            await asyncio.wait_for(attacker.done.wait(), 60)
            while not victim.arrived >= ATTACKS:  # the beacon has no answer to wait for
                await asyncio.sleep(0.01)
    assert victim.reached == set()


async def test_a_name_that_points_to_loopback_reaches_no_handler(tmp_path: Path) -> None:
    victim = Victim()
    async with serving(victim) as url:
        # A page that only reads: a control request is refused for other reasons, too.
        rebound = f"http://rebound.example:{urlsplit(url).port}/own?how=rebinding"
        async with browsing(tmp_path, rebound):
            while "rebinding" not in victim.arrived:
                await asyncio.sleep(0.01)
    assert victim.reached == set()


async def test_the_server_s_own_page_may_send_control_requests(tmp_path: Path) -> None:
    victim = Victim()
    async with serving(victim) as url, browsing(tmp_path, f"{url}/own"):
        await asyncio.wait_for(victim.done.wait(), 60)
    assert victim.reached == {"page", "own"}
