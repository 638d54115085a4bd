"""Writers and readers of a stream in JetStream, on a timeline.

``LogWriter``, ``LogOwnership``, ``BrokerPreparation`` and ``LogFollower`` are the real cores. ``LogWriterActor`` and
``LogReaderActor`` use a connection as ``nats_writer`` and ``nats_log_reader`` do: keep a bounded number of messages in
flight, store snapshots, send heartbeats, read again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from functools import partial

from observability.jetstream.broker_preparation import PAUSE_S, BrokerPreparation
from observability.jetstream.log_follower import LogFollower
from observability.jetstream.log_ownership import LogOwnership
from observability.jetstream.log_writer import (
    ACK_TIMEOUT_S,
    HEARTBEAT_INTERVAL_S,
    MAX_IN_FLIGHT,
    SNAPSHOT_CHECK_S,
    LogTraffic,
    LogWriter,
)
from observability.kv_stream import BatchApplier, BlockView, FollowPolicy, NullStreamListener, StreamState, Tier
from observability.kv_stream.log_cursor import LogCursor
from observability.kv_stream.log_records import LogHeartbeat, LogMessage, Snapshot, SnapshotPointer
from observability.kv_stream.stream_state import MAX_REPLAY_CREDIT
from scheduler_components import BlockRemoved, BlockStored, DecodeError, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder
from scheduler_components.kv_events.stream_digest import STREAM_DIGEST_BYTES
from worlds.simulated_broker import BrokerClient, LogTrouble, LogTroubles, SimulatedBroker
from worlds.timeline import BrokenPromise, Timeline, WorldCounters

MAX_PAYLOAD_BYTES = 120
"""What the broker accepts: a batch of one in two hundred is larger."""

REQUEST_TIMEOUT_S = 5.0
"""Of a reader's requests, as the NATS client has it."""

_SLICE_S = 0.002
"""Longest pause between two slices of a snapshot that is built."""

_MAX_BUILD_BATCHES = 8
"""Batches published while a snapshot is built, at most."""

_EVENT_BYTES = 48
"""Size of an event that stores one block, at most. It is also enough for half of what else a snapshot has."""

_FRAME_BYTES = 3
"""What a snapshot adds to each batch."""

POLICY = FollowPolicy(
    answer_timeout_s=2.0,
    retry_min_s=0.1,
    retry_max_s=0.5,
    request_interval_s=0.5,
    probe_interval_s=1.0,
    dead_after_s=5.0,
)


