"""One run through all layers: publisher, writer, real server, reader."""

from __future__ import annotations

from typing import Any

import pytest
from kit.events import stored

from observability.jetstream import JetStreamConfig, LogAddress, open_jetstream_subscriber, open_jetstream_writer
from observability.kv_stream import StreamState, Tier
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

pytestmark = [pytest.mark.sockets, pytest.mark.processes]


def test_a_reader_has_the_blocks_of_the_publisher(nats_server: Any) -> None:
    config = JetStreamConfig(servers=nats_server.url)
    with open_jetstream_writer(config, "http://pod-1:30000", topic="kv") as writer:
        sink = writer.sink(0)
        sink.publish(KVEventBatch(1.0, (stored(1, 2),), 0))
        with open_jetstream_subscriber(config, [LogAddress("http://pod-1:30000", 0, "kv")]) as reader:
            assert reader.wait_until(0, 0, 20.0), reader.stats()
            sink.publish(KVEventBatch(2.0, (stored(3), BlockRemoved((1,))), 0))
            assert reader.wait_until(0, 1, 20.0), reader.stats()
            stats = reader.stats()[0]
            assert stats.state is StreamState.LIVE
            assert reader.blocks(0, Tier.DEVICE) == {2, 3}
            sink.publish(KVEventBatch(3.0, (AllBlocksCleared(),), 0))
            assert reader.wait_until(0, 2, 20.0), reader.stats()
            assert not reader.blocks(0, Tier.DEVICE)
            sink.publish(KVEventBatch(4.0, (BlockStored((4,), None, (4,), 1, None, group_idx=1),), 0))
            assert reader.wait_until(0, 3, 20.0), reader.stats()
            assert (reader.blocks(0, group_idx=1), reader.match_lengths([4], group_idx=1)) == ({4}, {0: 1})
            assert reader.stats()[0].state is StreamState.LIVE


def test_an_event_that_cannot_be_encoded_is_left_out(nats_server: Any) -> None:
    config = JetStreamConfig(servers=nats_server.url)
    with open_jetstream_writer(config, "pod-1") as writer:
        sink = writer.sink(0)
        sink.publish(KVEventBatch(1.0, (stored(1), BlockRemoved(("no hash",)), stored(2)), 0))  # type: ignore[arg-type]
        with open_jetstream_subscriber(config, [LogAddress("pod-1")]) as reader:
            assert reader.wait_until(0, 0, 20.0), reader.stats()
            assert reader.blocks(0) == {1, 2}
        assert sink.stats().events_refused == 1
