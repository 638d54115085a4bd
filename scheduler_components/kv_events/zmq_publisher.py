"""The ZMQ publisher: live batches on a PUB socket, past ones on a replay ROUTER.

Who works: the scheduler's own thread. ``publish()`` appends; ``idle()``, called where the scheduler waits for its
device, encodes, sends and serves replays. A scheduler that never calls ``idle()`` has its batches sent inside
``publish()``. A sending thread, as SGLang and vLLM have it, starves when the scheduler keeps the GIL.

Who owns the sockets: whoever holds the turn, a lock that the scheduler's thread never waits for. The only other
taker is the backstop thread, when the scheduler has stopped taking its turns.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque

import msgspec

from scheduler_components.errors import ConfigError, ForkedPublisherError, PublisherClosedError
from scheduler_components.kv_events.codec import BatchEncoder
from scheduler_components.kv_events.endpoint import Endpoint
from scheduler_components.kv_events.event_stream import EPOCH_BYTES, EventStream
from scheduler_components.kv_events.events import AllBlocksCleared, EventBatch, KVEventBatch
from scheduler_components.kv_events.folding import collapse
from scheduler_components.kv_events.publisher import EventPublisher
from scheduler_components.kv_events.replay_cursors import ReplayCursors
from scheduler_components.kv_events.replay_wire import END_SEQ
from scheduler_components.kv_events.thread_backstop import Backstop, Look
from scheduler_components.kv_events.zmq_live_sender import ZmqLiveSender
from scheduler_components.kv_events.zmq_replay_server import ZmqReplayServer
from scheduler_components.kv_events.zmq_sockets import Context, StreamSockets, open_stream_sockets
from scheduler_components.metrics.stats import PublisherStats

__all__ = ["CloseReport", "ZmqEventPublisher"]

_log = logging.getLogger(__name__)

_MAX_DEFERRED = 8
"""Batches that may wait for ``idle()``: past these, ``publish()`` sends inline whatever the hook does."""

_STALLED_AFTER_S = 0.005
"""A scheduler that has not published or idled for this long has stopped ticking: the backstop acts for it."""


class CloseReport(msgspec.Struct, frozen=True):
    """What ``close`` could still do: batches sent and dropped over the publisher's whole life."""

    batches_sent: int
    batches_dropped: int


