"""A network that cuts, delays and partitions: afterwards the view is live and equals the published state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.sockets, pytest.mark.processes]

Start = Callable[..., Any]
NUM_CUTS = 4


def test_connections_cut_in_the_middle_of_a_stream_recover(
    start_publisher: Start, open_proxy: Start, watch: Start
) -> None:
    publisher = start_publisher(buffer_steps=200)
    events, replay = open_proxy(publisher.endpoint), open_proxy(publisher.replay_endpoint)
    view = watch(events.address, replay.address)
    for turn in range(NUM_CUTS):
        publisher.begin("publish", 1_000 * turn, 1_000 * (turn + 1), 200)
        view.poll_until(lambda turn=turn: 1_000 * turn + 100 in view.subscriber.blocks(0))
        events.cut()
        replay.cut()
        publisher.read()
    view.converge(set(range(1_000 * NUM_CUTS)))


def test_a_silent_partition_of_either_channel_recovers(start_publisher: Start, open_proxy: Start, watch: Start) -> None:
    publisher = start_publisher(buffer_steps=200, hwm=100)
    events, replay = open_proxy(publisher.endpoint), open_proxy(publisher.replay_endpoint)
    view = watch(events.address, replay.address)
    done = 0
    for held in (events, replay, events):
        publisher.ask("publish", done, done + 500, 2_000)
        view.converge(set(range(done + 500)))
        held.hold()
        publisher.ask("publish", done + 500, done + 2_000, 2_000)
        for _ in range(10):
            view.subscriber.poll(0.01)
        held.go_on()
        done += 2_000
        view.converge(set(range(done)))


def test_a_cut_of_a_slow_connection_recovers(start_publisher: Start, open_proxy: Start, watch: Start) -> None:
    publisher = start_publisher(buffer_steps=100)
    events, replay = open_proxy(publisher.endpoint), open_proxy(publisher.replay_endpoint)
    view = watch(events.address, replay.address)
    publisher.ask("publish", 0, 1_000, 100)
    view.converge(set(range(1_000)))
    for proxy in (events, replay):
        proxy.hold()
    publisher.ask("publish", 1_000, 3_000, 100)
    for proxy in (events, replay):
        proxy.cut()
        proxy.go_on()
    view.converge(set(range(3_000)))
