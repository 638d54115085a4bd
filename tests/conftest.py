"""Fixtures that all tests share, and the lengths of searches.

Markers say what a test needs: ``pytest --markers`` lists them, and ``-m "not processes and not site"`` is quick.

``make test`` runs the tests without a marker of another target (``engines_only``, ``soak_only``, ``site``, ``types``,
``packaging``), with the profile ``default``. ``make soak`` runs the tests marked ``soak`` again with the profile
``soak``: a hundred times the examples for a property that asks for ``num_examples``, and the long form of a test that
asks for ``soaking``. CI runs the suite with the profile ``ci``, whose examples are the same in each run, and the tests
marked ``soak_only`` with new ones. To repeat a failure: ``pytest TEST --hypothesis-seed N``.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import json
import os
import secrets
import select
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from kit.waiting import wait_until

# Loaded machines are slow, so a deadline per example would measure the machine.
settings.register_profile("default", deadline=None, max_examples=30, print_blob=True)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None)
settings.register_profile("soak", settings.get_profile("default"), max_examples=1_000)
# `make mutants`: the same examples for each variant, without shrinking.
settings.register_profile(
    "mutants",
    settings.get_profile("default"),
    max_examples=100,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("default")

# Each new client of httpx reads the 140 certificates of certifi, also for http. From OpenSSL's own folder it reads one
# when it needs it. Tests make hundreds of clients.
os.environ.setdefault("SSL_CERT_DIR", ssl.get_default_verify_paths().openssl_capath)


LONGEST_FILES = (
    "test_engine_commands.py",
    "test_torch_sync.py",
    "test_zmq_relay_processes.py",
    "test_nats_subscriber.py",
    "test_engine.py",
    "test_zmq_sinks_jetstream_processes.py",
    "test_route_command.py",
    "test_http_proxy.py",
    "test_docs.py",
    "test_engine_commands_hicache.py",
    "test_doctor.py",
    "test_zmq_publisher_processes.py",
    "test_http_server.py",
    "test_delivery_world.py",
    "test_planted_bugs.py",
    "test_http_fleet.py",
    "test_hicache_torchrun.py",
)
"""They run first, so that no worker is left alone with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop, for two minutes at most."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(asyncio.wait_for(test(**arguments), timeout=120))
    return True


def pytest_collection_finish() -> None:
    """Exempt what the collection has made from garbage collection: tests that collect would walk it each time."""
    gc.freeze()


pytest_plugins = ["kit.faults", "kit.http_worker", "kit.served", "kit.sockets", "kit.tiny_model"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close what a test enters here when the test ends, in reverse order."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def soaking() -> bool:
    """True if the profile ``soak`` is loaded, so that tests run their long forms."""
    return settings.get_current_profile_name() == "soak"


@pytest.fixture
def free_ports() -> Callable[[int], int]:
    """Find a block of free ports on loopback; return the lowest.

    They are closed again before the test uses them, so they are outside the range that the system assigns itself.
    """

    def find(count: int) -> int:
        for _ in range(100):
            held: list[socket.socket] = []
            base = 15_000 + secrets.randbelow(17_000)
            try:
                for port in range(base, base + count):
                    held.append(socket.socket())
                    held[-1].bind(("127.0.0.1", port))
            except OSError:
                continue
            else:
                return base
            finally:
                for each in held:
                    each.close()
        raise AssertionError(f"no {count} free ports in a row")

    return find


@pytest.fixture
def trace_beyond_the_host(tmp_path: Path) -> Path:
    """A trace that needs storage on any machine: 12 prompts of 1,024 tokens, repeated three times in a circle.

    Tiers of fewer than 12,288 tokens together that evict the least recently used prompt have always evicted a prompt
    before it is repeated.
    """
    lines = [
        {"timestamp": 400 * at, "input_length": 1024, "output_length": 4, "hash_ids": [2 * chat, 2 * chat + 1]}
        for at, chat in enumerate([*range(12)] * 3)
    ]
    trace = tmp_path / "circle.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return trace


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Wait until a condition holds; fails after thirty seconds."""
    return wait_until


@pytest.fixture(scope="session")
def die_with_us() -> Callable[[], object] | None:
    """``preexec_fn`` of a child that must not outlive the tests; None if the system does not support it.

    The child ends with the thread that starts it, so start it on a thread that stays.
    """
    if sys.platform != "linux":
        return None
    pr_set_pdeathsig = 1
    return partial(ctypes.CDLL(None).prctl, pr_set_pdeathsig, signal.SIGKILL)


class RelayProcess:
    """``scheduler-components relay`` in its own process; ``url`` is its HTTP address."""

    DEADLINE_S = 40.0

    def __init__(
        self, *sources: str, before: Callable[[], object] | None, arguments: Sequence[str], **settings: object
    ) -> None:
        command = [sys.executable, "-m", "scheduler_components", "relay", *sources, *arguments]
        loopback = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "bind": True}
        config = ["--kv-events-config", json.dumps(loopback | settings)]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": before}
        self.process = subprocess.Popen([*command, *config], text=True, **options)
        ready, _, _ = select.select([self.process.stdout], [], [], self.DEADLINE_S)
        assert ready, "the relay did not start"
        words = self.process.stdout.readline().split()  # type: ignore[union-attr]
        self.url = words[words.index("says") - 1].removesuffix("/health")

    def get(self, path: str) -> Any:
        """Return the reply to ``path``, also to an error status."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            answer = direct.open(self.url + path, timeout=self.DEADLINE_S)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            text = answer.read().decode()
            return json.loads(text) if "json" in answer.headers["content-type"] else text

    def stop(self) -> tuple[int, str]:
        """Terminate it; return its exit code and its standard error."""
        self.process.terminate()
        _, complaints = self.process.communicate(timeout=self.DEADLINE_S)
        return self.process.returncode, complaints

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def start_relay(die_with_us: Callable[[], object] | None) -> Iterator[Callable[..., RelayProcess]]:
    """Start a relay process: ``start_relay(*sources, arguments=("--option", "value"), **settings)``."""
    with ExitStack() as stack:

        def start(*sources: str, arguments: Sequence[str] = (), **settings: object) -> RelayProcess:
            relay = RelayProcess(*sources, before=die_with_us, arguments=arguments, **settings)
            stack.callback(relay.end)
            return relay

        yield start
