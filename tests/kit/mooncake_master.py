"""Mooncake's real master over TCP on this machine, where its wheel and its system libraries are installed."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import pytest

from scheduler_components.hicache import MooncakeAddress

MASTER = shutil.which("mooncake_master", path=sysconfig.get_path("scripts"))


def client_loads() -> bool:
    """Ask in another process: without its system libraries the import fails, and what it loads stays loaded."""
    if MASTER is None or importlib.util.find_spec("mooncake") is None:
        return False
    attempt = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, check=False)
    return attempt.returncode == 0


needs_mooncake = pytest.mark.skipif(
    not client_loads(),
    reason="needs scheduler-components[mooncake] and libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1",
)


def free_ports(num_ports: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def master_of(log: Path) -> Iterator[tuple[subprocess.Popen[bytes], MooncakeAddress]]:
    """Start a master; it cannot say which ports it took, so where another process was quicker it starts again."""
    for _ in range(5):
        rpc, http, metrics = free_ports(3)
        options = {
            "rpc_port": rpc,
            "rpc_address": "127.0.0.1",
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": "127.0.0.1",
            "http_metadata_server_port": http,
            "metrics_port": metrics,
            "default_kv_lease_ttl": 500,
        }
        arguments = [str(MASTER), *(f"--{name}={value}" for name, value in options.items())]
        with log.open("ab") as output, subprocess.Popen(arguments, stdout=output, stderr=output) as master:
            try:
                if comes_up(master, (rpc, http)):
                    metadata = f"http://127.0.0.1:{http}/metadata"
                    yield (
                        master,
                        MooncakeAddress(
                            master=f"127.0.0.1:{rpc}", metadata=metadata, segment_bytes=64 << 20, buffer_bytes=32 << 20
                        ),
                    )
                    return
            finally:
                master.kill()
    raise AssertionError(log.read_text())


def comes_up(master: subprocess.Popen[bytes], ports: tuple[int, ...]) -> bool:
    pause = Event()
    for _ in range(1200):
        if master.poll() is not None:
            return False
        if all(answers(port) for port in ports):
            return True
        pause.wait(0.05)
    return False
