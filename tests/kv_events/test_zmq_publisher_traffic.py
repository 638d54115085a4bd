"""Traffic that never stops, in loops that starve the publisher's thread.

Property, judged while the loop runs: few batches wait, and a replay arrives completely. The switch interval makes it
independent of the machine's speed: the thread gets the GIL only when the loop releases it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import zmq
from hypothesis import settings
from kit.events import numbered_batch
from kit.sockets import Open

from benchmarks.bench_traffic import LOOPS, TrafficSpec, run_traffic
from benchmarks.publishers import KIT, KIT_INLINE, KIT_WITHOUT_IDLE
from scheduler_components.kv_events.backlog import MAX_WAITING

pytestmark = pytest.mark.sockets

END = b"\xff" * 8
KEPT = 4_000
DEADLINE_S = 20.0
"""A machine that runs other tests may give libzmq's own thread no time for a second."""


@pytest.fixture
def starving() -> Iterator[None]:
    """No thread is interrupted: another one runs when it releases the GIL, for as long as it likes."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(10.0)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("starving")
@pytest.mark.parametrize("send_mode", ["background", "inline"])
@pytest.mark.parametrize("makes_system_calls", [False, True], ids=["holds the GIL", "small system calls"])
def test_live_batches_and_a_replay_arrive_during_traffic(
    opened: Open, open_socket: Callable[[int], zmq.Socket[bytes]], makes_system_calls: bool, send_mode: str
) -> None:
    publisher = opened(buffer_steps=1_000_000, send_mode=send_mode)
    for number in range(KEPT):
        publisher.publish(numbered_batch(number))
    assert publisher.flush(10.0)
    client = open_socket(zmq.DEALER)
    client.rcvhwm = 0
    client.connect(publisher.replay_endpoint or "")
    client.send_multipart([b"", bytes(8)])
    replayed: list[bytes] = []
    most_pending = steps = 0
    sink = os.open(os.devnull, os.O_WRONLY)
    until_s = time.monotonic() + DEADLINE_S
    while END not in replayed[-1:] and time.monotonic() < until_s:
        for _ in range(20):
            sum(range(100))
            if makes_system_calls:
                os.write(sink, b"!")  # releases the GIL for a microsecond
        publisher.publish(numbered_batch(KEPT + steps))
        most_pending = max(most_pending, publisher.stats().batches_pending)
        steps += 1
        while client.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # unlike a receive, this keeps the GIL
            replayed.append(client.recv_multipart()[-2])
    os.close(sink)
    numbers = [int.from_bytes(each, "big") for each in replayed[:-1]]
    assert replayed[-1] == END
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= KEPT
    assert most_pending < MAX_WAITING


def traffic_cases() -> Iterator[tuple[str, int, str]]:
    """Every subject with every number of clients and every loop; each pair of values outside ``make soak``."""
    is_soak = settings.get_current_profile_name() == "soak"
    for (row, subject), (column, num_clients), (number, loop) in product(
        enumerate((KIT_WITHOUT_IDLE, KIT, KIT_INLINE)), enumerate((0, 1, 4)), enumerate(LOOPS)
    ):
        if is_soak or (row + column + number) % 3 == 0:
            yield subject, num_clients, loop


@pytest.mark.soak_only
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("subject", "num_clients", "loop"), [*traffic_cases()])
def test_every_loop_keeps_the_promises_during_traffic(subject: str, num_clients: int, loop: str) -> None:
    result = run_traffic(TrafficSpec(subject=subject, shape="1 block", loop=loop, num_clients=num_clients))
    assert result.max_pending <= MAX_WAITING
    assert result.deliveries is not None
    assert len(result.deliveries.delays_s) == len(result.publish_us)  # none is lost
    if result.replays is not None:
        assert all(result.replays.ended)
        assert all(batches >= 10_000 for batches in result.replays.batches)
