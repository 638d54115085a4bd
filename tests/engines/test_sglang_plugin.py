"""Inside a real SGLang: the plugin's publisher in the place of its own.

The probe asks SGLang's radix tree which prefixes stand. The hashes of their pages are what a reader must have.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

pytest.importorskip("sglang", reason="`make engines` makes an environment with sglang")

from observability import StreamState, discover, open_subscriber
from scheduler_components.cache import hash_pages

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

PLUGIN = {"SGLANG_PLUGINS": "scheduler_components,probe"}
PAGE = 16
DEADLINE_S = 60.0


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


def joined(server, expected: dict[int, set[int]]) -> None:
    """A reader that joins now becomes live, and holds what is expected of each rank."""
    with open_subscriber(discover(server.url)) as subscriber:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            subscriber.poll(0.05)
            stats = subscriber.stats()
            is_live = all(stats[rank].state is StreamState.LIVE for rank in expected)
            if is_live and all(subscriber.blocks(rank) == blocks for rank, blocks in expected.items()):
                return
            found = {rank: len(subscriber.blocks(rank)) for rank in expected}
            assert time.monotonic() < deadline_s, (stats, found, {rank: len(b) for rank, b in expected.items()})


def test_a_late_joiner_is_whole_although_the_window_has_passed(sglang_servers: Callable) -> None:
    server = sglang_servers(**PLUGIN)
    texts = run(server, prompts(60, seed=1))
    expected = resident_blocks(server, texts)
    assert len(expected) > 80
    joined(server, {0: expected})
