"""Who relays without a broker needs no client of one; who asks for a broker is told what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
def test_a_relay_asks_for_the_extra_only_when_it_is_needed(source: str, options: tuple[str, ...], said: str) -> None:
    settings = '{"endpoint": "tcp://127.0.0.1:0", "bind": true}'
    command = [sys.executable, "-c", WITHOUT_NATS, "relay", source, "--kv-events-config", settings, *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1
