"""The route ``/kv_pool``: the content of an engine's KV pool, to verify its event stream.

Mount it only if an operator has enabled it. With the hash of a block, a client that can guess a prompt learns whether
another client has sent it, and each snapshot iterates over the pool. So a pool is read at most once per second.
Requests in between get the last snapshot, whose sequence number identifies its moment. An event stream without keys
exposes the same hashes; see ``SECURITY.md``.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import chain, count

import msgspec

from observability.http_status import error_response
from observability.kv_pool_client import MAX_HASHES_PER_PAGE, KvPoolPage, KvPoolPlace
from scheduler_components import ComponentError, ConfigError
from scheduler_components._internal.extras import naming_extras
from scheduler_components.values import KvPoolSnapshot

with naming_extras:
    from starlette.datastructures import QueryParams
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

__all__ = ["kv_pool_route"]

MIN_READ_INTERVAL_S = 1.0
"""Shortest time between two snapshots of one pool. A snapshot of 36,000 blocks takes a scheduler 2 ms."""

_MAX_CACHED_SNAPSHOTS = 4
"""Snapshots to keep per rank, so a client has this many seconds to fetch the pages. Each takes 8 bytes per block."""

_MAX_DIGITS, _MAX_SHOWN = 8, 40

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, kw_only=True)
class _CachedSnapshot:
    """One snapshot, packed."""

    name: str
    sequence: int | None
    places: tuple[KvPoolPlace, ...]
    hashes: array[int]

    @classmethod
    def of(cls, name: str, reading: KvPoolSnapshot) -> _CachedSnapshot:
        places = tuple(KvPoolPlace(*place, len(held)) for place, held in reading.blocks.items())
        return cls(
            name=name,
            sequence=reading.sequence,
            places=places,
            hashes=array("q", chain.from_iterable(reading.blocks.values())),
        )

    @property
    def num_pages(self) -> int:
        return max(1, -(-len(self.hashes) // MAX_HASHES_PER_PAGE))

    def page(self, rank: int, number: int) -> KvPoolPage:
        return KvPoolPage(
            reading=self.name,
            rank=rank,
            sequence=self.sequence,
            page=number,
            num_pages=self.num_pages,
            places=self.places,
            hashes=self.hashes[number * MAX_HASHES_PER_PAGE : (number + 1) * MAX_HASHES_PER_PAGE].tolist(),
        )


@dataclass(slots=True, kw_only=True)
class _RankSnapshots:
    """The last snapshots of one pool. At most one read is in flight."""

    kept: deque[_CachedSnapshot] = field(default_factory=lambda: deque(maxlen=_MAX_CACHED_SNAPSHOTS))
    due_s: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def find(self, name: str) -> _CachedSnapshot:
        for each in self.kept:
            if each.name == name:
                return each
        raise LookupError(f"reading={name[:_MAX_SHOWN]!r}: is no longer kept; begin again without it")


@dataclass(slots=True, kw_only=True)
class _KvPoolEndpoint:
    read_pool: Callable[[int], Awaitable[KvPoolSnapshot]]
    num_ranks: int
    clock: Callable[[], float]
    ranks: dict[int, _RankSnapshots] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)

    async def answer(self, request: Request) -> Response:
        try:
            page = await self._page(request.query_params)
        except ConfigError as error:
            return error_response(400, str(error), param=error.field)
        except LookupError as error:
            return error_response(410, str(error), param="reading")
        except ComponentError as error:
            return error_response(503, str(error))
        return Response(_encode(page), media_type="application/json", headers={"cache-control": "no-store"})

    async def _page(self, query: QueryParams) -> KvPoolPage:
        rank = _number("rank", query.get("rank", "0"), self.num_ranks)
        readings = self.ranks.setdefault(rank, _RankSnapshots())
        name, page = query.get("reading"), query.get("page", "0")
        if name is None:
            _number("page", page, 1)  # a request for a further page must name its snapshot
            kept = await self._newest(rank, readings)
        else:
            kept = readings.find(name)
        return kept.page(rank, _number("page", page, kept.num_pages))

    async def _newest(self, rank: int, readings: _RankSnapshots) -> _CachedSnapshot:
        """Read the pool, or return the last snapshot if it is recent."""
        async with readings.lock:
            if not readings.kept or self.clock() >= readings.due_s:
                reading = await self.read_pool(rank)
                readings.due_s = self.clock() + MIN_READ_INTERVAL_S
                readings.kept.append(_CachedSnapshot.of(f"{rank}-{next(self.numbers)}", reading))
            return readings.kept[-1]


def _number(field: str, text: str, end: int) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < _MAX_DIGITS else end
    if number >= end:
        raise ConfigError(field, text[:_MAX_SHOWN], "is not there", f"give a number from 0 to {end - 1}")
    return number


def kv_pool_route(
    read_pool: Callable[[int], Awaitable[KvPoolSnapshot]],
    *,
    num_ranks: int,
    clock: Callable[[], float] = time.monotonic,
) -> Route:
    """Return the route, to mount in an application.

    An invalid request gets 400 with one sentence, a snapshot that is no longer kept 410, and a scheduler that does not
    answer 503.

    Args:
        read_pool: reads the pool of one rank, usually between two steps of its scheduler. Raises ComponentError if the
            scheduler does not answer.
        num_ranks: number of streams, and so of pools.
        clock: monotonic seconds.
    """
    return Route(
        "/kv_pool", _KvPoolEndpoint(read_pool=read_pool, num_ranks=num_ranks, clock=clock).answer, methods=["GET"]
    )
