"""One stream's sockets and all that moves through them, opened, worked and closed as one.

Nothing here locks: whoever calls holds the publisher's turn.
"""

from __future__ import annotations

import enum
import logging
import os
import time

from scheduler_components.kv_events.codec import BatchEncoder
from scheduler_components.kv_events.config import KVEventsConfig
from scheduler_components.kv_events.endpoint import Endpoint
from scheduler_components.kv_events.event_stream import EPOCH_BYTES, EventStream
from scheduler_components.kv_events.replay_cursors import ReplayCursors
from scheduler_components.kv_events.zmq_access import StreamAccess
from scheduler_components.kv_events.zmq_live_sender import ZmqLiveSender
from scheduler_components.kv_events.zmq_replay_server import ZmqReplayServer
from scheduler_components.kv_events.zmq_sockets import Context, StreamSockets, open_stream_sockets
from scheduler_components.metrics.stats import PublisherStats

__all__ = ["Occasion", "ZmqStreamEdge", "open_stream_edge"]

_log = logging.getLogger(__name__)

_REQUESTS_EVERY_S = 0.004
"""To look for replay requests costs a system call: a scheduler of quick steps does it in some of them."""

_TURNS_BETWEEN_COUNTS = 64
"""Peers come rarely: their reports are looked for once in so many turns of a busy scheduler."""


class Occasion(enum.Enum):
    """When a turn is taken."""

    STEP = "inside the scheduler's step, where every microsecond shows"
    WAIT = "while the scheduler waits for its device: there is some time"
    STALL = "by the backstop, for a scheduler that has stopped ticking"


class ZmqStreamEdge:
    """The live sender, the replay server and the counters of one stream; made by ``open_stream_edge``.

    Attributes:
        live: what takes batches to the PUB socket.
        sockets: where the stream really is.
        is_open_bind: True when it listens beyond loopback without authentication.
    """

    __slots__ = ("_cursors", "_looked_at_s", "_num_turns", "_replay", "_stream", "is_open_bind", "live", "sockets")

    def __init__(
        self,
        sockets: StreamSockets,
        stream: EventStream,
        cursors: ReplayCursors,
        live: ZmqLiveSender,
        *,
        is_open_bind: bool,
    ) -> None:
        self.sockets = sockets
        self.live = live
        self.is_open_bind = is_open_bind
        self._stream = stream
        self._cursors = cursors
        self._replay = ZmqReplayServer(sockets.replay, cursors) if sockets.replay else None
        self._num_turns = 0
        self._looked_at_s = 0.0

    @property
    def wakeup_fds(self) -> tuple[int, ...]:
        """Become readable when a peer came or wants something."""
        replay = [self._replay.wakeup_fd] if self._replay else []
        return (*replay, *(counter.wakeup_fd for counter in self.sockets.peers if counter))

    def act(self, occasion: Occasion, now_s: float) -> bool:
        """Send what is pending, fold, serve a bite of replays; True while there is more to do.

        ``now_s`` is ``time.monotonic``.
        """
        self.live.send_pending()
        self._stream.fold_some()
        if self._stream.is_held_up:
            self._cursors.cut_pinned()
        self._num_turns += 1
        if self._num_turns % _TURNS_BETWEEN_COUNTS == 0:
            self.count_peers()
        if self._replay is None:
            return False
        has_looked = now_s - self._looked_at_s < _REQUESTS_EVERY_S and occasion is not Occasion.STALL
        if has_looked and not len(self._cursors):
            return False
        self._looked_at_s = now_s
        return self._replay.serve_bite(is_waiting=occasion is Occasion.WAIT)

    def count_peers(self) -> bool:
        """Take a bounded number of reports of who connected; True while there may be more."""
        more = [counter.count_some() for counter in self.sockets.peers if counter]
        return any(more)

    def close(self, deadline: float) -> bool:
        """Send, end and close everything; True when some peer had not taken all of it by ``deadline``."""
        self.live.drain(deadline)
        # The live tail goes first, for nobody can ask for it again. linger 0 would lose what libzmq has queued.
        now = time.monotonic()
        self.sockets.pub.close(linger=max(0, int((deadline - now) * 1000)))
        if self._replay:
            self._replay.finish(until=(now + deadline) / 2, deadline=deadline)
        self.sockets.release()
        was_cut = time.monotonic() >= deadline
        if was_cut:
            _log.warning("a peer of %s had not taken all KV events when the deadline passed", self.sockets.endpoint)
        return was_cut

    def stats(self, lag_s: float) -> PublisherStats:
        """Counters since the stream was opened."""
        live, replays, stream = self.live, self._cursors, self._stream
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
            batches_buffered=len(stream),
            bytes_buffered=stream.kept_bytes,
            blocks_in_base=stream.num_base_blocks,
            batches_pending=len(live.pending),
            lag_s=lag_s if live.pending else 0.0,
            last_sequence=stream.next_sequence - 1,
            subscribers_seen=live_peers.num_connected if live_peers else 0,
            peers_refused=sum(counter.num_refused for counter in self.sockets.peers if counter),
            open_bind_without_auth=int(self.is_open_bind),
        )


def open_stream_edge(settings: KVEventsConfig, rank: int, inproc_context: Context | None) -> ZmqStreamEdge:
    """Check all there is to check, then open the sockets of stream ``rank``.

    Raises:
        ConfigError: a key file cannot be used, or no port is left for this stream; nothing has been opened.
        StartError: the system refused an address; nothing stays open.
    """
    plan = settings.port_plan(rank + 1)  # so many streams there are at least
    events_at, replay_at = plan.event_endpoint(rank), plan.replay_endpoint(rank)
    binds = events_at.decide_bind(settings.bind)
    access = _read_access(settings)
    topic = settings.topic.encode()
    encoder = BatchEncoder(settings.dialect)
    stream = EventStream(
        epoch=os.urandom(EPOCH_BYTES),
        max_steps=settings.buffer_steps if replay_at else 0,
        max_bytes=settings.buffer_bytes,
        # Microseconds, because a busy stream sends more than one batch a millisecond and would outrun its successor.
        first_sequence=0 if settings.seq_base == "zero" else time.time_ns() // 1000,
    )
    cursors = ReplayCursors(stream, encoder=encoder, rank=rank, framing=settings.replay_framing, topic=topic)
    sockets = open_stream_sockets(
        events_at, replay_at, hwm=settings.hwm, bind=binds, access=access, inproc_context=inproc_context
    )
    live = ZmqLiveSender(
        sockets.pub, topic=topic, encoder=encoder, stream=stream, rank=rank, max_pending=settings.max_queue_size
    )
    is_open_bind = access is None and _warn_if_open(events_at if binds else None, replay_at)
    return ZmqStreamEdge(sockets, stream, cursors, live, is_open_bind=is_open_bind)


def _read_access(settings: KVEventsConfig) -> StreamAccess | None:
    if settings.secret_key_file is None or settings.client_keys_dir is None:
        return None
    return StreamAccess.read(settings.secret_key_file, settings.client_keys_dir)


def _warn_if_open(*bound: Endpoint | None) -> bool:
    listening = [str(endpoint) for endpoint in bound if endpoint is not None and not endpoint.is_loopback]
    if listening:
        where = " and ".join(listening)
        _log.warning('KV events with prompt token ids are readable by anyone who reaches %s: auth is "none"', where)
    return bool(listening)
