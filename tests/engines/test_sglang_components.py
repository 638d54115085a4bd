"""Inside a real SGLang: a server with this kit's components in its scheduler, compared with an unchanged server.

The probe records the events of each server's cache and the messages of its scheduler. In the scheduler with this kit's
components, it also calls SGLang's own load inquirer in every step.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import pytest

pytest.importorskip("sglang", reason="`make engines` makes an environment with sglang")

from msgspec.structs import asdict
from prometheus_client.parser import text_string_to_metric_families

from observability import discover, open_subscriber
from observability.kv_stream import StreamState
from scheduler_components.cache import hash_pages
from scheduler_components.load import open_zmq_load_reader

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

OWN = {"SGLANG_PLUGINS": "probe"}
COMPOSED = {"SGLANG_PLUGINS": "scheduler_components,probe", "SCHEDULER_COMPONENTS_KV_EVENTS": '{"components": true}'}
SMALL = ("--max-running-requests", "4", "--chunked-prefill-size", "64")
PAGE = 16
DEADLINE_S = 120.0
OURS = ["sglang_components", "sglang_load", "sglang_components"]


def texts(count: int, seed: int, most: int = 96) -> list[list[int]]:
    rng = random.Random(seed)
    made: list[list[int]] = []
    for at in range(count):
        head = rng.choice(made)[: PAGE * 2] if at % 3 == 2 else []
        made.append([*head, *(rng.randrange(10, 1_000) for _ in range(rng.randrange(32, most)))])
    return made


def serve(server) -> list:
    """Serve prompts one after the other, so that two servers take the same steps.

    The workload has chunked prompts, salted prompts, a flush and evictions.
    """
    answers = [server.generate([text])[0] for text in texts(20, seed=1, most=300)]
    answers += [server.generate([text], cache_salt="tenant", session_id="chat")[0] for text in texts(6, seed=1)]
    server.post("/flush_cache")
    return answers + [server.generate([text], max_new_tokens=50)[0] for text in texts(25, seed=2)]


@dataclass
class Served:
    server: object
    answers: list
    inside: dict
    """The answer of the probe in the first rank."""


@pytest.fixture(scope="module")
def both(sglang_servers: Callable) -> Iterator[tuple[Served, Served]]:
    """Serve the same requests with SGLang's own components and with this kit's."""
    servers = [sglang_servers(*SMALL, **env) for env in (OWN, COMPOSED)]
    served = [(server, serve(server)) for server in servers]
    yield tuple(Served(server, answers, server.ask([])[0, 0]) for server, answers in served)


def test_the_plugin_replaces_sglangs_components(both: tuple[Served, Served]) -> None:
    own, composed = both
    assert [part.rpartition(".")[2] for part in composed.inside["parts"]] == OURS
    assert not any(part.startswith("scheduler_components") for part in own.inside["parts"])


def test_both_servers_return_the_same_tokens(both: tuple[Served, Served]) -> None:
    own, composed = both
    assert own.answers == composed.answers


def test_both_caches_record_the_same_events(both: tuple[Served, Served]) -> None:
    own, composed = both
    assert len(own.inside["events"]) > 100
    assert own.inside["events"] == composed.inside["events"]


def test_both_servers_send_the_same_kv_metrics(both: tuple[Served, Served]) -> None:
    own, composed = both
    assert len(own.inside["kv_metrics"]) > 40
    assert own.inside["kv_metrics"] == composed.inside["kv_metrics"]


MEASURED = {"timestamp", "gen_throughput", "total_prefill_busy_us", "decode_moments", "memory"}
"""Fields that differ between runs: times, and the memory that the machine has left."""


def test_both_load_routes_return_the_same_load(both: tuple[Served, Served]) -> None:
    loads = [json.loads(one.server.get("/v1/loads"))["loads"][0] for one in both]
    assert loads[0].keys() == loads[1].keys() > MEASURED
    assert [loads[0][name] for name in loads[0].keys() - MEASURED] == [
        loads[1][name] for name in loads[0].keys() - MEASURED
    ]


def test_both_load_streams_publish_the_same_load(both: tuple[Served, Served]) -> None:
    stats = []
    for one in both:
        with closing(open_zmq_load_reader([f"tcp://127.0.0.1:{one.server.events_port + 5}"])) as reader:
            deadline_s = time.monotonic() + DEADLINE_S
            while not reader.read(1.0).samples:
                assert time.monotonic() < deadline_s
            [sample] = reader.view.samples.values()
            assert reader.bad == 0
            stats.append(asdict(sample.stat))
    fields = list(stats[0])[:10]  # SGLang's fields come first, then this kit's
    for name in (*fields[:9], "total_prefill_uncached_tokens"):
        assert stats[0][name] == stats[1][name], name


def test_both_servers_describe_their_streams_alike(both: tuple[Served, Served]) -> None:
    described = []
    for one in both:
        events = json.loads(one.server.get("/server_info"))["kv_events"]
        ports = [key for key in events if "port" in key]
        described.append(events | {key: events[key] - one.server.events_port for key in ports})
    assert described[0] == described[1]
    assert "load_endpoint_port_base" in described[0]


def test_both_servers_export_the_same_metrics_except_times(both: tuple[Served, Served]) -> None:
    pages = []
    for one in both:
        samples = {}
        for family in text_string_to_metric_families(one.server.get("/metrics").decode()):
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name != "pid"}
                samples[sample.name, tuple(sorted(labels.items()))] = sample.value
        pages.append(samples)
    # The number of HTTP requests depends on this test.
    left_out = ("seconds", "latency", "throughput", "time", "memory", "_created", "http_", "fwd_occupancy")
    own, composed = (
        {key: value for key, value in page.items() if not any(word in key[0] for word in left_out)} for page in pages
    )
    assert len(own) > 50
    assert own == composed


def test_every_load_report_equals_sglangs_own(both: tuple[Served, Served], record_property: Callable) -> None:
    """1,100 requests wait at the same time. Some are aborted."""
    server = both[1].server
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(server.generate, texts(1_100, seed=3), max_new_tokens=2)
        long.result()
        aborted = pool.submit(server.generate, texts(200, seed=4), max_new_tokens=50)
        while json.loads(server.get("/v1/loads"))["loads"][0]["num_waiting_reqs"] < 100:
            assert not aborted.done()
        server.post("/abort_request", abort_all=True)
        aborted.result()
    inside = server.ask([])[0, 0]
    assert inside["different"] == []
    assert inside["reports"] > 500
    assert inside["most_waiting"] > 1_000
    record_property("costs_us", json.dumps(inside["costs_us"]))  # for --junit-xml; no test asserts a time


def check_events_are_published_while_another_request_decodes(server) -> None:
    """A request's blocks are published in its last step. SGLang itself publishes at its next log line."""
    short, long = texts(2, seed=7)
    with open_subscriber(discover(server.url)) as subscriber, ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(server.generate, [long], max_new_tokens=200)
        answer = server.generate([short], max_new_tokens=24)[0]
        expected = set(hash_pages([*short, *answer][:-1], PAGE))
        deadline_s = time.monotonic() + DEADLINE_S
        while not expected <= subscriber.blocks(0):
            subscriber.poll(0.01)
            assert time.monotonic() < deadline_s
        assert not decoding.done()
        decoding.result()


