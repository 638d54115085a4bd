"""A real NATS server per test, with a system-assigned port and a temporary store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from kit.waiting import wait_until

from observability.kv_stream import StreamState
from scheduler_components import BlockRemoved, BlockStored, KVEventBatch

pytest.importorskip("nats", reason="the extra `jetstream` has the client")


def find_server() -> str:
    """Return the server's program, next to this Python or on the path."""
    found = shutil.which("nats-server", path=Path(sys.executable).parent) or shutil.which("nats-server")
    if found is None:
        pytest.skip("no nats-server: the extra `dev` has it")
    return found


class NatsServer:
    """One server process; ``kill`` and ``start`` keep its port and its store."""

    def __init__(self, folder: Path, *options: str, port: int = -1) -> None:
        self.folder = folder
        self.port = port
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server, and wait until it listens."""
        for old in self.folder.glob("*.ports"):
            old.unlink()
        command = [find_server(), "-a", "127.0.0.1", "-p", str(self.port), "--ports_file_dir", str(self.folder)]
        command += ["-js", "-sd", str(self.folder / "store"), "-l", str(self.folder / "log"), *self.options]
        self.process = subprocess.Popen(command)
        deadline = time.monotonic() + 20
        while not (ports := self._ports()):
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "the server did not begin to listen"
            Event().wait(0.01)
        self.port = int(ports[0].rpartition(":")[2])

    def _ports(self) -> list[str]:
        for path in self.folder.glob("*.ports"):
            try:
                found: list[str] = json.loads(path.read_text())["nats"]
            except ValueError:
                continue  # partly written
            return found
        return []

    def freeze(self) -> None:
        """Pause the process, and wait until all of its threads have stopped."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Resume the process."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def free_server(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[NatsServer]:
    """A server with a port that is not started."""
    server = NatsServer(tmp_path / "nats", port=free_ports(1))
    yield server
    server.kill()


@pytest.fixture
def nats_cluster(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[list[NatsServer]]:
    """Three servers on loopback with three replicas."""
    first = free_ports(6)
    routes = ",".join(f"nats://127.0.0.1:{first + 3 + number}" for number in range(3))
    servers = []
    for number in range(3):
        route = f"nats://127.0.0.1:{first + 3 + number}"
        options = ("-n", f"server-{number}", "--cluster_name", "three", "--cluster", route, "--routes", routes)
        servers.append(NatsServer(tmp_path / f"nats-{number}", *options, port=first + number))
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.kill()


class LogFeeder:
    """Publishes generated batches to a sink, and keeps the resulting state."""

    def __init__(self, sink: Any) -> None:
        self.sink = sink
        self.held: set[int] = set()
        self.num_batches = 0

    def store(self, *hashes: int) -> None:
        self.held.update(hashes)
        self._publish(BlockStored(hashes, None, tuple(range(4 * len(hashes))), 4, None))

    def remove(self, *hashes: int) -> None:
        self.held.difference_update(hashes)
        self._publish(BlockRemoved(hashes))

    def churn(self, count: int) -> None:
        """Store and remove blocks; some hundred stay stored."""
        for _ in range(count):
            number = self.num_batches
            if number % 3 == 2:
                self.remove(number // 2)
            else:
                self.store(number + 1_000, number + 1_001)

    def _publish(self, event: BlockStored | BlockRemoved) -> None:
        self.sink.publish(KVEventBatch(float(self.num_batches), (event,), None))
        self.num_batches += 1


@pytest.fixture
def feed() -> Callable[[Any], LogFeeder]:
    return LogFeeder


@pytest.fixture
def wait_for_whole() -> Callable[..., None]:
    """Poll until a reader is LIVE with exactly the published blocks; fail after half a minute."""

    def wait(reader: Any, feeder: LogFeeder, rank: int = 0) -> None:
        def is_whole() -> bool:
            return reader.stats()[rank].state is StreamState.LIVE and reader.blocks(rank) == feeder.held

        wait_until(is_whole, poll=lambda: reader.poll(0.05), describe=lambda: reader.stats()[rank])

    return wait


@pytest.fixture
def poll_until() -> Callable[..., None]:
    """Poll a reader until a condition holds; fail after half a minute."""

    def wait(reader: Any, condition: Callable[[], object]) -> None:
        wait_until(condition, poll=lambda: reader.poll(0.05), describe=reader.stats)

    return wait
