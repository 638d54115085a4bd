"""SimulatedBroker: what JetStream keeps of one worker's stream, and the connections to it, on a timeline.

The log drops its oldest messages by its limits, knows the ids of recent messages, and numbers what it stores. The
pointer has a revision, and a writer replaces it only if it knows the current one. Log and buckets can be deleted, a
power failure can lose what was stored last, and a broker without a leader answers nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

import attrs
import msgspec

from observability.jetstream.log_writer import LogLimits
from observability.kv_stream.log_records import ID_HEADER, LogHeartbeat, LogMessage, SnapshotPointer
from observability.simulation.timeline import BrokenPromise, Timeline
from observability.simulation.world_counters import WorldCounters

__all__ = ["BrokerClient", "BrokerQuality", "BrokerRefusedError", "BrokerUser", "SimulatedBroker"]

T = TypeVar("T")

_LATENCY_S = 0.001
_JITTER_S = 0.004


class BrokerRefusedError(Exception):
    """The broker refuses a request: what it needs was deleted, or the pointer has another revision."""


@attrs.frozen(kw_only=True)
class BrokerQuality:
    """How a connection to the broker fails. Probabilities are per request.

    Attributes:
        request_loss: the request does not arrive.
        answer_loss: the broker carries out the request, and its answer does not arrive.
    """

    request_loss: float = 0.0
    answer_loss: float = 0.0


class SimulatedBroker:
    """One worker's log, pointer and snapshot objects. A bucket or log is None after its deletion.

    Args:
        timeline: of the world.
        limits: of the log.
        counters: of the world.
        duplicate_window_s: how long the broker knows the id of a message.

    Attributes:
        log: messages with the time of their storage.
        last_seq: number of the newest message that the log ever had.
        pointer: the stored bytes; ``revision`` counts its changes in this bucket.
        objects: the two snapshots by slot.
        is_down: it answers nothing, because it elects a leader or starts.
        clients: connections, which hear about new messages and heartbeats.
        has_one_writer: only one writer has ever used the log.
    """

    __slots__ = (
        "_duplicate_window_s", "_ids", "_timeline", "clients", "counters", "has_one_writer", "has_pointer_bucket",
        "is_down", "last_seq", "limits", "log", "objects", "pointer", "revision",
    )  # fmt: skip

    def __init__(
        self,
        timeline: Timeline,
        limits: LogLimits,
        counters: WorldCounters | None = None,
        *,
        duplicate_window_s: float = 120.0,
    ) -> None:
        self._timeline = timeline
        self.limits = limits
        self.counters = counters or WorldCounters()
        self._duplicate_window_s = duplicate_window_s
        self.log: deque[tuple[LogMessage, float]] | None = None
        self.last_seq = 0
        self._ids: dict[str, tuple[int, float]] = {}
        self.pointer: bytes | None = None
        self.revision = 0
        self.has_pointer_bucket = False
        self.objects: dict[int, bytes] | None = None
        self.is_down = False
        self.clients: list[BrokerClient] = []
        self.has_one_writer = True

    # --- requests of writers ---

    def open_log(self) -> int:
        """Create the log unless it exists; return the number of its newest message."""
        if self.log is None:
            self.log, self.last_seq = deque(), 0
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
            raise BrokerRefusedError("no log")
        self._expire()
        message_id = message.headers[ID_HEADER]
        known = self._ids.get(message_id)
        if known is not None:
            return known[0], True
        self.last_seq += 1
        now_s = self._timeline.now_s
        self._ids[message_id] = self.last_seq, now_s
        self.log.append((msgspec.structs.replace(message, log_seq=self.last_seq), now_s))
        num_bytes = self._num_bytes()
        while len(self.log) > self.limits.max_msgs or num_bytes > self.limits.max_bytes:
            dropped, _ = self.log.popleft()
            num_bytes -= len(dropped.payload) + self.limits.overhead_bytes
            self._check_covered(dropped)
        for client in self.clients:
            client.push_log()
        return self.last_seq, False

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
        for client in self.clients:
            client.push_snapshot_request()

    # --- faults ---

    def delete_log(self) -> None:
        self.log = None

    def delete_pointer_bucket(self) -> None:
        self.has_pointer_bucket = False

    def delete_snapshot_bucket(self) -> None:
        self.objects = None

    def lose_tail(self, num_messages: int) -> None:
        """A power failure: the newest messages were acknowledged, and are not on the disk."""
        if self.log is None:
            return
        for _ in range(min(num_messages, len(self.log))):
            self.log.pop()
        self.last_seq -= min(num_messages, self.last_seq)
        self._ids = {each.headers[ID_HEADER]: (each.log_seq, stored_s) for each, stored_s in self.log}

    def expire(self, num_messages: int) -> None:
        """Drop the oldest messages, as an operator's purge or a full disk does."""
        for _ in range(min(num_messages, len(self.log or ()))):
            assert self.log is not None
            self.log.popleft()

    def elect_leader(self, outage_s: float) -> None:
        """Answer nothing for a while."""
        self.is_down = True
        self._timeline.after(outage_s, self._end_outage)

    def _end_outage(self) -> None:
        self.is_down = False
        for client in self.clients:
            client.push_log()

    def _expire(self) -> None:
        """Drop messages and forget ids by their age."""
        assert self.log is not None
        now_s = self._timeline.now_s
        while self.log and now_s - self.log[0][1] > self.limits.max_age_s:
            self.log.popleft()  # an unreachable broker may have no snapshot in time
        while self._ids and now_s - next(iter(self._ids.values()))[1] > self._duplicate_window_s:
            del self._ids[next(iter(self._ids))]

    def _num_bytes(self) -> int:
        return sum(len(each.payload) + self.limits.overhead_bytes for each, _ in self.log or ())

    def _check_covered(self, dropped: LogMessage) -> None:
        """Check that the snapshot covers a message that the log drops by its limits, while one writer uses it."""
        if self.pointer is None or not self.has_pointer_bucket or not self.has_one_writer:
            return
        pointer = SnapshotPointer.decode(self.pointer)
        if pointer.epoch == dropped.epoch and dropped.seq >= pointer.end:
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
            if self._broker.is_down or self not in self._broker.clients:
                return
            if not self.is_up:
                if random.random() < 0.5:  # the client keeps it, and sends it after it has connected again
                    self._deferred.append(carry_out)
                return
            if random.random() < self.quality.request_loss:
                self._broker.counters.faults["request lost"] += 1
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
            self._broker.counters.faults["answer lost"] += 1
            return
        self._push(arrive)

    def _push(self, arrive: Callable[[], None]) -> None:
        """Let something arrive at the client, unless the connection is lost before."""
        generation = self._generation
        self._timeline.after(self._delay_s(), lambda: arrive() if generation == self._generation else None)

    def _delay_s(self) -> float:
        return _LATENCY_S + _JITTER_S * self._timeline.random.random()

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
