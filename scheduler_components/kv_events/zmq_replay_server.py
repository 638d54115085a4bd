"""Serving replays over the ROUTER: a bounded number of sends a turn, and never a wait."""

from __future__ import annotations

import logging
import time

import zmq

from scheduler_components.kv_events.replay_cursors import ReplayCursors

__all__ = ["ZmqReplayServer"]

_log = logging.getLogger(__name__)

_SENDS_A_TURN = 16
"""A bite of replay between two live batches: larger ones show in the live latency (measured)."""

_SENDS_A_WAIT = 96
"""A bite while the scheduler waits for its device: some 300 microseconds that nobody else wants."""

_BYTES_A_SEND = 16 * 1024
"""What counts as one send of a bite; a chunk of the base is as large as a whole bite."""

_REQUESTS_A_TURN = 16
"""Of their own, so that a client that does nothing but ask keeps nobody from being answered."""

_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

_CLOSE_POLL_MS = 200
"""A client that takes nothing for so long gets no more than the end marker when the publisher closes."""


class ZmqReplayServer:
    """Owns the ROUTER from the moment it is given until ``finish``; the caller holds the publisher's turn."""

    __slots__ = ("_events", "_has_failed", "_socket", "cursors")

    def __init__(self, socket: zmq.Socket[bytes], cursors: ReplayCursors) -> None:
        self._socket = socket
        # pyzmq's Python-level getsockopt makes enums of both ends: ten times the call itself.
        self._events = super(zmq.Socket, socket).get
        self.cursors = cursors
        self._has_failed = False

    @property
    def wakeup_fd(self) -> int:
        """Becomes readable when a client asks, or can take more."""
        return int(self._socket.getsockopt(zmq.FD))

    def serve_bite(self, *, is_waiting: bool = False) -> bool:
        """Take requests and send at most a bite of answers; True while there is more to do right away.

        ``is_waiting`` says that the scheduler has time: the bite is a large one.
        """
        if self._has_failed:
            return False
        try:
            return self._serve_bite(_SENDS_A_WAIT if is_waiting else _SENDS_A_TURN)
        except zmq.ZMQError as error:
            # Only somebody who closed a shared context can have done this. A scheduler does not stop for it.
            self._has_failed = True
            _log.error("KV events cannot be replayed any more: %s", error)
            return False

    def _serve_bite(self, sends_left: int) -> bool:
        asked = 0
        while asked < _REQUESTS_A_TURN and self._is_readable():
            asked += 1
            self.cursors.ask(self._socket.recv_multipart(zmq.NOBLOCK))
        if not len(self.cursors):
            return asked == _REQUESTS_A_TURN
        for client in self.cursors.clients:
            sends_left = self._serve(client, sends_left)
            if not sends_left:
                return True
        # A client that cannot take more wakes the socket's descriptor when it can; only a request is work for now.
        return self._is_readable()

    def _is_readable(self) -> bool:
        return bool(int(self._events(_EVENTS)) & _POLLIN)

    def _serve(self, client: bytes, sends_left: int) -> int:
        """Send to one client until it is done, is full, or the bite is eaten; returns the sends left."""
        done = False
        while sends_left and not done:
            message = self.cursors.message(client)
            try:
                if message is not None:
                    self._socket.send_multipart(message, zmq.NOBLOCK)
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    _log.warning("replay to a client failed: %s", error)
                self.cursors.drop(client)
                self.cursors.num_truncated += 1
                return sends_left
            done = self.cursors.sent(client)
            # A step of planning, or a chunk of the base, is a bite of its own.
            cost = _SENDS_A_WAIT if message is None else 1 + len(message[-1]) // _BYTES_A_SEND
            sends_left = max(0, sends_left - cost)
        self.cursors.rotate(client)
        return sends_left

    def finish(self, until: float, deadline: float) -> None:
        """Answer what was asked until ``until``, then end every answer, and close; sent by ``deadline`` or never.

        Both are times of ``time.monotonic``.
        """
        while (self.serve_bite() or len(self.cursors)) and not self._has_failed and time.monotonic() < until:
            if len(self.cursors) and not self._socket.poll(_CLOSE_POLL_MS, zmq.POLLOUT | zmq.POLLIN):
                break
        if not self._has_failed:
            self.cursors.cut_short()
            for client in self.cursors.clients:
                self._serve(client, 1)
        self._socket.close(linger=max(0, int((deadline - time.monotonic()) * 1000)))
