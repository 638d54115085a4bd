"""Which of several writers owns a stream in the broker: the newest pointer decides. Pure: no socket, clock or thread.

A writer replaces the pointer to the newest snapshot only if it knows the revision of the current one. So of two writers
the older one finds an epoch there that is not its own, and stops.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from observability.jetstream.log_writer import LogWriter
from observability.kv_stream.log_records import Snapshot, SnapshotPointer

__all__ = ["LogOwnership"]


@dataclass(slots=True, kw_only=True)
class LogOwnership:
    """What one writer knows of the pointer to its stream's newest snapshot.

    Attributes:
        slot: the object that the pointer names, whichever writer wrote it; -1 without a pointer.
        revision: of that pointer; 0 without one.
        num_stored: pointers that this writer has stored.
        epochs: that this writer has put into a pointer.
        is_superseded: another writer took the stream over.
    """

    slot: int = -1
    revision: int = 0
    num_stored: int = 0
    epochs: set[bytes] = field(default_factory=set)
    is_superseded: bool = False

    @property
    def has_begun(self) -> bool:
        """True once this writer has stored a pointer.

        From then on, a pointer with an epoch that is not in ``epochs`` means that another writer took over.
        """
        return self.num_stored > 0

    def on_pointer_read(self, pointer: SnapshotPointer | None, revision: int, *, num_stored: int) -> bool:
        """Note the broker's pointer. Return False if it is not the one that this writer stored or read last.

        A revision alone does not identify a pointer: revisions start over in a bucket that was created again.

        Args:
            pointer: None without one, or if it cannot be decoded.
            revision: of the pointer or of its deletion, 0 without either.
            num_stored: of this object when the pointer was requested. The answer may come after this writer has stored
                another pointer; then it is ignored, because it would look like that of another writer.
        """
        if num_stored != self.num_stored:
            return True
        is_foreign = pointer is not None and pointer.epoch not in self.epochs
        is_known = revision == self.revision and not is_foreign
        self.revision, self.slot = revision, -1 if pointer is None else pointer.slot
        self.is_superseded |= self.has_begun and is_foreign
        return is_known

    def on_broker_checked(self, writer: LogWriter, *, is_known: bool, last_log_seq: int) -> None:
        """Compare log and pointer with what this writer stored, after a connect or a failure.

        If the broker has lost either of them, ``writer`` stores a snapshot before anything else.

        Args:
            writer: of the stream.
            is_known: result of ``on_pointer_read``.
            last_log_seq: number of the newest message of the log, 0 without one.
        """
        if not self.has_begun:
            writer.log_seq = last_log_seq
        elif not is_known or last_log_seq < writer.log_seq:
            writer.log_seq = last_log_seq
            writer.on_snapshot_lost()

    def next_pointer(self, snapshot: Snapshot) -> SnapshotPointer:
        """Return the pointer to ``snapshot``, in the object that the current pointer does not name.

        Store the object, then the pointer if its revision is still ``revision``.
        """
        self.epochs.add(snapshot.epoch)
        return SnapshotPointer(snapshot.epoch, snapshot.end, 0 if self.slot else 1)

    def on_pointer_stored(self, pointer: SnapshotPointer, revision: int) -> None:
        """The broker has ``pointer`` as ``revision``."""
        self.revision, self.slot = revision, pointer.slot
        self.num_stored += 1
