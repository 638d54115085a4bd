"""The table of hit rates counts every prompt token once, and a larger cache has more hits."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.studies.hicache_hit_rate import Found, Sizes, as_table, find_in_device, find_in_tiers, unbounded_tokens
from scheduler_engine.device.workload import TRACE_BLOCK_TOKENS, TraceRequest

DEVICE_TOKENS = 8 * TRACE_BLOCK_TOKENS


@pytest.fixture(scope="module")
def requests() -> list[TraceRequest]:
    """Conversations that grow by a block a turn and come back in any order."""
    random, turns, made = Random(1), dict.fromkeys(range(12), 0), []
    for index in range(80):
        chat = random.randrange(12)
        turns[chat] = turns[chat] % 6 + 1
        hash_ids = (0, *(100 * (chat + 1) + block for block in range(turns[chat])))
        length = len(hash_ids) * TRACE_BLOCK_TOKENS
        made.append(TraceRequest(index=index, arrival_s=0.0, input_length=length, output_length=1, hash_ids=hash_ids))
    return made


def test_a_host_raises_the_hit_rate_up_to_the_possible_hits(requests: list[TraceRequest]) -> None:
    sizes = Sizes(TRACE_BLOCK_TOKENS, DEVICE_TOKENS)
    alone = find_in_device(requests, sizes)
    some = find_in_tiers(requests, Sizes(TRACE_BLOCK_TOKENS, DEVICE_TOKENS, 4 * DEVICE_TOKENS))
    everything = unbounded_tokens(requests)
    ample = find_in_tiers(requests, Sizes(TRACE_BLOCK_TOKENS, DEVICE_TOKENS, everything))
    unbounded = find_in_device(requests, Sizes(TRACE_BLOCK_TOKENS, everything))
    assert 0 < alone.hit_rate < some.hit_rate < ample.hit_rate == unbounded.hit_rate < 1
    assert {found.prompt_tokens for found in (alone, some, ample, unbounded)} == {
        sum(request.input_length for request in requests)
    }


def test_smaller_pages_than_the_blocks_of_the_trace_have_the_same_hits(requests: list[TraceRequest]) -> None:
    """But for the last token of a prompt, which is computed always, and costs its page."""
    coarse = find_in_device(requests, Sizes(TRACE_BLOCK_TOKENS, unbounded_tokens(requests)))
    fine = find_in_device(requests, Sizes(16, unbounded_tokens(requests)))
    assert 0 <= fine.device_tokens - coarse.device_tokens < len(requests) * TRACE_BLOCK_TOKENS


def test_the_table_has_one_line_per_cache() -> None:
    lines = as_table([("device only", Found(100, 25)), ("host of 64 (4x)", Found(100, 25, 50))]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["device", "only", "25.0%", "25.0%", "0.0%"],
        ["host", "of", "64", "(4x)", "75.0%", "25.0%", "50.0%"],
    ]
