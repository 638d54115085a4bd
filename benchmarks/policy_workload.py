"""The workload of ``bench_policies``, for this kit and its peers. It needs no other module.

64 requests run. As many wait as the row says: in each step two finish, two others are admitted, and two arrive. A
prompt has 256 tokens. Its first 128 are those of one of eight families, and the families of even number are cached.
"""

from __future__ import annotations

NUM_RUNNING = 64
PROMPT_TOKENS = 256
SHARED_TOKENS = 128
OUTPUT_TOKENS = 32
NUM_ADMITTED = 2  # per step: the requests that finish
PREFILL_TOKENS = 512
"""Prefill tokens of one step: two prompts, or four whose family is cached."""

PAGE_SIZE = 16
KV_TOKENS = 1 << 18
NUM_FAMILIES = 8


def prompt(number: int) -> list[int]:
    """Return the tokens of a request."""
    family = number * 7 % NUM_FAMILIES
    own = number * (PROMPT_TOKENS - SHARED_TOKENS)
    return [*range(family * 1_000, family * 1_000 + SHARED_TOKENS), *range(own % 20_000, own % 20_000 + 127), number]


def cached_families() -> list[list[int]]:
    """Return the prefixes that are cached before the first step."""
    return [prompt_of_family(family) for family in range(0, NUM_FAMILIES, 2)]


def prompt_of_family(family: int) -> list[int]:
    """Return the shared tokens of a family."""
    return list(range(family * 1_000, family * 1_000 + SHARED_TOKENS))
