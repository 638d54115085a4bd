"""The publishing end of a stream: it numbers batches under the lock, wakes the sender, and counts what it refuses."""

from __future__ import annotations

import threading

import pytest
from kit.events import UnknownEvent, batch, numbered_batch

pytest.importorskip("nats", reason="needs nats-py: pip install scheduler-components[jetstream]")

from observability.jetstream.addresses import LogAddress
from observability.jetstream.log_writer import LogLimits, LogTraffic, LogWriter
from observability.jetstream.nats_sink import JetStreamSink, WrittenStream
from scheduler_components import BlockRemoved
from scheduler_components.kv_events import BatchDecoder, BatchEncoder

LIMITS = LogLimits(max_msgs=8, max_bytes=100_000, max_age_s=100.0, overhead_bytes=10)


class SinkBench:
    """A sink and the calls that it makes."""

    def __init__(self) -> None:
        writer = LogWriter(epoch=bytes(16), rank=2, limits=LIMITS, traffic=LogTraffic())
        self.stream = WrittenStream(LogAddress("pod", 2), writer)
        self.lock = threading.Lock()
        self.woken: list[WrittenStream] = []
        self.num_closes = 0
        self.sink = JetStreamSink(self.stream, BatchEncoder(), self.lock, wake=self.wake, close=self.close)

    def wake(self, stream: WrittenStream) -> None:
        assert not self.lock.locked(), "the sender would wait for the lock that woke it"
        self.woken.append(stream)

    def close(self) -> None:
        self.num_closes += 1

    def published(self) -> list[object]:
        stream = self.stream.writer.stream
        payloads = [stream.payload(seq) for seq in range(stream.first, stream.next_sequence)]
        return [event for payload in payloads for event in BatchDecoder().decode(payload).events]


def test_batches_are_numbered_with_the_rank_of_the_stream() -> None:
    bench = SinkBench()
    bench.sink.publish(numbered_batch(7))
    bench.sink.publish(numbered_batch(8))
    bench.sink.idle()
    assert bench.published() == [BlockRemoved((7,)), BlockRemoved((8,))]
    assert BatchDecoder().decode(bench.stream.writer.stream.payload(0)).attn_dp_rank == 2
    assert bench.woken == [bench.stream] * 2
    stats = bench.sink.stats()
    assert (stats.last_sequence, stats.batches_buffered, stats.batches_pending, stats.batches_sent) == (1, 2, 2, 0)


def test_an_event_that_cannot_be_encoded_is_left_out_and_counted() -> None:
    bench = SinkBench()
    bench.sink.publish(batch(BlockRemoved((1,)), UnknownEvent(1), BlockRemoved((2**64,))))
    assert bench.published() == [BlockRemoved((1,))]
    assert bench.sink.stats().events_refused == 2


def test_a_batch_of_nothing_but_refused_events_takes_no_number() -> None:
    bench = SinkBench()
    bench.sink.publish(batch(UnknownEvent(1)))
    assert bench.sink.stats().last_sequence == -1
    assert bench.sink.stats().events_refused == 1


def test_another_epoch_begins_empty_and_wakes_the_sender() -> None:
    bench = SinkBench()
    bench.sink.publish(numbered_batch(7))
    bench.sink.start_epoch()
    assert bench.published() == []
    assert bench.stream.writer.epoch != bytes(16)
    assert len(bench.woken) == 2


def test_the_upstream_state_is_in_the_next_heartbeat() -> None:
    bench = SinkBench()
    bench.sink.set_upstream_state("partial")
    assert bench.stream.writer.upstream == "partial"
    bench.sink.set_upstream_state(None)
    assert bench.stream.writer.upstream is None


def test_shutdown_closes_the_writer() -> None:
    bench = SinkBench()
    bench.sink.shutdown()
    assert bench.num_closes == 1
