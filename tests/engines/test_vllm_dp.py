"""The plugin in a vLLM server of two data-parallel engines. Each engine is a process with its own stream."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.waiting import wait_until

pytest.importorskip("vllm", reason="`make engines` makes an environment with vllm")

from vllm_in_process import POOL_BLOCKS, WINDOW
from vllm_server import VllmServer

from observability.kv_stream import StreamState, Subscriber, open_subscriber
from scheduler_components.kv_events import Endpoint, StreamAddress

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

RANKS = (0, 1)


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
    free_block: Callable[[int], int],
    die_with_us: Callable[[], object] | None,
) -> Iterator[VllmServer]:
    ports = free_block(13)  # streams at ports + 1 and above, replay ten higher
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports + 1}",
        "replay_endpoint": f"tcp://*:{ports + 11}",
        "buffer_steps": WINDOW,
    }
    started = VllmServer(
        tiny_llama,
        tmp_path_factory.mktemp("vllm_dp"),
        ports,
        *("--load-format", "dummy", "--data-parallel-size", "2", "--kv-events-config", json.dumps(events)),
        preexec_fn=die_with_us,
    )
    try:
        started.wait_until_up()
        yield started
    finally:
        started.stop()


def follow(server: VllmServer) -> Subscriber:
    """Follow the streams at the addresses that vLLM itself reports."""
    sources: dict[str, Any] = json.loads(server.get("/kv_event_sources"))
    addresses = [
        StreamAddress(
            rank=int(rank),
            events=Endpoint.parse(source["endpoint"].replace("*", "127.0.0.1")),
            replay=Endpoint.parse(source["replay_endpoint"].replace("*", "127.0.0.1")),
        )
        for rank, source in sources.items()
    ]
    return open_subscriber(addresses)


def poll_until(subscriber: Subscriber, condition: Callable[[], object]) -> None:
    wait_until(condition, poll=lambda: subscriber.poll(0.05), describe=subscriber.stats, deadline_s=60)


def test_a_late_joiner_gets_all_blocks_of_both_ranks(server: VllmServer) -> None:
    chance = random.Random(31)
    with follow(server) as early:
        poll_until(early, lambda: {each.state for each in early.positions().values()} == {StreamState.LIVE})
        for rank in (*RANKS, *RANKS, 0):
            for _ in range(WINDOW):
                server.generate([chance.randrange(3, 1_000) for _ in range(chance.randrange(40, 300))], rank)
                early.poll(0.0)
        with follow(server) as late:
            poll_until(late, lambda: all(_agree(late, early, rank) for rank in RANKS))
            stats = late.stats()
        numbers = {rank: each.last_seq for rank, each in early.stats().items()}
    assert numbers[0] > numbers[1] > WINDOW  # more than a replay buffer on both ranks; rank 0 got more requests
    for rank in RANKS:
        assert (stats[rank].snapshots, stats[rank].rank_mismatches, stats[rank].decode_errors) == (1, 0, 0)
        assert stats[rank].blocks_held > POOL_BLOCKS // 2


def _agree(late: Subscriber, early: Subscriber, rank: int) -> bool:
    """Return whether both are live at the same batch with the same blocks. The last batches may still be in flight."""
    early.poll(0.0)
    at, other = late.positions()[rank], early.positions()[rank]
    are_live = at.state is other.state is StreamState.LIVE
    return are_live and at.last_seq == other.last_seq and late.blocks(rank) == early.blocks(rank)
