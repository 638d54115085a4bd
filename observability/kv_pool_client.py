"""The client of ``/kv_pool``, which returns a snapshot of a KV pool in JSON pages.

One page::

    {"reading": "0-17", "rank": 0, "sequence": 512, "page": 0, "num_pages": 1,
     "places": [{"medium": "GPU", "group_idx": null, "num_blocks": 3}], "hashes": [-5, 7, 11]}

The ``hashes`` of all pages, concatenated, are the blocks of the places in their order. ``GET /kv_pool?rank=0`` starts a
snapshot and returns its first page; ``GET /kv_pool?rank=0&reading=0-17&page=1`` returns the second. Any engine can
implement this, with ``"sequence": null`` if it does not know the position of its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlencode

import msgspec

from observability.kv_stream import UnreachableError, fetch_page, parse_worker_url
from scheduler_components import DecodeError, StartError
from scheduler_components.events import MediumGroup, medium_group, signed_block_hash
from scheduler_components.values import KvPoolSnapshot

if TYPE_CHECKING:
    import httpx

__all__ = ["MAX_HASHES_PER_PAGE", "KvPoolPage", "KvPoolPlace", "KvPoolUnreadableError", "fetch_kv_pool"]

MAX_HASHES_PER_PAGE = 16_384
"""Hashes of one page: about 340 KB of JSON."""

_MAX_PAGES = 4_096
"""67 million blocks, more than any pool has, take half a gigabyte."""

_MAX_ATTEMPTS = 3

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_HASHES_PER_PAGE * _MAX_PAGES)]


class KvPoolPlace(msgspec.Struct, frozen=True):
    """One medium and KV-cache group, and its number of blocks in the pool; 0 if it is known to be empty."""

    medium: str | None
    group_idx: int | None = None
    num_blocks: _Count = 0


class KvPoolPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a snapshot. Only ``page`` and ``hashes`` differ between its pages.

    Attributes:
        reading: id of the snapshot, for requests of further pages.
        rank, sequence: as in ``KvPoolSnapshot``.
        page, num_pages: number of the page from 0, and number of pages, at least one.
        places: the places of the hashes of all pages, in their order.
        hashes: at most ``MAX_HASHES_PER_PAGE``; signed or unsigned 64-bit.
    """

    reading: str
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    sequence: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    page: int = 0
    num_pages: Annotated[int, msgspec.Meta(ge=1, le=_MAX_PAGES)] = 1
    places: tuple[KvPoolPlace, ...]
    hashes: Annotated[list[int], msgspec.Meta(max_length=MAX_HASHES_PER_PAGE)]


class KvPoolUnreadableError(UnreachableError):
    """The pool cannot be read: nothing answers at the URL, or the server has no ``/kv_pool``."""


def fetch_kv_pool(url: str, rank: int = 0, *, timeout_s: float = 30.0, api_key: str | None = None) -> KvPoolSnapshot:
    """Read the pool of one rank over HTTP.

    Args:
        url: URL of the worker, with or without ``/kv_pool``.
        rank: index of its stream.
        timeout_s: timeout for one page; an engine answers after its next step.
        api_key: key of an engine that requires one.

    Raises:
        ConfigError: ``url`` is not a worker's URL.
        KvPoolUnreadableError: nothing answers, the server has no ``/kv_pool``, or the answer is not a snapshot.
    """
    worker = parse_worker_url(url.rstrip("/").removesuffix("/kv_pool"))
    fetch = partial(fetch_page, timeout_s=timeout_s, api_key=api_key)
    for _ in range(_MAX_ATTEMPTS - 1):
        try:
            return _fetch_pages(worker, rank, fetch)
        except _SnapshotExpiredError:
            continue  # other clients have replaced the snapshot before its last page was fetched
    return _fetch_pages(worker, rank, fetch)


class _SnapshotExpiredError(KvPoolUnreadableError):
    """A further page of a snapshot was refused."""


def _fetch_pages(worker: httpx.URL, rank: int, fetch: Callable[[httpx.URL, str], bytes]) -> KvPoolSnapshot:
    first = _fetch(worker, {"rank": rank}, fetch, KvPoolUnreadableError)
    hashes = list(first.hashes)
    for number in range(1, first.num_pages):
        query = {"rank": rank, "reading": first.reading, "page": number}
        page = _fetch(worker, query, fetch, _SnapshotExpiredError)
        if (page.reading, page.page) != (first.reading, number):
            problem = f"gives page {page.page} of another reading where page {number} was asked for"
            raise KvPoolUnreadableError(_kv_pool_url(worker), problem, "each page must be of the reading that is named")
        hashes += page.hashes
    if len(hashes) != sum(place.num_blocks for place in first.places):
        problem = f"{len(hashes)} hashes came for {sum(place.num_blocks for place in first.places)} blocks"
        raise KvPoolUnreadableError(_kv_pool_url(worker), problem, "the pages must hold what their places count")
    return KvPoolSnapshot(_places(first, hashes), first.sequence, rank)


def _places(first: KvPoolPage, hashes: list[int]) -> dict[MediumGroup, list[int]]:
    """Assign the hashes to their places, as signed integers."""
    blocks: dict[MediumGroup, list[int]] = {}
    start = 0
    for place in first.places:
        stop = start + place.num_blocks
        held = blocks.setdefault(medium_group(place.medium, place.group_idx), [])
        held += [signed_block_hash(each) for each in hashes[start:stop]]
        start = stop
    return blocks


def _fetch(
    worker: httpx.URL,
    query: Mapping[str, object],
    fetch: Callable[[httpx.URL, str], bytes],
    refused: type[KvPoolUnreadableError],
) -> KvPoolPage:
    try:
        body = fetch(worker.copy_with(query=urlencode(query).encode()), "/kv_pool")
        return _decode_page(body)
    except UnreachableError as error:
        raise KvPoolUnreadableError(error.resource, error.problem, error.hint) from error
    except StartError as error:
        hint = "start the engine with --kv-pool, or leave --oracle out"
        raise refused(error.resource, error.problem, hint) from error
    except (DecodeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "check that this is the worker's own URL"
        raise KvPoolUnreadableError(_kv_pool_url(worker), f"is no page of a pool: {error}", hint) from error


def _kv_pool_url(worker: httpx.URL) -> str:
    return str(worker.copy_with(path=worker.path.rstrip("/") + "/kv_pool"))


_decode_page = msgspec.json.Decoder(KvPoolPage).decode
