"""The publisher describes its endpoints as a process on the same machine dials them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from scheduler_components.engines.sglang_publisher import SglangEventPublisher


@pytest.mark.parametrize(
    ("bound", "described"),
    [
        ("tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[::]:5557", "tcp://[::1]:5557"),
        ("tcp://127.0.0.2:5557", "tcp://127.0.0.2:5557"),
        ("ipc:///run/events", "ipc:///run/events"),
        ("ipc://@events", "ipc://@events"),
        ("inproc://events", None),
    ],
)
def test_the_described_endpoint_is_reachable_from_this_machine(bound: str, described: str | None) -> None:
    stream = SimpleNamespace(endpoint=bound, replay_endpoint=None)
    listening = SglangEventPublisher(dp_rank=0, topic="kv", binds=True, stream=stream)
    expected = {"dp_rank": 0, "endpoint": described, "topic": "kv", "block_size": 64}
    assert listening.describe_local_source(64) == (expected if described else None)
    dialing = SglangEventPublisher(dp_rank=0, topic="kv", binds=False, stream=stream)
    assert dialing.describe_local_source(64) is None
