"""``route`` in front of two real engines: processes, sockets, HTTP and event streams, seen from outside."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from kit.command_processes import ONE_RANK, finish, started, wait_for_url
from kit.imported_later import ImportedLater

openai = ImportedLater("openai", reason="needs openai: pip install scheduler-components[dev]")

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

ENGINE = ["serve", *ONE_RANK, "--port", "0", "--page-size", "16", "--speed", "8"]
KEY = "a-key"


@dataclass(slots=True)
class Routed:
    """Two engines and the proxy in front of them."""

    engines: list[subprocess.Popen[str]]
    engine_urls: list[str]
    proxy: subprocess.Popen[str]
    url: str
    client: httpx.Client

    def status(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.get("/status").json()["engines"]
        return found

    def states(self) -> list[str]:
        return [engine["state"] for engine in self.status()]


@pytest.fixture(scope="module")
def routed() -> Iterator[Routed]:
    """One pair of engines for all tests of this file; the last test kills one of them."""
    with ExitStack() as stack:
        engines = [stack.enter_context(started(*ENGINE, "--api-key", KEY)) for _ in range(2)]
        urls = [wait_for_url(engine) for engine in engines]
        keys = ["--api-key", "of-clients", "--replica-api-key", KEY]
        options = ["--port", "0", "--poll-interval", "0.1", "--picker", "sticky"]  # the same without a conversation
        proxy = stack.enter_context(started("route", *urls, *options, *keys))
        url, headers = wait_for_url(proxy), {"authorization": "Bearer of-clients"}
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60))
        yield Routed(engines, urls, proxy, url, client)


@pytest.fixture
def ready(routed: Routed, eventually: Callable[[Callable[[], object]], None]) -> Routed:
    eventually(lambda: routed.client.get("/ready").status_code == 200 and "down" not in routed.states())
    return routed


def words(topic: str, count: int) -> str:
    return " ".join(f"{topic}-{number}" for number in range(count))


def test_a_prompt_goes_where_its_prefix_is_and_finds_it_in_the_cache(
    ready: Routed, eventually: Callable[[Callable[[], object]], None]
) -> None:
    """The cached tokens are those that the engine itself reports. Each topic has a system prompt of 320 tokens.

    A report that was made while the last request ran would outweigh them.
    """
    placed: dict[str, set[str]] = {}
    for turn in range(3):
        for topic in ("law", "art", "sea", "tea"):
            messages = [
                {"role": "system", "content": words(topic, 320)},
                {"role": "user", "content": words(f"{topic}-{turn}", 8)},
            ]
            eventually(lambda: not any(each["load_blocks"] for engine in ready.status() for each in engine["replicas"]))
            answer = ready.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
            assert answer.status_code == 200, answer.text
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached >= 320) == (turn > 0), (topic, turn, cached)
            placed.setdefault(topic, set()).add(answer.headers["x-replica"])
    assert [len(replicas) for replicas in placed.values()] == [1, 1, 1, 1]
    assert len(set.union(*placed.values())) == 2, "both engines serve"
    counted = [replica for engine in ready.status() for replica in engine["replicas"]]
    assert sum(replica["picks"] for replica in counted) == 12
    assert [replica["stream"] for replica in counted] == ["live", "live"]


@pytest.mark.parametrize("weight_version", [None, "v2"])
def test_the_blocks_that_engines_publish_are_those_of_the_tokens_that_they_return(
    ready: Routed, eventually: Callable[[Callable[[], object]], None], weight_version: str | None
) -> None:
    """The third prompt is known from events alone: the client sent the two before to the engine itself.

    After an update of the weights the hashes of the same tokens are others.
    """
    body = {"text": words("direct", 200), "sampling_params": {"max_new_tokens": 1}}
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=ready.engine_urls[1], headers=headers, timeout=60) as engine:
        if weight_version is not None:
            update = {"weight_version": weight_version, "parts": {"layer.0": "bmV3"}}
            assert engine.post("/update_weights", json=update).status_code == 200
        replica = ready.status()[1]["replicas"][0]
        before, cached_before = replica["last_seq"], replica["cached_blocks"]
        for _ in range(2):
            assert engine.post("/generate", json=body).status_code == 200

        def is_followed() -> bool:
            [published] = re.findall(r"kv_events_last_sequence\{.*\} (\d+)", engine.get("/metrics").text)
            return before < int(published) <= ready.status()[1]["replicas"][0]["last_seq"]

        eventually(is_followed)
    answer = ready.client.post("/generate", json=body)
    assert answer.headers["x-replica"] == "1"
    assert answer.json()["meta_info"]["cached_tokens"] >= 192
    assert ready.status()[1]["replicas"][0]["cached_blocks"] - cached_before >= 12
    assert ready.client.get("/status").json()["unknown_prompts"] == 0


def test_a_conversation_stays_on_its_engine_with_the_sticky_picker(ready: Routed) -> None:
    """Its prompts share nothing, so the lowest cost would be that of each engine in turn."""
    bodies = [{"text": words(f"talk-{turn}", 20), "sampling_params": {"max_new_tokens": 1}} for turn in range(6)]
    of_one = {ready.client.post("/generate", json=body | {"conversation": "c"}).headers["x-replica"] for body in bodies}
    assert len(of_one) == 1


def test_a_client_of_openai_gets_its_stream_chunk_by_chunk(ready: Routed) -> None:
    client = openai.OpenAI(base_url=f"{ready.url}/v1", api_key="of-clients", max_retries=0)
    with client.chat.completions.create(
        model="simulated-8b", messages=[{"role": "user", "content": "hello"}], stream=True, max_tokens=6
    ) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert len(chunks) == 6
    assert (chunks[0].finish_reason, chunks[-1].finish_reason) == (None, "length")
    assert [model.id for model in client.models.list()] == ["simulated-8b"]


def test_metrics_need_no_key_and_everything_else_does(ready: Routed) -> None:
    url = ready.url
    page = httpx.get(f"{url}/metrics").text
    assert 'kv_proxy_replica_is_up{engine="1",rank="0"} 1.0' in page
    assert httpx.get(f"{url}/status").status_code == 401
    assert httpx.post(f"{url}/generate", json={"text": "a"}).status_code == 401


def test_an_engine_that_is_killed_gets_nothing_more_and_its_requests_go_on(
    ready: Routed, eventually: Callable[[Callable[[], object]], None]
) -> None:
    """The prompt is cached on the engine that is killed, which would get it again."""
    body = {"text": words("killed", 160), "sampling_params": {"max_new_tokens": 1}}
    dead = int(ready.client.post("/generate", json=body).headers["x-replica"])
    ready.engines[dead].kill()
    for _ in range(5):
        answer = ready.client.post("/generate", json=body)
        assert (answer.status_code, answer.headers["x-replica"]) == (200, str(1 - dead))
    eventually(lambda: ready.states()[dead] == "down")
    assert "does not answer" in ready.status()[dead]["problem"]
    before = ready.status()[dead]["replicas"]
    for number in range(20):
        ready.client.post("/generate", json={"text": words(f"other-{number}", 40)})
    assert ready.status()[dead]["replicas"] == before


def test_sigterm_lets_an_open_stream_end(routed: Routed) -> None:
    """Runs last, when one engine is left."""
    body = {"text": "a b c", "sampling_params": {"max_new_tokens": 200}, "stream": True}
    with routed.client.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        routed.proxy.send_signal(signal.SIGTERM)
        *_, last, done = [line for line in lines if line]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "length"
    code, _, err = finish(routed.proxy)
    assert (code, err.splitlines()[-1:]) == (143, ["scheduler-components: terminated; all processes are stopped"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["ftp://127.0.0.1:1"], "is not the URL of a worker"),
        (["http://127.0.0.1:1", "http://127.0.0.1:1/"], "is given twice"),
        (["http://127.0.0.1:1", "--secret-key-file", "x"], "publisher_key_file"),
        (["http://127.0.0.1:1", "--replica-api-key-file", "/nowhere/key"], "replica_api_key_file"),
        (["http://127.0.0.1:1", "--picker", "best"], "least-cost"),
        (["http://127.0.0.1:1", "--host", "203.0.113.1", "--port", "0"], "203.0.113.1"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_starts(
    arguments: list[str], complaint: str, command_line: Callable[..., Any]
) -> None:
    ran = command_line("route", *arguments)
    assert ran.code in (1, 2)
    assert complaint in ran.complaint
