"""The rules of a log's writer: a snapshot first, retries in order, and a snapshot before a limit drops a message.

The model in ``kv_stream/test_log_cursor.py`` runs writers and readers together; here each rule is alone.
"""

from __future__ import annotations

import attrs
import pytest
from kit.events import numbered_batch

from observability.jetstream.log_writer import LogLimits, LogTraffic, LogWriter
from observability.kv_stream.log_records import LogMessage, Snapshot
from scheduler_components.kv_events import BatchDecoder, BatchEncoder

EPOCH, LATER_EPOCH = bytes(16), b"\1" * 16
LIMITS = LogLimits(
    max_msgs=8, max_bytes=100_000, max_age_s=100.0, overhead_bytes=10, buffer_steps=4, buffer_bytes=100_000
)
ROOM = 1_000_000


def make_writer(**limits: float) -> LogWriter:
    return LogWriter(epoch=EPOCH, rank=3, limits=attrs.evolve(LIMITS, **limits), traffic=LogTraffic())


def append(writer: LogWriter, *numbers: int) -> None:
    for number in numbers:
        writer.append(BatchEncoder().encode(numbered_batch(number), 3))


def build(writer: LogWriter) -> tuple[Snapshot, int]:
    slices = writer.build_snapshot()
    while True:
        try:
            next(slices)
        except StopIteration as made:
            result: tuple[Snapshot, int] = made.value
            return result


def store_snapshot(writer: LogWriter, now_s: float = 0.0) -> Snapshot:
    snapshot, traffic = build(writer)
    writer.on_snapshot_stored(snapshot, traffic, now_s)
    return snapshot


def pop(writer: LogWriter) -> LogMessage:
    message = writer.pop_message(ROOM)
    assert message is not None
    return message


def pop_all(writer: LogWriter) -> list[int]:
    found = []
    while (message := writer.pop_message(ROOM)) is not None:
        found.append(message.seq)
    return found


def test_nothing_is_sent_before_the_first_snapshot() -> None:
    writer = make_writer()
    append(writer, 0)
    assert writer.pop_message(ROOM) is None
    assert writer.heartbeat() is None
    assert (writer.snapshot_reason(0.0), writer.num_waiting) == ("the stream begins", 1)


def test_the_snapshot_has_what_came_before_it_and_the_log_what_comes_after() -> None:
    writer = make_writer()
    append(writer, 0, 1)
    snapshot = store_snapshot(writer)
    assert (snapshot.epoch, snapshot.first, snapshot.end, snapshot.log_seq) == (EPOCH, 0, 2, 0)
    assert (writer.num_waiting, writer.counters.collapsed, writer.counters.bases) == (0, 2, 1)
    append(writer, 2)
    message = pop(writer)
    assert (message.epoch, message.seq, message.digest) == (EPOCH, 2, writer.stream.digest)
    assert BatchDecoder().decode(message.payload).attn_dp_rank == 3
    heartbeat = writer.heartbeat()
    assert heartbeat is not None
    assert (heartbeat.next, heartbeat.snapshot_end, heartbeat.digest) == (3, 2, message.digest)


def test_a_batch_waits_until_it_is_acknowledged() -> None:
    writer = make_writer()
    store_snapshot(writer)
    append(writer, 0, 1)
    first, second = pop(writer), pop(writer)
    assert writer.num_waiting == 2
    writer.on_stored(second, 8)
    writer.on_stored(first, 7)
    assert (writer.num_waiting, writer.counters.stored, writer.log_seq) == (0, 2, 8)


def test_a_failed_message_and_those_after_it_are_sent_again_except_the_acknowledged() -> None:
    writer = make_writer()
    store_snapshot(writer)
    append(writer, 0, 1, 2, 3)
    messages = [pop(writer) for _ in range(4)]
    writer.on_failed(messages[1])
    writer.on_stored(messages[2], 9)
    assert pop_all(writer) == [1, 3]
    assert (writer.counters.failures, writer.counters.retried) == (1, 2)


def test_an_answer_about_an_earlier_epoch_changes_nothing() -> None:
    writer = make_writer()
    store_snapshot(writer)
    append(writer, 0)
    old = pop(writer)
    writer.start_epoch(LATER_EPOCH)
    store_snapshot(writer)
    append(writer, 5)
    assert pop_all(writer) == [0]
    writer.on_failed(old)
    assert pop_all(writer) == []
    writer.on_stored(old, 4)
    assert (writer.counters.stored, writer.num_waiting) == (0, 1)


