"""Print the resident bytes per (rank, block) of a view or of Dynamo's tree, in a separate process. Linux only.

Hashes are new objects in every event, as a decoder makes them, so objects that the view keeps count.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.studies.dynamo_tree import DynamoTree
from observability.kv_stream import BlockView
from scheduler_components import BlockStored

_NUM_BLOCKS = 200_000
_NUM_SHARED = 40_000
_NUM_RANKS = 64
_RUN = 64


def _runs(num_blocks: int) -> Iterator[tuple[int, ...]]:
    for first in range(0, num_blocks, _RUN):
        yield tuple((index * 0x9E3779B97F4A7C15) % (1 << 64) - (1 << 63) for index in range(first, first + _RUN))


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _bytes_each(store: Callable[[int, tuple[int, ...], int | None], None], num_ranks: int, num_blocks: int) -> float:
    """Store every block on each rank, run below run. A first run allocates everything that is not per block."""
    store(0, (1,), None)
    before = _resident_bytes()
    for rank in range(num_ranks):
        parent = None
        for run in _runs(num_blocks):
            store(rank, run, parent)
            parent = run[-1]
    return (_resident_bytes() - before) / (num_ranks * num_blocks)


def main() -> None:
    """Print the bytes of the subject of the command line."""
    subject, _, thing = sys.argv[1].partition(", ")
    num_ranks, num_blocks = (1, _NUM_BLOCKS) if thing == "distinct" else (_NUM_RANKS, _NUM_SHARED)
    if subject == "view":
        view = BlockView()

        def store(rank: int, hashes: tuple[int, ...], parent: int | None) -> None:
            view.apply(rank, (BlockStored(hashes, parent, (), 1, None, "GPU"),))

        print(_bytes_each(store, num_ranks, num_blocks))
    else:
        print(_bytes_each(DynamoTree().store, num_ranks, num_blocks))


if __name__ == "__main__":
    main()
