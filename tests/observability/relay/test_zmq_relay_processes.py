"""A relay between a publisher and its readers, each in its own process.

The last test restarts engine, relay and reader in any order, by SIGTERM or SIGKILL. It runs one round; under the
profile ``soak`` it runs ``RELAY_ROUNDS`` rounds, by default 20.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from observability import DoctorOptions, check_worker, discover
from observability.doctor import Severity

pytestmark = [pytest.mark.faults, pytest.mark.sockets, pytest.mark.processes]

Start = Callable[..., Any]
DEADLINE_S = 40.0
ROUNDS = 1
SOAK_ROUNDS = int(os.environ.get("RELAY_ROUNDS", "20"))


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
    checked = check_worker(relay.url, DoctorOptions(timeout_s=2.0, listen_s=5.0))  # not warned of load and requests
    assert [result for result in checked if result.severity is not Severity.OK] == []
    assert any("live at batch" in result.what and "150 blocks held" in result.what for result in checked)
    assert 'kv_relay_is_whole{rank="0"} 1.0' in relay.get("/metrics")
    publisher.process.kill()
    publisher.process.wait()
    view.poll_until(lambda: view.state == "partial")
    assert "connecting" in relay.get("/health")["problem"]
    again = start_publisher(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
    again.ask("publish", 70, 80, 50)
    view.converge(set(range(70, 80)))
    assert relay.stop() == (143, "scheduler-components: terminated; all processes are stopped\n")


class BlockLocation:
    """An engine, its relay and the relay's reader at fixed addresses; ``pool`` has the true state."""

    def __init__(self, stack: ExitStack, directory: Path, starts: dict[str, Start], seed: int) -> None:
        self.draw = random.Random(seed)
        self.engine_at = {name: f"ipc://{directory}/engine_{name}" for name in ("endpoint", "replay_endpoint")}
        self.relay_at = {name: f"ipc://{directory}/relay_{name}" for name in ("endpoint", "replay_endpoint")}
        self.pool: set[int] = set()
        self.starts = starts
        self.up: dict[str, Any] = {}
        self.last_answer: list[Any] = []
        for name in ("engine", "relay", "reader"):
            self.start(name)
        stack.callback(self.end)

    def start(self, name: str) -> None:
        at = self.relay_at
        if name == "engine":
            self.pool = set()
            seq_base = self.draw.choice(["zero", "clock"])
            self.up[name] = self.starts["publisher"](**self.engine_at, seq_base=seq_base, buffer_steps=50)
        elif name == "relay":
            self.up[name] = self.starts["relay"](",".join(self.engine_at.values()), **at, buffer_steps=50)
        else:
            self.up[name] = self.starts["subscriber"](at["endpoint"], at["replay_endpoint"])

    def stop(self, name: str) -> None:
        """Stop a process by SIGTERM or SIGKILL."""
        process = self.up.pop(name).process
        process.send_signal(self.draw.choice([signal.SIGKILL, signal.SIGTERM]))
        process.wait()

    def work(self) -> None:
        """Let the engine store, remove and sometimes clear."""
        if "engine" not in self.up:
            return
        engine, draw = self.up["engine"], self.draw
        for _ in range(draw.randrange(1, 6)):
            first = draw.randrange(5_000)
            stop = first + draw.randrange(1, 200)
            verb = draw.choices(["publish", "remove", "clear"], [6, 3, 1])[0]
            if verb == "publish":
                engine.ask("publish", first, stop, 50)
                self.pool |= set(range(first, stop))
            elif verb == "remove":
                engine.ask("remove", first, stop)
                self.pool -= set(range(first, stop))
            else:
                engine.ask("clear")
                self.pool.clear()

    def play(self) -> None:
        """Stop some of the three, start them again in any order, and let the engine publish whenever it runs."""
        names = self.draw.sample(["engine", "relay", "reader"], self.draw.randrange(1, 4))
        for name in names:
            self.work()
            self.stop(name)
        self.draw.shuffle(names)
        for name in names:
            self.work()
            self.start(name)
        self.work()

    def reads_the_pool(self) -> bool:
        """Return True once the reader is live with the engine's blocks."""
        wanted = sorted(self.pool)
        answer: Any = {}
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            self.up["reader"].send("?")
            answer = self.up["reader"].read()
            if answer["state"] == "live" and answer["blocks"] == wanted:
                return True
        self.last_answer = [
            answer["state"],
            len(answer["blocks"]),
            "of",
            len(wanted),
            self.up["relay"].get("/server_info"),
        ]
        return False

    def end(self) -> None:
        for each in self.up.values():
            each.end()


@pytest.mark.soak
@pytest.mark.timeout(SOAK_ROUNDS * 90)
def test_the_reader_has_the_engines_blocks_after_any_restart(
    stack: ExitStack, start_publisher: Start, start_relay: Start, start_subscriber: Start, soaking: bool, tmp_path: Path
) -> None:
    starts = {"publisher": start_publisher, "relay": start_relay, "subscriber": start_subscriber}
    seed = random.randrange(2**32)
    location = BlockLocation(stack, tmp_path, starts, seed)
    location.work()
    assert location.reads_the_pool()
    for number in range(SOAK_ROUNDS if soaking else ROUNDS):
        location.play()
        assert location.reads_the_pool(), f"seed {seed}, round {number}: {location.last_answer}"
