"""Measure the hit rate of a host tier on a trace: ``python -m benchmarks.studies.hicache_hit_rate TRACE [--limit N]``.

One rank, no engine and no clock. Each request in turn matches its prefix, loads its pages back from the host, is
computed in no time and cached. The table depends only on the trace and the sizes and is equal on every machine. An
engine has a slightly lower hit rate, because its running requests hold pages that the cache could use.
"""

from __future__ import annotations

import argparse
import random
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import attrs

from scheduler_components import ConfigError
from scheduler_components.agreement import ParallelGroups
from scheduler_components.cache import RadixCache
from scheduler_components.hicache import HiCacheStepper, HiRadixCache
from scheduler_components.values.page_operations import (
    CopyToDevice,
    CopyToHost,
    Instruction,
    IoEvent,
    LoadBackDone,
    WriteDone,
)
from scheduler_engine.device.hicache_sim import SimulatedHostPages
from scheduler_engine.device.workload import TRACE_BLOCK_TOKENS, TraceRequest, open_trace, prompt_tokens

_SETTLE_STEPS = 2  # one to start the transfers of the last request, one to end them


@attrs.frozen
class Sizes:
    """Sizes of one rank, in tokens; ``host_tokens`` is 0 without a host tier."""

    page_size: int
    device_tokens: int
    host_tokens: int = 0


@dataclass(slots=True)
class Found:
    """Prompt tokens of all requests, by the tier that had them."""

    prompt_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Cached / prompt tokens, 0 to 1."""
        return (self.device_tokens + self.host_tokens) / max(1, self.prompt_tokens)


@dataclass(slots=True)
class InstantMover:
    """A ``PageMover`` without storage. Every submitted instruction has succeeded at the next poll."""

    has_storage = False
    load_back_budget_pages = 1 << 30
    _ended: list[IoEvent] = field(default_factory=list)

    def submit(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, CopyToHost):
                self._ended.append(WriteDone(instruction.op, True))
            elif isinstance(instruction, CopyToDevice):
                self._ended.append(LoadBackDone(instruction.op, True))

    def poll(self) -> list[IoEvent]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Nothing to let go of."""


def find_in_device(requests: Iterable[TraceRequest], sizes: Sizes) -> Found:
    """Replay requests that fit the device over a cache without a host tier."""
    cache = RadixCache(page_size=sizes.page_size, capacity_tokens=sizes.device_tokens)
    found = Found()
    for _, prompt in _prompts(requests, found):
        found.device_tokens += _compute(cache, prompt)
    return found


def find_in_tiers(requests: Iterable[TraceRequest], sizes: Sizes) -> Found:
    """Replay requests that fit the device over a cache with a host tier."""
    num_host_pages = sizes.host_tokens // sizes.page_size
    cache = HiRadixCache(
        page_size=sizes.page_size,
        capacity_tokens=sizes.device_tokens,
        host=SimulatedHostPages(num_host_pages, rng=random.Random(0), failure=0.0),
        num_host_pages=num_host_pages,
    )
    stepper = HiCacheStepper(cache=cache, groups=ParallelGroups(), mover=InstantMover())
    found = Found()
    for rid, prompt in _prompts(requests, found):
        for _ in range(_SETTLE_STEPS):
            stepper.step()
        while not cache.prefetch_queue.is_done(rid, prompt[:-1]):
            stepper.step()
        cached = _compute(cache, prompt)
        cache.prefetch_queue.record_admission(rid, prompt_tokens=len(prompt), cached_tokens=cached)
    stats = cache.stats()
    found.device_tokens, found.host_tokens = stats.device_hit_tokens, stats.host_hit_tokens
    return found


def unbounded_tokens(requests: Iterable[TraceRequest]) -> int:
    """Return the tokens of a device that holds the whole trace without eviction."""
    blocks, longest = set[int](), 0
    for request in requests:
        blocks.update(request.hash_ids)
        longest = max(longest, request.input_length)
    return len(blocks) * TRACE_BLOCK_TOKENS + longest + TRACE_BLOCK_TOKENS


def _prompts(requests: Iterable[TraceRequest], found: Found) -> Iterator[tuple[str, array[int]]]:
    """Yield each request's name and prompt, and count it."""
    for request in requests:
        found.prompt_tokens += request.input_length
        prompt = array("I", prompt_tokens(request))
        if sys.byteorder == "big":
            prompt.byteswap()
        yield str(request.index), prompt


def _compute(cache: RadixCache | HiRadixCache, prompt: array[int]) -> int:
    """Compute and cache the uncached tokens of a prompt, at least the last one; return how many were cached."""
    match = cache.match_prefix(prompt[:-1])
    cache.lock(match.node)
    fresh = cache.allocate(len(prompt) // cache.page_size - len(match.pages))
    cache.insert(prompt, [*match.pages, *fresh])
    cache.unlock(match.node)
    return match.num_tokens


def as_table(rows: Iterable[tuple[str, Found]]) -> str:
    """Format one line per cache: its hit rate, by tier."""
    lines = [f"{'cache':<32}{'cached':>8}{'device':>8}{'host':>8}  of the prompt tokens"]
    for name, found in rows:
        shares = (found.hit_rate, *(tokens / max(1, found.prompt_tokens) for tokens in _tiers(found)))
        lines.append(f"{name:<32}" + "".join(f"{share:>8.1%}" for share in shares))
    return "\n".join(lines)


def _tiers(found: Found) -> tuple[int, int]:
    return found.device_tokens, found.host_tokens


def main() -> int:
    """Replay the trace once per cache and print the table; return 2 for invalid arguments."""
    try:
        return _run(_parser().parse_args())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    sizes = Sizes(arguments.page_size, arguments.device_tokens)
    trace = list(open_trace(arguments.trace, limit=arguments.limit))
    requests = [request for request in trace if request.input_length <= sizes.device_tokens]
    print(
        f"{len(requests):,} requests, {sum(request.input_length for request in requests):,} prompt tokens; "
        f"device of {sizes.device_tokens:,} tokens, pages of {sizes.page_size}; "
        f"{len(trace) - len(requests)} longer requests left out"
    )
    print(as_table(_measure(requests, sizes, arguments.host)))
    return 0


def _measure(
    requests: Sequence[TraceRequest], sizes: Sizes, host_factors: Sequence[int]
) -> Iterator[tuple[str, Found]]:
    yield "device only", find_in_device(requests, sizes)
    for factor in host_factors:
        tiers = attrs.evolve(sizes, host_tokens=factor * sizes.device_tokens)
        yield f"host of {tiers.host_tokens:,} ({factor}x)", find_in_tiers(requests, tiers)
    yield "unbounded", find_in_device(requests, attrs.evolve(sizes, device_tokens=unbounded_tokens(requests)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.hicache_hit_rate", description=__doc__)
    parser.add_argument("trace", type=Path, help="a file of Mooncake's JSON lines")
    parser.add_argument("--limit", type=int, help="only the first requests of the trace")
    parser.add_argument("--device-tokens", type=int, default=262_144, help="size of the device's pool (262144)")
    parser.add_argument(
        "--host", type=int, nargs="+", default=[2, 4, 16, 64], help="host tiers, times the device's size"
    )
    parser.add_argument(
        "--page-size", type=int, default=TRACE_BLOCK_TOKENS, help="tokens a page (512, as the trace's blocks)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
