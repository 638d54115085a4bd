"""Acknowledgements: every rank takes the same operations out, in the order in which they began, ended everywhere.

Properties, for any order in which ranks' I/O ends and whatever of it fails:
- what all ranks pop is the same, in order, each operation once;
- nothing is popped before it ended on every rank; it is good exactly when it ended well on all of them.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import CacheIntegrityError
from scheduler_components.hicache.controller import AckQueue


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, bool]]]]:
    """For each rank, the operations in the order in which they end there, and how."""
    num_operations = draw(st.integers(0, 8))
    order = st.permutations(range(num_operations))
    ranks = draw(st.lists(order, min_size=1, max_size=4))
    return num_operations, [[(number, draw(st.booleans())) for number in rank] for rank in ranks]


@settings(max_examples=200, deadline=None)
@given(schedule=schedules(), steps=st.lists(st.integers(0, 3), max_size=60))
def test_ranks_acknowledge_alike(schedule: tuple[int, list[list[tuple[int, bool]]]], steps: list[int]) -> None:
    num_operations, ends = schedule
    queues = [AckQueue[str]() for _ in ends]
    for queue in queues:
        for number in range(num_operations):
            queue.push(number, f"operation {number}")
    good_everywhere = [all(dict(rank)[number] for rank in ends) for number in range(num_operations)]
    ended = [dict.fromkeys(range(num_operations), False) for _ in ends]
    left = [list(rank) for rank in ends]
    popped: list[int] = []
    for step in steps + [num_operations] * (num_operations + 1):
        for rank, queue in enumerate(queues):
            for number, is_good in left[rank][: step + rank]:
                queue.acknowledge(number, is_good)
                ended[rank][number] = True
            del left[rank][: step + rank]
        done, good = min(queue.done() for queue in queues), min(queue.good() for queue in queues)
        settled = [queue.pop(done, good) for queue in queues]
        assert all(one == settled[0] for one in settled)
        for number, operation, is_good in settled[0]:
            assert operation == f"operation {number}"
            assert all(rank[number] for rank in ended)
            assert is_good == good_everywhere[number]
            popped.append(number)
    assert popped == list(range(num_operations))
    assert not any(len(queue) for queue in queues)


def test_an_operation_ends_once() -> None:
    queue = AckQueue[None]()
    queue.push(1, None)
    queue.acknowledge(1, True)
    with pytest.raises(CacheIntegrityError, match="operation 1 ended twice"):
        queue.acknowledge(1, False)
