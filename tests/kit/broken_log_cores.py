"""Writers and readers of a log that are broken on purpose. Each function breaks one rule for the rest of a test.

The last ones break what the edge ``nats_writer`` shares with the simulation: ownership, and the check of the broker.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from observability.jetstream.broker_preparation import BrokerPreparation
from observability.jetstream.log_ownership import LogOwnership
from observability.jetstream.log_writer import LogWriter
from observability.kv_stream import log_cursor
from observability.kv_stream.digest_cursor import NO_EPOCH
from observability.kv_stream.instructions import ApplyStaged, ReadLog
from observability.kv_stream.log_cursor import LogCursor
from observability.kv_stream.log_records import LogMessage, Snapshot, SnapshotPointer


def digest_of_a_message_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(log_cursor._LogPosition, "is_next", lambda self, message: True)


def epoch_of_a_message_not_compared(patch: pytest.MonkeyPatch) -> None:
    on_message = LogCursor.on_message
    patch.setattr(log_cursor._LogPosition, "is_next", lambda self, message: True)

    def accept_any_epoch(self: LogCursor, message: LogMessage) -> Any:
        epoch = self._target.at.epoch
        return on_message(self, LogMessage(message.log_seq, epoch, message.seq, message.digest, message.payload))

    patch.setattr(LogCursor, "on_message", accept_any_epoch)


def future_messages_applied(patch: pytest.MonkeyPatch) -> None:
    on_message = LogCursor.on_message
    patch.setattr(log_cursor._LogPosition, "is_next", lambda self, message: True)

    def accept_ahead(self: LogCursor, message: LogMessage) -> Any:
        at = self._target.at
        if message.epoch == at.epoch and message.seq > at.next:
            at.next = message.seq
        return on_message(self, message)

    patch.setattr(LogCursor, "on_message", accept_ahead)


def reordered_messages_are_dropped_without_recovery(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(log_cursor._LogPosition, "hold", lambda self, message: None)
    patch.setattr(LogCursor, "_on_writer_ahead", lambda self: ())


def stalled_readers_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(log_cursor, "STALLED_HEARTBEATS", 10**6)


def every_heartbeat_is_a_proof(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogCursor, "_on_digest_mismatch", lambda self: self._on_verified())
    patch.setattr(log_cursor._LogPosition, "is_next", lambda self, message: True)


def another_epoch_is_never_read(patch: pytest.MonkeyPatch) -> None:
    on_other_epoch = LogCursor._on_other_epoch
    patch.setattr(LogCursor, "_on_other_epoch", lambda self: on_other_epoch(self) if self.epoch == NO_EPOCH else ())


def failed_requests_are_not_retried(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogCursor, "on_retry_due", lambda self: ())


def batches_of_the_snapshot_are_left_out(patch: pytest.MonkeyPatch) -> None:
    read = LogCursor.on_snapshot_read

    def read_less(self: LogCursor, request_id: int, snapshot: Snapshot | None) -> Any:
        for each in read(self, request_id, snapshot):
            if not (isinstance(each, ApplyStaged) and not each.is_snapshot_chunk):
                yield each

    patch.setattr(LogCursor, "on_snapshot_read", read_less)


def the_log_is_read_from_a_later_number(patch: pytest.MonkeyPatch) -> None:
    read = LogCursor.on_snapshot_read

    def read_on(self: LogCursor, request_id: int, snapshot: Snapshot | None) -> Any:
        for each in read(self, request_id, snapshot):
            yield ReadLog(each.log_seq + 3) if isinstance(each, ReadLog) else each

    patch.setattr(LogCursor, "on_snapshot_read", read_on)


def no_message_is_retried(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogWriter, "on_failed", lambda self, message: self._in_flight.discard(message.seq))


def messages_sent_beyond_the_limit(patch: pytest.MonkeyPatch) -> None:
    why = LogWriter.snapshot_reason
    patch.setattr(
        LogWriter, "snapshot_reason", lambda self, now_s: "" if "max" in why(self, now_s) else why(self, now_s)
    )
    pop_message = LogWriter.pop_message

    def pop_any(self: LogWriter, max_payload_bytes: int) -> LogMessage | None:
        limits, self.limits = self.limits, attrs.evolve(self.limits, max_msgs=10**6, max_bytes=10**9)
        try:
            return pop_message(self, max_payload_bytes)
        finally:
            self.limits = limits

    patch.setattr(LogWriter, "pop_message", pop_any)


def batches_before_the_buffer_are_skipped(patch: pytest.MonkeyPatch) -> None:
    why, pop_message = LogWriter.snapshot_reason, LogWriter.pop_message

    def skip(self: LogWriter, max_payload_bytes: int) -> LogMessage | None:
        self._next_out = max(self._next_out, self.stream.first)
        return pop_message(self, max_payload_bytes)

    patch.setattr(LogWriter, "pop_message", skip)
    patch.setattr(
        LogWriter, "snapshot_reason", lambda self, now_s: "" if "unreachable" in why(self, now_s) else why(self, now_s)
    )


def large_batches_wait(patch: pytest.MonkeyPatch) -> None:
    why = LogWriter.snapshot_reason
    patch.setattr(
        LogWriter, "snapshot_reason", lambda self, now_s: "" if "larger" in why(self, now_s) else why(self, now_s)
    )


def the_snapshot_is_older_than_its_number(patch: pytest.MonkeyPatch) -> None:
    making = LogWriter.build_snapshot

    def make_less(self: LogWriter) -> Any:
        snapshot, traffic = yield from making(self)
        return Snapshot(
            snapshot.epoch,
            snapshot.first,
            snapshot.digest,
            snapshot.chunks[:0],
            snapshot.batches,
            snapshot.end_digest,
            snapshot.log_seq,
        ), traffic

    patch.setattr(LogWriter, "build_snapshot", make_less)


def a_replaced_writer_goes_on(patch: pytest.MonkeyPatch) -> None:
    on_pointer_read = LogOwnership.on_pointer_read

    def read(self: LogOwnership, pointer: SnapshotPointer | None, revision: int, *, num_stored: int) -> bool:
        is_known = on_pointer_read(self, pointer, revision, num_stored=num_stored)
        self.is_superseded = False
        return is_known

    patch.setattr(LogOwnership, "on_pointer_read", read)


def every_other_writer_stops(patch: pytest.MonkeyPatch) -> None:
    """A writer that begins finds an older one's pointer, and gives up."""
    on_pointer_read = LogOwnership.on_pointer_read

    def read(self: LogOwnership, pointer: SnapshotPointer | None, revision: int, *, num_stored: int) -> bool:
        is_known = on_pointer_read(self, pointer, revision, num_stored=num_stored)
        self.is_superseded |= pointer is not None and pointer.epoch not in self.epochs
        return is_known

    patch.setattr(LogOwnership, "on_pointer_read", read)


