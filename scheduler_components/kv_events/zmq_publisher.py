"""ZmqEventPublisher: send live batches on a PUB socket and answer replays on a ROUTER socket.

The file is ordered from the sockets up: the live socket (its rules are in ``live_sender``), ``ZmqReplayServer`` (the
replay socket), ``ZmqStreamSockets`` (both, and everything else of one stream), ``ZmqEventPublisher`` (which thread owns
the sockets). ``stream_drain`` has the rules of a drain, ``handover`` those of who drains, and when.

Work: ``publish()`` appends. ``idle()``, called where the scheduler waits for its device, drains: it encodes, sends and
serves replays. A scheduler that never calls ``idle()`` hands its batches over to the backstop thread. A sending thread
alone, as in SGLang and vLLM, starves when the scheduler keeps the GIL. So ``publish()`` drains batches that have become
too many or too old.

Ownership: the thread that drains owns the sockets. It holds the owner lock, for which the scheduler's thread never
waits.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import zmq
from msgspec import UNSET, UnsetType

from scheduler_components._internal.fork_hook import register_for_fork
from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import ForkedPublisherError, PublisherClosedError, StartError
from scheduler_components.events import AllBlocksCleared, EventBatch, KVEventBatch
from scheduler_components.kv_events.backlog import MAX_WAIT_S, MAX_WAITING
from scheduler_components.kv_events.codec import BatchEncoder
from scheduler_components.kv_events.config import KVEventsConfig
from scheduler_components.kv_events.endpoints import Endpoint
from scheduler_components.kv_events.event_publisher import EventPublisher
from scheduler_components.kv_events.handover import IDLE_REPLAY_S, PUBLISH_S, REQUESTS_EVERY_S, Handover
from scheduler_components.kv_events.live_sender import LiveSender
from scheduler_components.kv_events.replay import ReplaySessions
from scheduler_components.kv_events.replay_messages import END_SEQ
from scheduler_components.kv_events.stream import EventStream
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES
from scheduler_components.kv_events.stream_drain import ReplayServer, StreamDrain
from scheduler_components.kv_events.thread_backstop import Backstop
from scheduler_components.kv_events.zmq_sockets import (
    Context,
    MessageSender,
    Socket,
    StreamSockets,
    open_stream_sockets,
)
from scheduler_components.values import PublisherStats

if TYPE_CHECKING:
    from scheduler_components.kv_events.sequence_floor import SequenceFloor
    from scheduler_components.kv_events.zmq_auth import CurveServerKeys

__all__ = [
    "ZmqReplayServer",
    "ZmqStreamSockets",
    "open_zmq_stream",
    "CloseReport",
    "ZmqEventPublisher",
]

_log = logging.getLogger(__name__)

# Send live batches. ``live_sender`` has the rules; this is its socket.


class _LiveSocket:
    """Sends the frames of live batches on the PUB socket."""

    __slots__ = ("_has_failed", "_send")

    def __init__(self, socket: Socket) -> None:
        self._send = MessageSender(socket).send
        self._has_failed = False

    def send(self, frames: tuple[bytes, bytes, bytes]) -> bool:
        """Send one batch. Return False if nothing can be sent any more, and log it once."""
        try:
            self._send(frames)
        except zmq.ZMQError as error:
            # Only code that closed a shared context causes this. The scheduler continues.
            if not self._has_failed:
                self._has_failed = True
                _log.error("KV events cannot be sent any more: %s", error)
            return False
        return True


# Serve replays on the ROUTER, and never wait.

_FRAMES_PER_SLICE = 64
"""Frames of requests that are received before answers are sent: some 20 requests, or a part of a hostile one. A client
that sends only requests, or one request of any number of frames, prevents neither answers nor batches.
"""

_KEPT_FRAMES = 4
"""One more than a request has, so that a longer one is seen to be malformed. Its further frames are dropped."""

_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

_CLOSE_POLL_MS = 200
"""A client that accepts nothing for this long gets only the end marker when the publisher closes."""

_CLOSE_SLICE_S = 0.01


class ZmqReplayServer:
    """The ROUTER until ``finish``: the ``ReplayChannel`` of a drain. The caller owns the sockets.

    Attributes:
        cursors: the open answers.
        has_failed: True if nothing can be received or sent any more.
    """

    __slots__ = ("_events", "_request", "_send", "_socket", "cursors", "has_failed")

    def __init__(self, socket: Socket, cursors: ReplaySessions) -> None:
        self._socket = socket
        self._request: list[bytes] = []  # the first frames of the message that is being received
        self._send = MessageSender(socket).send
        # pyzmq's Python-level getsockopt converts to enums, which costs ten times the call itself.
        self._events = super(zmq.Socket, socket).get
        self.cursors = cursors
        self.has_failed = False

    @property
    def wakeup_fd(self) -> int:
        """File descriptor that becomes readable when a client sends a request, or can accept more."""
        return int(self._socket.getsockopt(zmq.FD))

    def receive_requests(self) -> bool:
        """Receive a bounded number of frames of requests. Return True while there may be more."""
        num_received = 0
        try:
            while not self.has_failed and num_received < _FRAMES_PER_SLICE and self._is_readable():
                num_received += 1
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
                if len(self._request) < _KEPT_FRAMES:
                    self._request.append(frame.bytes)
                if not frame.more:
                    request, self._request = self._request, []
                    self.cursors.receive(request)
        except zmq.ZMQError as error:
            # Only code that closed a shared context causes this. The scheduler continues.
            self.has_failed = True
            _log.error("KV events cannot be replayed any more: %s", error)
        return num_received == _FRAMES_PER_SLICE

    def _is_readable(self) -> bool:
        return bool(int(self._events(_EVENTS)) & _POLLIN)

    def send(self, message: tuple[bytes, ...]) -> bool | None:
        """Send one message. Return False if its client's queue is full, None if the client is gone."""
        try:
            self._send(message)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                _log.warning("replay to a client failed: %s", error)
            return None
        return True

    def finish(self, answers: ReplayServer, until: float, deadline: float) -> None:
        """Answer requests until ``until``, then end every answer and close the socket.

        Args:
            answers: sends the answers over this socket.
            until: ``time.monotonic`` at which answers are cut.
            deadline: ``time.monotonic`` at which unsent messages are dropped.
        """
        while not self.has_failed and (now_s := time.monotonic()) < until:
            has_more = self.receive_requests() | answers.serve_slice(min(until, now_s + _CLOSE_SLICE_S))
            if not has_more and not len(self.cursors):
                break
            if not has_more and not self._socket.poll(_CLOSE_POLL_MS, zmq.POLLOUT | zmq.POLLIN):
                break
        if not self.has_failed:
            self.cursors.end_all()
            for client in self.cursors.clients:
                answers.serve_turn(client)
        self._socket.close(linger=max(0, int((deadline - time.monotonic()) * 1000)))


