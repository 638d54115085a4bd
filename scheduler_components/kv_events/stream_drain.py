"""StreamDrain: one drain of a stream. Live batches, folding, requests and answers get their turns. Pure: no socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from scheduler_components.kv_events.live_sender import LiveSender
from scheduler_components.kv_events.replay import ReplaySessions
from scheduler_components.kv_events.stream import EventStream

if TYPE_CHECKING:
    from scheduler_components.kv_events.sequence_floor import SequenceFloor

__all__ = ["MESSAGES_PER_TURN", "ReplayServerChannel", "ReplayServer", "StreamDrain"]

MESSAGES_PER_TURN = 8
"""Messages to one client before the time is checked and the next client gets its turn."""

_BYTES_PER_TURN = 64 * 1024
"""The same in bytes: a chunk of the snapshot takes as long as many small batches."""

_DRAINS_PER_COUNT = 64
"""Peers connect rarely, so their reports are received once per this many drains of a busy scheduler."""


class ReplayServerChannel(Protocol):
    """The connections to the replay clients. It never waits."""

    @property
    def has_failed(self) -> bool:
        """True if nothing can be received or sent any more."""
        ...

    def receive_requests(self) -> bool:
        """Pass a bounded number of requests to the sessions. Return True while there may be more."""
        ...

    def send(self, message: tuple[bytes, ...]) -> bool | None:
        """Send one message of an answer. Return False if its client takes no more now, None if the client is gone."""
        ...


class ReplayServer:
    """Sends the open answers to their clients, in turns.

    Args:
        sessions: the open answers.
        channel: of the clients.
        clock: monotonic seconds.
    """

    __slots__ = ("_channel", "_clock", "_sessions")

    def __init__(self, sessions: ReplaySessions, channel: ReplayServerChannel, *, clock: Callable[[], float]) -> None:
        self._sessions = sessions
        self._channel = channel
        self._clock = clock

    def receive_requests(self) -> bool:
        """Receive a bounded number of requests. Return True while there may be more."""
        return self._channel.receive_requests()

    def serve_slice(self, until_s: float) -> bool:
        """Send answers until ``until_s`` (of the clock), to the clients in turns, and at least one turn.

        Return True while a client may take more.
        """
        can_send = not self._channel.has_failed
        while can_send:
            can_send = False
            for client in self._sessions.clients:
                can_send |= self.serve_turn(client)
                if self._clock() >= until_s:
                    return len(self._sessions) > 0
        # A full client is tried again at the next poll.
        return False

    def serve_turn(self, client: bytes) -> bool:
        """Send a few messages to one client. Return False if it takes no more now."""
        sessions, send = self._sessions, self._channel.send
        num_bytes = 0
        for _ in range(MESSAGES_PER_TURN):
            message = sessions.message(client)
            if message is not None:
                was_sent = send(message)
                if was_sent is None:
                    sessions.drop(client)
                    sessions.num_truncated += 1
                    return False
                if not was_sent:
                    sessions.on_full(client, self._clock())
                    sessions.rotate(client)
                    return False
            if sessions.on_sent(client):
                return True
            num_bytes += _BYTES_PER_TURN if message is None else len(message[-1])
            if num_bytes >= _BYTES_PER_TURN:
                break
        sessions.rotate(client)
        return True


class StreamDrain:
    """Sends, folds and answers. The caller owns the sockets.

    Args:
        live: sends the pending batches.
        stream: of the batches.
        sessions: the open answers.
        floor: of the stream's numbers, if it is kept in a file.
        server: receives the requests and sends the answers; None without replay.
        count_peers: called once in some drains.
        clock: monotonic seconds.

    Attributes:
        requests_at_s: when replay requests were last received.
    """

    __slots__ = (
        "_clock",
        "_count_peers",
        "_floor",
        "_live",
        "_num_drains",
        "_server",
        "_sessions",
        "_stream",
        "requests_at_s",
    )

    def __init__(
        self,
        live: LiveSender,
        stream: EventStream,
        sessions: ReplaySessions,
        *,
        floor: SequenceFloor | None,
        server: ReplayServer | None,
        count_peers: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._stream = stream
        self._sessions = sessions
        self._floor = floor
        self._server = server
        self._count_peers = count_peers
        self._clock = clock
        self._num_drains = 0
        self.requests_at_s = 0.0

    def drain(self, send_s: float, replay_s: float, *, requests_every_s: float = 0.0) -> bool:
        """Send pending batches, fold, and serve replays. Return True while there is more to do.

        Each of the three makes progress, however short its time is.

        Args:
            send_s: time in seconds for sending and folding.
            replay_s: time in seconds for replays, in addition; 0 leaves them to another call.
            requests_every_s: do not poll for replay requests if they were polled this recently.
        """
        clock, live, stream, server = self._clock, self._live, self._stream, self._server
        send_until_s = clock() + send_s
        live.send_pending(send_until_s)
        while stream.is_over_limit and not stream.pins and clock() < send_until_s:
            stream.fold_oldest()
        if stream.has_stuck_pins:
            self._sessions.cancel_pinned()
        self._num_drains += 1
        if self._num_drains % _DRAINS_PER_COUNT == 0:
            self._count_peers()
            if self._floor is not None:
                self._floor.reserve_above(stream.next_sequence)
        unfinished = bool(live.pending) and clock() >= send_until_s
        if server is None:
            return unfinished
        now_s = clock()
        # An answer covers all batches that were published before its request is received.
        if not unfinished and now_s - self.requests_at_s >= requests_every_s:
            self.requests_at_s = now_s
            unfinished = server.receive_requests()
        if replay_s and len(self._sessions):
            unfinished |= server.serve_slice(now_s + replay_s)
        return unfinished
