"""The plugin in a vLLM server of two data-parallel engines. Each engine is a process with its own stream."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.waiting import wait_until

pytest.importorskip("vllm", reason="`make engines` makes an environment with vllm")

from vllm_in_process import ENVIRONMENT, POOL_BLOCKS, TRACE_BLOCK_TOKENS, WINDOW

from observability.kv_stream import StreamState, Subscriber, open_subscriber
from scheduler_components.kv_events import Endpoint, StreamAddress

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

START_S = 600.0
"""A start takes two minutes on two busy cores, because three processes import vLLM."""

RANKS = (0, 1)


class VllmServer:
    """One API server with two engines. Their streams are at ``ports + 1`` and above, replay ten higher."""

    def __init__(self, model: Path, folder: Path, ports: int, **process: Any) -> None:
        self.url, self.model, self._log = f"http://127.0.0.1:{ports}", str(model), folder / "log"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports + 1}",
            "replay_endpoint": f"tcp://*:{ports + 11}",
            "buffer_steps": WINDOW,
        }
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model),
            *(
                "--load-format",
                "dummy",
                "--dtype",
                "float32",
                "--enforce-eager",
                "--block-size",
                str(TRACE_BLOCK_TOKENS),
            ),
            *("--max-model-len", "1024", "--num-gpu-blocks-override", str(POOL_BLOCKS), "--data-parallel-size", "2"),
            *("--host", "127.0.0.1", "--port", str(ports), "--kv-events-config", json.dumps(events)),
        ]
        own = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        with self._log.open("wb") as log:
            process["env"] = os.environ | own
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **process)

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read()

    def wait_until_up(self) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                self.get("/health")
            except OSError:
                log = self._log.read_text(errors="replace")[-4000:]
                assert self._process.poll() is None and time.monotonic() < deadline_s, log
                time.sleep(0.2)
            else:
                return

    def generate(self, prompt: list[int], rank: int) -> None:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=300).close()

    def stop(self) -> None:
        """Kill the server and its engines, which are in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
    free_block: Callable[[int], int],
    die_with_us: Callable[[], object] | None,
) -> Iterator[VllmServer]:
    started = VllmServer(tiny_llama, tmp_path_factory.mktemp("vllm_dp"), free_block(13), preexec_fn=die_with_us)
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
