"""A relay without a broker needs no NATS client; one with a broker names the missing extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

WITHOUT_NATS = """
import sys
sys.modules["nats"] = None
from scheduler_engine.cli.main import main
command = ["relay", "--kv-events-config", '{"endpoint": "tcp://127.0.0.1:0", "bind": true}']
for sys.argv[1:] in (
    [*command, "nowhere"],
    [*command, "tcp://127.0.0.1:9", "--jetstream", "nats://127.0.0.1:4222", "--worker", "pod"],
):
    try:
        main()
    except SystemExit:
        pass
"""


def test_a_relay_needs_the_extra_only_for_jetstream() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_NATS], capture_output=True, text=True, check=True)
    without, with_broker = ran.stderr.splitlines()
    assert "source='nowhere': is neither a URL nor an endpoint" in without
    assert "scheduler-components[jetstream]" in with_broker
