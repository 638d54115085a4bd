"""A real NATS server per test: its port comes from the system, its store is the test's, and it ends with the test."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

pytest.importorskip("nats", reason="the extra `jetstream` has the client")


def find_server() -> str:
    """The server's program: beside this Python, or on the path."""
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
        """Start, and wait until it listens."""
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
                continue  # half written
            return found
        return []

    def kill(self) -> None:
        """End it at once, as a crash would."""
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
