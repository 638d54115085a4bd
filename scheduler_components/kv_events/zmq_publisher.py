"""The ZMQ publisher: live batches on a PUB socket, past ones on a replay ROUTER.

Who works: the scheduler's own thread. ``publish()`` appends; ``idle()``, called where the scheduler waits for its
device, encodes, sends and serves replays. A scheduler that never calls ``idle()`` has its batches sent inside
``publish()``, a burst of them in groups. A sending thread, as SGLang and vLLM have it, starves when the scheduler
keeps the GIL.

Who owns the sockets: whoever holds the turn, a lock that the scheduler's thread never waits for. The only other
taker is the backstop thread, when the scheduler has stopped taking its turns.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time

import msgspec

from scheduler_components.errors import ConfigError, ForkedPublisherError, PublisherClosedError, StartError
from scheduler_components.fork_hook import tell_of_forks
from scheduler_components.kv_events.config import KVEventsConfig
from scheduler_components.kv_events.endpoint import Endpoint
from scheduler_components.kv_events.events import AllBlocksCleared, EventBatch, KVEventBatch
from scheduler_components.kv_events.publisher import EventPublisher
from scheduler_components.kv_events.replay_wire import END_SEQ
from scheduler_components.kv_events.thread_backstop import Backstop, Look
from scheduler_components.kv_events.zmq_sockets import Context
from scheduler_components.kv_events.zmq_stream_edge import Occasion, open_stream_edge
from scheduler_components.metrics.stats import PublisherStats

__all__ = ["CloseReport", "ZmqEventPublisher"]

_log = logging.getLogger(__name__)

_GROUP = 8
"""Batches of a burst that go out together: what costs most is to wake libzmq's thread, and it wakes once for all."""

_BURST_GAP_S = 0.0001
"""Calls that follow each other within this are a burst once ``_GROUP`` of them have: no scheduler steps as quickly."""

_STALLED_AFTER_S = 0.005
"""A scheduler that has not published or idled for this long has stopped ticking: the backstop acts for it."""

_LET_GO_S = 1.0
"""Time for another thread to end its turn, which takes milliseconds: also a ``close(0)`` closes its sockets."""


