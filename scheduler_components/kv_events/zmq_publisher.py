"""ZmqEventPublisher: send live batches on a PUB socket and answer replays on a ROUTER socket.

The file is ordered from the sockets up: ``ZmqLiveSender`` (encode, number, send), ``ZmqReplayServer`` (answers in
slices), ``ZmqStreamSockets`` (both, and everything else of one stream), ``ZmqEventPublisher`` (which thread works, and
when).

Work: ``publish()`` appends. ``idle()``, called where the scheduler waits for its device, drains: it encodes, sends and
serves replays. A scheduler that never calls ``idle()`` hands its batches over to the backstop thread. A sending thread
alone, as in SGLang and vLLM, starves when the scheduler keeps the GIL. So ``publish()`` drains batches that have become
too many or too old (``backlog.py``).

Ownership: the thread that drains owns the sockets. It holds the owner lock, for which the scheduler's thread never
waits.
"""

from __future__ import annotations

import atexit
import enum
import inspect
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from contextlib import ExitStack
from pathlib import Path

import msgspec
import zmq
from msgspec import UNSET, UnsetType

from scheduler_components.errors import ForkedPublisherError, PublisherClosedError, StartError
from scheduler_components.events import AllBlocksCleared, EventBatch, KVCacheEvent, KVEventBatch, ValidatedEvents
from scheduler_components.fork_hook import register_for_fork
from scheduler_components.kv_events.backlog import MAX_WAITING, Backlog, InlineBacklog, batch_cost
from scheduler_components.kv_events.codec import (
    ENCODE_ERRORS,
    MAX_PAYLOAD_BYTES,
    BatchEncoder,
    batch_rank,
    oversize_reason,
    split_events,
)
from scheduler_components.kv_events.config import KVEventsConfig
from scheduler_components.kv_events.endpoints import Endpoint
from scheduler_components.kv_events.event_publisher import EventPublisher
from scheduler_components.kv_events.file_sequence_floor import SequenceFloor, open_sequence_floor
from scheduler_components.kv_events.replay import ReplaySessions
from scheduler_components.kv_events.replay_messages import END_SEQ
from scheduler_components.kv_events.snapshot import merge_batches
from scheduler_components.kv_events.stream import EventStream
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES
from scheduler_components.kv_events.thread_backstop import Backstop, DrainResult
from scheduler_components.kv_events.zmq_auth import CurveServerKeys
from scheduler_components.kv_events.zmq_sockets import Context, Socket, StreamSockets, open_stream_sockets
from scheduler_components.validators import check_integer
from scheduler_components.values import PublisherStats

__all__ = [
    "ZmqLiveSender",
    "ZmqReplayServer",
    "DrainReason",
    "ZmqStreamSockets",
    "open_zmq_stream",
    "CloseReport",
    "ZmqEventPublisher",
]

_log = logging.getLogger(__name__)

# Send live batches: encode, number, send. Only ``pending.append`` may be called without owning the sockets.

_LARGE_PAYLOAD_BYTES = MAX_PAYLOAD_BYTES // 2
"""A larger batch is sent in several parts, so that no reader refuses it for its size."""

_MAX_REFUSALS_LOGGED = 100
"""Maximum log lines about refused events; further ones are only counted."""

_SNDMORE = int(zmq.SNDMORE)
"""A plain integer: the C-level send would convert an enum three times per batch."""

_INVALID_BATCH_ERRORS = (*ENCODE_ERRORS, AttributeError, RecursionError)
"""Raised while encoding an object that is not a valid batch of events."""


