"""A workload for an SGLang server of the tests, and what its tree holds after it."""

from __future__ import annotations

import random

from scheduler_components.cache import hash_pages

PAGE = 16


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of 2 to 6 pages; every third one goes on where an earlier one ended its first pages."""
    rng = random.Random(seed)
    made: list[list[int]] = []
    for at in range(count):
        head = rng.choice(made)[: PAGE * 2] if at % 3 == 2 else []
        made.append([*head, *(rng.randrange(10, 1_000) for _ in range(rng.randrange(32, 96)))])
    return made


def run(server, asked: list[list[int]]) -> list[list[int]]:
    """Serve them one by one, each a step of its own; returns each prompt with its answer."""
    return [[*prompt, *server.generate([prompt])[0]] for prompt in asked]


def resident_blocks(server, texts: list[list[int]], dp_rank: int = 0) -> set[int]:
    """The hashes of all pages that SGLang's tree holds, which are all of these texts."""
    answer = server.ask(texts)[dp_rank, 0]
    found = zip(texts, answer["prompts"], strict=True)
    blocks = {block for text, tokens in found for block in hash_pages(text[:tokens], PAGE)}
    assert len(blocks) * PAGE == answer["total"]
    return blocks
