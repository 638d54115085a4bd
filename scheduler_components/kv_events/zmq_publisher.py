"""The ZMQ publisher: live batches on a PUB socket, past ones on a replay ROUTER.

The file is read from the sockets up: ``ZmqLiveSender`` (encode, number, send), ``ZmqReplayServer`` (answers in slices),
``ZmqStreamSockets`` (both, and all else of one stream), ``ZmqEventPublisher`` (who works, and when).

Who works: ``publish()`` appends; ``idle()``, called where the scheduler waits for its device, encodes, sends and serves
replays: it drains. A scheduler that never calls ``idle()`` hands its batches over to the backstop thread. A sending
thread alone, as SGLang and vLLM have it, starves when the scheduler keeps the GIL. So ``publish()`` drains by itself
what has become too much, or too old (``backlog.py``).

Who owns the sockets: the thread that drains. It holds the owner lock, for which the scheduler's thread never waits.
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

# Sending live batches: encode, number, send. The caller of all but ``pending.append`` owns the sockets.

_LARGE_PAYLOAD_BYTES = MAX_PAYLOAD_BYTES // 2
"""A batch above this goes out as several, so that no reader refuses it for its size."""

_MAX_REFUSALS_TOLD = 100
"""Further ones are only counted."""

_SNDMORE = int(zmq.SNDMORE)
"""A plain integer: the C-level send makes one of an enum three times per batch."""

_UNSOUND = (*ENCODE_ERRORS, AttributeError, RecursionError)
"""What something raises that was published and is no batch of events."""


class ZmqLiveSender:
    """Takes batches through encoder and stream to the PUB socket, and counts.

    Attributes:
        pending: accepted batches, oldest first; any thread may append.
        num_batches, num_events, num_bytes: sent.
        num_refused: events that readers would not take and that were left out of their batch.
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
        # pyzmq's Python-level send costs several times its C-level send, three times per batch.
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
        """Send all that is pending, also what comes meanwhile; begin no further batch after ``until_s``."""
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
        """Batches that have no number yet: also the one that another thread encodes just now."""
        return len(self.pending) + self._is_sending

    def send_until(self, deadline: float, *, at_least: int) -> None:
        """Send what is pending until ``deadline`` (``time.monotonic``), and ``at_least`` so many batches."""
        num_sent = 0
        while self.pending and not self._is_torn and (num_sent < at_least or time.monotonic() < deadline):
            self._send_batch(self.pending.popleft())
            num_sent += 1

    def drop_pending(self) -> None:
        """Count what could not be sent any more."""
        count = len(self.pending)
        if count:
            self.num_dropped += count
            self.pending.clear()
            _log.warning("%d KV-event batches were not sent before the deadline", count)

    def _collapse_overflow(self) -> None:
        """More is pending than may be kept: send one batch with the same effect instead. Nothing is lost."""
        count = len(self.pending)
        if not self._is_overflowing:
            self._is_overflowing = True
            _log.warning("%d KV-event batches were pending: collapsed into one", count)
        batches = [self.pending.popleft() for _ in range(count)]
        try:
            merged = merge_batches(batches)
        except _UNSOUND:
            # Something among them is no batch: one by one, it alone is refused.
            for batch in batches:
                self._send_batch(batch)
            return
        self.num_collapsed += count
        if merged is not None:
            self._send_batch(merged)

    def _send_batch(self, batch: EventBatch) -> None:
        """Encode before taking a number: an event that cannot be encoded takes none, and costs no good event."""
        try:
            payload: bytes | None
            payload, changes = self._encoder.encode_with_changes(batch, self._rank)
            events = batch.events
        except _UNSOUND:
            payload, events = self._encode_sound(batch)
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
            # Only somebody who closed a shared context can have done this. A scheduler does not stop for it.
            self.num_dropped += 1
            if not self._is_failing:
                self._is_failing = True
                _log.error("KV events cannot be sent any more: %s", error)
            return
        except BaseException:
            # A signal handler raised, perhaps between two frames. To send more would continue that message; to close
            # takes it back.
            self._is_torn = True
            raise
        self.num_batches += 1
        self.num_events += len(events)
        self.num_bytes += len(payload)

    def _encode_sound(self, batch: EventBatch) -> tuple[bytes | None, tuple[KVCacheEvent, ...]]:
        try:
            payload, events, refused = self._encoder.encode_valid(batch, self._rank)
        except _UNSOUND as error:
            self._refuse(1, f"{type(batch).__name__}, which is no batch of them: {error}")
            return None, ()
        if refused:
            self._refuse(len(refused), ", ".join(f"{event.name} ({event.reason})" for event in refused))
        return payload, events

    def _refuse(self, count: int, what: str) -> None:
        """Count always; say it for as long as a scheduler's bug has not filled its log with it."""
        if self.num_refused < _MAX_REFUSALS_TOLD:
            _log.error("KV events that readers would not take are left out: %s", what)
        self.num_refused += count