class ZmqEventPublisher(EventPublisher):
    """Publishes one rank's stream. The first seven parameters are those of SGLang's class of this name.

    Opens its sockets in the constructor, as that class does, because code written for it counts on a listening
    publisher once it has been made.

    Args:
        attn_dp_rank: the stream's index; offsets both endpoints and is stamped on batches without a rank.
        endpoint: PUB address of rank 0; tcp, ipc or inproc. Port 0 lets the system choose.
        replay_endpoint: ROUTER address of rank 0, or None for no replay; then nothing is kept.
        buffer_steps: batches kept for replay one by one; older ones are folded into a base.
        hwm: messages queued for one slow subscriber before PUB drops its oldest wish; it recovers by replay.
        max_queue_size: batches that may be pending; beyond it they collapse into the one that they amount to.
        topic: first frame of every message.
        dialect: ``"array"``, ``"map"`` or ``"vllm"``.
        bind: True binds the PUB socket, False connects it; None follows the host (wildcards bind).
        replay_framing: ``"seed"`` or ``"topic"``.
        seq_base: ``"zero"`` starts at 0, as the original; ``"clock"`` starts at wall-clock milliseconds with
            AllBlocksCleared, so that plain consumers notice a restart.
        buffer_bytes: payload bytes kept for replay one by one.
        context: a context to share, which inproc peers need; by default the publisher's own.

    Raises:
        ConfigError: a parameter that cannot work; nothing has been opened.
        StartError: the system refused an address; nothing stays open.
    """

    SHUTDOWN_TIMEOUT: float = 1.0
    END_SEQ = END_SEQ

    def __init__(
        self,
        attn_dp_rank: int,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
        *,
        dialect: str = "array",
        bind: bool | None = None,
        replay_framing: str = "seed",
        seq_base: str = "zero",
        buffer_bytes: int = 256 * 1024 * 1024,
        context: Context | None = None,
    ) -> None:
        super().__init__(attn_dp_rank)
        if seq_base not in ("zero", "clock"):
            raise ConfigError("seq_base", seq_base, "is not known", "give zero or clock")
        events_at = Endpoint.parse(endpoint, field="endpoint").offset(attn_dp_rank, field="endpoint")
        binds = events_at.decide_bind(bind)
        replay_at = (
            Endpoint.parse(replay_endpoint, field="replay_endpoint").offset(attn_dp_rank, field="replay_endpoint")
            if replay_endpoint
            else None
        )
        encoder = BatchEncoder(dialect)
        self._stream = EventStream(
            epoch=os.urandom(EPOCH_BYTES),
            max_steps=buffer_steps if replay_at else 0,
            max_bytes=buffer_bytes,
            first_sequence=0 if seq_base == "zero" else int(time.time() * 1000),
        )
        self._cursors = ReplayCursors(
            self._stream, encoder=encoder, rank=attn_dp_rank, framing=replay_framing, topic=topic.encode()
        )
        self._max_queue_size = max_queue_size
        self._pending: deque[EventBatch] = deque()
        self._turn = threading.Lock()
        self._pid = os.getpid()
        self._idle_is_called = False
        self._ticked_at_s = 0.0
        self._closed: CloseReport | None = None
        self._batches_collapsed = self._batches_dropped = 0
        self._is_overflowing = False
        self._is_open_bind = binds and not events_at.is_loopback
        self._sockets = open_stream_sockets(events_at, replay_at, hwm=hwm, bind=binds, context=context)
        self._live = ZmqLiveSender(
            self._sockets.pub, topic=topic.encode(), encoder=encoder, stream=self._stream, rank=attn_dp_rank
        )
        self._start(self._sockets)
        if seq_base == "clock":
            self.publish(KVEventBatch(ts=time.time(), events=(AllBlocksCleared(),)))

    def _start(self, sockets: StreamSockets) -> None:
        self.endpoint = sockets.endpoint
        self.replay_endpoint = sockets.replay_endpoint
        self._replay = ZmqReplayServer(sockets.replay, self._cursors) if sockets.replay else None
        if self._is_open_bind:
            _log.warning("KV events with prompt token ids are readable by anyone who reaches %s", self.endpoint)
        self._backstop = Backstop(
            self,
            watched_fd=self._replay.wakeup_fd if self._replay else None,
            name=f"kv-events-backstop-{self._attn_dp_rank}",
        )
        self._backstop.start()
        atexit.register(self.shutdown)

    def publish(self, events: EventBatch) -> None:
        """Accept one batch; never blocks. It goes out now, or at the next ``idle()``, in order.

        Raises:
            PublisherClosedError: after ``shutdown()``.
            ForkedPublisherError: in a child process: the sockets and the stream are the parent's.
        """
        if self._closed is not None:
            raise PublisherClosedError("publish() after shutdown(): the batch was not taken")
        if os.getpid() != self._pid:
            raise ForkedPublisherError(self._pid)
        pending = self._pending
        pending.append(events)
        if self._idle_is_called and len(pending) <= _MAX_DEFERRED and not self._backstop.has_ended:
            self._idle_is_called = False
            self._backstop.watch()
            return
        self._take_turn()

    def idle(self) -> None:
        """Send what is pending and serve a bite of each replay; call it where the scheduler waits for its device."""
        self._idle_is_called = True
        self._take_turn()

    def _take_turn(self) -> None:
        self._ticked_at_s = time.monotonic()
        # Never waits: whoever holds the turn looks at the pending batches again after letting go.
        while self._turn.acquire(blocking=False):
            try:
                unfinished = self._act()
            finally:
                self._turn.release()
            if unfinished:
                self._backstop.watch()
            if not self._pending:
                return

    def take_turn_if_stalled(self) -> Look:
        """The backstop's look: act when the scheduler has not ticked lately."""
        if time.monotonic() - self._ticked_at_s < _STALLED_AFTER_S or not self._turn.acquire(blocking=False):
            return Look.TICKING
        try:
            unfinished = self._act()
        finally:
            self._turn.release()
        return Look.BUSY if unfinished or self._pending else Look.QUIET

    def _act(self) -> bool:
        """Send what is pending, fold, serve a bite of replays; True while there is more to do. Needs the turn."""
        self._collapse_overflow()
        while self._pending:
            self._live.send(self._pending.popleft())
        self._stream.fold_some()
        if self._stream.is_held_up:
            self._cursors.cut_short()
        return self._replay.serve_bite() if self._replay else False

    def _collapse_overflow(self) -> None:
        """More is pending than may be kept: send the one batch that it amounts to instead. Nothing is lost by it."""
        count = len(self._pending)
        if count <= self._max_queue_size:
            self._is_overflowing = False
            return
        merged = collapse([self._pending.popleft() for _ in range(count)])
        self._batches_collapsed += count
        if not self._is_overflowing:
            self._is_overflowing = True
            _log.warning("%d KV-event batches were pending: collapsed into one", count)
        if merged is not None:
            self._live.send(merged)

    def shutdown(self) -> None:
        """``close`` within ``SHUTDOWN_TIMEOUT`` seconds; safe to call twice."""
        self.close(self.SHUTDOWN_TIMEOUT)

    def close(self, deadline_s: float) -> CloseReport:
        """Send what is pending, end open replays with their end marker, let go of sockets, thread and context.

        Never raises for what the network does, and returns within about ``deadline_s``; a second call returns the
        first one's report.
        """
        if self._closed is not None:
            return self._closed
        self._closed = CloseReport(self._live.num_batches, self._batches_dropped)
        atexit.unregister(self.shutdown)
        if os.getpid() != self._pid:
            return self._closed
        deadline = time.monotonic() + deadline_s
        stopped = self._backstop.stop(deadline_s)
        if stopped and self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                self._drain(deadline)
            finally:
                self._turn.release()
        self._batches_dropped += len(self._pending)
        if self._pending:
            _log.warning("%d KV-event batches were not sent within %s s", len(self._pending), deadline_s)
        self._pending.clear()
        self._closed = CloseReport(self._live.num_batches, self._batches_dropped)
        return self._closed

    def _drain(self, deadline: float) -> None:
        while self._pending and time.monotonic() < deadline:
            self._live.send(self._pending.popleft())
        if self._replay:
            self._replay.finish(deadline)
        # linger 0 would lose what libzmq has queued but not yet written.
        linger_ms = max(0, int((deadline - time.monotonic()) * 1000))
        self._sockets.pub.close(linger=linger_ms)
        if self._sockets.own_context:
            self._sockets.own_context.term()

    def stats(self) -> PublisherStats:
        """Counters since the publisher was opened."""
        replays = self._cursors
        return PublisherStats(
            batches_sent=self._live.num_batches,
            events_sent=self._live.num_events,
            bytes_sent=self._live.num_bytes,
            events_refused=self._live.num_refused,
            batches_collapsed=self._batches_collapsed,
            batches_dropped=self._batches_dropped,
            replays_served=replays.num_served,
            batches_replayed=replays.num_batches,
            replays_refused=replays.num_refused,
            replays_truncated=replays.num_truncated,
            replays_open=len(replays),
            batches_buffered=len(self._stream),
            bytes_buffered=self._stream.kept_bytes,
            blocks_in_base=self._stream.num_base_blocks,
            batches_pending=len(self._pending),
            last_sequence=self._stream.next_sequence - 1,
            open_bind_without_auth=int(self._is_open_bind),
        )

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """``endpoint`` of rank 0 moved to a rank: port + rank for tcp, a suffix for ipc and inproc.

        Raises:
            ConfigError: the endpoint cannot be parsed, or the port leaves 0 to 65535.
        """
        return str(Endpoint.parse(endpoint).offset(data_parallel_rank)) if endpoint else endpoint
