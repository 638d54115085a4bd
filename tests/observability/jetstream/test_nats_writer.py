"""One run through all layers: publisher, writer, real server, reader."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
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


def test_a_reader_says_why_the_broker_stores_nothing_and_is_live_when_it_can(
    nats_server: Any, tmp_path: Path, poll_until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """The server measures its disk when it starts. A full disk has the effect of this limit."""
    limits = tmp_path / "limits.conf"
    limits.write_text("jetstream { max_file_store: 1000 }")
    nats_server.kill()
    nats_server.options = ("-c", str(limits))
    nats_server.start()
    config = JetStreamConfig(servers=nats_server.url, max_bytes=1_000_000)
    with (
        open_jetstream_writer(config, "pod-1") as writer,
        open_jetstream_subscriber(config, [LogAddress("pod-1")]) as reader,
    ):
        writer.sink(0).publish(KVEventBatch(1.0, (stored(1, 2),), 0))
        poll_until(reader, lambda: "insufficient storage" in reader.stats()[0].last_error)
        assert reader.stats()[0].state is StreamState.CONNECTING
        nats_server.kill()
        limits.write_text("jetstream { max_file_store: 100MB }")
        nats_server.start()
        poll_until(reader, lambda: reader.stats()[0].state is StreamState.LIVE)
        assert reader.blocks(0) == {1, 2}
        poll_until(reader, lambda: not reader.stats()[0].last_error)
        poll_until(reader, lambda: writer.stats()[0].waiting == 0)
    reasons = [each.getMessage() for each in caplog.records if "insufficient storage" in each.getMessage()]
    assert [each.split(": ")[1].split(" (")[0] for each in reasons] == [
        "JetStream is not ready",
        "the writer cannot store batches",
    ]
    assert all("it measures the disk when it starts" in each for each in reasons)


def test_a_problem_of_a_writer_is_bounded_printable_and_logged_once(
    nats_server: Any, poll_until: Callable[..., None], wait_for_whole: Any, feed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config, address = JetStreamConfig(servers=nats_server.url), LogAddress("pod-1")
    loop = asyncio.new_event_loop()
    with open_jetstream_subscriber(config, [address]) as reader, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        stack.callback(loop.close)
        stack.callback(thread.join)
        stack.callback(loop.call_soon_threadsafe, loop.stop)

        async def send(*texts: bytes) -> None:
            client = await nats.connect(nats_server.url)
            for text in texts:
                await client.publish(address.problem_subject, text)
            await client.close()

        def problem() -> str:
            return reader.stats()[0].last_error

        def has_problem(*texts: bytes) -> bool:
            asyncio.run_coroutine_threadsafe(send(*texts), loop).result(10.0)
            return bool(problem())

        poll_until(reader, lambda: has_problem(b"\x1b[2J" + b"x" * 9_999))
        assert problem() == "?[2J" + "x" * 496
        assert has_problem(b"\x1b[2J" + b"x" * 9_999, b"full")
        poll_until(reader, lambda: problem() == "full")
        assert [each.getMessage().rpartition(": ")[2][:4] for each in caplog.records] == ["?[2J", "full"]
        with open_jetstream_writer(config, "pod-1") as writer:
            feeder = feed(writer.sink(0))
            feeder.store(1)
            wait_for_whole(reader, feeder)
            poll_until(reader, lambda: not problem())