# Serving replays over the ROUTER: a bounded number of sends per drain, and never a wait.

_SENDS_PER_SLICE = 16
"""A slice of replay between two live batches: larger ones show in the live latency (measured)."""

_SENDS_PER_LARGE_SLICE = 96
"""A slice while the scheduler waits for its device: some 300 microseconds that nobody else wants."""

_BYTES_PER_SEND = 16 * 1024
"""What counts as one send of a slice; a chunk of the base is as large as a whole slice."""

_REQUESTS_PER_SLICE = 16
"""Counted apart, so that a client that only asks keeps nobody from being answered."""

_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

_CLOSE_POLL_MS = 200
"""A client that takes nothing for so long gets no more than the end marker when the publisher closes."""


class ZmqReplayServer:
    """Owns the ROUTER from the moment it is given until ``finish``; the caller owns the sockets."""

    __slots__ = ("_events", "_has_failed", "_socket", "cursors")

    def __init__(self, socket: zmq.Socket[bytes], cursors: ReplaySessions) -> None:
        self._socket = socket
        # pyzmq's Python-level getsockopt makes enums of both ends: ten times the call itself.
        self._events = super(zmq.Socket, socket).get
        self.cursors = cursors
        self._has_failed = False

    @property
    def wakeup_fd(self) -> int:
        """Becomes readable when a client asks, or can take more."""
        return int(self._socket.getsockopt(zmq.FD))

    def serve_slice(self, now_s: float, *, is_waiting: bool = False) -> bool:
        """Take requests and send at most a slice of answers; True while there is more to do right away.

        ``now_s`` is ``time.monotonic``; ``is_waiting`` says that the scheduler has time: the slice is a large one.
        """
        if self._has_failed:
            return False
        try:
            return self._serve_slice(_SENDS_PER_LARGE_SLICE if is_waiting else _SENDS_PER_SLICE, now_s)
        except zmq.ZMQError as error:
            # Only somebody who closed a shared context can have done this. A scheduler does not stop for it.
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
        # Who cannot take more is asked again at the next look; only a request is work for now.
        return self._is_readable()

    def _is_readable(self) -> bool:
        return bool(int(self._events(_EVENTS)) & _POLLIN)

    def _serve(self, client: bytes, sends_left: int, now_s: float) -> int:
        """Send to one client until it is done, is full, or the slice is used up; returns the sends left."""
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
            # A step of planning, or a chunk of the base, is a slice of its own.
            cost = _SENDS_PER_LARGE_SLICE if message is None else 1 + len(message[-1]) // _BYTES_PER_SEND
            sends_left = max(0, sends_left - cost)
        self.cursors.rotate(client)
        return sends_left

    def finish(self, until: float, deadline: float) -> None:
        """Answer what was asked until ``until``, then end every answer, and close; sent by ``deadline`` or never.

        Both are times of ``time.monotonic``.
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


# One stream's sockets and all that moves through them, opened, drained and closed as one.
#
# Nothing here locks: whoever calls owns the sockets.

_REQUESTS_EVERY_S = 0.004
"""To look for replay requests costs a system call: a scheduler of quick steps does it in some of them."""

_SLICE_S = 0.0002
"""So long the thread works before it offers the GIL: a scheduler that wakes up meanwhile waits for it."""

_DRAINS_PER_COUNT = 64
"""Peers come rarely: their reports are looked for once in so many drains of a busy scheduler."""


class DrainReason(enum.Enum):
    """Why the stream is drained now, which decides how much time that may take."""

    STEP = "inside the scheduler's step, where every microsecond shows"
    RELIEF = "the same, for the thread: too much was left to it; it serves the replays"
    HANDED_OVER = "by the thread that the scheduler leaves its batches to, a slice at a time"
    WAIT = "while the scheduler waits for its device: there is some time"
    STALL = "by the thread, for a scheduler that has stopped draining"


_BY_THREAD = (DrainReason.HANDED_OVER, DrainReason.STALL)
"""In slices: the thread may lose the GIL in each send, and has the sockets meanwhile."""


class ZmqStreamSockets:
    """The live sender, the replay server and the counters of one stream; made by ``open_zmq_stream``.

    Attributes:
        live: what takes batches to the PUB socket.
        sockets: where the stream really is.
        is_open_bind: True when it listens beyond loopback without authentication.
    """

    __slots__ = (
        "_sessions",
        "_floor",
        "_looked_at_s",
        "_num_drains",
        "_replay",
        "_stream",
        "is_open_bind",
        "live",
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
        self._sessions = cursors
        self._floor = floor
        self._replay = ZmqReplayServer(sockets.replay, cursors) if sockets.replay else None
        self._num_drains = 0
        self._looked_at_s = 0.0

    @property
    def wakeup_fds(self) -> tuple[int, ...]:
        """Become readable when a peer came or wants something."""
        replay = [self._replay.wakeup_fd] if self._replay else []
        return (*replay, *(counter.wakeup_fd for counter in self.sockets.peers if counter))

    def drain(self, reason: DrainReason, now_s: float) -> bool:
        """Send what is pending, fold, serve a slice of replays; True while there is more to do.

        ``now_s`` is ``time.monotonic``.
        """
        self.live.send_pending(now_s + _SLICE_S if reason in _BY_THREAD else math.inf)
        self._stream.fold_oldest()
        if self._stream.has_stuck_pins:
            self._sessions.cancel_pinned()
        self._num_drains += 1
        if self._num_drains % _DRAINS_PER_COUNT == 0:
            self.count_peers()
            self._floor.reserve_above(self._stream.next_sequence)
        if self._replay is None or reason is DrainReason.RELIEF:
            return False
        if self.live.pending:
            return True  # an answer covers what was published before it was asked for
        has_looked = now_s - self._looked_at_s < _REQUESTS_EVERY_S and reason is not DrainReason.STALL
        if has_looked and not len(self._sessions):
            return False
        self._looked_at_s = now_s
        unfinished = self._replay.serve_slice(now_s, is_waiting=reason is DrainReason.WAIT)
        while unfinished and reason in _BY_THREAD and time.monotonic() < now_s + _SLICE_S:
            unfinished = self._replay.serve_slice(now_s)
        return unfinished

    def set_upstream_state(self, state: str | None) -> None:
        """Let every META say ``state`` from now on; see ``ReplayMeta.upstream``."""
        self._sessions.upstream = state

    def can_progress(self, now_s: float) -> bool:
        """True while a replay client may soon take more: a full one that is not stuck, or one that waits its turn.

        Nobody tells when it can. A descriptor says so once, and a look that came between may have heard it.
        """
        return self._sessions.can_progress(now_s)

    @property
    def has_open_replays(self) -> bool:
        """True while a replay client has not got all of its answer."""
        return len(self._sessions) > 0

    def count_peers(self) -> bool:
        """Take a bounded number of reports of who connected; True while there may be more."""
        more = [counter.poll_events() for counter in self.sockets.peers if counter]
        return any(more)

    def close(self, deadline: float) -> bool:
        """Send, end and close everything; True when some peer had not taken all of it by ``deadline``."""
        self.live.send_until(deadline, at_least=MAX_WAITING)  # no less than a call of publish() would send
        # The live tail goes first, for nobody can ask for it again. linger 0 would lose what libzmq has queued.
        now = time.monotonic()
        self.sockets.pub.close(linger=max(0, int((deadline - now) * 1000)))
        if self._replay:
            self._replay.finish(until=(now + deadline) / 2, deadline=deadline)
        self.release()
        was_cut = time.monotonic() >= deadline
        if was_cut:
            text = "%s closed at its deadline: a peer had not taken all of %d batches handed to libzmq (KV events)"
            _log.warning(text, self.sockets.endpoint, self.live.num_batches)
        return was_cut

    def release(self) -> None:
        """Let go of the sockets and of the file of the numbers."""
        self.sockets.release()
        self._floor.close(self._stream.next_sequence)

    def stats(self, lag_s: float) -> PublisherStats:
        """Counters since the stream was opened."""
        live, replays, stream = self.live, self._sessions, self._stream
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
            batches_pending=live.num_unsent,  # before the number: nobody may read an old one and nothing pending
            lag_s=lag_s if live.pending else 0.0,
            last_sequence=stream.next_sequence - 1,
            subscribers_seen=live_peers.num_connected if live_peers else 0,
            peers_refused=sum(counter.num_refused for counter in self.sockets.peers if counter),
            open_bind_without_auth=int(self.is_open_bind),
        )


def open_zmq_stream(settings: KVEventsConfig, rank: int, inproc_context: Context | None) -> ZmqStreamSockets:
    """Check all there is to check, then open the sockets of stream ``rank``.

    Raises:
        ConfigError: a key file cannot be used, or no port is left for this stream; nothing has been opened.
        StartError: the system refused an address or the file of the numbers; nothing stays open.
    """
    plan = settings.port_plan(rank + 1)  # so many streams there are at least
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
    """Choose the first number. Files of further streams get a suffix, as ipc paths do."""
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
"""A scheduler that has not published or idled for this long has stopped draining: the backstop drains for it."""

_LATE_S = 0.003
"""A thread that comes so late did not get the GIL until the interpreter took it away from the scheduler."""

_LULL_AFTER_S = 0.02
"""Until then a busy scheduler's next batch is waited for; to wake the thread for it costs its step a system call."""