class ZmqLiveSender:
    """Encode, number and send batches on the PUB socket, and count them.

    Attributes:
        pending: accepted batches, oldest first; any thread may append.
        num_batches, num_events, num_bytes: sent.
        num_refused: events that readers would refuse, and that were omitted from their batch.
        num_collapsed: batches that were merged with others, because more than ``max_pending`` were pending.
        num_dropped: batches that could not be sent at all.
    """

    __slots__ = (
        "_encoder",
        "_is_failing",
        "_is_sending",
        "_is_torn",
        "_is_overflowing",
        "_max_pending",
        "_rank",
        "_send",
        "_stream",
        "_topic",
        "num_batches",
        "num_bytes",
        "num_collapsed",
        "num_dropped",
        "num_events",
        "num_refused",
        "pending",
    )

    def __init__(
        self,
        socket: Socket,
        *,
        topic: bytes,
        encoder: BatchEncoder,
        stream: EventStream,
        rank: int,
        max_pending: int,
    ) -> None:
        # pyzmq's Python-level send costs several times its C-level send, and there are three sends per batch.
        self._send = super(zmq.Socket, socket).send
        self._topic = topic
        self._encoder = encoder
        self._stream = stream
        self._rank = rank
        self._max_pending = max_pending
        self._is_overflowing = self._is_failing = self._is_torn = self._is_sending = False
        self.pending: deque[EventBatch] = deque()
        self.num_batches = self.num_events = self.num_bytes = self.num_refused = 0
        self.num_collapsed = self.num_dropped = 0

    def send_pending(self, until_s: float = math.inf) -> None:
        """Send all pending batches, including those that arrive meanwhile. Start no batch after ``until_s``."""
        try:
            while self.pending:
                self._is_sending = True
                if len(self.pending) > self._max_pending:
                    self._collapse_overflow()
                else:
                    self._is_overflowing = False
                    self._send_batch(self.pending.popleft())
                if time.monotonic() >= until_s:
                    return
        finally:
            self._is_sending = False

    @property
    def num_unsent(self) -> int:
        """Batches without a number, including one that another thread is encoding."""
        return len(self.pending) + self._is_sending

    def send_until(self, deadline: float, *, at_least: int) -> None:
        """Send pending batches until ``deadline`` (``time.monotonic``), but no fewer than ``at_least``."""
        num_sent = 0
        while self.pending and not self._is_torn and (num_sent < at_least or time.monotonic() < deadline):
            self._send_batch(self.pending.popleft())
            num_sent += 1

    def drop_pending(self) -> None:
        """Count the batches that cannot be sent any more."""
        count = len(self.pending)
        if count:
            self.num_dropped += count
            self.pending.clear()
            _log.warning("%d KV-event batches were not sent before the deadline", count)

    def _collapse_overflow(self) -> None:
        """Replace too many pending batches by one with the same effect. No information is lost."""
        count = len(self.pending)
        if not self._is_overflowing:
            self._is_overflowing = True
            _log.warning("%d KV-event batches were pending: collapsed into one", count)
        batches = [self.pending.popleft() for _ in range(count)]
        try:
            merged = merge_batches(batches)
        except _INVALID_BATCH_ERRORS:
            # An object among them is no batch: send one by one, so that it alone is refused.
            for batch in batches:
                self._send_batch(batch)
            return
        self.num_collapsed += count
        if merged is not None:
            self._send_batch(merged)

    def _send_batch(self, batch: EventBatch) -> None:
        """Encode before taking a number, so that an invalid event takes none and costs no valid event."""
        try:
            payload: bytes | None
            payload, changes = self._encoder.encode_with_changes(batch, self._rank)
            events = batch.events
        except _INVALID_BATCH_ERRORS:
            payload, events = self._encode_valid_events(batch)
            changes = None
        if payload is None:
            return
        if len(payload) > _LARGE_PAYLOAD_BYTES:
            reason = oversize_reason(events, self._encoder)
            if reason is not None:
                self._refuse(1, f"{type(events[0]).__name__} ({reason})")
                return
            parts = split_events(events)
            if parts is not None:
                for part in parts:
                    self._send_batch(
                        EventBatch(ts=batch.ts, events=ValidatedEvents(part), attn_dp_rank=batch_rank(batch))
                    )
                return
        sequence = self._stream.append(payload, changes)
        try:
            self._send(self._topic, _SNDMORE)
            self._send(sequence.to_bytes(8, "big"), _SNDMORE)
            self._send(payload)
        except zmq.ZMQError as error:
            # Only code that closed a shared context causes this. The scheduler continues.
            self.num_dropped += 1
            if not self._is_failing:
                self._is_failing = True
                _log.error("KV events cannot be sent any more: %s", error)
            return
        except BaseException:
            # A signal handler raised, perhaps between two frames. Another send would continue that message; closing
            # discards it.
            self._is_torn = True
            raise
        self.num_batches += 1
        self.num_events += len(events)
        self.num_bytes += len(payload)

    def _encode_valid_events(self, batch: EventBatch) -> tuple[bytes | None, tuple[KVCacheEvent, ...]]:
        try:
            payload, events, refused = self._encoder.encode_valid(batch, self._rank)
        except _INVALID_BATCH_ERRORS as error:
            self._refuse(1, f"{type(batch).__name__}, which is not a batch of events: {error}")
            return None, ()
        if refused:
            self._refuse(len(refused), ", ".join(f"{event.name} ({event.reason})" for event in refused))
        return payload, events

    def _refuse(self, count: int, what: str) -> None:
        """Count refused events, and log them until a scheduler's bug would fill its log with them."""
        if self.num_refused < _MAX_REFUSALS_LOGGED:
            _log.error("KV events that readers would refuse are omitted: %s", what)
        self.num_refused += count


# Serve replays on the ROUTER: a bounded number of sends per drain, and never a wait.

_SENDS_PER_SLICE = 16
"""Size of a slice of replay between two live batches. Larger slices show in the live latency (measured)."""

_SENDS_PER_LARGE_SLICE = 96
"""Size of a slice while the scheduler waits for its device: some 300 otherwise unused microseconds."""

