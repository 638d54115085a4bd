"""Measure match, insert and evict of the radix cache per page, for any size of the tree."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256

from benchmarks.measure import Goal, Measurement, Scale, measure_interleaved
from scheduler_components.cache import RadixCache
from scheduler_components.cache.block_hash import pack_tokens

NAME = "cache"
PAGE_SIZE = 16
PAGES_PER_PROMPT = 64
SIZES = (1_000, 10_000, 100_000, 1_000_000)
_PROMPT_TOKENS = 10_000


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peers: theirs want a device's tensors
    """Time one long match, then all three operations in growing trees."""
    rows = [*_long_match(scale)]
    sizes = [size for size in SIZES if size <= scale.of(SIZES[-1])]
    costs = {size: GrowthProbe(size).costs_us(scale.turns) for size in sizes}
    for operation in ("match", "insert", "evict"):
        for size in sizes:
            beside = {} if size == sizes[0] else {f"{sizes[0]:,} pages": costs[sizes[0]][operation]}
            goal = Goal(2.0, f"{sizes[0]:,} pages") if beside else None
            what = f"{operation} per page, tree of {size:,} pages"
            rows.append(Measurement(NAME, what, "us", costs[size][operation], beside, goal))
    return rows


def _long_match(scale: Scale) -> list[Measurement]:
    """Time the match of a fully cached prompt of 10,000 tokens, in one node and in nodes of one page."""
    tokens = array("I", range(_PROMPT_TOKENS))
    page_keys = {key: number for number, key in enumerate(_pages_of(tokens))}
    rows = []
    for nodes, cache in (
        ("one node", _cache_of_one_node(tokens)),
        ("one node per page", _cache_of_single_pages(tokens)),
    ):
        for kind, prompt in (("array", tokens), ("list", tokens.tolist())):
            calls: dict[str, Callable[[], object]] = {
                "ours": partial(cache.match_prefix, prompt),
                "limit": partial(_look_pages_up, page_keys, prompt),
                "hashing": partial(_hash_chain, prompt),
            }
            found = measure_interleaved(calls, turns=2 * scale.turns, number=scale.of(200))
            us = {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
            beside = {"limit": us["limit"], "hashing": us["hashing"]}
            what = f"match of {_PROMPT_TOKENS:,} tokens, {nodes}, {kind}"
            rows.append(Measurement(NAME, what, "us", us["ours"], beside, Goal(3.0, "limit")))
    return rows


def _pages_of(tokens: Sequence[int]) -> list[bytes]:
    packed = pack_tokens(tokens)
    step = 4 * PAGE_SIZE
    return [packed[at : at + step] for at in range(0, len(packed), step)]


def _look_pages_up(page_keys: dict[bytes, int], tokens: Sequence[int]) -> None:
    """Look up every page key once: the least that a cache of pages can do."""
    for key in _pages_of(tokens):
        page_keys.get(key)


def _hash_chain(tokens: Sequence[int]) -> bytes:
    """Do the work of a cache that finds pages by their hash."""
    digest = b""
    for page in _pages_of(tokens):
        digest = sha256(digest + page).digest()
    return digest


def _cache_of_one_node(tokens: Sequence[int]) -> RadixCache:
    cache = RadixCache(page_size=PAGE_SIZE, capacity_tokens=2 * _PROMPT_TOKENS, record=True)
    cache.insert(tokens, cache.allocate(len(tokens) // PAGE_SIZE))
    return cache


def _cache_of_single_pages(tokens: Sequence[int]) -> RadixCache:
    """Make the worst tree for a match, in which each page was inserted separately."""
    cache = RadixCache(page_size=PAGE_SIZE, capacity_tokens=2 * _PROMPT_TOKENS, record=True)
    for stop in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
        cache.insert(tokens[:stop], [*cache.match_prefix(tokens[:stop]).pages, *cache.allocate(1)])
    return cache


class GrowthProbe:
    """A full tree of different prompts of 64 pages, and the costs of further operations.

    Args:
        num_pages: pages in the tree.
    """

    def __init__(self, num_pages: int) -> None:
        self._cache = RadixCache(page_size=PAGE_SIZE, capacity_tokens=num_pages * PAGE_SIZE, record=True)
        self._num_prompts = num_pages // PAGES_PER_PROMPT
        for number in range(self._num_prompts):
            self._cache.insert(self._prompt(number), self._cache.allocate(PAGES_PER_PROMPT))
            self._cache.take_events()
        self._newest = self._num_prompts

    @staticmethod
    def _prompt(number: int) -> array[int]:
        first = number * PAGES_PER_PROMPT * PAGE_SIZE % (1 << 31)
        return array("I", range(first, first + PAGES_PER_PROMPT * PAGE_SIZE))

    def costs_us(
        self, turns: int, prompts: int = 15, clock: Callable[[], float] = time.perf_counter
    ) -> dict[str, list[float]]:
        """Return the microseconds per page of each operation, one value per turn."""
        found: dict[str, list[float]] = {"match": [], "evict": [], "insert": []}
        for _ in range(turns):
            gc.collect()
            for operation, call in (("match", self._match), ("evict", self._evict), ("insert", self._insert)):
                begun = clock()
                call(prompts)
                found[operation].append((clock() - begun) * 1e6 / (prompts * PAGES_PER_PROMPT))
        return found

    def _match(self, prompts: int) -> None:
        for number in range(self._newest - prompts, self._newest):
            self._cache.match_prefix(self._prompt(number))

    def _evict(self, prompts: int) -> None:
        for _ in range(prompts):
            self._cache.evict(PAGES_PER_PROMPT)
            self._cache.take_events()

    def _insert(self, prompts: int) -> None:
        for _ in range(prompts):
            self._cache.insert(self._prompt(self._newest), self._cache.allocate(PAGES_PER_PROMPT))
            self._cache.take_events()
            self._newest += 1
