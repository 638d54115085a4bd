"""The hierarchical cache on real gloo processes: in make test CP2, and in make soak CP2, TP2 x CP2 and PP2 by torchrun.

Rank 0 makes the requests; an intake brings them to the others over gloo.

Property: every rank holds the same pages at every step, though each one's I/O is slow and fails at times of its own.
And pages are read from the store that all of them share: reserve, read, revoke and commit are agreed over gloo.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from kit.forked_ranks import ForkedRanks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.ranks,
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="needs torch: pip install scheduler-components[torch]"
    ),
]

PATIENCE_S = 90


@pytest.mark.parametrize(
    "size, cp_size, pp_size",
    [
        pytest.param(4, 2, 1, id="TP2 x CP2"),
        pytest.param(2, 2, 1, id="CP2"),
        pytest.param(2, 1, 2, id="PP2"),
    ],
)
@pytest.mark.soak_only
def test_ranks_of_torchrun_hold_the_same_pages_at_every_step(size: int, cp_size: int, pp_size: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "-m"]
    command += [
        "scheduler_engine.device.hicache_torchrun",
        "--attn-cp-size",
        str(cp_size),
        "--pp-size",
        str(pp_size),
        "--steps",
        "150",
        "--seed",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    expect_equal_pages(done.stdout.splitlines(), size)


def test_ranks_hold_the_same_pages_at_every_step(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)), "WORLD_SIZE": "2"}
    arguments = ["--attn-cp-size", "2", "--steps", "150", "--seed", "1"]
    with ForkedRanks(tmp_path, 2, run_rank, tmp_path, world, arguments) as ranks:
        for rank in range(2):
            ranks.wait(rank)
    expect_equal_pages([line for rank in range(2) for line in (tmp_path / f"{rank}.out").read_text().splitlines()], 2)


def run_rank(rank: int, folder: Path, world: dict[str, str], arguments: list[str]) -> None:
    """Run the program as torchrun would, with its output in a file of the folder."""
    from scheduler_engine.device import hicache_torchrun

    os.environ |= world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [hicache_torchrun.__name__, *arguments]
    try:
        with (folder / f"{rank}.out").open("w") as out, redirect_stdout(out):
            hicache_torchrun.main()
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
        raise


def expect_equal_pages(lines: list[str], size: int) -> None:
    """Check what all ranks wrote: equal digests at each report, and pages of every kind of storage operation."""
    held: dict[str, set[str]] = defaultdict(set)
    ranks: dict[str, set[str]] = defaultdict(set)
    ends = {line.split(maxsplit=2)[2] for line in lines if " read " in line}
    [(read, revoked, backed_up)] = [map(int, re.findall(r"\d+", end)) for end in ends]
    assert min(read, revoked, backed_up) > 0
    for line in lines:
        if " read " in line:
            continue
        _, rank, _, step, _, digest = line.split()
        held[step].add(digest)
        ranks[step].add(rank)
    assert [int(step) for step in held] == list(range(15, 151, 15))
    assert all(len(digests) == 1 for digests in held.values())
    assert all(len(present) == size for present in ranks.values())
    assert len(set.union(*held.values())) > 1
