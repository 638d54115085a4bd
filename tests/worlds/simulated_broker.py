"""SimulatedBroker: what JetStream keeps of one worker's stream, and the connections to it, on a timeline.

The log drops its oldest messages by its limits, knows the ids of recent messages, and numbers what it stores. The
pointer has a revision, and a writer replaces it only if it knows the current one. Log and buckets can be deleted, a
power failure can lose what was stored last, and a broker without a leader answers nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol, TypeVar

import attrs
import msgspec

from observability.jetstream.broker_preparation import PAUSE_S
from observability.jetstream.log_writer import (
    ACK_TIMEOUT_S,
    DUPLICATE_WINDOW_S,
    HEARTBEAT_INTERVAL_S,
    REQUEST_PAUSE_S,
    SNAPSHOT_CHECK_S,
    LogLimits,
)
from observability.kv_stream.log_cursor import STALLED_HEARTBEATS
from observability.kv_stream.log_records import ID_HEADER, LogHeartbeat, LogMessage, SnapshotPointer
from worlds.timeline import BrokenPromise, Timeline, WorldCounters

T = TypeVar("T")

_LATENCY_S = 0.001


class BrokerRefusedError(Exception):
    """The broker refuses a request: what it needs was deleted, or the pointer has another revision."""


@attrs.frozen(kw_only=True)
class BrokerQuality:
    """How a connection to the broker fails. Probabilities are per request.

    Attributes:
        request_loss: the request does not arrive.
        answer_loss: the broker carries out the request, and its answer does not arrive.
        jitter_s: a request or an answer takes up to this time longer.
    """

    request_loss: float = 0.0
    answer_loss: float = 0.0
    jitter_s: float = 0.004


class SimulatedBroker:
    """One worker's log, pointer and snapshot objects. A bucket or log is None after its deletion.

    Args:
        timeline: of the world.
        limits: of the log.
        counters: of the world.

    Attributes:
        troubles: of this log.
        log: messages with the time of their storage.
        last_seq: number of the newest message that the log ever had.
        pointer: the stored bytes; ``revision`` counts its changes in this bucket.
        objects: the two snapshots by slot.
        is_down: it answers nothing, because it elects a leader or starts.
        clients: connections, which hear about new messages and heartbeats.
        stored: epoch and number of every message that the log has ever had.
        num_bytes: payload bytes of all of them.
    """

    __slots__ = (
        "_duplicate_window_s", "_forged", "_has_gone_back", "_ids", "_is_deleted", "_lost_end", "_timeline", "clients",
        "counters", "has_pointer_bucket", "is_down", "last_seq", "limits", "log", "num_bytes", "objects", "pointer",
        "revision", "stored", "troubles",
    )  # fmt: skip

    def __init__(
        self,
        timeline: Timeline,
        limits: LogLimits,
        counters: WorldCounters | None = None,
    ) -> None:
        self._timeline = timeline
        self.limits = limits
        self.counters = counters or WorldCounters()
        self.troubles = LogTroubles(timeline)
        self._duplicate_window_s = min(DUPLICATE_WINDOW_S, limits.max_age_s)
        self.log: deque[tuple[LogMessage, float]] | None = None
        self.last_seq = 0
        self._ids: dict[str, tuple[LogMessage, float]] = {}
        self._forged: set[int] = set()
        self._is_deleted = False  # and no writer has noticed it
        self._has_gone_back = False  # the next message gets a number that an earlier one had
        self._lost_end: dict[bytes, int] = {}  # one above the highest number that a fault has taken out, by epoch
        self.stored: set[tuple[bytes, int]] = set()
        self.num_bytes = 0
        self.pointer: bytes | None = None
        self.revision = 0
        self.has_pointer_bucket = False
        self.objects: dict[int, bytes] | None = None
        self.is_down = False
        self.clients: list[BrokerClient] = []

    # --- requests of writers ---

    def open_log(self) -> int:
        """Create the log unless it exists; return the number of its newest message."""
        if self.log is None:
            self.log, self.last_seq, self._is_deleted = deque(), 0, False
            self._ids.clear()
        return self.last_seq

    def open_pointer_bucket(self) -> None:
        if not self.has_pointer_bucket:
            self.has_pointer_bucket, self.pointer, self.revision = True, None, 0

    def open_snapshot_bucket(self) -> None:
        if self.objects is None:
            self.objects = {}

    def store(self, message: LogMessage) -> tuple[int, bool]:
        """Append a message unless its id is known; return its number, and whether the id was known."""
        if self.log is None:
            if self._is_deleted:
                self._is_deleted = False
                self.troubles.note(LogTrouble.REFUSED)
            raise BrokerRefusedError("no log")
        self._expire()
        message_id = message.headers[ID_HEADER]
        known, _ = self._ids.get(message_id, (None, 0.0))
        if known is not None:
            if known.digest != message.digest:
                self.troubles.note(LogTrouble.STALLED)  # a forged message has the place of this one
            return known.log_seq, True
        self._append(message_id, message)
        return self.last_seq, False

    def _append(self, message_id: str, message: LogMessage, *, is_forged: bool = False) -> None:
        assert self.log is not None
        if self._has_gone_back:
            self._has_gone_back = False
            self.troubles.note(LogTrouble.STALLED)  # readers continue above the number that this message gets
        self.last_seq += 1
        now_s = self._timeline.now_s
        message = msgspec.structs.replace(message, log_seq=self.last_seq)
        self._ids[message_id] = message, now_s
        self.log.append((message, now_s))
        if is_forged:
            self._forged.add(self.last_seq)
        else:
            self.stored.add((message.epoch, message.seq))
        self.num_bytes += len(message.payload)
        num_bytes = sum(len(each.payload) + self.limits.overhead_bytes for each, _ in self.log)
        while len(self.log) > self.limits.max_msgs or num_bytes > self.limits.max_bytes:
            dropped, _ = self.log.popleft()
            num_bytes -= len(dropped.payload) + self.limits.overhead_bytes
            self._check_covered(dropped)
        self._timeline.after(self.limits.max_age_s, self._expire)
        for client in self.clients:
            client.push_log()

    def put_object(self, slot: int, data: bytes) -> None:
        if self.objects is None:
            raise BrokerRefusedError("no snapshot bucket")
        self.objects[slot] = data

    def update_pointer(self, data: bytes, revision: int) -> int | None:
        """Replace the pointer if it has ``revision``; return the new revision, None for another one."""
        if not self.has_pointer_bucket:
            raise BrokerRefusedError("no pointer bucket")
        if revision != self.revision:
            return None
        self.pointer = data
        self.revision += 1
        return self.revision

    # --- requests of both ---

    def read_pointer(self) -> tuple[SnapshotPointer | None, int]:
        """Return the pointer and its revision; (None, 0) before the first."""
        if not self.has_pointer_bucket:
            raise BrokerRefusedError("no pointer bucket")
        if self.pointer is None:
            return None, self.revision
        return SnapshotPointer.decode(self.pointer), self.revision

    def read_object(self, slot: int) -> bytes:
        if self.objects is None or slot not in self.objects:
            raise BrokerRefusedError("no snapshot")
        return self.objects[slot]

    def message_from(self, log_seq: int) -> LogMessage | None:
        """Return the first message numbered ``log_seq`` or above."""
        if not self.log:
            return None
        index = max(0, log_seq - self.log[0][0].log_seq)  # the numbers in the log have no gap
        return self.log[index][0] if index < len(self.log) else None

    def send_heartbeat(self, heartbeat: LogHeartbeat) -> None:
        """Pass a heartbeat to every connection. The broker stores none."""
        for client in self.clients:
            client.push_heartbeat(heartbeat)

    def request_snapshot(self) -> None:
        """Pass a reader's request to every writer."""
        self.counters.counts["snapshots requested"] += 1
        for client in self.clients:
            client.push_snapshot_request()

    # --- faults ---

    def forge(self, message: LogMessage) -> None:
        """Store a message of another client, which no writer has sent."""
        message_id = message.headers[ID_HEADER]
        if self.log is not None and message_id not in self._ids:
            self._append(message_id, message, is_forged=True)

    def delete_log(self) -> None:
        for each, _ in self.log or ():
            self._note_lost(each)
        self._has_gone_back |= bool(self.last_seq)
        self._is_deleted = True
        self.log = None

    def _note_lost(self, message: LogMessage) -> None:
        self._lost_end[message.epoch] = max(self._lost_end.get(message.epoch, 0), message.seq + 1)
        self._forged.discard(message.log_seq)

    def delete_pointer_bucket(self) -> None:
        self.has_pointer_bucket = False

    def delete_snapshot_bucket(self) -> None:
        self.objects = None

    def lose_tail(self, num_messages: int) -> None:
        """A power failure: the newest messages were acknowledged, and are not on the disk."""
        if self.log is None:
            return
        for _ in range(min(num_messages, len(self.log))):
            self._note_lost(self.log.pop()[0])
            self.last_seq -= 1
            self._has_gone_back = True
        self._ids = {each.headers[ID_HEADER]: (each, stored_s) for each, stored_s in self.log}

    def expire(self, num_messages: int) -> None:
        """Drop the oldest messages, as an operator's purge or a full disk does."""
        for _ in range(min(num_messages, len(self.log or ()))):
            assert self.log is not None
            self._note_lost(self.log.popleft()[0])

    @property
    def is_damaged(self) -> bool:
        """True while snapshot and log do not add up to the newest state, because a part of them was deleted."""
        if self.log is None or self.objects is None or not self.has_pointer_bucket or self.pointer is None:
            return True
        pointer = SnapshotPointer.decode(self.pointer)
        return pointer.slot not in self.objects or self._lost_end.get(pointer.epoch, 0) > pointer.end

    def elect_leader(self, outage_s: float) -> None:
        """Answer nothing for a while."""
        self.is_down = True
        self._timeline.after(outage_s, self._end_outage)

    def _end_outage(self) -> None:
        self.is_down = False
        self.troubles.note(LogTrouble.STALLED)
        for client in self.clients:
            client.push_log()

    def _expire(self) -> None:
        """Drop messages and forget ids by their age."""
        now_s = self._timeline.now_s
        while self.log and now_s - self.log[0][1] >= self.limits.max_age_s:
            dropped, _ = self.log.popleft()
            if now_s >= self.troubles.settled_s + SNAPSHOT_CHECK_S + AGE_LIMIT_S:
                self._check_covered(dropped)
        while self._ids and now_s - next(iter(self._ids.values()))[1] >= self._duplicate_window_s:
            del self._ids[next(iter(self._ids))]

    def _check_covered(self, dropped: LogMessage) -> None:
        """Check that the snapshot covers a message that the log drops by its limits.

        The writer knows which of its messages the log has. So a message of another sender after this one excuses it.
        """
        if self.pointer is None or not self.has_pointer_bucket:
            return
        pointer = SnapshotPointer.decode(self.pointer)
        is_covered = pointer.epoch != dropped.epoch or dropped.seq < pointer.end or dropped.log_seq in self._forged
        later = (each for each, _ in self.log or ())
        if is_covered or any(each.epoch != dropped.epoch or each.log_seq in self._forged for each in later):
            return
        detail = f"batch {dropped.seq} was dropped, and the snapshot ends at {pointer.end}"
        raise BrokenPromise("the snapshot covers what the log drops", detail)


