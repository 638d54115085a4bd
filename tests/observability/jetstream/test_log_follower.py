"""A follower of a log carries out instructions, keeps its deadlines, and drops messages of an ended reading."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
from kit.events import stored_run
from kit.follower_bench import POLICY, Diary

from observability.jetstream.log_follower import LogFollower
from observability.kv_stream import BatchApplier, BlockView, StreamState, Tier
from observability.kv_stream.digest_cursor import NO_EPOCH, Position
from observability.kv_stream.log_records import LogHeartbeat, LogMessage, Snapshot, SnapshotPointer
from scheduler_components import KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, EventStream

EPOCH = b"\7" * 16


class RecordingChannel:
    """Keeps the requests of a follower."""

    def __init__(self) -> None:
        self.pointers: list[int] = []
        self.snapshots: list[tuple[int, SnapshotPointer]] = []
        self.readings: list[tuple[int, int]] = []
        self.num_wanted = 0

    def read_pointer(self, request_id: int) -> None:
        self.pointers.append(request_id)

    def read_snapshot(self, request_id: int, pointer: SnapshotPointer) -> None:
        self.snapshots.append((request_id, pointer))

    def request_snapshot(self) -> None:
        self.num_wanted += 1

    def read_log(self, reading_id: int, log_seq: int) -> None:
        self.readings.append((reading_id, log_seq))


class LogBench:
    """A follower of one log, and the writer's stream as it truly is. A snapshot covers its first two batches."""

    def __init__(self) -> None:
        self.channel, self.diary, self.view = RecordingChannel(), Diary(), BlockView()
        self.follower = LogFollower(
            applier=BatchApplier(
                rank=0, view=self.view, decoder=BatchDecoder(), listener=self.diary, wall_clock=lambda: 0.0
            ),
            channel=self.channel,
            policy=POLICY,
            jitter=lambda: 0.0,
        )
        self.stream = EventStream(epoch=EPOCH, max_steps=100, max_bytes=100_000)
        for first in range(0, 12, 2):
            self.stream.append(BatchEncoder().encode(KVEventBatch(1.0, (stored_run(first, 2),)), 0))
        self.pointer = SnapshotPointer(EPOCH, 2, 0)
        self.follower.begin(0.0)

    def snapshot(self) -> Snapshot:
        payloads = [self.stream.payload(seq) for seq in range(2)]
        return Snapshot(EPOCH, 0, self.stream.digest_before(0), [], payloads, self.stream.digest_before(2), 10)

    def message(self, seq: int) -> LogMessage:
        return LogMessage(11 + seq - 2, EPOCH, seq, self.stream.digest_before(seq + 1), self.stream.payload(seq))

    def heartbeat(self, next_seq: int = 4) -> LogHeartbeat:
        return LogHeartbeat(EPOCH, next_seq, self.stream.digest_before(next_seq), 2)

    @property
    def state(self) -> StreamState:
        return self.follower.cursor.state

    def sync(self, now_s: float = 0.0) -> None:
        """Bring the follower from nothing to the end of the snapshot."""
        run(self.follower.on_heartbeat(self.heartbeat(), now_s))
        run(self.follower.on_pointer_read(self.channel.pointers[-1], self.pointer, now_s))
        request_id, pointer = self.channel.snapshots[-1]
        assert pointer == self.pointer
        run(self.follower.on_snapshot_read(request_id, self.snapshot(), now_s))

    def receive(self, *numbers: int, now_s: float = 0.0) -> None:
        for seq in numbers:
            run(self.follower.on_message(self.channel.readings[-1][0], self.message(seq), now_s))

    @property
    def blocks(self) -> set[int]:
        return set(self.view.blocks(0, Tier.DEVICE))