_BYTES_PER_SEND = 16 * 1024
"""Bytes that count as one send of a slice. A chunk of the snapshot is as large as a whole slice."""

_REQUESTS_PER_SLICE = 16
"""Counted separately, so that a client that only sends requests does not prevent answers."""

_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

_CLOSE_POLL_MS = 200
"""A client that accepts nothing for this long gets only the end marker when the publisher closes."""


class ZmqReplayServer:
    """Serve the ROUTER until ``finish``. The caller owns the sockets."""

    __slots__ = ("_events", "_has_failed", "_socket", "cursors")

    def __init__(self, socket: zmq.Socket[bytes], cursors: ReplaySessions) -> None:
        self._socket = socket
        # pyzmq's Python-level getsockopt converts to enums, which costs ten times the call itself.
        self._events = super(zmq.Socket, socket).get
        self.cursors = cursors
        self._has_failed = False

    @property
    def wakeup_fd(self) -> int:
        """File descriptor that becomes readable when a client sends a request, or can accept more."""
        return int(self._socket.getsockopt(zmq.FD))

    def serve_slice(self, now_s: float, *, is_waiting: bool = False) -> bool:
        """Receive requests and send at most one slice of answers. Return True while there is more to do immediately.

        Args:
            now_s: ``time.monotonic``.
            is_waiting: True if the scheduler waits for its device, so the slice is a large one.
        """
        if self._has_failed:
            return False
        try:
            return self._serve_slice(_SENDS_PER_LARGE_SLICE if is_waiting else _SENDS_PER_SLICE, now_s)
        except zmq.ZMQError as error:
            # Only code that closed a shared context causes this. The scheduler continues.
            self._has_failed = True
            _log.error("KV events cannot be replayed any more: %s", error)
            return False

    def _serve_slice(self, sends_left: int, now_s: float) -> bool:
        asked = 0
        while asked < _REQUESTS_PER_SLICE and self._is_readable():
            asked += 1
            self.cursors.receive(self._socket.recv_multipart(zmq.NOBLOCK))
        if not len(self.cursors):
            return asked == _REQUESTS_PER_SLICE
        for client in self.cursors.clients:
            sends_left = self._serve(client, sends_left, now_s)
            if not sends_left:
                return True
        # A full client is tried again at the next poll; only a request is immediate work.
        return self._is_readable()

    def _is_readable(self) -> bool:
        return bool(int(self._events(_EVENTS)) & _POLLIN)

    def _serve(self, client: bytes, sends_left: int, now_s: float) -> int:
        """Send to one client until its answer is complete, it is full, or the slice is used up.

        Returns:
            The remaining sends of the slice.
        """
        done = False
        while sends_left and not done:
            message = self.cursors.message(client)
            try:
                if message is not None:
                    self._socket.send_multipart(message, zmq.NOBLOCK)
            except zmq.Again:
                self.cursors.on_full(client, now_s)
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    _log.warning("replay to a client failed: %s", error)
                self.cursors.drop(client)
                self.cursors.num_truncated += 1
                return sends_left
            done = self.cursors.on_sent(client)
            # A step of planning, or a chunk of the snapshot, counts as a whole slice.
            cost = _SENDS_PER_LARGE_SLICE if message is None else 1 + len(message[-1]) // _BYTES_PER_SEND
            sends_left = max(0, sends_left - cost)
        self.cursors.rotate(client)
        return sends_left

    def finish(self, until: float, deadline: float) -> None:
        """Answer requests until ``until``, then end every answer and close the socket.

        Args:
            until: ``time.monotonic`` at which answers are cut.
            deadline: ``time.monotonic`` at which unsent messages are dropped.
        """
        while (
            (self.serve_slice(now_s := time.monotonic()) or len(self.cursors))
            and not self._has_failed
            and now_s < until
        ):
            if len(self.cursors) and not self._socket.poll(_CLOSE_POLL_MS, zmq.POLLOUT | zmq.POLLIN):
                break
        if not self._has_failed:
            self.cursors.end_all()
            for client in self.cursors.clients:
                self._serve(client, 1, deadline)
        self._socket.close(linger=max(0, int((deadline - time.monotonic()) * 1000)))


# The sockets of one stream, opened, drained and closed together. Nothing here locks: the caller owns the sockets.

_REQUESTS_EVERY_S = 0.004
"""Polling for replay requests costs a system call, so a scheduler with fast steps polls only in some of them."""

_SLICE_S = 0.0002
"""Time that the thread works before it offers the GIL. A scheduler that wakes up meanwhile waits for it."""

_DRAINS_PER_COUNT = 64
"""Peers connect rarely, so their reports are received once per this many drains of a busy scheduler."""