class BrokerUser(Protocol):
    """Receives what the broker sends over a connection."""

    def on_message(self, reading_id: int, message: LogMessage) -> None:
        """A message of the log came, from the reading that ``read_from`` started under ``reading_id``."""
        ...

    def on_heartbeat(self, heartbeat: LogHeartbeat) -> None:
        """A writer's heartbeat came."""
        ...

    def on_snapshot_requested(self) -> None:
        """A reader asks the writer for a snapshot."""
        ...


class BrokerClient:
    """One connection to the broker.

    Args:
        timeline: of the world.
        broker: at its other end.
        user: receives what comes.

    Attributes:
        quality: how requests fail.
        is_up: the connection is up.
        next_log_seq: the log is read from here on; 0 while nothing is read.
    """

    __slots__ = (
        "_broker", "_deferred", "_generation", "_log_arrives_s", "_reading_id", "_timeline", "_user", "is_up",
        "next_log_seq", "quality",
    )  # fmt: skip

    def __init__(self, timeline: Timeline, broker: SimulatedBroker, user: BrokerUser) -> None:
        self._timeline = timeline
        self._broker = broker
        self._user = user
        self.quality = BrokerQuality()
        self.is_up = True
        self._generation = 0  # what was in transit in an earlier one is lost
        self.next_log_seq = self._reading_id = 0
        self._deferred: list[Callable[[], None]] = []
        self._log_arrives_s = 0.0
        broker.clients.append(self)

    def close(self) -> None:
        """End the connection for good."""
        self.is_up = False
        self._generation += 1
        self._deferred.clear()
        self._broker.clients.remove(self)

    def disconnect(self) -> None:
        """Lose the connection, and what is in transit."""
        self.is_up = False
        self._generation += 1

    def reconnect(self) -> None:
        """Connect again, and send what was kept meanwhile."""
        self.is_up = True
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()

    def call(
        self,
        request: Callable[[], T],
        answered: Callable[[T], None],
        failed: Callable[[str], None],
        *,
        timeout_s: float,
    ) -> None:
        """Send a request. Exactly one of ``answered`` and ``failed`` is called, after ``timeout_s`` at the latest."""
        timeline, random = self._timeline, self._timeline.random
        is_done = False

        def finish(then: Callable[[], None]) -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                then()

        def carry_out() -> None:
            if self not in self._broker.clients:
                return
            if self._broker.is_down:
                self._broker.troubles.note(LogTrouble.UNANSWERED)
                return
            if not self.is_up:
                if random.random() < 0.5:  # the client keeps it, and sends it after it has connected again
                    self._deferred.append(carry_out)
                return
            if random.random() < self.quality.request_loss:
                self._note_fault("request lost")
                return
            try:
                result = request()
            except BrokerRefusedError as error:
                reason = str(error)
                self._answer(lambda: finish(lambda: failed(reason)))
            else:
                self._answer(lambda: finish(lambda: answered(result)))

        timeline.after(self._delay_s(), carry_out)
        timeline.after(timeout_s, lambda: finish(lambda: failed("no answer")))

    def _answer(self, arrive: Callable[[], None]) -> None:
        if self._timeline.random.random() < self.quality.answer_loss:
            self._note_fault("answer lost")
            return
        self._push(arrive)

    def _note_fault(self, kind: str) -> None:
        self._broker.counters.faults[kind] += 1
        self._broker.troubles.note(LogTrouble.UNANSWERED)

    def _push(self, arrive: Callable[[], None]) -> None:
        """Let something arrive at the client, unless the connection is lost before."""
        generation = self._generation
        self._timeline.after(self._delay_s(), lambda: arrive() if generation == self._generation else None)

    def _delay_s(self) -> float:
        return _LATENCY_S + self.quality.jitter_s * self._timeline.random.random()

    # --- what the broker sends ---

    def push_heartbeat(self, heartbeat: LogHeartbeat) -> None:
        """Send a heartbeat."""
        if self.is_up:
            self._push(lambda: self._user.on_heartbeat(heartbeat))

    def push_snapshot_request(self) -> None:
        """Send a reader's request for a snapshot."""
        if self.is_up:
            self._push(self._user.on_snapshot_requested)

    def read_from(self, reading_id: int, log_seq: int) -> None:
        """Read the log from ``log_seq`` on, under ``reading_id``."""
        self._reading_id, self.next_log_seq = reading_id, log_seq
        self.push_log()

    def push_log(self) -> None:
        """Send the messages that were not sent yet, in order."""
        if not self.next_log_seq or not self.is_up or self._broker.is_down:
            return
        while (message := self._broker.message_from(self.next_log_seq)) is not None:
            self.next_log_seq = message.log_seq + 1
            self._push_in_order(self._reading_id, message)

    def _push_in_order(self, reading_id: int, message: LogMessage) -> None:
        timeline, generation = self._timeline, self._generation
        self._log_arrives_s = max(self._log_arrives_s, timeline.now_s + self._delay_s())

        def arrive() -> None:
            if generation == self._generation:
                self._user.on_message(reading_id, message)

        timeline.after(self._log_arrives_s - timeline.now_s, arrive)


