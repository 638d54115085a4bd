"""Drive Dynamo's selector if ``ai-dynamo-runtime`` is installed (written for 1.6.1).

``SelectionService`` is the core of its KV router without the network to workers: a catalogue of workers, an index that
follows their KV events over ZeroMQ, the scheduler that chooses a worker, and its reservations. Workers need no process
here, because nothing is sent to them.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq

from scheduler_components.cache import hash_pages

_MODEL = "routing"
_PAUSE_S = 0.02
_DEADLINE_S = 60.0


def has_dynamo_selector() -> bool:
    """Return whether the selector is installed."""
    os.environ.setdefault("DYN_LOG", "error")  # it logs to standard output
    try:
        return hasattr(importlib.import_module("dynamo._core"), "SelectionService")
    except ImportError:
        return False


class DynamoSelector:
    """The selector and the calls of the comparison."""

    def __init__(self, service: Any, tokens: Sequence[int]) -> None:
        self._service = service
        self._request = {"model_name": _MODEL, "token_ids": list(tokens)}

    async def overlaps(self) -> dict[int, int]:
        """Return how many leading blocks of the prompt each worker has."""
        found = await self._service.overlap_scores(self._request)
        return {each["worker_id"]: each["device_blocks"] for each in found["workers"]}

    async def pick(self) -> int:
        """Choose a worker, and count nothing there."""
        worker: int = (await self._service.select(self._request))["worker_id"]
        return worker

    async def pick_and_finish(self) -> None:
        """Choose a worker, count the request there, and end it."""
        chosen = await self._service.select_and_reserve(self._request)
        await self._service.free_reservation(chosen["selection_id"])


@asynccontextmanager
async def open_dynamo_selector(
    depths: Sequence[int], *, num_workers: int, tokens: Sequence[int], page_size: int
) -> AsyncIterator[DynamoSelector]:
    """Open a selector in which worker i holds the first ``depths[i % len(depths)]`` blocks of a prompt.

    Workers of one depth follow one stream.
    """
    service = importlib.import_module("dynamo._core").SelectionService(indexer_threads=1)
    with zmq.Context() as context:
        streams = [context.socket(zmq.PUB) for _ in depths]
        try:
            endpoints = [f"tcp://127.0.0.1:{stream.bind_to_random_port('tcp://127.0.0.1')}" for stream in streams]
            for worker in range(num_workers):
                record = {"worker_id": worker, "model_name": _MODEL, "block_size": page_size}
                record |= {"endpoint": f"http://127.0.0.1:1/{worker}", "max_num_batched_tokens": 8192}
                record |= {"total_kv_blocks": 65_536, "kv_events_endpoint": endpoints[worker % len(depths)]}
                await service.upsert_worker(record)
            selector = DynamoSelector(service, tokens)
            expected = {worker: depths[worker % len(depths)] for worker in range(num_workers)}
            await _publish_until(selector, streams, _batches(depths, tokens, page_size), expected)
            yield selector
        finally:
            service.shutdown()
            for stream in streams:
                stream.close(linger=0)


def _batches(depths: Sequence[int], tokens: Sequence[int], page_size: int) -> list[bytes]:
    hashes = hash_pages(tokens, page_size)
    stored = [
        ["BlockStored", hashes[:depth], None, tokens[: depth * page_size], page_size, None, "GPU"] for depth in depths
    ]
    return [msgspec.msgpack.encode([time.time(), [event], 0]) for event in stored]


async def _publish_until(
    selector: DynamoSelector, streams: Sequence[zmq.Socket[bytes]], batches: Sequence[bytes], expected: dict[int, int]
) -> None:
    """Publish the same batches again and again, because listeners connect in the background, until all are applied."""
    async with asyncio.timeout(_DEADLINE_S):
        number = 0
        while await selector.overlaps() != expected:
            for stream, batch in zip(streams, batches, strict=True):
                stream.send_multipart([b"", number.to_bytes(8, "big"), batch])
            number += 1
            await asyncio.sleep(_PAUSE_S)