class DrainReason(enum.Enum):
    """The reason of a drain, which determines how long it may take."""

    STEP = "inside the scheduler's step, where every microsecond counts"
    RELIEF = "inside the scheduler's step, because too much was left to the thread, which serves the replays"
    HANDED_OVER = "by the thread to which the scheduler hands its batches over, one slice at a time"
    WAIT = "while the scheduler waits for its device, so there is some time"
    STALL = "by the thread, because the scheduler has stopped draining"


_BY_THREAD = (DrainReason.HANDED_OVER, DrainReason.STALL)
"""In slices, because the thread owns the sockets and may lose the GIL in each send."""


class ZmqStreamSockets:
    """The live sender, the replay server and the counters of one stream. Opened by ``open_zmq_stream``.

    Attributes:
        live: sends batches on the PUB socket.
        sessions: the open answers to replay requests.
        sockets: the open sockets and their actual addresses.
        is_open_bind: True if the stream listens beyond loopback without authentication.
    """

    __slots__ = (
        "_floor",
        "_polled_at_s",
        "_num_drains",
        "_replay",
        "_stream",
        "is_open_bind",
        "live",
        "sessions",
        "sockets",
    )

    def __init__(
        self,
        sockets: StreamSockets,
        stream: EventStream,
        cursors: ReplaySessions,
        live: ZmqLiveSender,
        *,
        floor: SequenceFloor,
        is_open_bind: bool,
    ) -> None:
        self.sockets = sockets
        self.live = live
        self.is_open_bind = is_open_bind
        self._stream = stream
        self.sessions = cursors
        self._floor = floor
        self._replay = ZmqReplayServer(sockets.replay, cursors) if sockets.replay else None
        self._num_drains = 0
        self._polled_at_s = 0.0

    @property
    def wakeup_fds(self) -> tuple[int, ...]:
        """File descriptors that become readable when a peer connects or needs service."""
        replay = [self._replay.wakeup_fd] if self._replay else []
        return (*replay, *(counter.wakeup_fd for counter in self.sockets.peers if counter))

    def drain(self, reason: DrainReason, now_s: float) -> bool:
        """Send the pending batches, fold, and serve a slice of replays. Return True while there is more to do.

        ``now_s`` is ``time.monotonic``.
        """
        self.live.send_pending(now_s + _SLICE_S if reason in _BY_THREAD else math.inf)
        self._stream.fold_oldest()
        if self._stream.has_stuck_pins:
            self.sessions.cancel_pinned()
        self._num_drains += 1
        if self._num_drains % _DRAINS_PER_COUNT == 0:
            self.count_peers()
            self._floor.reserve_above(self._stream.next_sequence)
        if self._replay is None or reason is DrainReason.RELIEF:
            return False
        if self.live.pending:
            return True  # an answer covers all batches that were published before its request
        has_polled = now_s - self._polled_at_s < _REQUESTS_EVERY_S and reason is not DrainReason.STALL
        if has_polled and not len(self.sessions):
            return False
        self._polled_at_s = now_s
        unfinished = self._replay.serve_slice(now_s, is_waiting=reason is DrainReason.WAIT)
        while unfinished and reason in _BY_THREAD and time.monotonic() < now_s + _SLICE_S:
            unfinished = self._replay.serve_slice(now_s)
        return unfinished

    def count_peers(self) -> bool:
        """Receive a bounded number of peer reports. Return True while there may be more."""
        more = [counter.poll_events() for counter in self.sockets.peers if counter]
        return any(more)

    def close(self, deadline: float) -> bool:
        """Send, end and close everything. Return True if a peer had not received all of it by ``deadline``."""
        self.live.send_until(deadline, at_least=MAX_WAITING)  # at least what a call of publish() would send
        # The live tail goes first, because no reader can request it later. linger 0 would lose libzmq's queue.
        now = time.monotonic()
        self.sockets.pub.close(linger=max(0, int((deadline - now) * 1000)))
        if self._replay:
            self._replay.finish(until=(now + deadline) / 2, deadline=deadline)
        self.release()
        was_cut = time.monotonic() >= deadline
        if was_cut:
            text = "%s closed at its deadline: a peer had not received all of %d batches handed to libzmq (KV events)"
            _log.warning(text, self.sockets.endpoint, self.live.num_batches)
        return was_cut

    def release(self) -> None:
        """Close the sockets and the sequence floor."""
        self.sockets.release()
        self._floor.close(self._stream.next_sequence)

    def stats(self, lag_s: float) -> PublisherStats:
        """Return the counters since the stream was opened."""
        live, replays, stream = self.live, self.sessions, self._stream
        live_peers = self.sockets.peers[0]
        return PublisherStats(
            batches_sent=live.num_batches,
            events_sent=live.num_events,
            bytes_sent=live.num_bytes,
            events_refused=live.num_refused,
            batches_collapsed=live.num_collapsed,
            batches_dropped=live.num_dropped,
            replays_served=replays.num_served,
            batches_replayed=replays.num_batches,
            replays_refused=replays.num_refused,
            replays_truncated=replays.num_truncated,
            replays_open=len(replays),
            replays_waiting=replays.num_waiting,
            batches_buffered=len(stream),
            bytes_buffered=stream.buffered_bytes,
            blocks_in_base=stream.num_snapshot_blocks,
            bytes_in_base=stream.num_snapshot_bytes,
            batches_pending=live.num_unsent,  # before last_sequence: never an old number without pending ones
            lag_s=lag_s if live.pending else 0.0,
            last_sequence=stream.next_sequence - 1,
            subscribers_seen=live_peers.num_connected if live_peers else 0,
            peers_refused=sum(counter.num_refused for counter in self.sockets.peers if counter),
            open_bind_without_auth=int(self.is_open_bind),
        )


