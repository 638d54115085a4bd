"""A reader that joins a publisher with a full replay buffer becomes LIVE while the publisher continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from observability.kv_stream import StreamState

pytestmark = [pytest.mark.faults, pytest.mark.sockets, pytest.mark.processes]

Start = Callable[..., Any]

BUFFER_STEPS = 10_000
STANDING = 12_000
"""Blocks that stay cached: some are in the snapshot."""


@pytest.mark.parametrize(
    ("rate", "send_mode"),
    [
        (2_000, "background"),
        *[
            pytest.param(*case, marks=pytest.mark.soak_only)
            for case in (
                (500, "background"),
                (500, "inline"),
                (2_000, "inline"),
                (10_000, "background"),
                (10_000, "inline"),
            )
        ],
    ],
)
def test_a_late_reader_arrives_in_every_loop(start_publisher: Start, watch: Start, rate: int, send_mode: str) -> None:
    """The loop never calls ``idle()``. The first fold after the snapshot takes the batch that the answer sends next."""
    publisher = start_publisher(buffer_steps=BUFFER_STEPS, send_mode=send_mode)
    publisher.ask("publish", 0, STANDING, 20)
    publisher.begin("pace", STANDING, rate, STANDING)
    first, second = (watch(publisher.endpoint, publisher.replay_endpoint) for _ in range(2))
    for reader in (first, second):
        reader.poll_until(lambda reader=reader: reader.state is StreamState.LIVE)
        stats = reader.subscriber.stats()[0]
        assert stats.snapshots == 1
        assert stats.replays_cut == 0 or rate == 10_000  # a busy machine may be too slow for a buffer of one second
        assert stats.newest_batch_age_s is not None
        assert stats.newest_batch_age_s < 5.0
    publisher.send("\n")
    stop = publisher.read()
    first.converge(set(range(stop - STANDING, stop)))
