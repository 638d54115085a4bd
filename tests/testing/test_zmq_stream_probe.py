"""A probe records the raw frames of a stream from its construction on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import zmq
from kit.events import numbered_batch

from scheduler_components.kv_events import Endpoint
from scheduler_components.testing import ScriptedPublisher
from scheduler_components.testing.zmq_stream_probe import StreamProbe

pytestmark = pytest.mark.sockets


def test_a_probe_keeps_the_live_frames_after_it_is_closed(eventually: Callable[..., None]) -> None:
    with ScriptedPublisher.open() as publisher, zmq.Context() as context:
        probe = StreamProbe(context, Endpoint.parse(publisher.endpoint), None, while_waiting=publisher.idle)
        try:
            eventually(lambda: probe.receive(1) or publisher.num_subscribers)
            for number in range(3):
                publisher.publish(numbered_batch(number))
            eventually(lambda: probe.receive(1) or len(probe.live) == 3)
        finally:
            probe.close()
    assert [int.from_bytes(frames[1], "big") for frames in probe.live] == sorted(publisher.sent)
    assert [frames[2] for frames in probe.live] == list(publisher.sent.values())
