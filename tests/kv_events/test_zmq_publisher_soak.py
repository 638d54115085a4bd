"""2,000 batches per second while subscribers connect and disconnect: nothing grows, and the view is correct at the end.

Takes six seconds; with the profile ``soak`` the variable ``SOAK_SECONDS``, 60 by default.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from observability.kv_stream import open_subscriber, static_address

pytestmark = [pytest.mark.faults, pytest.mark.sockets, pytest.mark.processes]

Start = Callable[..., Any]
SECONDS = 6
SOAK_SECONDS = int(os.environ.get("SOAK_SECONDS", "60"))
WARM_UP_SECONDS = 4  # longer than filling the replay buffer and the cached blocks takes
BATCHES_PER_SECOND = 2_000
STANDING_BLOCKS = 5_000
MAX_GROWTH_BYTES = 12 * 1024 * 1024


def churn(events: str, replay: str) -> None:
    """Connect and disconnect readers of every kind: of the live stream, of a whole or partial replay, and the kit's."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        sockets = [stack.enter_context(context.socket(kind)) for kind in (zmq.SUB, zmq.SUB, zmq.DEALER, zmq.DEALER)]
        for socket, endpoint in zip(sockets, (events, events, replay, replay), strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 20_000)
            if socket.type == zmq.SUB:
                socket.subscribe(b"")
            socket.connect(endpoint)
            if socket.type == zmq.DEALER:
                socket.send_multipart([b"", bytes(8)])
        sockets[0].recv_multipart()
        sockets[2].recv_multipart()  # and disconnects in the middle of its answer
        while sockets[3].recv_multipart()[-2] != b"\xff" * 8:
            pass
        kit = stack.enter_context(open_subscriber([static_address(events, replay=replay)]))
        assert kit.wait_until(0, 0, 20.0)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_SECONDS * 3 + 60)
def test_nothing_grows(start_publisher: Start, watch: Start, soaking: bool) -> None:
    seconds = SOAK_SECONDS if soaking else SECONDS
    publisher = start_publisher(buffer_steps=4_000)
    view = watch(publisher.endpoint, publisher.replay_endpoint)
    baseline: list[int] = []
    own: tuple[int, int] = (0, 0)
    for second in range(seconds):
        publisher.begin("tick", second * BATCHES_PER_SECOND, BATCHES_PER_SECOND, STANDING_BLOCKS)
        churn(publisher.endpoint, publisher.replay_endpoint)
        view.poll_until(lambda second=second: second * BATCHES_PER_SECOND in view.subscriber.blocks(0))
        publisher.read()
        if second == WARM_UP_SECONDS:
            view.poll_until(lambda: publisher.ask("stats")["replays_open"] == 0)
            baseline = publisher.ask("resources")
            own = (len(list(Path("/proc/self/fd").iterdir())), threading.active_count())
    last = seconds * BATCHES_PER_SECOND
    view.converge(set(range(last - STANDING_BLOCKS, last)))
    # libzmq's own thread closes the connections of disconnected readers a little later.
    view.poll_until(lambda: publisher.ask("resources")[1] <= baseline[1])
    memory_bytes, descriptors, threads = publisher.ask("resources")
    assert memory_bytes - baseline[0] < MAX_GROWTH_BYTES
    assert descriptors <= baseline[1]  # fewer if a reader of the warm-up had not disconnected completely
    assert threads == baseline[2]
    assert len(list(Path("/proc/self/fd").iterdir())) <= own[0]
    assert threading.active_count() == own[1]
    stats = publisher.ask("stats")
    assert stats["subscribers_seen"] >= 3 * seconds
    assert (stats["batches_sent"], stats["batches_dropped"], stats["batches_collapsed"]) == (last, 0, 0)
