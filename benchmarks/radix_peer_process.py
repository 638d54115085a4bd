"""Run SGLang's radix cache over the prompts of ``bench_trace``, in a Python with SGLang and without this kit.

``python -m benchmarks.radix_peer_process PROMPTS CAPACITY_TOKENS``: for each line of standard input, ``PAGE_SIZE
EVENTS`` (0 or 1), print the microseconds of processor time per request.
"""

from __future__ import annotations

import importlib.abc
import json
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_publishers import Placeholders

for absent in ("torchvision",):  # models need it, the cache does not
    try:
        __import__(absent)
    except ImportError:
        finder: importlib.abc.MetaPathFinder = Placeholders(absent)
        sys.meta_path.append(finder)

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey


class Slots:
    """A minimal allocator: a tensor of free slots."""

    device = "cpu"

    def __init__(self, num_tokens: int) -> None:
        self.free_slots = torch.arange(num_tokens, dtype=torch.int64)

    def free(self, slots: Any) -> None:
        self.free_slots = torch.cat((self.free_slots, slots))

    def free_segment(self, slots: Any, **_: Any) -> None:
        self.free(slots)

    def allocate(self, num_tokens: int) -> Any:
        slots, self.free_slots = self.free_slots[:num_tokens], self.free_slots[num_tokens:]
        return slots


def serve(prompts: list[array[int]], capacity_tokens: int, page_size: int, events: bool) -> float:
    """Match, allocate, cache and release each prompt; return microseconds per request."""
    slots = Slots(capacity_tokens)
    cache = RadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=slots,
            page_size=page_size,
            enable_kv_cache_events=events,
        )
    )
    begun = time.thread_time()
    for prompt in prompts:
        key = RadixKey(prompt[: len(prompt) // page_size * page_size], None)
        match = cache.match_prefix(MatchPrefixParams(key=key))
        cache.inc_lock_ref(match.last_device_node)
        known = match.device_prefix_len
        lacking = len(key) - known
        if len(slots.free_slots) < lacking:
            cache.evict(EvictParams(num_tokens=lacking - len(slots.free_slots)))
        values = torch.cat((torch.arange(known, dtype=torch.int64), slots.allocate(lacking)))
        cache.insert(InsertParams(key=key, value=values))
        stored = cache.match_prefix(MatchPrefixParams(key=key))
        cache.inc_lock_ref(stored.last_device_node)
        cache.dec_lock_ref(match.last_device_node)
        cache.dec_lock_ref(stored.last_device_node)
        cache.take_events()
    return (time.thread_time() - begun) * 1e6 / len(prompts)


def main() -> None:
    """Answer until the end of standard input."""
    prompts = [array("q", tokens) for tokens in json.loads(Path(sys.argv[1]).read_text())]
    for line in sys.stdin:
        page_size, events = map(int, line.split())
        print(serve(prompts, int(sys.argv[2]), page_size, bool(events)), flush=True)


if __name__ == "__main__":
    main()