def open_zmq_stream(settings: KVEventsConfig, rank: int, inproc_context: Context | None) -> ZmqStreamSockets:
    """Validate everything, then open the sockets of stream ``rank``.

    Raises:
        ConfigError: a key file cannot be used, or no port is left for this stream; nothing has been opened.
        StartError: the system refused an address or the sequence floor; nothing stays open.
    """
    plan = settings.port_plan(rank + 1)  # there are at least this many streams
    events_at, replay_at = plan.event_endpoint(rank), plan.replay_endpoint(rank)
    binds = events_at.resolve_bind(settings.bind)
    access = CurveServerKeys.of(settings)
    topic = settings.topic.encode()
    encoder = BatchEncoder(settings.dialect)
    floor = _open_floor(settings, rank)
    stream = EventStream(
        epoch=os.urandom(EPOCH_BYTES),
        max_steps=settings.buffer_steps if replay_at else 0,
        max_bytes=settings.buffer_bytes,
        first_sequence=floor.first,
    )
    cursors = ReplaySessions(stream, encoder=encoder, rank=rank, framing=settings.replay_framing, topic=topic)
    with ExitStack() as undo:
        undo.callback(floor.close, floor.first)
        sockets = open_stream_sockets(
            events_at, replay_at, hwm=settings.hwm, bind=binds, access=access, inproc_context=inproc_context
        )
        undo.pop_all()
    live = ZmqLiveSender(
        sockets.pub, topic=topic, encoder=encoder, stream=stream, rank=rank, max_pending=settings.max_queue_size
    )
    is_open_bind = access is None and _warn_if_open(events_at if binds else None, replay_at)
    return ZmqStreamSockets(sockets, stream, cursors, live, floor=floor, is_open_bind=is_open_bind)