AGE_LIMIT_S = 0.1
"""Age of the oldest batch that a LIVE reader lacks, or that waits at the writer. A batch may wait while the snapshot is
stored, which takes three requests and some slices of building, and it takes two more ways to the reader."""

JOIN_LIMIT_S = 2 * HEARTBEAT_INTERVAL_S + 0.3
"""Time until a reader that joins is LIVE. It waits for a heartbeat and reads pointer, snapshot and log. If the snapshot
is newer than that heartbeat, the next one proves it. It may begin again, if the snapshot was replaced meanwhile."""

_STALL_S = (STALLED_HEARTBEATS + 1) * HEARTBEAT_INTERVAL_S
"""Time until a reader that lacks a message reads the snapshot."""


class LogTrouble(Enum):
    """What costs a writer or its readers a recovery, and how long that may take, in seconds.

    DELAYED: requests and messages took longer.
    RESTARTED: a writer begins an epoch, while the replaced one may still run: both read the pointer, store a snapshot
        again after a pause, and send a heartbeat each.
    STALLED: readers lack a message that the log does not have.
    REFUSED: the broker refuses a message, because the log was deleted. The writer prepares the broker, and stores a
        snapshot; readers are stalled.
    UNANSWERED: a request or its answer was lost, or the connection. The writer sends what was lost again after the
        timeout; readers are stalled meanwhile.
    DAMAGED: what the pointer names was deleted, or messages after it were. Readers stall, read what is there, stall
        again, and request a snapshot, which the writer stores after a pause and after one attempt that fails.
    """

    DELAYED = 0.5
    RESTARTED = PAUSE_S + HEARTBEAT_INTERVAL_S + JOIN_LIMIT_S
    STALLED = _STALL_S + JOIN_LIMIT_S
    REFUSED = PAUSE_S + _STALL_S + JOIN_LIMIT_S
    UNANSWERED = ACK_TIMEOUT_S + PAUSE_S + _STALL_S + JOIN_LIMIT_S
    DAMAGED = 3 * _STALL_S + REQUEST_PAUSE_S + SNAPSHOT_CHECK_S + PAUSE_S + JOIN_LIMIT_S


class LogTroubles:
    """The troubles of one log.

    Args:
        timeline: of the world.

    Attributes:
        noted_s: when the newest one happened.
        settled_s: from then on no trouble so far excuses anything.
    """

    __slots__ = ("_timeline", "noted_s", "settled_s")

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.noted_s = self.settled_s = 0.0

    def note(self, trouble: LogTrouble) -> None:
        """A trouble happens now."""
        self.noted_s = self._timeline.now_s
        self.settled_s = max(self.settled_s, self.noted_s + trouble.value)

    @property
    def are_over(self) -> bool:
        """True while nothing has to be recovered from."""
        return self._timeline.now_s >= self.settled_s
