"""The hierarchical cache on real gloo processes, started by torchrun: TP2 x CP2, CP2 and PP2.

Rank 0 makes the requests; an intake brings them to the others over gloo.

Property: every rank holds the same pages at every step, though each one's I/O is slow and fails at times of its own.
And pages are read from the store that all of them share: reserve, read, revoke and commit are agreed over gloo.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import defaultdict

import pytest

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
        pytest.param(4, 2, 1, id="TP2 x CP2", marks=pytest.mark.soak_only),
        pytest.param(2, 2, 1, id="CP2"),
        pytest.param(2, 1, 2, id="PP2", marks=pytest.mark.soak_only),
    ],
)
def test_ranks_hold_the_same_pages_at_every_step(size: int, cp_size: int, pp_size: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "-m"]
    command += [
        "scheduler_components.reference.device.hicache_torchrun",
        "--attn-cp-size",
        str(cp_size),
        "--pp-size",
        str(pp_size),
        "--steps",
        "150",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    held: dict[str, set[str]] = defaultdict(set)
    ranks: dict[str, set[str]] = defaultdict(set)
    lines = done.stdout.splitlines()
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