# The sockets of one stream, opened, drained and closed together. Nothing here locks: the caller owns the sockets.


class ZmqStreamSockets:
    """The live sender, the replay server and the counters of one stream. Opened by ``open_zmq_stream``.

    Attributes:
        live: sends batches on the PUB socket.
        sessions: the open answers to replay requests.
        sockets: the open sockets and their actual addresses.
        is_open_bind: True if the stream listens beyond loopback without authentication.
        work: drains the stream.
    """

    __slots__ = ("_answers", "_floor", "_replay", "_stream", "is_open_bind", "live", "sessions", "sockets", "work")

    def __init__(
        self,
        sockets: StreamSockets,
        stream: EventStream,
        cursors: ReplaySessions,
        live: LiveSender,
        *,
        floor: SequenceFloor | None,
        is_open_bind: bool,
    ) -> None:
        self.sockets = sockets
        self.live = live
        self.is_open_bind = is_open_bind
        self._stream = stream
        self.sessions = cursors
        self._floor = floor
        self._replay = ZmqReplayServer(sockets.replay, cursors) if sockets.replay else None
        self._answers = ReplayServer(cursors, self._replay, clock=time.monotonic) if self._replay else None
        # No part refers to this object: a publisher that was dropped is freed without the garbage collector.
        self.work = StreamDrain(
            live,
            stream,
            cursors,
            floor=floor,
            server=self._answers,
            count_peers=partial(_count_peers, sockets),
            clock=time.monotonic,
        )

    @property
    def wakeup_fds(self) -> tuple[int, ...]:
        """File descriptors that become readable when a peer connects or needs service."""
        replay = [self._replay.wakeup_fd] if self._replay else []
        return (*replay, *(counter.wakeup_fd for counter in self.sockets.peers if counter))

    def count_peers(self) -> bool:
        """Receive a bounded number of peer reports. Return True while there may be more."""
        return _count_peers(self.sockets)

    def close(self, deadline: float) -> bool:
        """Send, end and close everything. Return True if a peer had not received all of it by ``deadline``."""
        self.live.send_until(deadline, at_least=MAX_WAITING)  # at least what a call of publish() would send
        # The live tail goes first, because no reader can request it later. linger 0 would lose libzmq's queue.
        now = time.monotonic()
        self.sockets.pub.close(linger=max(0, int((deadline - now) * 1000)))
        if self._replay and self._answers:
            self._replay.finish(self._answers, until=(now + deadline) / 2, deadline=deadline)
        self.release()
        was_cut = time.monotonic() >= deadline
        if was_cut:
            text = "%s closed at its deadline: a peer had not received all of %d batches handed to libzmq (KV events)"
            _log.warning(text, self.sockets.endpoint, self.live.num_batches)
        return was_cut

    def release(self) -> None:
        """Close the sockets and the sequence floor."""
        self.sockets.release()
        if self._floor is not None:
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
            send_stalls=live.num_stalls,
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
            batches_pending=len(live.pending),  # before last_sequence: never an old number without pending ones
            lag_s=lag_s if live.pending else 0.0,
            last_sequence=stream.next_sequence - 1,
            subscribers_seen=live_peers.num_connected if live_peers else 0,
            peers_refused=sum(counter.num_refused for counter in self.sockets.peers if counter),
            open_bind_without_auth=int(self.is_open_bind),
        )