def a_log_that_lost_its_end_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    on_broker_checked = LogOwnership.on_broker_checked

    def check(self: LogOwnership, writer: LogWriter, *, is_known: bool, last_log_seq: int) -> None:
        on_broker_checked(self, writer, is_known=is_known, last_log_seq=max(last_log_seq, writer.log_seq))

    patch.setattr(LogOwnership, "on_broker_checked", check)


def a_lost_pointer_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    on_broker_checked = LogOwnership.on_broker_checked

    def check(self: LogOwnership, writer: LogWriter, *, is_known: bool, last_log_seq: int) -> None:
        on_broker_checked(self, writer, is_known=True, last_log_seq=last_log_seq)

    patch.setattr(LogOwnership, "on_broker_checked", check)


def the_snapshot_overwrites_the_one_in_use(patch: pytest.MonkeyPatch) -> None:
    next_pointer = LogOwnership.next_pointer

    def same_slot(self: LogOwnership, snapshot: Snapshot) -> SnapshotPointer:
        pointer = next_pointer(self, snapshot)
        return SnapshotPointer(pointer.epoch, pointer.end, 0)

    patch.setattr(LogOwnership, "next_pointer", same_slot)


def a_deleted_bucket_is_not_created_again(patch: pytest.MonkeyPatch) -> None:
    """The defect of 0.4: a failure was no reason to prepare the broker again."""
    patch.setattr(BrokerPreparation, "on_failed", lambda self: None)


def a_revision_alone_identifies_a_pointer(patch: pytest.MonkeyPatch) -> None:
    """The defect of 0.4: in a bucket that was created again, another pointer may have the same revision."""
    on_pointer_read = LogOwnership.on_pointer_read

    def read(self: LogOwnership, pointer: SnapshotPointer | None, revision: int, *, num_stored: int) -> bool:
        return revision == self.revision or on_pointer_read(self, pointer, revision, num_stored=num_stored)

    patch.setattr(LogOwnership, "on_pointer_read", read)


def a_late_answer_looks_like_another_writer(patch: pytest.MonkeyPatch) -> None:
    """The defect of 0.4 that a simulated world found: both writers of a stream stopped."""
    on_pointer_read = LogOwnership.on_pointer_read

    def read(self: LogOwnership, pointer: SnapshotPointer | None, revision: int, *, num_stored: int) -> bool:
        del num_stored
        return on_pointer_read(self, pointer, revision, num_stored=self.num_stored)

    patch.setattr(LogOwnership, "on_pointer_read", read)
