"""``/kv_pool``: a pool in pages over a real server, bounded, and read at most once a second however many ask."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.kv_pool_routes import CPU, GPU, fetched, page, run
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from observability import kv_pool_route
from observability.http_kv_pool import MIN_READ_INTERVAL_S
from observability.kv_pool_client import MAX_HASHES_PER_PAGE, KvPoolUnreadableError
from scheduler_components import ComponentError
from scheduler_components.testing import VirtualClock
from scheduler_components.values import KvPoolSnapshot


class Pools:
    """A source of readings that counts how often it is asked."""

    def __init__(self, *readings: KvPoolSnapshot) -> None:
        self.readings = readings
        self.num_reads = 0
        self.problem: ComponentError | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.readings)

    async def read_pool(self, rank: int) -> KvPoolSnapshot:
        self.num_reads += 1
        await asyncio.sleep(0)  # others ask meanwhile
        if self.problem is not None:
            raise self.problem
        return self.readings[rank]


def route_of(pools: Pools, **options: Any) -> Route:
    return kv_pool_route(pools.read_pool, num_ranks=pools.num_ranks, **options)


def as_sets(reading: KvPoolSnapshot) -> dict[object, set[int]]:
    return {place: set(hashes) for place, hashes in reading.blocks.items()}


def test_a_pool_of_many_pages_arrives_as_it_was_read() -> None:
    large = KvPoolSnapshot({GPU: range(-5, 2 * MAX_HASHES_PER_PAGE), CPU: (), ("STORAGE", None): range(7)}, 41, 1)
    pools = Pools(KvPoolSnapshot({}, -1, 0), large)
    got = fetched(route_of(pools), rank=1)
    assert as_sets(got) == as_sets(large)
    assert list(got.blocks) == list(large.blocks)
    assert (got.sequence, got.rank, pools.num_reads) == (41, 1, 1)


def test_an_empty_pool_is_one_page_that_names_its_places() -> None:
    got = fetched(route_of(Pools(KvPoolSnapshot({GPU: (), CPU: ()}, None))))
    assert (dict(got.blocks), got.sequence) == ({GPU: [], CPU: []}, None)


def test_whoever_asks_within_a_second_gets_the_same_reading() -> None:
    clock, pools = VirtualClock(1_700_000_000.0), Pools(KvPoolSnapshot({GPU: range(3)}, 5))

    async def ask(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url) as client:
            answers = await asyncio.gather(*(client.get("/kv_pool") for _ in range(5)))
            clock.now_s += MIN_READ_INTERVAL_S
            answers.append(await client.get("/kv_pool"))
        return [answer.json()["reading"] for answer in answers]

    assert run(ask, route_of(pools, clock=clock)) == ["0-0"] * 5 + ["0-1"]
    assert pools.num_reads == 2


def test_only_the_last_readings_are_kept_and_others_are_said_to_be_gone() -> None:
    clock, pools = VirtualClock(1_700_000_000.0), Pools(KvPoolSnapshot({GPU: range(MAX_HASHES_PER_PAGE + 1)}, 5))

    async def ask(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url) as client:
            for _ in range(5):
                await client.get("/kv_pool")
                clock.now_s += MIN_READ_INTERVAL_S
            further = [{"reading": f"0-{number}", "page": 1} for number in range(5)]
            return [(await client.get("/kv_pool", params=each)).status_code for each in further]

    assert run(ask, route_of(pools, clock=clock)) == [410, 200, 200, 200, 200]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("rank=2", "rank"), ("rank=-1", "rank"), ("rank=x", "rank"), ("rank=" + "9" * 5_000, "rank"),
        ("page=1", "page"), ("reading=0-0&page=1", "page"), ("reading=0-0&page=", "page"), ("rank=²", "rank"),
    ],
)  # fmt: skip
def test_a_clients_mistake_is_one_sentence_with_the_field(query: str, field: str) -> None:
    async def ask(url: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=url) as client:
            await client.get("/kv_pool")
            return await client.get(f"/kv_pool?{query}")

    answer = run(ask, route_of(Pools(KvPoolSnapshot({GPU: (1,)}, 0), KvPoolSnapshot({}, 0))))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert "give a number from 0 to" in error["message"]
    assert len(error["message"]) < 120


def test_a_scheduler_that_does_not_answer_is_said_and_asked_again() -> None:
    pools = Pools(KvPoolSnapshot({GPU: (1,)}, 0))
    pools.problem = ComponentError("rank 0 did not read its pool (30.0 s)")
    with pytest.raises(KvPoolUnreadableError, match="answers 503"):
        fetched(route_of(pools))
    pools.problem = None
    assert as_sets(fetched(route_of(pools))) == {GPU: {1}}


def test_a_reading_that_goes_away_between_two_pages_is_begun_again() -> None:
    gone = {"reading": "gone", "num_pages": 2, "places": [{"medium": "GPU", "num_blocks": 1}]}
    pools, asked = Pools(KvPoolSnapshot({GPU: (9,)}, 8)), []
    whole = route_of(pools)

    async def answer(request: Request) -> Any:
        asked.append(dict(request.query_params))
        if len(asked) == 1:
            return JSONResponse(page(**gone))
        return await whole.endpoint(request)

    assert as_sets(fetched(Route("/kv_pool", answer))) == {GPU: {9}}
    assert asked == [{"rank": "0"}, {"rank": "0", "reading": "gone", "page": "1"}, {"rank": "0"}]


@given(text=st.dictionaries(st.sampled_from(["rank", "reading", "page"]), st.text(max_size=30)))
def test_no_query_makes_it_fail(text: dict[str, str]) -> None:
    async def ask() -> int:
        app = Starlette(routes=[route_of(Pools(KvPoolSnapshot({GPU: (1,)}, 0)))])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
            return (await client.get("/kv_pool", params=text)).status_code

    assert asyncio.run(ask()) in (200, 400, 410)