def _count_peers(sockets: StreamSockets) -> bool:
    more = [counter.poll_events() for counter in sockets.peers if counter]
    return any(more)


def open_zmq_stream(settings: KVEventsConfig, rank: int, inproc_context: Context | None) -> ZmqStreamSockets:
    """Validate everything, then open the sockets of stream ``rank``.

    Raises:
        ConfigError: a key file cannot be used, or no port is left for this stream; nothing has been opened.
        StartError: the system refused an address or the sequence floor; nothing stays open.
    """
    plan = settings.port_plan(rank + 1)  # there are at least this many streams
    events_at, replay_at = plan.event_endpoint(rank), plan.replay_endpoint(rank)
    binds = events_at.resolve_bind(settings.bind)
    access = _read_keys(settings)
    topic = settings.topic.encode()
    encoder = BatchEncoder(settings.dialect)
    first_sequence, floor = _first_sequence(settings, rank)
    stream = EventStream(
        epoch=os.urandom(EPOCH_BYTES),
        max_steps=settings.buffer_steps if replay_at else 0,
        max_bytes=settings.buffer_bytes,
        first_sequence=first_sequence,
    )
    cursors = ReplaySessions(stream, encoder=encoder, rank=rank, framing=settings.replay_framing, topic=topic)
    with ExitStack() as undo:
        if floor is not None:
            undo.callback(floor.close, first_sequence)
        sockets = open_stream_sockets(
            events_at, replay_at, hwm=settings.hwm, bind=binds, access=access, inproc_context=inproc_context
        )
        undo.pop_all()
    live = LiveSender(
        _LiveSocket(sockets.pub).send,
        topic=topic,
        encoder=encoder,
        stream=stream,
        rank=rank,
        max_pending=settings.max_queue_size,
        clock=time.monotonic,
    )
    is_open_bind = access is None and _warn_if_open(events_at if binds else None, replay_at)
    return ZmqStreamSockets(sockets, stream, cursors, live, floor=floor, is_open_bind=is_open_bind)


def _read_keys(settings: KVEventsConfig) -> CurveServerKeys | None:
    if settings.auth == "none":
        return None
    from scheduler_components.kv_events.zmq_auth import CurveServerKeys

    return CurveServerKeys.of(settings)


def _first_sequence(settings: KVEventsConfig, rank: int) -> tuple[int, SequenceFloor | None]:
    """Choose the first number. The files of further streams get a suffix, as ipc paths do."""
    if settings.seq_base == "zero":
        return 0, None
    # Microseconds, because a busy stream sends more than one batch per millisecond and would outrun its successor.
    wanted, name = time.time_ns() // 1000, settings.seq_floor_file
    if not name:
        return wanted, None
    from scheduler_components.kv_events.file_sequence_floor import open_sequence_floor

    floor = open_sequence_floor(Path(f"{name}_dp{rank}" if rank else name), wanted=wanted)
    return floor.first, floor


def _warn_if_open(*bound: Endpoint | None) -> bool:
    listening = [str(endpoint) for endpoint in bound if endpoint is not None and not endpoint.is_loopback]
    if listening:
        where = " and ".join(listening)
        _log.warning('KV events with prompt token ids are readable by anyone who reaches %s: auth is "none"', where)
    return bool(listening)


# Time limits of calls, in seconds.

_OWNER_WAIT_S = 0.002
"""Time that a call which must send waits for the thread's slice to end. A slice takes less."""