_LET_GO_S = 1.0
"""Time for another thread to end its drain, which takes milliseconds: also a ``close(0)`` closes its sockets."""


class CloseReport(msgspec.Struct, frozen=True):
    """What ``close`` could still do.

    A PUB socket never says what arrived: a subscriber that is slower than its queue misses batches without a word,
    and finds out by their numbers.

    Attributes:
        batches_handed_over: handed to libzmq over the publisher's whole life, which is not delivered.
        batches_dropped: accepted and never handed over, over the same time.
        was_cut: True when the deadline passed before every peer had taken what libzmq still had for it: a slow or
            stopped subscriber has missed the end of the stream. False: it all went into the peers' connections.
        is_under_way: True when ``close`` was called by a signal handler inside the ``publish()`` or ``idle()`` that
            has the sockets: that call closes them at its end, and a second ``close`` then returns what came of it.
    """

    batches_handed_over: int
    batches_dropped: int
    was_cut: bool = False
    is_under_way: bool = False


_open_publishers: weakref.WeakSet[ZmqEventPublisher] = weakref.WeakSet()


@atexit.register
def _shutdown_all() -> None:
    """At exit, what still is open sends its tail. Weak, for a publisher that nobody holds any more closes itself."""
    for publisher in tuple(_open_publishers):
        publisher.shutdown()


