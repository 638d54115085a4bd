"""A relay between a publisher and its readers, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from observability import discover

Start = Callable[..., Any]


def test_a_late_reader_of_a_relay_has_the_whole_state(
    start_publisher: Start, start_relay: Start, watch: Start, tmp_path: Path
) -> None:
    publisher = start_publisher(endpoint=f"ipc://{tmp_path}/kv", replay_endpoint=f"ipc://{tmp_path}/replay")
    publisher.ask("publish", 0, 75, 50)
    relay = start_relay(f"{publisher.endpoint},{publisher.replay_endpoint}", buffer_steps=10)
    publisher.ask("publish", 75, 100, 50)
    (address,) = discover(relay.url)
    view = watch(str(address.events), str(address.replay))
    view.converge(set(range(100)))
    publisher.ask("publish", 100, 150, 50)
    view.converge(set(range(150)))
    assert relay.get("/health") == {"status": "ok"}
    assert discover(relay.url)[0].block_size == 10
    publisher.process.kill()
    publisher.process.wait()
    view.poll_until(lambda: view.state == "partial")
    assert "connecting" in relay.get("/health")["problem"]
    again = start_publisher(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
    again.ask("publish", 70, 80, 50)
    view.converge(set(range(70, 80)))
    assert relay.stop() == (143, "scheduler-components: terminated; all processes are stopped\n")
