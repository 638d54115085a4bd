"""A relay without a broker needs no NATS client; one with a broker names the missing extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

WITHOUT_NATS = """
import sys
sys.modules["nats"] = None
from scheduler_components.reference.cli.main import main
sys.exit(main())
"""
BROKER = ("--jetstream", "nats://127.0.0.1:4222", "--worker", "pod")


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("nowhere", (), "source='nowhere': is neither a URL nor an endpoint"),
        ("tcp://127.0.0.1:9", BROKER, "scheduler-components[jetstream]"),
    ],
)
def test_a_relay_needs_the_extra_only_for_jetstream(source: str, options: tuple[str, ...], said: str) -> None:
    settings = '{"endpoint": "tcp://127.0.0.1:0", "bind": true}'
    command = [sys.executable, "-c", WITHOUT_NATS, "relay", source, "--kv-events-config", settings, *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1
