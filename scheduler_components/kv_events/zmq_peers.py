"""Counting the peers of a socket from libzmq's own reports of handshakes."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

__all__ = ["PeerCounter", "open_peer_counter"]

_REPORTS_A_TURN = 16
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class PeerCounter:
    """Counts completed and refused handshakes of one socket; made by ``open_peer_counter``, worked within the turn.

    libzmq tells a PUB socket's owner nothing else about its subscribers: not what they subscribe to, nor what was
    dropped for them.

    Attributes:
        num_connected: handshakes completed since the socket was opened.
        num_refused: handshakes that failed: no key, a wrong key, or no ZeroMQ peer at all.
    """

    __slots__ = ("_monitor", "num_connected", "num_refused")

    def __init__(self, monitor: zmq.Socket[bytes]) -> None:
        self._monitor = monitor
        self.num_connected = self.num_refused = 0

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


def open_peer_counter(socket: zmq.Socket[bytes]) -> PeerCounter:
    """Begin to count the peers of ``socket``."""
    address = f"inproc://peers-{id(socket)}"
    socket.monitor(address, _WATCHED)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    # libzmq's own thread would wait, with all traffic, for room in a queue that is bounded.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    counter = PeerCounter(monitor)
    # libzmq wakes a reader only once it has looked and found nothing.
    counter.count_some()
    return counter
