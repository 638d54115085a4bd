"""Bare endpoints need no HTTP client; a URL without one raises an error that names the extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

from observability.kv_stream import discover
from scheduler_components import StartError

pytestmark = pytest.mark.processes

BARE = """
import sys
sys.modules["httpx"] = None
from observability.kv_stream import static_address
from observability import discover, open_async_subscriber, open_subscriber, watch_streams
from observability.kv_stream import *
with open_subscriber([static_address("tcp://127.0.0.1:9")]) as subscriber:
    subscriber.poll(0)
"""


def test_bare_endpoints_are_followed_without_httpx() -> None:
    ran = subprocess.run([sys.executable, "-W", "error", "-c", BARE], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_url_without_httpx_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(StartError, match=r"scheduler-components\[http\]"):
        discover("http://127.0.0.1:1")