def run(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def test_a_snapshot_and_the_log_after_it_make_the_view_live() -> None:
    bench = LogBench()
    bench.sync()
    assert bench.channel.readings == [(1, 11)], "the log is read from after the snapshot"
    assert bench.state is not StreamState.LIVE
    bench.receive(2, 3)
    assert (bench.state, bench.blocks) == (StreamState.LIVE, set(range(8)))
    assert bench.follower.position.last_seq == 3
    assert bench.diary.states[-1] is StreamState.LIVE


def test_a_message_of_an_ended_reading_is_dropped() -> None:
    bench = LogBench()
    bench.sync()
    old = bench.channel.readings[-1][0]
    bench.follower.on_reconnected()
    assert bench.channel.readings[-1] == (old + 1, 11)
    for seq in (2, 3):
        run(bench.follower.on_message(old, bench.message(seq), 0.0))
    assert bench.state is StreamState.SYNCING
    bench.receive(2, 3)
    assert bench.state is StreamState.LIVE


def test_before_the_first_heartbeat_a_reconnect_reads_nothing() -> None:
    bench = LogBench()
    bench.follower.on_reconnected()
    assert bench.channel.readings == []


def test_a_pointer_that_does_not_come_is_requested_again_after_a_pause() -> None:
    bench = LogBench()
    run(bench.follower.on_heartbeat(bench.heartbeat(), 0.0))
    assert len(bench.channel.pointers) == 1
    assert bench.follower.next_deadline_s <= POLICY.answer_timeout_s
    bench.follower.tick(POLICY.answer_timeout_s)
    assert len(bench.channel.pointers) == 1
    run(bench.follower.on_heartbeat(bench.heartbeat(), POLICY.answer_timeout_s))
    bench.follower.tick(POLICY.answer_timeout_s + POLICY.retry_max_s)
    assert len(bench.channel.pointers) == 2
    run(bench.follower.on_pointer_read(bench.channel.pointers[0], bench.pointer, 14.0))
    assert bench.channel.snapshots == [], "the answer to the first request came too late"


def test_a_snapshot_has_longer_to_come_than_a_pointer() -> None:
    bench = LogBench()
    run(bench.follower.on_heartbeat(bench.heartbeat(), 0.0))
    run(bench.follower.on_pointer_read(bench.channel.pointers[0], bench.pointer, 0.0))
    for second in range(1, 12 * int(POLICY.answer_timeout_s), 2):
        run(bench.follower.on_heartbeat(bench.heartbeat(), float(second)))
        bench.follower.tick(float(second))
    assert len(bench.channel.pointers) == 1
    assert bench.follower.cursor.open_request_id is not None


def test_silence_ends_live_and_a_long_silence_clears_the_view() -> None:
    bench = LogBench()
    bench.sync()
    bench.receive(2, 3)
    bench.follower.tick(POLICY.answer_timeout_s - 0.1)
    assert bench.state is StreamState.LIVE
    bench.follower.tick(POLICY.answer_timeout_s)
    assert (bench.state, bench.blocks) == (StreamState.CONNECTING, set(range(8)))
    bench.follower.tick(POLICY.answer_timeout_s + POLICY.dead_after_s)
    assert (bench.state, bench.blocks, len(bench.diary.cleared)) == (StreamState.DEAD, set(), 1)
    assert bench.follower.next_deadline_s == math.inf


def test_a_writer_that_never_comes_is_dead_in_time() -> None:
    bench = LogBench()
    assert bench.follower.next_deadline_s == POLICY.dead_after_s
    bench.follower.tick(POLICY.dead_after_s)
    assert bench.state is StreamState.DEAD


def test_a_lost_broker_is_noticed_immediately() -> None:
    bench = LogBench()
    bench.sync()
    bench.receive(2, 3)
    bench.follower.on_disconnected(1.0)
    assert bench.state is StreamState.CONNECTING


def test_a_hole_in_the_log_is_reported_to_the_listener() -> None:
    gaps: list[tuple[int, int]] = []
    bench = LogBench()
    bench.diary.on_gap = lambda rank, expected, seq: gaps.append((expected, seq))  # type: ignore[method-assign]
    bench.sync()
    bench.receive(2, 3, 5)
    assert gaps == [(4, 5)]
    assert bench.follower.position.last_seq == 3


def test_an_unreadable_batch_makes_the_view_partial() -> None:
    bench = LogBench()
    bench.sync()
    bench.receive(2, 3)
    bench.stream.append(b"nonsense")
    bench.receive(4, 5, 6)
    assert bench.state is not StreamState.LIVE
    assert bench.diary.unreadable == [6]
    assert bench.follower.stats("kv.log.pod").decode_errors == 1


def test_a_flood_of_heartbeats_costs_a_bounded_number_of_requests() -> None:
    """Every client of the broker may send heartbeats: of another epoch, or of a position that was never reached."""
    bench = LogBench()
    bench.sync()
    bench.receive(2, 3)
    other = LogHeartbeat(b"o" * 16, 9, bytes(8), 0)
    for number, heartbeat in enumerate((other, LogHeartbeat(EPOCH, 4, b"notadig!", 2)) * 500):
        now_s = number / 100
        run(bench.follower.on_heartbeat(heartbeat, now_s))
        bench.follower.tick(now_s)
        run(bench.follower.on_pointer_read(bench.channel.pointers[-1], bench.pointer, now_s))
        if bench.channel.snapshots:
            run(bench.follower.on_snapshot_read(bench.channel.snapshots[-1][0], bench.snapshot(), now_s))
    num_allowed = 4 + 10.0 / POLICY.request_interval_s
    assert 4 < len(bench.channel.pointers) <= num_allowed
    bench.receive(2, 3, now_s=10.0)
    run(bench.follower.on_heartbeat(bench.heartbeat(), 10.0))
    assert bench.state is StreamState.LIVE


def test_a_heartbeat_without_an_epoch_proves_nothing() -> None:
    """A forged one: the epoch of a reader that has read nothing yet is 16 zero bytes."""
    bench = LogBench()
    run(bench.follower.on_heartbeat(LogHeartbeat(NO_EPOCH, 0, Position().digest, 0), 0.0))
    assert bench.state is not StreamState.LIVE
    assert len(bench.channel.pointers) == 1


def test_a_failed_request_that_finds_no_credit_is_sent_when_there_is_some() -> None:
    bench = LogBench()
    bench.follower.policy = attrs.evolve(POLICY, request_interval_s=3.0)
    run(bench.follower.on_heartbeat(bench.heartbeat(), 0.0))
    bench.follower.cursor.counters.credit = 0
    run(bench.follower.on_pointer_read(1, None, 0.0))
    for second, num_requests in ((1, 1), (2, 1), (3, 1), (4, 2)):
        bench.follower.tick(float(second))
        assert len(bench.channel.pointers) == num_requests