def _open_floor(settings: KVEventsConfig, rank: int) -> SequenceFloor:
    """Choose the first number. The files of further streams get a suffix, as ipc paths do."""
    if settings.seq_base == "zero":
        return open_sequence_floor(None, wanted=0)
    name = settings.seq_floor_file
    path = Path(f"{name}_dp{rank}" if rank else name) if name else None
    # Microseconds, because a busy stream sends more than one batch per millisecond and would outrun its successor.
    return open_sequence_floor(path, wanted=time.time_ns() // 1000)


def _warn_if_open(*bound: Endpoint | None) -> bool:
    listening = [str(endpoint) for endpoint in bound if endpoint is not None and not endpoint.is_loopback]
    if listening:
        where = " and ".join(listening)
        _log.warning('KV events with prompt token ids are readable by anyone who reaches %s: auth is "none"', where)
    return bool(listening)


_STALLED_AFTER_S = 0.005
"""A scheduler that has not published or idled for this long has stopped draining, so the backstop drains."""

_LATE_S = 0.003
"""A thread with this delay got the GIL only when the interpreter took it from the scheduler."""

_LULL_AFTER_S = 0.02
"""Time to wait for a busy scheduler's next batch, because waking the thread for it costs its step a system call."""

_DRAIN_END_S = 1.0
"""Time for another thread to end its drain, which takes milliseconds. Even ``close(0)`` waits for it."""


class CloseReport(msgspec.Struct, frozen=True):
    """The outcome of ``close``.

    A PUB socket never reports delivery: a subscriber that is slower than its queue misses batches and detects it by
    their numbers.

    Attributes:
        batches_handed_over: batches handed to libzmq since the publisher was opened; not all need be delivered.
        batches_dropped: batches accepted but never handed over, since the publisher was opened.
        was_cut: True if the deadline passed before every peer had received what libzmq still had for it: a slow or
            stopped subscriber has missed the end of the stream. False if all of it went into the peers' connections.
        is_under_way: True if a signal handler called ``close`` inside the ``publish()`` or ``idle()`` that owns the
            sockets: that call closes them at its end, and a second ``close`` then returns the outcome.
    """

    batches_handed_over: int
    batches_dropped: int
    was_cut: bool = False
    is_under_way: bool = False


_open_publishers: weakref.WeakSet[ZmqEventPublisher] = weakref.WeakSet()


@atexit.register
def _shutdown_all() -> None:
    """Send the tail of publishers that are still open at exit. An unreferenced publisher closes itself."""
    for publisher in tuple(_open_publishers):
        publisher.shutdown()


def _close_abandoned(edge: ZmqStreamSockets, backstop: Backstop, owner_pid: int) -> None:
    """Close the sockets of a publisher that was dropped without ``shutdown()``, on the thread that collects it."""
    if os.getpid() != owner_pid:
        return
    _log.warning("the KV-event publisher of %s was dropped without shutdown()", edge.sockets.endpoint)
    if backstop.stop(_DRAIN_END_S):
        edge.close(time.monotonic() + _DRAIN_END_S)
        edge.live.drop_pending()


class ZmqEventPublisher(EventPublisher):
    """Publish one rank's stream. The first seven parameters are those of SGLang's class of this name.

    The constructor opens the sockets, as that class does, because code written for it expects a listening publisher.

    Args:
        attn_dp_rank: the stream's index; offsets both endpoints and is stamped on batches without a rank.
        endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic: settings of ``KVEventsConfig``, with its
            meaning and defaults. They take precedence over ``config``.
        config: all other settings; None for the defaults.
        context: the context of inproc peers, by default pyzmq's ``Context.instance()``. Other transports have their own
            context.

    Raises:
        ConfigError: a setting is invalid; nothing has been opened.
        StartError: the system refused an address; nothing stays open.
    """

    SHUTDOWN_TIMEOUT: float = 1.0
    END_SEQ = END_SEQ

    def __init__(  # noqa: SCH010 the seven of SGLang's class, then this kit's own two
        self,
        attn_dp_rank: int,
        endpoint: str | UnsetType = UNSET,
        replay_endpoint: str | UnsetType | None = UNSET,
        buffer_steps: int | UnsetType = UNSET,
        hwm: int | UnsetType = UNSET,
        max_queue_size: int | UnsetType = UNSET,
        topic: str | UnsetType = UNSET,
        *,
        config: KVEventsConfig | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__(attn_dp_rank)
        settings = (config or KVEventsConfig()).changed(
            publisher="zmq",
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            buffer_steps=buffer_steps,
            hwm=hwm,
            max_queue_size=max_queue_size,
            topic=topic,
        )
        check_integer("attn_dp_rank", attn_dp_rank, "is not a rank", at_least=0)
        self._owner = threading.Lock()
        self._pid = os.getpid()
        self._is_forked = False
        # True while the next batch may wait, because ``idle()`` was just called and the backstop polls.
        self._may_defer = False
        self._hands_over = settings.send_mode == "background"
        self._backlog = (Backlog if self._hands_over else InlineBacklog)(settings.max_queue_size)
        # True while batches are left to the thread, because the scheduler publishes and does not call ``idle()``.
        self._is_handing_over = False
        self._drained_at_s = self._seen_called_at_s = 0.0
        self._closed: CloseReport | None = None
        self._close_by_s: float | None = None
        self._edge = open_zmq_stream(settings, attn_dp_rank, context)  # noqa: SCH008 a publisher of SGLang's name listens once it is made
        self._pending = self._edge.live.pending
        self.endpoint = self._edge.sockets.endpoint
        self.replay_endpoint = self._edge.sockets.replay_endpoint
        self._start_backstop()
        self._finalizer = weakref.finalize(self, _close_abandoned, self._edge, self._backstop, self._pid)
        self._finalizer.atexit = False
        _open_publishers.add(self)
        register_for_fork(self)
        if settings.seq_base == "clock":
            self.publish(KVEventBatch(ts=time.time(), events=(AllBlocksCleared(),)))

    def _start_backstop(self) -> None:
        name = f"kv-events-backstop-{self._attn_dp_rank}"
        self._backstop = Backstop(self, watched_fds=self._edge.wakeup_fds, name=name)
        try:
            self._backstop.start()  # noqa: SCH008 a publisher of SGLang's name listens once it is made
        except (OSError, RuntimeError) as error:
            self._edge.release()
            hint = "raise the limits of open files and threads, or stop the processes that use them"
            raise StartError(self.endpoint, f"cannot start its thread ({error})", hint) from error

    def publish(self, events: EventBatch) -> None:
        """Accept one batch; never block. The next ``idle()`` or the publisher's thread sends it.

        Batches keep their order. If neither comes soon, one of the next calls sends the waiting batches. Without
        further calls they are sent within some ten milliseconds. With ``send_mode`` ``inline``, this call sends a batch
        that does not wait for ``idle()``, and sends a burst of them in groups.

        Raises:
            PublisherClosedError: after ``shutdown()``, or if a signal handler called ``shutdown()`` meanwhile.
            ForkedPublisherError: in a child process, because the sockets and the stream belong to the parent.
        """
        if self._may_defer:
            self._pending.append(events)
            # Test again: the thread may have cleared the flag and checked the pending batches before the append.
            if self._may_defer:
                self._may_defer = False
                return
        elif self._may_wait(events):
            return
        self._drain(DrainReason.RELIEF if self._hands_over and self._backlog.is_prompt else DrainReason.STEP)

    def _may_wait(self, batch: EventBatch) -> bool:
        """Make a batch pending. Return True if it is left to the thread, or to the next call of its burst."""
        self._check_usable()
        pending = self._pending
        pending.append(batch)
        self._is_handing_over = self._hands_over
        if not self._backlog.may_wait(batch_cost(batch), time.monotonic(), len(pending)):
            return False
        # The thread watches waiting batches. A signal handler may have closed just before the batch became pending.
        return self._backstop.watch() and self._closed is None

    def _check_usable(self) -> None:
        if self._is_forked:
            raise ForkedPublisherError(self._pid)
        if self._closed is not None:
            raise PublisherClosedError("publish() after shutdown(): the batch was not accepted")

    def idle(self) -> None:
        """Send pending batches and serve a slice of each replay. Call it where the scheduler waits for its device.

        Raises:
            ForkedPublisherError: in a child process.
        """
        if self._is_forked:
            raise ForkedPublisherError(self._pid)
        if self._closed is None:
            is_busy = bool(self._pending) or self._is_handing_over
            self._is_handing_over = False
            self._drain(DrainReason.WAIT)
            if is_busy:  # a scheduler that only idles keeps the thread asleep
                # In this order, because a backstop that falls asleep in between clears the flag.
                self._may_defer = True
                if not self._backstop.watch():
                    self._may_defer = False

    def flush(self, deadline_s: float = 0.0) -> bool:
        """Send the pending batches. Wait up to ``deadline_s`` seconds for a thread that uses the sockets.

        Return True if every batch that was published before has its number and was passed to libzmq.

        Raises:
            ForkedPublisherError: in a child process.
        """
        until_s = time.monotonic() + deadline_s
        self.idle()
        while self._closed is None and self._edge.live.num_unsent:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            self._drain(DrainReason.WAIT, wait_s=left_s)
        return not self._edge.live.num_unsent

    def set_upstream_state(self, state: str | None) -> None:
        """Publish how completely a relay knows its own sources; see ``ReplayMeta.upstream``.

        Args:
            state: None if it knows all of them, otherwise a ``StreamState``. Readers that use the extension then do not
                treat their view as verified.
        """
        self._edge.sessions.upstream = state

    def after_fork_in_child(self) -> None:
        """Refuse every call in a forked child, because sockets and stream belong to the parent."""
        self._is_forked = True
        self._may_defer = False
        self._backstop.after_fork_in_child(self._edge)

    def stop_deferring(self) -> None:
        """Let ``publish()`` send the next batch, because the backstop stops polling."""
        self._may_defer = False

    def _drain(self, reason: DrainReason, *, wait_s: float = 0.0) -> None:
        self._drained_at_s = time.monotonic()
        try:
            # A step never waits: the owner checks the pending batches again after it has released the lock.
            while self._closed is None and self._owner.acquire(timeout=wait_s):
                try:
                    unfinished = self._edge.drain(reason, self._drained_at_s)
                finally:
                    self._owner.release()
                if unfinished:
                    self._backstop.watch()
                if not self._pending:
                    return
        finally:
            if self._close_by_s is not None:  # set by a signal handler meanwhile
                self._close_edge()
        if self._closed is not None and not self._closed.is_under_way and self._pending:
            # Accepted while a signal handler closed, so it would never be sent.
            self._edge.live.drop_pending()
            raise PublisherClosedError("publish() after shutdown(): the batch was not accepted")

    def drain_for_scheduler(self, late_s: float) -> DrainResult:
        """Drain the batches that were handed over, or all of them if the scheduler has not drained lately."""
        now, used_s = time.monotonic(), time.thread_time()
        is_prompt = self._backlog.is_prompt = late_s < _LATE_S
        is_handed_over = self._is_handing_over
        called_at_s = max(self._drained_at_s, self._backlog.last_s)
        # A late thread cannot distinguish a stopped scheduler from one that was kept from running as well.
        is_active = now - called_at_s < _STALLED_AFTER_S or not (is_prompt or called_at_s == self._seen_called_at_s)
        self._seen_called_at_s = called_at_s
        if is_active and not (is_handed_over and is_prompt):
            return DrainResult.DRAINING
        unfinished = False
        while self._closed is None:
            if not self._owner.acquire(blocking=False):
                return DrainResult.HANDED_OVER if is_handed_over else DrainResult.DRAINING
            try:
                unfinished = self._drain_slice(now)
            finally:
                self._owner.release()
            # A publish() that found the sockets owned has left its batch to their owner: this thread.
            if is_handed_over or not self._pending:
                break
            now = time.monotonic()
        if self._close_by_s is not None:
            self._close_edge()
        return self._next_poll(unfinished, now, used_s)

    def _drain_slice(self, now_s: float) -> bool:
        """Drain one slice on the thread. Return True while there is more. Without waiting batches, also count peers."""
        if self._is_handing_over and self._pending:
            return self._edge.drain(DrainReason.HANDED_OVER, now_s)
        return self._edge.drain(DrainReason.STALL, now_s) | self._edge.count_peers()

    def _next_poll(self, unfinished: bool, began_s: float, used_before_s: float) -> DrainResult:
        """Return when to poll again after a slice.

        Args:
            unfinished: True if the slice left work.
            began_s: monotonic time at which the slice began.
            used_before_s: processor time of the thread at that moment.
        """
        now = time.monotonic()
        waited_s = now - began_s - (time.thread_time() - used_before_s)
        if waited_s > _LATE_S:
            self._backlog.is_prompt = False
        if unfinished or self._pending:
            # A thread that has just waited for the GIL has already granted it to the scheduler.
            return DrainResult.SHARING if self._is_handing_over and waited_s < _SLICE_S else DrainResult.BUSY
        # Polled, because a descriptor reports it only once, and an earlier poll may have consumed the report.
        can_progress = self._edge.sessions.can_progress(now)
        if self._is_handing_over and (can_progress or now - self._backlog.last_s <= _LULL_AFTER_S):
            self._backstop.soon_s = self._backlog.next_poll_in_s(now)
            return DrainResult.HANDED_OVER
        if can_progress:
            return DrainResult.WAITING
        if len(self._edge.sessions):
            return DrainResult.STUCK
        return DrainResult.LULL if self._is_handing_over else DrainResult.QUIET

    def shutdown(self) -> None:
        """Call ``close`` with ``SHUTDOWN_TIMEOUT`` seconds. Safe to call twice."""
        self.close(self.SHUTDOWN_TIMEOUT)

    def close(self, deadline_s: float) -> CloseReport:
        """Send pending batches, end open replays with their end marker, and close sockets, thread and context.

        Never raises because of the network, and returns within about ``deadline_s``. A second call returns the first
        one's report. In a child process it does nothing, because the sockets belong to the parent. A signal handler may
        call it, also inside ``publish()``: it then returns immediately, and that ``publish()`` closes.
        """
        if self._closed is not None:
            return self._closed
        self._closed = self._report(is_under_way=True)
        self._may_defer = False
        self._finalizer.detach()
        _open_publishers.discard(self)
        if self._is_forked:
            self._closed = self._report()
            return self._closed
        close_by_s = time.monotonic() + deadline_s
        patience_s = max(deadline_s, _DRAIN_END_S)
        has_ended = self._backstop.stop(patience_s)
        # From here on, the owner of the sockets closes them when it releases them: perhaps the call that this one
        # interrupts.
        self._close_by_s = close_by_s
        if not has_ended or not self._close_edge(0.0 if self._interrupts_drain() else patience_s):
            _log.info("the KV-event sockets of %s are in use and will be closed afterwards", self.endpoint)
        return self._closed

    def _report(self, *, was_cut: bool = False, is_under_way: bool = False) -> CloseReport:
        live = self._edge.live
        return CloseReport(live.num_batches, live.num_dropped, was_cut, is_under_way)

    def _close_edge(self, patience_s: float = 0.0) -> bool:
        """Close the sockets once. Return False if another thread owns them, which then closes them."""
        if not self._owner.acquire(timeout=patience_s):
            return False
        try:
            if self._close_by_s is not None:
                close_by_s, self._close_by_s = self._close_by_s, None
                was_cut = self._edge.close(close_by_s)
                self._edge.live.drop_pending()
                self._closed = self._report(was_cut=was_cut)
        finally:
            self._owner.release()
        return True

    def _interrupts_drain(self) -> bool:
        """Return True in a signal handler that interrupts this publisher's own drain, which cannot end before it."""
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code is ZmqEventPublisher._drain.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def stats(self) -> PublisherStats:
        """Return the counters since the publisher was opened."""
        num_pending = len(self._pending)
        since_s = self._backlog.oldest_at_s(num_pending) if self._is_handing_over else self._drained_at_s
        return self._edge.stats(lag_s=time.monotonic() - since_s)

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """Return ``endpoint`` of rank 0 offset to another rank: port + rank for tcp, a suffix for ipc and inproc.

        Raises:
            ConfigError: the endpoint cannot be parsed, or the port is not from 0 to 65535.
        """
        return str(Endpoint.parse(endpoint).offset(data_parallel_rank)) if endpoint else endpoint