_STUCK_AFTER_S = 1.0
"""Sockets that stay in use for this long, while batches wait, are reported."""

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
        self._num_acquired = 0
        self._blocked_since_s: float | None = None
        self._pid = os.getpid()
        self._is_forked = False
        # True while the next batch may wait, because ``idle()`` was just called and the backstop polls.
        self._may_defer = False
        self._is_inline = settings.send_mode == "inline"
        self._closed: CloseReport | None = None
        self._close_by_s: float | None = None
        self._edge = open_zmq_stream(settings, attn_dp_rank, context)  # noqa: SCH008 a publisher of SGLang's name listens once it is made
        self._pending = self._edge.live.pending
        self._handover = Handover(
            self._edge.live, self._edge.sessions, max_waiting=settings.max_queue_size, is_inline=self._is_inline
        )
        self.endpoint = self._edge.sockets.endpoint
        self.replay_endpoint = self._edge.sockets.replay_endpoint
        self._start_backstop()
        self._finalizer = weakref.finalize(self, _close_abandoned, self._edge, self._backstop, self._pid)
        self._finalizer.atexit = False
        _open_publishers.add(self)
        register_for_fork(self.after_fork_in_child)
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
        """Accept one batch. The next ``idle()`` or the publisher's thread sends it.

        Batches keep their order. If twelve of them wait, or one has waited for 4 ms, this call sends for 75 us, and at
        least three small batches or a large one. Without further calls they are sent within some ten milliseconds. With
        ``send_mode`` ``inline``, this call sends the batch, unless it waits for ``idle()``.

        Raises:
            PublisherClosedError: after ``shutdown()``, or if a signal handler called ``shutdown()`` meanwhile.
            ForkedPublisherError: in a child process, because the sockets and the stream belong to the parent.
        """
        replay_s = 0.0
        if self._may_defer:
            self._pending.append(events)
            # Test again: the thread may have cleared the flag and checked the pending batches before the append.
            if self._may_defer:
                self._may_defer = False
                return
        else:
            self._check_usable()
            self._pending.append(events)
            handover, backstop = self._handover, self._backstop
            handover.is_active = not self._is_inline
            now_s, due_s = time.monotonic(), backstop.due_s
            replay_s = handover.replay_s(now_s, due_s)
            # The thread watches waiting batches. A signal handler may have closed just before the batch became pending.
            if handover.may_wait(now_s, due_s) and backstop.watch() and self._closed is None and not replay_s:
                return
        self._drain(math.inf if self._is_inline else PUBLISH_S, replay_s, wait_s=_OWNER_WAIT_S)

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
            handover = self._handover
            is_busy = bool(self._pending) or handover.is_active
            handover.is_active = False
            last_s = handover.drained_at_s
            self._drain(math.inf, IDLE_REPLAY_S, wait_s=_OWNER_WAIT_S if self._pending else 0.0)
            now_s = handover.drained_at_s
            if now_s - last_s >= MAX_WAIT_S and not handover.is_thread_prompt(now_s, self._backstop.due_s):
                # The next call may be late, and the thread may not be able to send in its place.
                self._may_defer = False
            elif is_busy:  # a scheduler that only idles keeps the thread asleep
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
        while self._closed is None and self._pending:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            self._drain(math.inf, IDLE_REPLAY_S, wait_s=left_s)
        return not self._pending

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

    def _drain(self, send_s: float, replay_s: float, *, wait_s: float) -> None:
        """Drain on the caller's thread. Wait at most ``wait_s`` seconds for a thread that uses the sockets."""
        self._handover.drained_at_s = time.monotonic()
        try:
            # Repeated, because another thread's call that found the sockets in use has left its batch to their owner.
            while self._closed is None and self._acquire(wait_s):
                try:
                    unfinished = self._edge.work.drain(send_s, replay_s, requests_every_s=REQUESTS_EVERY_S)
                finally:
                    self._owner.release()
                if (unfinished and self._backstop.watch()) or not self._pending:
                    break
        finally:
            if self._close_by_s is not None:  # set by a signal handler meanwhile
                self._close_edge()
        if self._closed is not None and not self._closed.is_under_way and self._pending:
            # Accepted while a signal handler closed, so it would never be sent.
            self._edge.live.drop_pending()
            raise PublisherClosedError("publish() after shutdown(): the batch was not accepted")

    def _acquire(self, wait_s: float) -> bool:
        """Acquire the sockets within ``wait_s`` seconds. Return False if another call uses them."""
        # A call in a signal handler would wait for the call that it interrupts.
        may_wait = wait_s > 0.0 and self._owner.locked() and self._count_users(sys._getframe()) == 1
        first_s, rest_s = min(wait_s, _OWNER_WAIT_S), max(0.0, wait_s - _OWNER_WAIT_S)
        if not (
            self._owner.acquire(timeout=first_s if may_wait else 0.0)
            or self._recover()
            or (may_wait and rest_s and self._owner.acquire(timeout=rest_s))
        ):
            return False
        self._num_acquired += 1
        self._blocked_since_s = None
        return True

    def _recover(self) -> bool:
        """Acquire sockets that no call will release. Return False if a call uses them.

        A signal handler may raise after a call acquired the lock and before the code that releases it.
        """
        before = self._num_acquired
        is_used = self._owner.locked() and self._is_used()
        if is_used or self._num_acquired != before:
            self._report_blocked()
            return False
        if not self._owner.acquire(blocking=False):
            if self._is_used() or self._num_acquired != before:
                return False  # by a call that began just now
            self._owner = threading.Lock()
            self._owner.acquire()
            self._edge.live.num_stalls += 1
            _log.error("a signal handler's exception interrupted %s, which goes on sending", self.endpoint)
        return True

    def _is_used(self) -> bool:
        """Return whether another call than the present one uses the sockets or is about to."""
        return sum(map(self._count_users, sys._current_frames().values())) > 1

    def _report_blocked(self) -> None:
        """Report once that batches wait while the sockets stay in use."""
        now_s = time.monotonic()
        if self._blocked_since_s is None:
            self._blocked_since_s = now_s
        elif now_s - self._blocked_since_s >= _STUCK_AFTER_S:
            self._blocked_since_s = math.inf
            self._edge.live.num_stalls += 1
            _log.error("%s has sent nothing for a second, and %d batches wait", self.endpoint, len(self._pending))

    def poll(self, late_s: float) -> float:
        """Drain a slice on the publisher's thread, unless the scheduler does. Return the seconds until the next poll.

        Args:
            late_s: delay of this poll: the GIL was not free, or the machine is busy.
        """
        now_s, handover = time.monotonic(), self._handover
        pause_s = handover.pause_s(now_s, late_s, self._edge.work.requests_at_s)
        if pause_s:
            return pause_s
        if self._closed is not None:
            return math.inf
        if not self._acquire(0.0):
            return MAX_WAIT_S
        live, sessions = self._edge.live, self._edge.sessions
        num_before = live.num_batches + sessions.num_batches
        slice_s = handover.slice_s(late_s)
        try:
            unfinished = self._edge.work.drain(slice_s, slice_s)
            is_busy = live.num_batches + sessions.num_batches > num_before
            if not is_busy:
                unfinished |= self._edge.count_peers()
        finally:
            self._owner.release()
        if self._close_by_s is not None:
            self._close_edge()
        return handover.next_poll_s(time.monotonic(), was_busy_at_s=now_s if is_busy else None, unfinished=unfinished)

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
        if not has_ended or not self._close_edge(0.0 if self._count_users(sys._getframe()) else patience_s):
            _log.info("the KV-event sockets of %s are in use and will be closed afterwards", self.endpoint)
        return self._closed

    def _report(self, *, was_cut: bool = False, is_under_way: bool = False) -> CloseReport:
        live = self._edge.live
        return CloseReport(live.num_batches, live.num_dropped, was_cut, is_under_way)

    def _close_edge(self, patience_s: float = 0.0) -> bool:
        """Close the sockets once. Return False if another thread owns them, which then closes them."""
        if not self._acquire(patience_s):
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

    def _count_users(self, frame: FrameType | None) -> int:
        """Return the number of calls in one thread's stack that use the sockets or are about to."""
        count, was_user = 0, False
        while frame is not None:
            is_user = frame.f_code in _USERS and frame.f_locals["self"] is self
            count += was_user and not is_user
            was_user, frame = is_user, frame.f_back
        return count + was_user

    def stats(self) -> PublisherStats:
        """Return the counters since the publisher was opened."""
        num_pending = len(self._pending)
        handover = self._handover
        since_s = handover.backlog.oldest_at_s(num_pending) if handover.is_active else handover.drained_at_s
        return self._edge.stats(lag_s=time.monotonic() - since_s)

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """Return ``endpoint`` of rank 0 offset to another rank: port + rank for tcp, a suffix for ipc and inproc.

        Raises:
            ConfigError: the endpoint cannot be parsed, or the port is not from 0 to 65535.
        """
        return str(Endpoint.parse(endpoint).offset(data_parallel_rank)) if endpoint else endpoint


_USERS = frozenset(
    method.__code__ for method in (ZmqEventPublisher._drain, ZmqEventPublisher.poll, ZmqEventPublisher._close_edge)
)
"""The code that acquires the sockets and releases them."""
