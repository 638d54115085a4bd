"""Record a stream: raw frames from its PUB socket, and raw replies from its replay ROUTER. It verifies nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import msgspec
import zmq

from scheduler_components.events import MediumGroup
from scheduler_components.kv_events import Endpoint, StreamAddress
from scheduler_components.kv_events.codec import MAX_PAYLOAD_BYTES
from scheduler_components.kv_events.replay_messages import END_SEQ, ReplayRequest, ReplayVerb
from scheduler_components.testing.interfaces import Frames
from scheduler_components.testing.stream_verifier import RecordedStream, ReplayResponse, sequence_of
from scheduler_components.values import KvPoolSnapshot

__all__ = [
    "ProbeOptions",
    "StreamProbe",
    "probe_streams",
]

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

_MAX_MESSAGES = 200_000
_MAX_BYTES = 512 * 1024 * 1024
"""Limit of one stream or reply. A verifier needs no more, and it bounds the memory for a hostile publisher."""

_LONGEST_ANSWER_S = 120.0
"""The probe stops reading a longer reply."""

_POLL_MS = 5
_STILL_S = 0.2
"""After a silence of this length the probe assumes that the stream is idle, if the oracle names no batch."""

_MALFORMED = b"\xff" * 7
"""Released publishers read these seven bytes as a huge number, which is harmless."""

_FAR = 1 << 62


@attrs.frozen(kw_only=True)
class ProbeOptions:
    """Limits of a recording.

    Attributes:
        listen_s: maximum duration.
        enough_batches: stop earlier once every stream has sent this number of live batches.
        answer_s: maximum silence while the probe waits for a reply.
        pool_every_s: interval between two readings of a pool, if it can be read.
    """

    listen_s: float = 10.0
    enough_batches: int = 200
    answer_s: float = 3.0
    pool_every_s: float = 1.0


class StreamProbe:
    """Records one stream from its construction until ``close``.

    Args:
        context: creates the sockets.
        events: the PUB address.
        replay: the ROUTER address; None without one.
        while_waiting: called repeatedly during a wait; a publisher without a thread works there.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        context: Context,
        events: Endpoint,
        replay: Endpoint | None,
        *,
        while_waiting: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.live: list[Frames] = []
        self.pool: list[KvPoolSnapshot] = []
        self._live_bytes = 0
        self._context = context
        self._replay = replay
        self._while_waiting = while_waiting
        self._clock = clock
        self._sub = self._open(zmq.SUB, events)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")

    def close(self) -> None:
        """Close the socket, and keep the recorded messages."""
        self._sub.close(linger=0)

    def _open(self, kind: int, endpoint: Endpoint) -> Socket:
        socket: Socket = self._context.socket(kind)  # noqa: SCH008 a probe listens once constructed
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.setsockopt(zmq.IPV6, int(endpoint.is_ipv6))
        socket.connect(str(endpoint))  # noqa: SCH008 a probe listens once constructed
        return socket

    def receive(self, wait_ms: int = 0) -> None:
        """Record the received messages, after waiting up to ``wait_ms`` for one."""
        self._while_waiting()
        if not self._sub.poll(wait_ms):
            return
        while self._sub.poll(0):
            frames = tuple(self._sub.recv_multipart())
            self._live_bytes += sum(map(len, frames))
            if len(self.live) < _MAX_MESSAGES and self._live_bytes < _MAX_BYTES:
                self.live.append(frames)

    def receive_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Record until ``condition`` holds; return False after ``timeout_s``."""
        deadline_s = self._clock() + timeout_s
        while not condition():
            if self._clock() >= deadline_s:
                return False
            self.receive(_POLL_MS)
        return True

    def request_replay(self, start: int, answer_s: float) -> ReplayResponse:
        """Request all batches from ``start``; read until the end marker, or until ``answer_s`` of silence."""
        return self._request(start.to_bytes(8, "big"), answer_s, start)[0]

    def send_malformed_request(self, answer_s: float) -> ReplayResponse:
        """Send a request of a wrong length."""
        return self._request(_MALFORMED, answer_s)[0]

    def probe_extension(self, answer_s: float) -> bool | None:
        """Whether the publisher supports this kit's extended requests; None without an end marker.

        Other publishers reply with a bare end marker.
        """
        request = ReplayRequest(0, ReplayVerb.STATUS, os.urandom(8), bytes(16))
        answer, meta = self._request(request.encode(), answer_s)
        return bool(meta) if answer.ended else None

    def _request(self, request: bytes, answer_s: float, start: int | None = None) -> tuple[ReplayResponse, bytes]:
        """Send one request on a separate socket, so that late messages cannot mix with other replies.

        Return the reply, and the payload of its end marker: empty, or a META.
        """
        assert self._replay is not None
        dealer = self._open(zmq.DEALER, self._replay)
        messages: list[Frames] = []
        num_bytes = 0
        try:
            dealer.send_multipart((b"", request))
            asked_s = last_s = self._clock()
            while self._clock() - last_s < answer_s:
                if not dealer.poll(_POLL_MS):
                    self.receive()
                    continue
                last_s = self._clock()
                is_long = len(messages) >= _MAX_MESSAGES or num_bytes >= _MAX_BYTES
                if is_long or last_s - asked_s > _LONGEST_ANSWER_S:
                    return ReplayResponse(start, tuple(messages), is_truncated=True), b""
                frames = tuple(dealer.recv_multipart())
                if frames[0] == b"":
                    frames = frames[1:]
                if len(frames) >= 2 and frames[-2] == END_SEQ:
                    return ReplayResponse(start, tuple(messages), ended=True), frames[-1]
                messages.append(frames)
                num_bytes += sum(map(len, frames))
        finally:
            dealer.close(linger=0)
        return ReplayResponse(start, tuple(messages)), b""

    def record(self, history: ReplayResponse | None, answer_s: float) -> RecordedStream:
        """Send the requests that follow the listening, and return the record."""
        self._catch_up(history, answer_s)
        if self._replay is None or history is None or history.is_silence:
            return RecordedStream(live=tuple(self.live), history=history, pool=tuple(self.pool))
        replayed, live = _numbers(history.messages), _numbers(self.live)
        # Start at the end of the history, because the live connection may have started later.
        again = self.request_replay(min(max(replayed, default=-1) + 1, min(live, default=_FAR)), answer_s)
        past_end = self.request_replay(max(replayed + live, default=0) + _FAR, answer_s)
        malformed = self.send_malformed_request(answer_s)
        extended = self.probe_extension(answer_s)
        self.receive()
        return RecordedStream(tuple(self.live), history, again, past_end, malformed, extended, tuple(self.pool))

    def read_pool(self, read_pool: Callable[[], KvPoolSnapshot], history: ReplayResponse | None) -> None:
        """Read the pool, and keep the reading with the number of the last batch before it.

        If the oracle does not name the number, read again after a silence. If both readings are equal and no message
        arrived around them, the stream was idle, and the reading follows the last recorded batch. Otherwise drop it.
        """
        reading = read_pool()
        if reading.sequence is None:
            self._receive_for(_STILL_S)
            num_received, first = len(self.live), read_pool()
            self._receive_for(_STILL_S)
            reading = read_pool()
            self._receive_for(_STILL_S)
            if len(self.live) != num_received or _as_sets(first) != _as_sets(reading):
                return
            replayed = () if history is None else history.messages
            here = max([*_numbers(replayed), *_numbers(self.live)], default=-1)
            reading = msgspec.structs.replace(reading, sequence=here)
        self.pool.append(reading)

    def _receive_for(self, seconds: float) -> None:
        self.receive_until(lambda: False, seconds)

    def _catch_up(self, history: ReplayResponse | None, answer_s: float) -> None:
        """Record up to the batch of the last reading."""
        goal = self.pool[-1].sequence if self.pool else None
        if goal is None or goal <= max(_numbers(history.messages if history is not None else ()), default=-1):
            return
        self.receive_until(lambda: max(_numbers(self.live[-1:]), default=-1) >= goal, answer_s)


def _numbers(messages: Sequence[Frames]) -> list[int]:
    """Return the valid sequence numbers of messages."""
    return [number for number in map(sequence_of, messages) if number is not None and number < _FAR]


def _read_pools(
    addresses: Sequence[StreamAddress],
    probes: Sequence[StreamProbe],
    histories: Sequence[ReplayResponse | None],
    read_pool: Callable[[int], KvPoolSnapshot],
) -> None:
    for address, probe, history in zip(addresses, probes, histories, strict=True):
        probe.read_pool(partial(read_pool, address.rank), history)


def _as_sets(reading: KvPoolSnapshot) -> dict[MediumGroup, frozenset[int]]:
    return {place: frozenset(hashes) for place, hashes in reading.blocks.items()}


def probe_streams(
    addresses: Sequence[StreamAddress],
    options: ProbeOptions,
    *,
    read_pool: Callable[[int], KvPoolSnapshot] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[RecordedStream]:
    """Record several streams concurrently, and return one record per stream in their order.

    Args:
        addresses: of the streams.
        options: limits of the recording.
        read_pool: reads the pool of a rank. It is called at intervals and at the end. Its errors end the recording.
        clock: monotonic seconds.
    """
    probes: list[StreamProbe] = []
    context: Context = zmq.Context()
    with context:
        try:
            for address in addresses:
                probes.append(StreamProbe(context, address.events, address.replay, clock=clock))
            histories = [
                None if address.replay is None else probe.request_replay(0, options.answer_s)
                for address, probe in zip(addresses, probes, strict=True)
            ]
            deadline_s = clock() + options.listen_s
            pool_due_s = clock()
            while clock() < deadline_s and any(len(probe.live) < options.enough_batches for probe in probes):
                for probe in probes:
                    probe.receive(_POLL_MS)
                if read_pool is not None and clock() >= pool_due_s:
                    _read_pools(addresses, probes, histories, read_pool)
                    pool_due_s = clock() + options.pool_every_s
            if read_pool is not None:
                _read_pools(addresses, probes, histories, read_pool)
            return [probe.record(each, options.answer_s) for probe, each in zip(probes, histories, strict=True)]
        finally:
            for probe in probes:
                probe.close()