class CloseReport(msgspec.Struct, frozen=True):
    """What ``close`` could still do.

    Attributes:
        batches_sent: handed to the PUB socket over the publisher's whole life.
        batches_dropped: accepted and never sent, over the same time.
        was_cut: True when the deadline passed before every peer had taken all that was sent to it: a slow or stopped
            subscriber has missed the end of the stream.
    """

    batches_sent: int
    batches_dropped: int
    was_cut: bool = False


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
        seq_base: ``"zero"`` starts at 0, as the original; ``"clock"`` starts at wall-clock microseconds with
            AllBlocksCleared, so that plain consumers notice a restart.
        buffer_bytes: payload bytes kept for replay one by one.
        auth: ``"none"``, or ``"required"``: CURVE, and nobody but the clients of ``client_keys_dir``.
        secret_key_file, client_keys_dir: see ``zmq_access``; given together with ``auth="required"``.
        context: where inproc peers are, by default pyzmq's ``Context.instance()``. Other transports have a context
            of their own.

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
        auth: str = "none",
        secret_key_file: str | None = None,
        client_keys_dir: str | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__(attn_dp_rank)
        settings = KVEventsConfig(
            publisher="zmq",
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            buffer_steps=buffer_steps,
            hwm=hwm,
            max_queue_size=max_queue_size,
            topic=topic,
            dialect=dialect,
            bind=bind,
            replay_framing=replay_framing,
            seq_base=seq_base,
            buffer_bytes=buffer_bytes,
            auth=auth,
            secret_key_file=secret_key_file,
            client_keys_dir=client_keys_dir,
        )
        if type(attn_dp_rank) is not int or attn_dp_rank < 0:
            raise ConfigError("attn_dp_rank", attn_dp_rank, "is not a rank", "give an integer of at least 0")
        self._turn = threading.Lock()
        self._pid = os.getpid()
        self._is_inherited = False
        # True while the next batch may wait: ``idle()`` has just been called, and the backstop looks.
        self._may_defer = False
        self._group = min(_GROUP, max_queue_size)
        self._num_close_calls = 0
        self._called_at_s = self._ticked_at_s = 0.0
        self._closed: CloseReport | None = None
        self._edge = open_stream_edge(settings, attn_dp_rank, context)
        self._pending = self._edge.live.pending
        self.endpoint = self._edge.sockets.endpoint
        self.replay_endpoint = self._edge.sockets.replay_endpoint
        self._start_backstop()
        atexit.register(self.shutdown)
        tell_of_forks(self)
        if seq_base == "clock":
            self.publish(KVEventBatch(ts=time.time(), events=(AllBlocksCleared(),)))

    def _start_backstop(self) -> None:
        name = f"kv-events-backstop-{self._attn_dp_rank}"
        self._backstop = Backstop(self, watched_fds=self._edge.wakeup_fds, name=name)
        try:
            self._backstop.start()
        except (OSError, RuntimeError) as error:
            self._edge.sockets.release()
            mend = "raise the limits of open files and threads, or stop what uses them up"
            raise StartError(self.endpoint, f"cannot start its thread ({error})", mend) from error

    def publish(self, events: EventBatch) -> None:
        """Accept one batch; never blocks. It goes out now, at the next ``idle()``, or with the rest of a burst.

        Batches keep their order. What waits goes out within some ten milliseconds when nothing is called any more.

        Raises:
            PublisherClosedError: after ``shutdown()``.
            ForkedPublisherError: in a child process: the sockets and the stream are the parent's.
        """
        if self._may_defer:
            self._pending.append(events)
            # Read again: whoever took it back meanwhile may have looked at the pending batches before this one came.
            if self._may_defer:
                self._may_defer = False
                return
        elif self._joins_group(events):
            return
        self._take_turn(Occasion.STEP)

    def _joins_group(self, events: EventBatch) -> bool:
        """Make a batch pending; True when it is one of a burst and waits for the rest of its group."""
        self._check_usable()
        now = time.monotonic()
        pending = self._pending
        pending.append(events)
        if now - self._called_at_s > _BURST_GAP_S:
            self._num_close_calls = 0
        self._called_at_s = now
        self._num_close_calls += 1
        # The backstop has an eye on what waits.
        return self._num_close_calls > _GROUP and len(pending) < self._group and self._backstop.watch()

    def _check_usable(self) -> None:
        if self._is_inherited:
            raise ForkedPublisherError(self._pid)
        if self._closed is not None:
            raise PublisherClosedError("publish() after shutdown(): the batch was not taken")

    def idle(self) -> None:
        """Send what is pending and serve a bite of each replay; call it where the scheduler waits for its device.

        Raises:
            ForkedPublisherError: in a child process.
        """
        if self._is_inherited:
            raise ForkedPublisherError(self._pid)
        if self._closed is None:
            is_busy = bool(self._pending) or self._num_close_calls > 0
            self._num_close_calls = 0
            self._take_turn(Occasion.WAIT)
            if is_busy:  # a scheduler that only idles keeps no thread awake
                # In this order: a backstop that goes to sleep in between takes the permission back.
                self._may_defer = True
                if not self._backstop.watch():
                    self._may_defer = False

    def disown(self) -> None:
        """In a forked child: sockets and stream are the parent's, and every call says so."""
        self._is_inherited = True
        self._may_defer = False

    def stop_deferring(self) -> None:
        """The backstop's word that it will not look any more: the next batch goes out inside ``publish()``."""
        self._may_defer = False

    def _take_turn(self, occasion: Occasion) -> None:
        self._ticked_at_s = time.monotonic()
        # Never waits: whoever holds the turn looks at the pending batches again after letting go.
        while self._closed is None and self._turn.acquire(blocking=False):
            try:
                unfinished = self._edge.act(occasion, self._ticked_at_s)
            finally:
                self._turn.release()
            if unfinished:
                self._backstop.watch()
            if not self._pending:
                return

    def take_turn_if_stalled(self) -> Look:
        """The backstop's look: act when the scheduler has not ticked lately."""
        now = time.monotonic()
        if now - self._ticked_at_s < _STALLED_AFTER_S or not self._turn.acquire(blocking=False):
            return Look.TICKING
        try:
            unfinished = self._edge.act(Occasion.STALL, now) | self._edge.count_peers()
        finally:
            self._turn.release()
        return Look.BUSY if unfinished or self._pending else Look.QUIET

    def shutdown(self) -> None:
        """``close`` within ``SHUTDOWN_TIMEOUT`` seconds; safe to call twice."""
        self.close(self.SHUTDOWN_TIMEOUT)

    def close(self, deadline_s: float) -> CloseReport:
        """Send what is pending, end open replays with their end marker, let go of sockets, thread and context.

        Never raises for what the network does, and returns within about ``deadline_s``; a second call returns the
        first one's report. In a child process it does nothing: the sockets are the parent's.
        """
        if self._closed is not None:
            return self._closed
        live = self._edge.live
        self._closed = CloseReport(live.num_batches, live.num_dropped)
        self._may_defer = False
        atexit.unregister(self.shutdown)
        if self._is_inherited:
            return self._closed
        deadline = time.monotonic() + deadline_s
        was_cut = True
        patience_s = max(deadline_s, _LET_GO_S)
        if self._backstop.stop(patience_s) and self._turn.acquire(timeout=patience_s):
            try:
                was_cut = self._edge.close(deadline)
            finally:
                self._turn.release()
        else:
            _log.error("a thread did not let go of the KV-event sockets of %s: they stay open", self.endpoint)
        live.drop_pending()
        self._closed = CloseReport(live.num_batches, live.num_dropped, was_cut)
        return self._closed

    def stats(self) -> PublisherStats:
        """Counters since the publisher was opened."""
        return self._edge.stats(lag_s=time.monotonic() - self._ticked_at_s)

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """``endpoint`` of rank 0 moved to a rank: port + rank for tcp, a suffix for ipc and inproc.

        Raises:
            ConfigError: the endpoint cannot be parsed, or the port leaves 0 to 65535.
        """
        return str(Endpoint.parse(endpoint).offset(data_parallel_rank)) if endpoint else endpoint
