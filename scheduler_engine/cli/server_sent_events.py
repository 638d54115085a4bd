"""Read the event streams of the engine's HTTP routes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx


async def event_data(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the data of each event before ``[DONE]``.

    Raises:
        httpx.RemoteProtocolError: the stream ended without ``[DONE]``.
    """
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            yield data
    raise httpx.RemoteProtocolError("the stream ended without [DONE]")