class LogWriterActor:
    """One writer of the stream, as ``nats_writer`` runs it.

    Args:
        timeline: of the world.
        broker: where it writes.
        number: of this writer in the world.
        truth: receives the state after every batch.

    Attributes:
        core: numbers and sends batches.
        client: its connection.
        ownership: whether it still owns the stream.
        held: the cache.
        preparation: when it prepares the broker.
        published_s: when each batch of the present epoch was published.
        is_closed: the process has ended.
    """

    __slots__ = (
        "_broker", "_encoder", "_in_flight", "_is_storing", "_num_counted_before", "_num_epochs", "_num_sent",
        "_timeline", "_truth", "client", "core", "held", "is_closed", "number", "ownership", "preparation",
        "published_s",
    )  # fmt: skip

    def __init__(self, timeline: Timeline, broker: SimulatedBroker, number: int, truth: Truth) -> None:
        self._timeline = timeline
        self._broker = broker
        self.number = number
        self._truth = truth
        self._encoder = BatchEncoder()
        self._num_epochs = self._num_sent = self._num_counted_before = 0
        self._is_storing = self.is_closed = False
        self.preparation = BrokerPreparation()
        self._in_flight: dict[int, tuple[LogMessage, float]] = {}
        self.ownership = LogOwnership()
        self.held: LogState = frozenset()
        self.published_s: dict[int, float] = {}
        self.core = LogWriter(epoch=self._new_epoch(), rank=0, limits=broker.limits, traffic=LogTraffic())
        self.client = BrokerClient(timeline, broker, self)

    def start(self) -> None:
        """Prepare the broker, and begin to send heartbeats and to check the snapshot's age."""
        self._prepare()
        self._timeline.after(HEARTBEAT_INTERVAL_S, self._beat)
        self._timeline.after(SNAPSHOT_CHECK_S, self._check_snapshot_again)

    def close(self) -> None:
        """End the process: what was not sent is lost."""
        self.is_closed = True
        self.client.close()

    # --- the scheduler's side ---

    def publish(self, event: KVCacheEvent) -> None:
        """Number one batch, and send it when the broker is ready."""
        if isinstance(event, BlockStored):
            self.held |= set(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            self.held -= set(event.block_hashes)
        else:
            self.held = frozenset()
        payload = self._encoder.encode(KVEventBatch(1.0, (event,), 0), 0)
        seq = self.core.append(payload)
        if seq and seq - 1 not in self.published_s:
            raise BrokenPromise("numbers have no gaps", f"batch {seq} follows no other")
        self._truth[self.core.epoch, seq] = self.held
        self.published_s[seq] = self._timeline.now_s
        if len(payload) > MAX_PAYLOAD_BYTES:
            self._broker.counters.faults["batch larger than a message"] += 1
            self._broker.troubles.note(LogTrouble.STALLED)
        self._send_waiting()
        self._check_memory()

    def _check_memory(self) -> None:
        stream, limits = self.core.stream, self._broker.limits
        kept = stream.next_sequence - stream.oldest
        # While a snapshot is built, nothing is folded.
        if kept > 2 * limits.buffer_steps + _MAX_BUILD_BATCHES:
            raise BrokenPromise("memory is bounded", f"the writer keeps {kept} batches of {limits.buffer_steps}")

    @property
    def is_waiting(self) -> bool:
        """True while it waits for an answer of the broker."""
        return bool(self._in_flight) or self._is_storing or not self.preparation.is_done

    @property
    def _num_counted(self) -> int:
        """Batches that the writer counts as not stored one by one, and messages that it counts as failed."""
        return self.core.counters.collapsed + self.core.counters.failures

    def check_counted(self) -> None:
        """Check that the writer has counted the batches of its epoch that the log never had, once none waits.

        Raises:
            BrokenPromise: it has not.
        """
        epoch, num_counted = self.core.epoch, self._num_counted - self._num_counted_before
        num_lost = sum((epoch, seq) not in self._broker.stored for seq in range(self.core.stream.next_sequence))
        if num_lost > num_counted:
            detail = f"the log never had {num_lost} batches, and {num_counted} are counted"
            raise BrokenPromise("every loss is reported", detail)

    def forge_next(self, payload: bytes) -> LogMessage:
        """Return a message that another client could forge: it has the number of the next batch."""
        return LogMessage(0, self.core.epoch, self.core.stream.next_sequence, bytes(STREAM_DIGEST_BYTES), payload)

    def start_epoch(self) -> None:
        """Begin an empty stream in the same process."""
        self.core.start_epoch(self._new_epoch())
        self.held = frozenset()
        self.published_s.clear()
        self._num_counted_before = self._num_counted
        self._broker.troubles.note(LogTrouble.RESTARTED)
        self._store_snapshot_if_due()

    def _new_epoch(self) -> bytes:
        self._num_epochs += 1
        epoch = bytes([self.number + 1, self._num_epochs]) * 8
        self._truth[epoch, -1] = frozenset()
        return epoch

    # --- the connection ---

    def on_disconnected(self) -> None:
        """Stop sending until the broker is prepared again."""
        self.client.disconnect()
        self.preparation.on_disconnected()

    def on_reconnected(self) -> None:
        """Prepare the broker again, because it may have lost messages."""
        self.client.reconnect()
        self._prepare()

    def _call(
        self, request: Callable[[], object], answered: Callable[..., None], failed: Callable[[str], None]
    ) -> None:
        self.client.call(request, answered, failed, timeout_s=ACK_TIMEOUT_S)

    def _prepare(self) -> None:
        """Create the log and the buckets, or check that they still have the stored messages."""
        number, broker = self.preparation.begin(), self._broker

        def then(request: Callable[[], object], answered: Callable[..., None]) -> None:
            self._call(request, lambda result: answered(result) if self._is_current(number) else None, again)

        def again(_: str) -> None:
            self._timeline.after(PAUSE_S, lambda: self._prepare() if self._is_current(number) else None)

        def check(last_log_seq: int, is_known: bool) -> None:
            if not self._is_current(number):
                return
            self.ownership.on_broker_checked(self.core, is_known=is_known, last_log_seq=last_log_seq)
            self.preparation.end(number)
            self._send_waiting()
            self._store_snapshot_if_due()

        then(
            broker.open_log,
            lambda last_log_seq: then(
                broker.open_pointer_bucket,
                lambda _: then(
                    broker.open_snapshot_bucket,
                    lambda _: self._read_pointer(partial(check, last_log_seq), again),
                ),
            ),
        )

    def _is_current(self, number: int) -> bool:
        return self.preparation.is_current(number) and self.client.is_up and not self.is_closed

    def _prepare_after_failure(self) -> None:
        """Prepare the broker again soon, unless that is under way."""
        pause_s = self.preparation.on_failed()
        if pause_s is not None:
            self._timeline.after(pause_s, self._prepare_if_needed)

    def _prepare_if_needed(self) -> None:
        if self.client.is_up and not self.preparation.is_done and not self.is_closed:
            self._prepare()

    # --- heartbeats ---

    def _beat(self) -> None:
        if self.is_closed:
            return
        if self.preparation.is_done:
            self._send_heartbeat()
            self._cancel_overdue()
        self._timeline.after(HEARTBEAT_INTERVAL_S, self._beat)

    def _send_heartbeat(self) -> None:
        heartbeat = self.core.heartbeat()
        if (
            heartbeat is not None
            and not self.ownership.is_superseded
            and self.client.is_up
            and not self._broker.is_down
        ):
            self._broker.send_heartbeat(heartbeat)

    def _cancel_overdue(self) -> None:
        """Fail all messages in flight once the oldest is overdue. They are sent again in order."""
        if self._in_flight and self._timeline.now_s - next(iter(self._in_flight.values()))[1] > ACK_TIMEOUT_S:
            for number in tuple(self._in_flight):
                self._on_failed(number, "no answer")

    def on_heartbeat(self, heartbeat: LogHeartbeat) -> None:
        """Read the pointer when another writer sends a heartbeat: that writer may have taken the stream over."""
        if heartbeat.epoch not in self.ownership.epochs and not self.ownership.is_superseded and not self.is_closed:
            self._read_pointer(lambda _: None, lambda _: None)

    def _read_pointer(self, read: Callable[[bool], None], failed: Callable[[str], None]) -> None:
        """Read the pointer, then call ``read`` with whether this writer knew it."""
        num_stored = self.ownership.num_stored

        def answered(found: tuple[SnapshotPointer | None, int]) -> None:
            read(self.ownership.on_pointer_read(*found, num_stored=num_stored))

        self._call(self._broker.read_pointer, answered, failed)

    def on_message(self, reading_id: int, message: LogMessage) -> None:
        """A writer reads no log."""

    # --- batches ---

    def _send_waiting(self) -> None:
        while len(self._in_flight) < MAX_IN_FLIGHT and self.preparation.is_done and not self.ownership.is_superseded:
            message = self.core.pop_message(MAX_PAYLOAD_BYTES)
            if message is None:
                break
            self._num_sent += 1
            number = self._num_sent
            self._in_flight[number] = message, self._timeline.now_s
            self._call(
                partial(self._broker.store, message),
                partial(self._on_acknowledged, number),
                partial(self._on_failed, number),
            )
        self._store_snapshot_if_due()

    def _on_acknowledged(self, number: int, result: tuple[int, bool]) -> None:
        message, _ = self._in_flight.pop(number, (None, 0.0))
        if message is not None and not self.is_closed:
            self.core.on_stored(message, result[0], is_duplicate=result[1])
            self._send_waiting()

    def _on_failed(self, number: int, _: str) -> None:
        """Schedule the message again, and check first which messages the broker has."""
        message, _sent_s = self._in_flight.pop(number, (None, 0.0))
        if message is None or self.is_closed:
            return
        self.core.on_failed(message)
        self._prepare_after_failure()

    # --- the snapshot ---

    def _check_snapshot_again(self) -> None:
        """A snapshot may be due by its age."""
        if not self.is_closed:
            self._store_snapshot_if_due()
            self._timeline.after(SNAPSHOT_CHECK_S, self._check_snapshot_again)

    def on_snapshot_requested(self) -> None:
        """Store a snapshot soon, because a reader needs one."""
        self.core.on_snapshot_requested()
        self._store_snapshot_if_due()

    def _store_snapshot_if_due(self) -> None:
        if self._is_storing or not self.preparation.is_done or self.ownership.is_superseded or self.is_closed:
            return
        if self.core.snapshot_reason(self._timeline.now_s):
            self._is_storing = True
            self._build(self.core.build_snapshot())

    def _check_size(self, snapshot: Snapshot) -> None:
        """Check that a snapshot that was just built has the size of the state and of the batches in the buffer."""
        stream = self.core.stream
        if snapshot.epoch != stream.epoch:
            return
        most = _EVENT_BYTES * (stream.num_snapshot_blocks + 2) + stream.buffered_bytes + _FRAME_BYTES * len(stream)
        num_bytes = len(snapshot.encode())
        if num_bytes > most:
            raise BrokenPromise("a snapshot has the size of the state", f"{num_bytes} bytes of {most}")

    def _build(self, slices: Generator[None, None, tuple[Snapshot, int]]) -> None:
        """Build the snapshot in slices: batches come in between."""
        if self.is_closed:
            return
        try:
            next(slices)
        except StopIteration as end:
            snapshot, traffic_bytes = end.value
            self._check_size(snapshot)
            self._write(snapshot, traffic_bytes)
        else:
            self._timeline.after(_SLICE_S * self._timeline.random.random(), partial(self._build, slices))

    def _write(self, snapshot: Snapshot, traffic_bytes: int) -> None:
        """Write the snapshot to the object that the pointer does not name, then update the pointer."""
        broker, ownership = self._broker, self.ownership

        def put(_: bool) -> None:
            if ownership.is_superseded:
                self._on_snapshot_failed()
                return
            revision, pointer = ownership.revision, ownership.next_pointer(snapshot)
            self._call(
                partial(broker.put_object, pointer.slot, snapshot.encode()),
                lambda _: self._call(
                    partial(broker.update_pointer, pointer.encode(), revision), partial(stored, pointer), unstored
                ),
                unstored,
            )

        def stored(pointer: SnapshotPointer, revision: int | None) -> None:
            if revision is None:
                self._read_pointer(lambda _: None, lambda _: None)
                self._on_snapshot_failed()
                return
            ownership.on_pointer_stored(pointer, revision)
            self.core.on_snapshot_stored(snapshot, traffic_bytes, self._timeline.now_s)
            self._is_storing = False
            self._send_heartbeat()
            self._send_waiting()

        def unstored(_: str) -> None:
            self._prepare_after_failure()
            self._on_snapshot_failed()

        self._read_pointer(put, unstored)

    def _on_snapshot_failed(self) -> None:
        self.core.on_snapshot_failed()
        self._timeline.after(PAUSE_S, self._store_again)

    def _store_again(self) -> None:
        self._is_storing = False
        self._store_snapshot_if_due()


class LogReaderActor:
    """A follower, its view and its connection, as ``nats_log_reader`` runs it. Implements ``LogChannel``.

    Args:
        timeline: of the world.
        broker: where it reads.
        truth: the state after every batch.
        name: in messages.

    Attributes:
        follower: follows the stream.
        client: its connection.
        judge: of what it must do at any time.
        num_bytes: payload bytes of the snapshots and messages that it has received.
        is_closed: the reader has left.
    """

    __slots__ = (
        "_broker", "_timeline", "_view", "_wakes_s", "client", "follower", "is_closed", "judge", "name", "num_bytes",
    )  # fmt: skip

    def __init__(self, timeline: Timeline, broker: SimulatedBroker, truth: Truth, name: str) -> None:
        self._timeline = timeline
        self._broker = broker
        self.name = name
        self._view = BlockView()
        self._wakes_s = math.inf
        self.num_bytes = 0
        self.is_closed = False
        self.client = BrokerClient(timeline, broker, self)
        self.judge = LogReaderJudge(
            name, timeline, broker.counters, truth=truth, troubles=broker.troubles, policy=POLICY
        )
        applier = BatchApplier(
            rank=0, view=self._view, decoder=BatchDecoder(), listener=NullStreamListener(), wall_clock=timeline.clock
        )
        self.follower = LogFollower(applier=applier, channel=self, policy=POLICY, jitter=timeline.random.random)

    def start(self) -> None:
        self.follower.begin(self._timeline.now_s)
        self._wake_in_time()

    def close(self) -> None:
        self.is_closed = True
        self.client.close()

    @property
    def state(self) -> StreamState:
        return self.follower.cursor.state

    @property
    def blocks(self) -> LogState:
        return frozenset(self._view.blocks(0, Tier.DEVICE))

    # --- LogChannel ---

    def read_pointer(self, request_id: int) -> None:
        self.judge.on_request()
        self._call(self._broker.read_pointer, partial(self._on_pointer, request_id))

    def read_snapshot(self, request_id: int, pointer: SnapshotPointer) -> None:
        self._call(partial(self._broker.read_object, pointer.slot), partial(self._on_object, request_id))

    def request_snapshot(self) -> None:
        self._call(self._broker.request_snapshot, lambda _: None)

    def read_log(self, reading_id: int, log_seq: int) -> None:
        self.client.read_from(reading_id, log_seq)

    def _call(self, request: Callable[[], object], answered: Callable[..., None]) -> None:
        self.client.call(request, answered, lambda _: answered(None), timeout_s=REQUEST_TIMEOUT_S)

    # --- the connection ---

    def on_disconnected(self) -> None:
        self.client.disconnect()
        self.follower.on_disconnected(self._timeline.now_s)
        self._check()

    def on_reconnected(self) -> None:
        self.client.reconnect()
        self.judge.on_connected()
        self.follower.on_reconnected()
        self._check()

    def on_heartbeat(self, heartbeat: LogHeartbeat) -> None:
        """Pass on a writer's heartbeat."""
        self.judge.on_heartbeat()
        self._run(self.follower.on_heartbeat(heartbeat, self._timeline.now_s))

    def on_snapshot_requested(self) -> None:
        """A reader stores no snapshot."""

    def on_message(self, reading_id: int, message: LogMessage) -> None:
        """Pass on a message of the log."""
        self.num_bytes += len(message.payload)
        self._run(self.follower.on_message(reading_id, message, self._timeline.now_s))

    def _on_pointer(self, request_id: int, found: tuple[SnapshotPointer | None, int] | None) -> None:
        pointer = None if found is None else found[0]
        self._run(self.follower.on_pointer_read(request_id, pointer, self._timeline.now_s))

    def _on_object(self, request_id: int, data: bytes | None) -> None:
        self.num_bytes += len(data or b"")
        try:
            snapshot = None if data is None else Snapshot.decode(data)
        except DecodeError:
            snapshot = None
        self._run(self.follower.on_snapshot_read(request_id, snapshot, self._timeline.now_s))

    def _run(self, steps: Iterator[None]) -> None:
        if self.is_closed:
            return
        checked: tuple[StreamState, bytes, int] | None = None
        for _ in steps:
            cursor = self.follower.cursor
            position = (cursor.state, cursor.epoch, cursor.last_seq)
            if position != checked:  # a snapshot of many blocks has many slices
                checked = position
                self._check()
        self._check()
        self._wake_in_time()

    def _wake_in_time(self) -> None:
        due_s = self.follower.next_deadline_s
        if due_s < self._wakes_s:
            self._wakes_s = due_s
            self._timeline.after(max(0.0, due_s - self._timeline.now_s), partial(self._wake, due_s))

    def _wake(self, due_s: float) -> None:
        if due_s != self._wakes_s or self.is_closed:
            return
        self._wakes_s = math.inf
        self.follower.tick(max(due_s, self._timeline.now_s))
        self._check()
        self._wake_in_time()

    def _check(self) -> None:
        self.judge.on_change(self.follower.cursor, self.blocks)


LogState = frozenset[int]
Truth = dict[tuple[bytes, int], LogState]
"""The blocks after a batch, by epoch and number."""

_ROUNDING_S = 1e-6


class LogReaderJudge:
    """Judges one reader.

    Args:
        name: in messages.
        timeline, counters: of the world.
        truth: the state after every batch.
        troubles: of the log.
        policy: how long the reader waits.

    Attributes:
        since_s: when the reader joined, or connected again.
    """

    __slots__ = (
        "_counters", "_heard_s", "_last_live", "_live_since_s", "_name", "_policy", "_requested_s", "_timeline",
        "_troubles", "_truth", "since_s",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        counters: WorldCounters,
        *,
        truth: Truth,
        troubles: LogTroubles,
        policy: FollowPolicy,
    ) -> None:
        self._name = name
        self._timeline = timeline
        self._counters = counters
        self._truth = truth
        self._troubles = troubles
        self._policy = policy
        self.since_s = timeline.now_s
        self._heard_s = 0.0
        self._live_since_s: float | None = None
        self._last_live: tuple[bytes, int, int, int, int] | None = None
        self._requested_s: list[float] = []

    def on_connected(self) -> None:
        """The reader has connected again."""
        self.since_s = self._timeline.now_s

    def on_heartbeat(self) -> None:
        """The reader gets a heartbeat."""
        self._heard_s = self._timeline.now_s

    def on_request(self) -> None:
        """Check that the credit allows the request that the reader sends now.

        Raises:
            BrokenPromise: it does not.
        """
        now_s = self._timeline.now_s
        self._requested_s.append(now_s)
        for number, sent_s in enumerate(reversed(self._requested_s), 1):
            if number > MAX_REPLAY_CREDIT + (now_s - sent_s) / self._policy.request_interval_s + _ROUNDING_S:
                raise BrokenPromise("bounded requests", f"{self._name} has sent {number} requests since {sent_s:.6f}")

    def on_change(self, cursor: LogCursor, blocks: LogState) -> None:
        """Check the reader's view after a message, a heartbeat or a deadline.

        Raises:
            BrokenPromise: it is LIVE and wrong, without heartbeats, or beyond a loss that it has not counted.
        """
        now_s = self._timeline.now_s
        if cursor.state is not StreamState.LIVE:
            self._live_since_s = None
            if cursor.state is StreamState.DEAD:
                self._last_live = None
            return
        if self._live_since_s is None:
            self._live_since_s = now_s
            self._counters.counts["recoveries"] += 1
            self._counters.measure("until_live_s", now_s - max(self.since_s, self._troubles.noted_s))
        if blocks != self._truth.get((cursor.epoch, cursor.last_seq)):
            raise BrokenPromise("a LIVE view is never wrong", f"{self._name} is LIVE at {cursor.last_seq} and wrong")
        if now_s - max(self._heard_s, self._live_since_s) > self._policy.answer_timeout_s + _ROUNDING_S:
            detail = f"{self._name} is LIVE and last heard the writer at {self._heard_s:.3f} s"
            raise BrokenPromise("LIVE needs heartbeats", detail)
        self._check_reported(cursor)

    def _check_reported(self, cursor: LogCursor) -> None:
        counters = cursor.counters
        live = cursor.epoch, cursor.last_seq, counters.applied, counters.snapshots, counters.restarts
        last, self._last_live = self._last_live, live
        if last is None:
            return
        epoch, last_seq, applied, snapshots, restarts = last
        if epoch != cursor.epoch:
            is_reported = counters.restarts > restarts
        else:
            is_reported = counters.snapshots > snapshots or cursor.last_seq - last_seq <= counters.applied - applied
        if not is_reported:
            raise BrokenPromise("every loss is reported", f"{self._name} is LIVE at {cursor.last_seq} without a report")
