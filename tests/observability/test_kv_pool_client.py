"""The client of /kv_pool reads pools of any engine, and an unusable answer is one sentence."""

from __future__ import annotations

import pytest
from kit.kv_pool_routes import GPU, fetched, page
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from observability import fetch_kv_pool
from observability.kv_pool_client import MAX_HASHES_PER_PAGE, KvPoolUnreadableError
from scheduler_components import ConfigError


def test_a_missing_route_and_an_unreachable_engine_raise_an_error_with_a_hint() -> None:
    with pytest.raises(KvPoolUnreadableError, match=r"/kv_pool.*answers 404; start the engine with --kv-pool"):
        fetched()
    with pytest.raises(KvPoolUnreadableError, match="check that the worker runs"):
        fetch_kv_pool("http://127.0.0.1:1/kv_pool", timeout_s=1.0)
    with pytest.raises(ConfigError, match="give http://host:port"):
        fetch_kv_pool("tcp://127.0.0.1:1")


def answering(*answers: object) -> Route:
    """Give these one after the other, the last one for ever."""
    left = list(answers)

    async def answer(_: Request) -> JSONResponse:
        return JSONResponse(left.pop(0) if len(left) > 1 else left[0])

    return Route("/kv_pool", answer)


def test_hashes_of_other_engines_are_folded_to_signed_64_bits() -> None:
    got = fetched(answering(page(hashes=[2**64 - 1], places=[{"medium": None, "num_blocks": 1}])))
    assert dict(got.blocks) == {GPU: [-1]}


@pytest.mark.parametrize(
    "wrong",
    [
        [], {}, "pool", page(hashes=["1"]), page(hashes=[1, 2]), page(num_pages=0), page(num_pages=10**9),
        page(places=[{"medium": "GPU", "num_blocks": -1}]), page(sequence=-2),
        page(hashes=[0] * (MAX_HASHES_PER_PAGE + 1)),
        page(num_pages=2), page(places=None),
        page(num_pages=2, places=[{"medium": "GPU", "num_blocks": 2}]),
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_reading_is_refused_in_one_sentence(wrong: object) -> None:
    with pytest.raises(KvPoolUnreadableError) as failed:
        fetched(answering(wrong))
    assert "/kv_pool" in str(failed.value)
    assert "\n" not in str(failed.value)
