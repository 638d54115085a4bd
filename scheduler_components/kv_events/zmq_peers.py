"""Counting the peers of a socket from libzmq's own reports of handshakes."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

__all__ = ["PeerCounter"]

_REPORTS_A_TURN = 16
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class PeerCounter:
    """Counts completed and refused handshakes of one socket; the caller holds the publisher's turn.

    libzmq tells a PUB socket's owner nothing else about its subscribers: not what they subscribe to, nor what was
    dropped for them.

    Attributes:
        num_connected: handshakes completed since the socket was opened.
        num_refused: handshakes that failed: no key, a wrong key, or no ZeroMQ peer at all.
    """

    __slots__ = ("_monitor", "num_connected", "num_refused")

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        address = f"inproc://peers-{id(socket)}"
        socket.monitor(address, _WATCHED)
        self._monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        # libzmq's own thread would wait, with all traffic, for room in a queue that is bounded.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(address)
        self.num_connected = self.num_refused = 0
        # libzmq wakes a reader only once it has looked and found nothing.
        self.count_some()

    @property
    def wakeup_fd(self) -> int:
        """Becomes readable when a peer came."""
        return int(self._monitor.getsockopt(zmq.FD))

    def count_some(self) -> bool:
        """Take a bounded number of reports; True while there may be more."""
        for _ in range(_REPORTS_A_TURN):
            if not int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False
            if recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.num_connected += 1
            else:
                self.num_refused += 1
        return True

    def close(self) -> None:
        """Close the monitor, before or after its socket."""
        self._monitor.close(linger=0)