def test_a_snapshot_of_an_earlier_epoch_does_not_count() -> None:
    writer = make_writer()
    snapshot, traffic = build(writer)
    writer.start_epoch(LATER_EPOCH)
    writer.on_snapshot_stored(snapshot, traffic, 0.0)
    assert writer.snapshot_reason(0.0) == "the stream begins"
    assert writer.counters.bases == 0


def test_a_known_id_of_a_message_sent_once_is_another_writers() -> None:
    writer = make_writer()
    store_snapshot(writer)
    append(writer, 0, 1)
    first, second = pop(writer), pop(writer)
    writer.on_failed(first)
    writer.on_stored(pop(writer), 5, is_duplicate=True)  # the broker had it, and only the answer was lost
    assert writer.snapshot_reason(0.0) == ""
    assert pop_all(writer) == [1]
    append(writer, 2)
    writer.on_stored(pop(writer), 6, is_duplicate=True)
    assert writer.snapshot_reason(0.0) == "another writer used the id of a batch"
    assert second.seq == 1
    assert (writer.counters.stored, writer.counters.collapsed) == (1, 1), "only the snapshot will have the batch"


def test_the_log_never_has_more_messages_after_the_snapshot_than_its_limit() -> None:
    writer = make_writer(buffer_steps=100)
    store_snapshot(writer)
    append(writer, *range(3))
    sent = [pop(writer) for _ in range(3)]
    assert writer.snapshot_reason(0.0) == ""
    append(writer, *range(3, 20))
    sent += [pop(writer) for _ in range(5)]
    assert pop_all(writer) == []
    for log_seq, message in enumerate(sent, 1):
        writer.on_stored(message, log_seq)
    assert writer.snapshot_reason(0.0) == "half of max_msgs is used up"
    store_snapshot(writer)
    append(writer, 20)
    assert pop_all(writer) == [20]


def test_the_log_never_has_more_bytes_after_the_snapshot_than_its_limit() -> None:
    payload = BatchEncoder().encode(numbered_batch(0), 3)
    size = len(payload) + LIMITS.overhead_bytes
    writer = make_writer(max_bytes=4 * size, max_msgs=1_000, buffer_steps=100)
    store_snapshot(writer)
    for _ in range(9):
        writer.append(payload)
    pop(writer)
    assert writer.snapshot_reason(0.0) == ""
    assert pop_all(writer) == [1, 2, 3]
    assert writer.snapshot_reason(0.0) == "half of max_bytes is used up"


def test_streams_of_one_worker_share_the_bytes_of_its_log() -> None:
    payload = BatchEncoder().encode(numbered_batch(0), 3)
    limits = attrs.evolve(LIMITS, max_bytes=2 * (len(payload) + LIMITS.overhead_bytes))
    traffic = LogTraffic()
    writers = [LogWriter(epoch=EPOCH, rank=rank, limits=limits, traffic=traffic) for rank in range(2)]
    for writer in writers:
        store_snapshot(writer)
        writer.append(payload)
        writer.append(payload)
    assert [len(pop_all(writer)) for writer in writers] == [2, 0]


def test_a_batch_larger_than_a_message_goes_into_a_snapshot() -> None:
    writer = make_writer()
    store_snapshot(writer)
    append(writer, 0)
    assert writer.pop_message(1) is None
    assert writer.snapshot_reason(0.0) == "a batch is larger than the broker's messages"
    store_snapshot(writer)
    assert (writer.snapshot_reason(0.0), writer.num_waiting, writer.counters.collapsed) == ("", 0, 1)


def test_batches_that_left_the_buffer_go_into_a_snapshot() -> None:
    writer = make_writer()
    store_snapshot(writer)
    append(writer, *range(10))
    assert writer.pop_message(ROOM) is None
    assert writer.snapshot_reason(0.0) == "the broker was unreachable for longer than batches are kept"
    snapshot = store_snapshot(writer)
    assert (snapshot.end, writer.counters.collapsed, pop_all(writer)) == (10, 10, [])