def _close_abandoned(edge: ZmqStreamSockets, backstop: Backstop, owner_pid: int) -> None:
    """Close what a publisher had that was dropped without ``shutdown()``, on whatever thread collected it."""
    if os.getpid() != owner_pid:
        return
    _log.warning("the KV-event publisher of %s was dropped without shutdown()", edge.sockets.endpoint)
    if backstop.stop(_LET_GO_S):
        edge.close(time.monotonic() + _LET_GO_S)
        edge.live.drop_pending()


class ZmqEventPublisher(EventPublisher):
    """Publishes one rank's stream. The first seven parameters are those of SGLang's class of this name.

    Opens its sockets in the constructor, as that class does, because code written for it counts on a listening
    publisher once it has been made.

    Args:
        attn_dp_rank: the stream's index; offsets both endpoints and is stamped on batches without a rank.
        endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic: settings of ``KVEventsConfig``, which
            has their meaning and defaults. What is given here goes before ``config``.
        config: all other settings; None for the defaults.
        context: where inproc peers are, by default pyzmq's ``Context.instance()``. Other transports have a context
            of their own.

    Raises:
        ConfigError: a setting that cannot work; nothing has been opened.
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
        # True while the next batch may wait: ``idle()`` has just been called, and the backstop looks.
        self._may_defer = False
        self._hands_over = settings.send_mode == "background"
        self._backlog = (Backlog if self._hands_over else InlineBacklog)(settings.max_queue_size)
        # True while batches are left to the thread: the scheduler publishes, and does not call ``idle()``.
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
            hint = "raise the limits of open files and threads, or stop what uses them up"
            raise StartError(self.endpoint, f"cannot start its thread ({error})", hint) from error

    def publish(self, events: EventBatch) -> None:
        """Accept one batch; never blocks. It goes out at the next ``idle()``, or else by the publisher's thread.

        Batches keep their order. Where neither comes soon, one of the next calls sends what waits. What waits goes out
        within some ten milliseconds when nothing is called any more. With ``send_mode`` ``inline`` a batch that does
        not wait for ``idle()`` goes out inside this call, a burst of them in groups.

        Raises:
            PublisherClosedError: after ``shutdown()``, and for a batch that a signal handler's ``shutdown()`` overtook.
            ForkedPublisherError: in a child process: the sockets and the stream are the parent's.
        """
        if self._may_defer:
            self._pending.append(events)
            # Read again: whoever took it back meanwhile may have looked at the pending batches before this one came.
            if self._may_defer:
                self._may_defer = False
                return
        elif self._may_wait(events):
            return
        self._drain(DrainReason.RELIEF if self._hands_over and self._backlog.is_prompt else DrainReason.STEP)

    def _may_wait(self, batch: EventBatch) -> bool:
        """Make a batch pending; True when it is left to the thread, or to the rest of its burst."""
        self._check_usable()
        pending = self._pending
        pending.append(batch)
        self._is_handing_over = self._hands_over
        if not self._backlog.may_wait(batch_cost(batch), time.monotonic(), len(pending)):
            return False
        # The thread watches what waits. A signal handler may have closed just before the batch became pending.
        return self._backstop.watch() and self._closed is None

    def _check_usable(self) -> None:
        if self._is_forked:
            raise ForkedPublisherError(self._pid)
        if self._closed is not None:
            raise PublisherClosedError("publish() after shutdown(): the batch was not taken")

    def idle(self) -> None:
        """Send what is pending and serve a slice of each replay; call it where the scheduler waits for its device.

        Raises:
            ForkedPublisherError: in a child process.
        """
        if self._is_forked:
            raise ForkedPublisherError(self._pid)
        if self._closed is None:
            is_busy = bool(self._pending) or self._is_handing_over
            self._is_handing_over = False
            self._drain(DrainReason.WAIT)
            if is_busy:  # a scheduler that only idles keeps no thread awake
                # In this order: a backstop that goes to sleep in between takes the permission back.
                self._may_defer = True
                if not self._backstop.watch():
                    self._may_defer = False

    def set_upstream_state(self, state: str | None) -> None:
        """Tell readers how far the publisher itself knows what it publishes; for relays, see ``ReplayMeta.upstream``.

        Args:
            state: None where all of it is known, else a ``StreamState``: no reader that asks by the extension takes
                its view for proved then.
        """
        self._edge.set_upstream_state(state)

    def after_fork_in_child(self) -> None:
        """In a forked child: sockets and stream are the parent's, and every call says so."""
        self._is_forked = True
        self._may_defer = False
        self._backstop.after_fork_in_child(self._edge)

    def stop_deferring(self) -> None:
        """The backstop stops looking: the next batch goes out inside ``publish()``."""
        self._may_defer = False

    def _drain(self, reason: DrainReason) -> None:
        self._drained_at_s = time.monotonic()
        try:
            # Never waits: the owner looks at the pending batches again after it has let go.
            while self._closed is None and self._owner.acquire(blocking=False):
                try:
                    unfinished = self._edge.drain(reason, self._drained_at_s)
                finally:
                    self._owner.release()
                if unfinished:
                    self._backstop.watch()
                if not self._pending:
                    return
        finally:
            if self._close_by_s is not None:  # by a signal handler, meanwhile
                self._close_edge()
        if self._closed is not None and not self._closed.is_under_way and self._pending:
            # Accepted while a signal handler closed: nobody would send it any more.
            self._edge.live.drop_pending()
            raise PublisherClosedError("publish() after shutdown(): the batch was not taken")

    def drain_for_scheduler(self, late_s: float) -> DrainResult:
        """The thread's look: drain what was handed over, or when the scheduler has not drained lately."""
        now, used_s = time.monotonic(), time.thread_time()
        is_prompt = self._backlog.is_prompt = late_s < _LATE_S
        is_handed_over = self._is_handing_over
        called_at_s = max(self._drained_at_s, self._backlog.last_s)
        # Who comes late does not know whether the scheduler has stopped, or was kept from running as well.
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
            # A publish() that found the sockets taken has left its batch to whoever had them: that is us.
            if is_handed_over or not self._pending:
                break
            now = time.monotonic()
        if self._close_by_s is not None:
            self._close_edge()
        return self._look_after(unfinished, now, used_s)

    def _drain_slice(self, now_s: float) -> bool:
        """What the thread does at once; True while there is more. Where no batch waits, it also looks for peers."""
        if self._is_handing_over and self._pending:
            return self._edge.drain(DrainReason.HANDED_OVER, now_s)
        return self._edge.drain(DrainReason.STALL, now_s) | self._edge.count_peers()

    def _look_after(self, unfinished: bool, began_s: float, used_before_s: float) -> DrainResult:
        """When to look again, after a slice that began at ``began_s`` and at that time of the thread's processor."""
        now = time.monotonic()
        waited_s = now - began_s - (time.thread_time() - used_before_s)
        if waited_s > _LATE_S:
            self._backlog.is_prompt = False
        if unfinished or self._pending:
            # Whoever has waited for the GIL just now has granted it to the scheduler.
            return DrainResult.SHARING if self._is_handing_over and waited_s < _SLICE_S else DrainResult.BUSY
        can_progress = self._edge.can_progress(now)
        if self._is_handing_over and (can_progress or now - self._backlog.last_s <= _LULL_AFTER_S):
            self._backstop.soon_s = self._backlog.next_poll_in_s(now)
            return DrainResult.HANDED_OVER
        if can_progress:
            return DrainResult.WAITING
        if self._edge.has_open_replays:
            return DrainResult.STUCK
        return DrainResult.LULL if self._is_handing_over else DrainResult.QUIET

    def shutdown(self) -> None:
        """``close`` within ``SHUTDOWN_TIMEOUT`` seconds; safe to call twice."""
        self.close(self.SHUTDOWN_TIMEOUT)

    def close(self, deadline_s: float) -> CloseReport:
        """Send what is pending, end open replays with their end marker, let go of sockets, thread and context.

        Never raises for what the network does, and returns within about ``deadline_s``; a second call returns the
        first one's report. In a child process it does nothing: the sockets are the parent's. A signal handler may
        call it, also inside ``publish()``: it then returns at once, and that ``publish()`` closes.
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
        patience_s = max(deadline_s, _LET_GO_S)
        has_ended = self._backstop.stop(patience_s)
        # From here on, whoever has the sockets closes them when it lets go: perhaps the call that this one interrupts.
        self._close_by_s = close_by_s
        if not has_ended or not self._close_edge(0.0 if self._interrupts_a_drain() else patience_s):
            _log.info("the KV-event sockets of %s are in use: they are closed after that", self.endpoint)
        return self._closed

    def _report(self, *, was_cut: bool = False, is_under_way: bool = False) -> CloseReport:
        live = self._edge.live
        return CloseReport(live.num_batches, live.num_dropped, was_cut, is_under_way)

    def _close_edge(self, patience_s: float = 0.0) -> bool:
        """Close the sockets, once; False when somebody has them, who closes them then."""
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

    def _interrupts_a_drain(self) -> bool:
        """True in a signal handler that stands on top of this publisher's own drain, which cannot end before it."""
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code is ZmqEventPublisher._drain.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def stats(self) -> PublisherStats:
        """Counters since the publisher was opened."""
        num_pending = len(self._pending)
        since_s = self._backlog.oldest_at_s(num_pending) if self._is_handing_over else self._drained_at_s
        return self._edge.stats(lag_s=time.monotonic() - since_s)

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """``endpoint`` of rank 0 moved to a rank: port + rank for tcp, a suffix for ipc and inproc.

        Raises:
            ConfigError: the endpoint cannot be parsed, or the port leaves 0 to 65535.
        """
        return str(Endpoint.parse(endpoint).offset(data_parallel_rank)) if endpoint else endpoint
