"""A workload for an SGLang server of the tests, and the content of its tree after the workload."""

from __future__ import annotations

import random

from scheduler_components.cache import hash_pages

PAGE = 16


def prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts of 2 to 6 pages. Every third one shares the first two pages of an earlier one."""
    rng = random.Random(seed)
    made: list[list[int]] = []
    for at in range(count):
        head = rng.choice(made)[: PAGE * 2] if at % 3 == 2 else []
        made.append([*head, *(rng.randrange(10, 1_000) for _ in range(rng.randrange(32, 96)))])
    return made


def run(server, asked: list[list[int]]) -> list[list[int]]:
    """Serve the prompts one after the other; return each prompt with its answer."""
    return [[*prompt, *server.generate([prompt])[0]] for prompt in asked]


def resident_blocks(server, texts: list[list[int]], dp_rank: int = 0) -> set[int]:
    """Return the hashes of all pages of SGLang's tree. All of them belong to ``texts``."""
    answer = server.ask(texts)[dp_rank, 0]
    found = zip(texts, answer["prompts"], strict=True)
    blocks = {block for text, tokens in found for block in hash_pages(text[:tokens], PAGE)}
    assert len(blocks) * PAGE == answer["total"]
    return blocks