@pytest.mark.parametrize(
    ("now_s", "is_requested", "reason"),
    [
        (4.9, True, ""),
        (5.0, True, "a reader requests one"),
        (49.9, False, ""),
        (50.0, False, "half of max_age_s is over"),
    ],
)
def test_snapshots_for_readers_and_by_age_have_pauses(now_s: float, is_requested: bool, reason: str) -> None:
    writer = make_writer()
    store_snapshot(writer)
    if is_requested:
        writer.on_snapshot_requested()
    assert writer.snapshot_reason(now_s) == reason
    store_snapshot(writer, now_s)
    assert writer.snapshot_reason(now_s + 5.0) == "", "the request is answered"


def test_a_lost_snapshot_is_stored_before_anything_else() -> None:
    writer = make_writer()
    store_snapshot(writer)
    append(writer, 0)
    writer.on_snapshot_lost()
    assert writer.pop_message(ROOM) is None
    assert writer.heartbeat() is None
    writer.on_snapshot_failed()
    assert (writer.snapshot_reason(0.0), writer.counters.failures) == ("the stream begins", 1)


def test_a_snapshot_has_the_batches_that_came_while_it_was_built() -> None:
    writer = make_writer()
    append(writer, *range(6))  # two of them are folded
    slices = writer.build_snapshot()
    next(slices)
    append(writer, 6, 7)
    with pytest.raises(StopIteration) as made:
        while True:
            next(slices)
    snapshot, _ = made.value.value
    assert (snapshot.first, snapshot.end, snapshot.end_digest) == (2, 8, writer.stream.digest)
    assert writer.stream.pins == 0


def test_a_snapshot_that_is_given_up_releases_the_stream() -> None:
    writer = make_writer()
    append(writer, *range(6))
    slices = writer.build_snapshot()
    next(slices)
    assert writer.stream.pins == 1
    slices.close()
    assert writer.stream.pins == 0


def send_late(writer: LogWriter, num_late: int) -> list[LogMessage]:
    """Store a snapshot, and hand out the batch after it, while ``num_late`` messages before its end are in flight."""
    store_snapshot(writer)
    append(writer, *range(num_late))
    late = [pop(writer) for _ in range(num_late)]
    store_snapshot(writer)
    append(writer, num_late)
    assert pop(writer).seq == num_late
    return late


def test_messages_in_flight_leave_less_room_in_the_log_after_a_snapshot() -> None:
    """The log may get them behind messages that the snapshot does not cover, and then they count."""
    writer = make_writer(buffer_steps=100)
    late = send_late(writer, 3)
    append(writer, *range(4, 12))
    assert pop_all(writer) == [4, 5, 6, 7]
    assert writer.snapshot_reason(0.0) == "messages in flight may use up max_msgs"
    for log_seq, message in enumerate(late, 1):
        writer.on_stored(message, log_seq)
    assert pop_all(writer) == []
    store_snapshot(writer)
    assert writer.num_waiting == 0


def test_a_snapshot_is_due_while_messages_in_flight_still_leave_room() -> None:
    """A batch without room is in the snapshot alone, and every reader that is live must recover from that."""
    writer = make_writer(buffer_steps=100)
    send_late(writer, 5)
    assert writer.snapshot_reason(0.0) == "half of max_msgs is used up"
    append(writer, 6)
    assert pop_all(writer) == [6]


def test_messages_that_the_log_has_before_the_next_one_is_sent_take_no_room() -> None:
    writer = make_writer(buffer_steps=100)
    store_snapshot(writer)
    append(writer, *range(5))
    in_flight = [pop(writer) for _ in range(5)]
    store_snapshot(writer)
    assert writer.num_waiting == 0, "the snapshot has them"
    for log_seq, message in enumerate(in_flight, 1):
        writer.on_stored(message, log_seq)
    append(writer, *range(5, 20))
    assert pop_all(writer) == list(range(5, 13))


def test_messages_sent_between_building_and_storing_a_snapshot_count_too() -> None:
    """The snapshot covers them, and the log may get them behind the first one that it does not cover."""
    writer = make_writer(buffer_steps=100)
    store_snapshot(writer)
    append(writer, *range(3))
    snapshot, traffic = build(writer)
    assert pop_all(writer) == [0, 1, 2]
    append(writer, 3)
    assert pop_all(writer) == [3]
    writer.on_snapshot_stored(snapshot, traffic, 0.0)
    append(writer, *range(4, 12))
    assert pop_all(writer) == [4, 5, 6, 7]
