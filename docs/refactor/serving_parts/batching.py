"""The parts of continuous batching with chunked prefill and retraction. The scheduler decides which request is next."""

from __future__ import annotations

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
    "Work",
    "admit",
    "advance",
    "check_fits",
    "next_tokens",
    "release",
    "retract",
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


def check_fits(request: Request, settings: Settings) -> None:
    """Refuse a request that the whole pool could not hold.

    Raises:
        ConfigError: with the sizes.
    """
    num_tokens = request.num_prompt_tokens + request.max_new_tokens
    if num_tokens > settings.kv_tokens:
        hint = f"give at most {settings.kv_tokens} tokens in all"
        raise ConfigError("max_new_tokens", request.max_new_tokens, f"makes {num_tokens} tokens with the prompt", hint)


def advance(cache: RadixCache, request: Request, settings: Settings) -> Work | None:
    """Allocate pages for the next positions of a running request; return None if the pool has no room."""
    num_tokens = min(request.num_uncomputed_tokens, settings.chunk_tokens)
    return Work(request, num_tokens) if _grow(cache, request, num_tokens) else None


def retract(cache: RadixCache, request: Request, counters: Counters) -> None:
    """Release the pages of a running request that is to wait again."""
    release(cache, request)
    request.num_retractions += 1
    counters.totals.num_retractions_total += 1


def admit(cache: RadixCache, request: Request, settings: Settings, counters: Counters) -> Work | None:
    """Give pages to a waiting request; return None if the pool has no room."""
    match = cache.match_prefix(request.token_ids[:-1])  # the device must compute the last token
    cache.lock(match.node)
    request.node = match.node
    request.pages = list(match.pages)
    request.num_cached_pages = len(match.pages)
    request.num_computed_tokens = match.num_tokens
    work = advance(cache, request, settings)
    if work is None:
        cache.unlock(match.node)
        request.node, request.pages = None, []
        request.num_cached_pages = request.num_computed_tokens = 0
        return None
    request.num_cached_tokens = match.num_tokens
    request.prefill_end = len(request.token_ids)
    if not request.num_retractions:
        counters.totals.prompt_tokens_total += request.num_prompt_tokens
        counters.totals.cached_tokens_total += match.num_tokens
        counters.rates.observe_prefill(request.num_prompt_tokens, match.num_tokens)
    return work


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


def _grow(cache: RadixCache, request: Request, num_tokens: int) -> bool:
    """Allocate pages for ``num_tokens`` more positions; return False if the pool has no room."""
    num_pages = -(-(request.num_computed_tokens + num_tokens) // cache.page_size)
    try:
        request.pages += cache.allocate(max(0, num_pages - len(request.pages)))
    except OutOfPagesError:
        return False
    return True
