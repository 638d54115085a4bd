"""The events of a stream are read up to ``[DONE]``, and a stream without it is an error."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from scheduler_engine.cli.server_sent_events import event_data


async def read(body: str) -> list[str]:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=body))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        return [data async for data in event_data(await client.get("/"))]


def test_the_data_of_each_event_before_the_end_is_read() -> None:
    assert asyncio.run(read('data: {"a": 1}\n\ndata: 2\n\ndata: [DONE]\n\ndata: 3\n\n')) == ['{"a": 1}', "2"]


def test_a_stream_without_its_end_is_an_error() -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="ended without"):
        asyncio.run(read("data: 1\n\n"))
