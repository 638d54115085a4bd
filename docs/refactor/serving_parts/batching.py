"""Continuous batching with chunked prefill and retraction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from zlib import crc32

import attrs
import msgspec

from scheduler_components import ConfigError, OutOfPagesError, RadixCache
from scheduler_components.metrics import RateMeter
from scheduler_components.values import SchedulerCounters
from serving_parts.request import Request

__all__ = [
    "Batch",
    "Counters",
    "Settings",
    "Waiting",
    "Work",
    "check_fits",
    "next_batch",
    "next_tokens",
    "release",
    "share",
]


@attrs.frozen(kw_only=True)
class Settings:
    """The operator's settings. ``kv_events`` is the publisher's configuration as text, None for no events."""

    kv_events: str | None = None
    page_size: int = 4
    kv_tokens: int = 64
    max_running_requests: int = 3
    chunk_tokens: int = 8
    eos_token_id: int = 7
    vocab_size: int = 50


class Counters(msgspec.Struct, frozen=True):
    """The counters of batching."""

    totals: SchedulerCounters
    rates: RateMeter


class Work(msgspec.Struct, frozen=True):
    """The positions of one request that the device computes in this step."""

    request: Request
    num_tokens: int


class Batch(msgspec.Struct, frozen=True):
    """The next work of the device, and the running requests after it."""

    works: tuple[Work, ...]
    running: list[Request]


class Waiting(Protocol):
    """A ``deque`` of requests, or a ``TokenCountedQueue``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Request: ...
    def popleft(self) -> Request: ...
    def appendleft(self, request: Request, /) -> None: ...


def check_fits(request: Request, settings: Settings) -> None:
    """Refuse a request that the whole pool could not hold.

    Raises:
        ConfigError: with the sizes.
    """
    num_tokens = request.num_prompt_tokens + request.max_new_tokens
    if num_tokens > settings.kv_tokens:
        hint = f"give at most {settings.kv_tokens} tokens in all"
        raise ConfigError("max_new_tokens", request.max_new_tokens, f"makes {num_tokens} tokens with the prompt", hint)


def next_batch(
    cache: RadixCache, waiting: Waiting, running: Sequence[Request], settings: Settings, counters: Counters
) -> Batch:
    """Advance every running request, retract the latest ones if pages run out, then admit waiting requests in order."""
    works: list[Work] = []
    staying = list(running)
    while len(works) < len(staying):
        request = staying[len(works)]
        num_tokens = min(request.num_uncomputed_tokens, settings.chunk_tokens)
        if _grow(cache, request, num_tokens):
            works.append(Work(request, num_tokens))
            continue
        victim = staying.pop()
        release(cache, victim)
        victim.num_retractions += 1
        counters.totals.num_retractions_total += 1
        waiting.appendleft(victim)
    has_room = len(staying) >= len(running)  # no admission in a step that retracts
    while has_room and len(waiting) and len(staying) < settings.max_running_requests:
        has_room = _admit(cache, waiting, works, settings, counters)
        staying = [work.request for work in works]
    return Batch(tuple(works), staying)


def next_tokens(batch: Batch, settings: Settings) -> list[int]:
    """Return the tokens of the device: hashes of request and position, equal in every run."""
    return [
        crc32(f"{work.request.rid}/{work.request.num_computed_tokens + work.num_tokens}".encode()) % settings.vocab_size
        for work in batch.works
    ]


def share(cache: RadixCache, request: Request) -> None:
    """Insert the full pages of a request into the cache and lock them."""
    num_pages = request.num_computed_tokens // cache.page_size
    if num_pages <= request.num_cached_pages:
        return
    match = cache.insert(request.token_ids[: num_pages * cache.page_size], request.pages[:num_pages])
    cache.lock(match.node)
    if request.node is not None:
        cache.unlock(request.node)
    request.node = match.node
    request.pages[:num_pages] = match.pages
    request.num_cached_pages = num_pages


def release(cache: RadixCache, request: Request) -> None:
    """Release all pages. The full ones stay cached."""
    share(cache, request)
    cache.free(request.pages[request.num_cached_pages :])
    if request.node is not None:
        cache.unlock(request.node)
    request.num_cached_tokens = request.num_cached_pages * cache.page_size
    request.node = None
    request.pages = []
    request.num_cached_pages = request.num_computed_tokens = request.prefill_end = 0


def _admit(cache: RadixCache, waiting: Waiting, works: list[Work], settings: Settings, counters: Counters) -> bool:
    """Admit the first waiting request if the pool has room for it; return whether it did."""
    request = waiting[0]
    match = cache.match_prefix(request.token_ids[:-1])  # the device must compute the last token
    cache.lock(match.node)
    request.node = match.node
    request.pages = list(match.pages)
    request.num_cached_pages = len(match.pages)
    request.num_computed_tokens = match.num_tokens
    num_tokens = min(request.num_uncomputed_tokens, settings.chunk_tokens)
    if not _grow(cache, request, num_tokens):
        cache.unlock(match.node)
        request.node, request.pages = None, []
        request.num_cached_pages = request.num_computed_tokens = 0
        return False
    waiting.popleft()
    request.num_cached_tokens = match.num_tokens
    request.prefill_end = len(request.token_ids)
    works.append(Work(request, num_tokens))
    if not request.num_retractions:
        counters.totals.prompt_tokens_total += request.num_prompt_tokens
        counters.totals.cached_tokens_total += match.num_tokens
        counters.rates.observe_prefill(request.num_prompt_tokens, match.num_tokens)
    return True


def _grow(cache: RadixCache, request: Request, num_tokens: int) -> bool:
    """Allocate pages for ``num_tokens`` more positions; return False if the pool has no room."""
    num_pages = -(-(request.num_computed_tokens + num_tokens) // cache.page_size)
    try:
        request.pages += cache.allocate(max(0, num_pages - len(request.pages)))
    except OutOfPagesError:
        return False
    return True