def test_tp_ranks_report_equal_loads_and_publish_one_stream(sglang_servers: Callable) -> None:
    """The server has TP 2, a policy that matches waiting requests, and retractions."""
    server = sglang_servers(
        *("--tp-size", "2", "--schedule-policy", "lpm", "--decode-log-interval", "1000000", *SMALL),
        **COMPOSED,
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
        SGLANG_TEST_RETRACT="1",
    )
    answered = [[*text, *server.generate([text])[0]] for text in texts(25, seed=5)]
    check_events_are_published_while_another_request_decodes(server)
    server.generate(texts(80, seed=6), max_new_tokens=8)
    inside = server.ask(answered)
    assert [rank["different"] for rank in inside.values()] == [[], []]
    assert all(rank["reports"] > 50 and rank["most_waiting"] > 50 for rank in inside.values())
    assert (bool(inside[0, 0]["kv_metrics"]), bool(inside[0, 1]["kv_metrics"])) == (True, False)
    addresses = discover(server.url)
    assert len(addresses) == 1
    with open_subscriber(addresses) as subscriber:
        deadline_s = time.monotonic() + DEADLINE_S
        while subscriber.stats()[0].state is not StreamState.LIVE:
            subscriber.poll(0.05)
            assert time.monotonic() < deadline_s, subscriber.stats()
        blocks = subscriber.blocks(0)
        assert len(blocks) * PAGE == inside[0, 0]["total"]
        found = zip(answered, inside[0, 0]["prompts"], strict=True)
        assert {block for text, tokens in found for block in hash_pages(text[:tokens], PAGE)} <= blocks
