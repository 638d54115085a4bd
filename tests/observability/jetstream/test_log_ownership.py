"""Of several writers of a stream, the one that stored the last pointer owns it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from observability.jetstream.log_ownership import LogOwnership
from observability.jetstream.log_writer import LogLimits, LogTraffic, LogWriter
from observability.kv_stream.log_records import Snapshot, SnapshotPointer

EPOCHS = (b"0" * 16, b"1" * 16)


class PointerBucket:
    """The pointer and its revision, and two writers that read and replace it."""

    def __init__(self) -> None:
        self.pointer: SnapshotPointer | None = None
        self.revision = 0
        self.writers = (LogOwnership(), LogOwnership())
        self.last_stored = -1
        self.in_transit: list[tuple[int, SnapshotPointer | None, int, int]] = []

    def request(self, number: int) -> None:
        """The broker answers a request, and the answer comes later."""
        self.in_transit.append((number, self.pointer, self.revision, self.writers[number].num_stored))

    def receive(self) -> None:
        """The oldest answer comes."""
        if self.in_transit:
            number, pointer, revision, num_stored = self.in_transit.pop(0)
            self.writers[number].on_pointer_read(pointer, revision, num_stored=num_stored)

    def read(self, number: int) -> None:
        writer = self.writers[number]
        writer.on_pointer_read(self.pointer, self.revision, num_stored=writer.num_stored)

    def store(self, number: int, *, is_read_before: bool) -> None:
        """Replace the pointer, as a writer does that has not been superseded."""
        writer = self.writers[number]
        if is_read_before:
            self.read(number)
        if writer.is_superseded:
            return
        known, pointer = writer.revision, writer.next_pointer(snapshot_of(EPOCHS[number]))
        if known == self.revision:
            self.pointer, self.revision = pointer, self.revision + 1
            writer.on_pointer_stored(pointer, self.revision)
            self.last_stored = number

    def delete(self) -> None:
        """The bucket is deleted and created again: revisions start over."""
        self.pointer, self.revision = None, 0


def snapshot_of(epoch: bytes) -> Snapshot:
    return Snapshot(epoch, 0, b"d" * 8, [], [], b"d" * 8, 0)


def new_writer() -> LogWriter:
    limits = LogLimits(max_msgs=16, max_bytes=4_000, max_age_s=10.0, overhead_bytes=100)
    return LogWriter(epoch=EPOCHS[0], rank=0, limits=limits, traffic=LogTraffic())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(0, 1)),
        st.tuples(st.just("request"), st.integers(0, 1)),
        st.just(("receive",)),
        st.tuples(st.just("store"), st.integers(0, 1), st.booleans()),
        st.just(("delete",)),
    ),
    max_size=12,
)


def run(steps: Sequence[tuple]) -> PointerBucket:
    """Carry out the steps."""
    bucket = PointerBucket()
    for step in steps:
        match step:
            case ("read", number):
                bucket.read(number)
            case ("request", number):
                bucket.request(number)
            case ("receive",):
                bucket.receive()
            case ("store", number, is_read_before):
                bucket.store(number, is_read_before=is_read_before)
            case _:
                bucket.delete()
    return bucket


def check_one_owner(steps: Sequence[tuple]) -> None:
    """Carry out the steps. Then the writer of the present pointer goes on, and any other that has begun stops."""
    bucket = run(steps)
    if bucket.pointer is not None:
        owner, other = bucket.writers[bucket.last_stored], bucket.writers[1 - bucket.last_stored]
        for number in (0, 1):
            bucket.read(number)
        assert not owner.is_superseded
        assert other.is_superseded or not other.has_begun


@given(steps=STEPS)
@settings(max_examples=num_examples(2))
def test_the_writer_of_the_present_pointer_goes_on_and_any_other_that_has_begun_stops(steps: list[tuple]) -> None:
    check_one_owner(steps)


def test_a_replaced_writer_stops() -> None:
    check_one_owner([("store", 0, True), ("store", 1, True)])


def test_a_writer_that_begins_replaces_an_older_one() -> None:
    bucket = run([("store", 0, True), ("store", 1, True)])
    assert bucket.last_stored == 1
    assert not bucket.writers[1].is_superseded


def test_a_pointer_of_another_bucket_is_not_the_own_one_because_of_its_revision() -> None:
    """A simulated world found it in 0.4: both writers went on."""
    check_one_owner([("store", 0, True), ("delete",), ("store", 1, True)])


def test_an_answer_that_comes_after_the_own_pointer_names_no_third_writer() -> None:
    """A simulated world found it in 0.4: both writers stopped."""
    check_one_owner([("store", 0, True), ("request", 1), ("store", 1, True), ("receive",)])


def test_a_snapshot_goes_to_the_object_that_the_pointer_does_not_name() -> None:
    ownership = LogOwnership()
    slots = []
    for revision in range(1, 4):
        pointer = ownership.next_pointer(snapshot_of(EPOCHS[0]))
        ownership.on_pointer_stored(pointer, revision)
        slots.append(pointer.slot)
    assert slots == [0, 1, 0]
    ownership.on_pointer_read(SnapshotPointer(EPOCHS[1], 5, 1), 9, num_stored=3)
    assert ownership.next_pointer(snapshot_of(EPOCHS[0])).slot == 0


def test_a_writer_that_has_not_begun_takes_the_position_of_the_log() -> None:
    writer = new_writer()
    LogOwnership().on_broker_checked(writer, is_known=False, last_log_seq=7)
    assert writer.log_seq == 7


def test_a_lost_pointer_and_a_shorter_log_cause_a_snapshot() -> None:
    for is_known, last_log_seq, is_lost in ((True, 7, False), (True, 9, False), (False, 7, True), (True, 6, True)):
        writer = new_writer()
        ownership = LogOwnership(num_stored=1)
        writer.log_seq = 7
        writer.on_snapshot_stored(snapshot_of(EPOCHS[0]), 0, 0.0)
        ownership.on_broker_checked(writer, is_known=is_known, last_log_seq=last_log_seq)
        assert (writer.heartbeat() is None) == is_lost
        assert writer.log_seq == (last_log_seq if is_lost else 7)
