"""The engine with ``--hicache``, end to end: real processes, memory, threads and sockets, verified from outside."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy", reason="needs numpy: pip install scheduler-components[hicache]")

from scheduler_components import ConfigError
from scheduler_engine.engine.config import HiCacheConfig

pytestmark = pytest.mark.processes

MODULE = [sys.executable, "-m", "scheduler_components"]
SMALL = ["--hicache", "--dp-size", "1", "--kv-tokens", "2048"]
DEADLINE_S = 90


def run(folder: Path, command: str, *arguments: str, num_ranks: int = 4, speed: int = 16) -> str:
    """What a run over file storage says; it must pass its checks."""
    storage = ["--hicache-storage", "file", "--hicache-storage-path", str(folder)]
    done = subprocess.run(
        [*MODULE, command, *SMALL, "--speed", str(speed), *storage, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    assert f"{num_ranks} ranks in 1 replicas, each in lockstep with its leader" in done.stdout
    assert re.search(r"dp0: \d+ device \+ \d+ host( \+ \d+ storage)? blocks equal", done.stdout)
    return done.stdout


def hits(summary: str) -> dict[str, float]:
    [line] = [line for line in summary.splitlines() if line.strip().startswith("hits by tier")]
    return {tier: float(rate) for tier, rate in re.findall(r"(\w+) ([\d.]+)%", line)}


@pytest.mark.parametrize("attn_tp_size", [1, pytest.param(2, marks=pytest.mark.soak_only)])
def test_evicted_pages_are_read_from_the_host_and_by_the_next_engine_from_storage(
    tmp_path: Path, attn_tp_size: int
) -> None:
    """Every page that comes back is compared with its bytes on the way; all ranks hold the same pages at every step.

    On two pipeline stages, each of which has its own slice of every page; in make soak on two ranks of each.
    """
    stages = ["--attn-cp-size", "1", "--pp-size", "2", "--attn-tp-size", str(attn_tp_size)]
    num_ranks = 2 * attn_tp_size
    first = hits(run(tmp_path, "demo", "--requests", "20", *stages, num_ranks=num_ranks))
    assert first["device"] > 0
    assert first["host"] > 0
    waiting = ["--hicache-prefetch", "wait_complete", "--hicache-write", "write_back"]
    second = hits(run(tmp_path, "demo", "--requests", "10", *stages, *waiting, num_ranks=num_ranks))
    assert second["storage"] > 0


@pytest.mark.soak_only
def test_prompts_in_a_circle_larger_than_device_and_host_come_from_storage(
    tmp_path: Path, trace_beyond_the_host: Path
) -> None:
    """The twin of the test over Mooncake's store."""
    storage = tmp_path / "pages"
    storage.mkdir()
    waiting = ["--port", "0", "--hicache-host-tokens", "4096", "--hicache-prefetch", "wait_complete"]
    # 100 ms between prompts, so that each is written to storage before it is evicted.
    found = hits(run(storage, "serve", "--trace", str(trace_beyond_the_host), *waiting, speed=4))
    assert found["storage"] > 5
    assert found["device"] + found["host"] < found["storage"]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--hicache-storage", "file"], "storage_path='': is empty; name the directory to store pages in"),
        (["--hicache-storage", "tape"], 'Invalid value "tape" for --hicache-storage'),
        (["--hicache-storage", "mooncake", "--hicache-mooncake-master", "nowhere"], "is not host:port"),
        (["--hicache-host-tokens", "0"], "Must be >= 1"),
    ],
)
def test_a_mistake_is_one_line(command_line: Callable[..., Any], arguments: list[str], complaint: str) -> None:
    ran = command_line("demo", "--hicache", *arguments)
    assert ran.code == 2
    assert complaint in ran.complaint


@pytest.mark.parametrize("field, value", [("storage", "tape"), ("host_tokens", 0), ("storage_bytes", -1)])
def test_an_invalid_value_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as raised:
        HiCacheConfig(**{"host_tokens": 1, field: value})
    assert raised.value.field == field
