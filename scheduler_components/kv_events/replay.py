"""ReplaySessions: the open answers to replay requests, one per client. Pure: no socket, no clock.

Each session is a generator of messages. The edge asks for one message at a time and reports which clients can take no
more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from scheduler_components.errors import ConfigError, DecodeError
from scheduler_components.kv_events.codec import BatchEncoder
from scheduler_components.kv_events.replay_messages import (
    END_SEQ,
    ReplayMeta,
    ReplayMetaKind,
    ReplayRequest,
    ReplayVerb,
)
from scheduler_components.kv_events.stream import EventStream, SnapshotChunk

__all__ = ["REPLAY_FRAMINGS", "ReplaySessions"]

REPLAY_FRAMINGS = ("seed", "topic")


NumberedPayload = tuple[bytes, bytes]
"""Sequence and payload of one message of an answer."""

ReplyMessages = Generator[NumberedPayload | None, None, None]
"""The messages of an answer; None while the next one is being prepared."""

_END: NumberedPayload = (END_SEQ, b"")


def _numbered(sequence: int, payload: bytes) -> NumberedPayload:
    return sequence.to_bytes(8, "big"), payload


def _end_marker_alone() -> ReplyMessages:
    yield _END


_STUCK_AFTER_S = 2.0
"""A client that takes less than ``_PROGRESS`` in this time is stuck, and yields to a waiting one. A pause of 1.5 s is
common.
"""

_PROGRESS = 64
"""Messages, or 16 KiB parts of large ones, that end being stuck: libzmq queues about this many for one client anyway.
"""

_BYTES_PER_PROGRESS = 16 * 1024

_MAX_WAITING = 1_024
"""Maximum requests that wait for a session; each takes some hundred bytes."""


class _Session:
    """One client's answer: the message to send next (None while it is being prepared) and the generator of the others.

    ``full_since_s`` is the time since which the client takes nothing, None while it accepts messages. ``num_taken`` is
    its progress since then.
    """

    __slots__ = ("full_since_s", "is_plain", "message", "messages", "num_taken")

    def __init__(self, messages: ReplyMessages, *, is_plain: bool) -> None:
        self.messages = messages
        self.message = next(messages)
        self.is_plain = is_plain
        self.full_since_s: float | None = None
        self.num_taken = 0

    def take(self) -> None:
        """Go on to the next message after the client took one. Raises StopIteration after the last."""
        if self.full_since_s is not None and self.message is not None:
            self.num_taken += 1 + len(self.message[1]) // _BYTES_PER_PROGRESS
            if self.num_taken >= _PROGRESS:
                self.full_since_s = None
        self.message = None
        self.message = next(self.messages)

    def full(self, now_s: float) -> None:
        """Note that the client took nothing."""
        if self.full_since_s is None:
            self.full_since_s, self.num_taken = now_s, 0

    def is_stuck(self, now_s: float) -> bool:
        """True if the client has taken almost nothing for a while."""
        return self.full_since_s is not None and now_s - self.full_since_s >= _STUCK_AFTER_S


class _SnapshotPlan:
    """The chunks of the snapshot, planned once for all clients that request it meanwhile. None until it is complete.

    ``num_clients`` of them have not begun to receive their chunks. As long as there are any, the snapshot is pinned.
    """

    __slots__ = ("_steps", "_stream", "chunks", "num_clients", "start")

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self.start = stream.first
        self.chunks: list[SnapshotChunk] | None = None
        self.num_clients = 0
        self._steps = stream.plan_snapshot()

    def step(self) -> None:
        """Plan a bounded part, unless another client's steps have completed the plan."""
        if self.chunks is None:
            try:
                self.chunks = next(self._steps)
            except StopIteration:  # a signal handler's exception ended the plan
                self._steps = self._stream.plan_snapshot()


class ReplaySessions:
    """All open answers of one stream.

    An answer covers at least the batches that had been sent when it was requested; the client receives later ones live.
    The stream keeps the batches of an open answer, so the replay buffer overtakes only a client that is slower than the
    publisher for the length of the whole buffer. A plain client whose start has left the replay buffer gets the folded
    snapshot first, as ordinary batches numbered below the buffer, so that it ends with the whole state. If these
    numbers are too few for messages that readers accept, it gets only the buffer: it sees the gap, and may request
    from 0.

    Above ``max_clients`` a request waits for its turn. A stuck client yields to it and gets no end marker, because a
    plain client would read the marker as the complete answer. A request that cannot even wait gets no end marker
    either.

    Args:
        stream: the stream to answer from.
        encoder: of the stream's dialect, for parts of runs in the snapshot.
        rank: stamped on folded batches.
        framing: ``"seed"`` (every measured consumer reads it) or ``"topic"`` (SGLang's and vLLM's present framing).
        topic: the topic frame of the ``topic`` framing.
        max_clients: maximum open answers.

    Attributes:
        upstream: value of ``ReplayMeta.upstream`` in every META; None unless a relay sets it.
        num_served, num_batches, num_refused, num_truncated: completed answers, batches in them, requests that were
            malformed or could not wait, and answers cut before their end.

    Raises:
        ConfigError: unknown framing.
    """

    __slots__ = (
        "_sessions",
        "_encoder",
        "_end_prefix",
        "_max_clients",
        "_plan",
        "_prefix",
        "_rank",
        "_receiving",
        "_stream",
        "_waiting",
        "num_batches",
        "num_refused",
        "num_served",
        "num_truncated",
        "upstream",
    )

    def __init__(
        self,
        stream: EventStream,
        *,
        encoder: BatchEncoder,
        rank: int,
        framing: str = "seed",
        topic: bytes = b"",
        max_clients: int = 64,
    ) -> None:
        if framing not in REPLAY_FRAMINGS:
            raise ConfigError("replay_framing", framing, "is not known", f"give one of {', '.join(REPLAY_FRAMINGS)}")
        self._stream = stream
        self._encoder = encoder
        self._rank = rank
        self._prefix: tuple[bytes, ...] = (b"", topic) if framing == "topic" else (b"",)
        self._end_prefix: tuple[bytes, ...] = (b"", b"") if framing == "topic" else (b"",)
        self._max_clients = max_clients
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._waiting: OrderedDict[bytes, ReplayRequest] = OrderedDict()
        self._receiving: set[bytes] = set()
        self._plan: _SnapshotPlan | None = None
        self.upstream: str | None = None
        self.num_served = self.num_batches = self.num_refused = self.num_truncated = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def clients(self) -> tuple[bytes, ...]:
        """Clients with an unfinished answer, the least recently served first."""
        return tuple(self._sessions)

    def receive(self, frames: Sequence[bytes]) -> None:
        """Receive one request as frames of the ROUTER. Answer a malformed one with a bare end marker.

        A client that requests again before its answer is complete starts over, because its earlier answer would be
        stale.
        """
        client = frames[0]
        try:
            if len(frames) != 3 or frames[1]:
                raise DecodeError(f"a replay request of {len(frames)} frames")
            request = ReplayRequest.parse(frames[2])
        except DecodeError:
            self.num_refused += 1
            self.drop(client)
            self._sessions[client] = _Session(_end_marker_alone(), is_plain=True)
            return
        self._forget(client)
        if client in self._waiting or len(self._waiting) < _MAX_WAITING:
            self._waiting[client] = request  # a client that already waits keeps its turn
            self._admit()
        else:
            self.num_refused += 1

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a session."""
        return len(self._waiting)

    def can_progress(self, now_s: float) -> bool:
        """True while some open client is not stuck, or a request waits for the place of a stuck one."""
        return bool(self._waiting) or not all(cursor.is_stuck(now_s) for cursor in self._sessions.values())

    def _admit(self) -> None:
        """Open sessions for waiting requests while there is room."""
        while self._waiting and len(self._sessions) < self._max_clients:
            client, request = self._waiting.popitem(last=False)
            is_plain = request.verb is None
            messages = self._plain(client, request.start) if is_plain else self._extended(client, request)
            self._sessions[client] = _Session(messages, is_plain=is_plain)

    def _plain(self, client: bytes, start: int) -> ReplyMessages:
        stream = self._stream
        stop = stream.next_sequence
        sequence = start if stream.has_folded else max(start, stream.first)
        with self._holding(client):
            while sequence < stop:
                if sequence < stream.oldest:
                    # At the start, and once more if the client falls behind by a whole replay buffer: the snapshot then
                    # contains all batches of the answer.
                    sequence = yield from self._folded(client, sequence)
                    continue
                stream.holds[client] = sequence
                yield _numbered(sequence, stream.payload(sequence))
                sequence += 1
        yield _END

    def _folded(self, client: bytes, start: int) -> Generator[NumberedPayload | None, None, int]:
        """Yield the snapshot as batches numbered up to ``first - 1``, at most ``first - start`` of them.

        Yield nothing if it does not fit into so many: the client then sees a gap in the numbers.

        Returns:
            ``first``, from which the batches follow.
        """
        self._stream.holds.pop(client, None)
        yield from self._wait_for_folding()
        with self._receiving_snapshot(client):
            chunks: list[SnapshotChunk] = []
            with self._pinned():
                first = self._stream.holds[client] = self._stream.first
                for planned in self._stream.plan_snapshot(max_chunks=first - start):
                    if planned is None:
                        yield None
                    else:
                        chunks = planned
            self.num_truncated += not chunks
            start = first - len(chunks)
            for number in range(start, first):
                # Chunks are freed one by one: freeing a large plan in one go would show in the scheduler's step.
                yield from self._chunk(number, chunks.pop(0), clear=number == start)
        return first

    def _wait_for_folding(self) -> ReplyMessages:
        """Wait until the backlog of the last pin is folded. Pinning again now would continue to hold it up."""
        while self._stream.is_over_limit and not self._stream.pins:
            yield None

    def _chunk(self, number: int, chunk: SnapshotChunk, *, clear: bool) -> ReplyMessages:
        for payload in self._stream.encode_chunk(chunk, self._encoder, self._rank, clear=clear):
            yield None if payload is None else _numbered(number, payload)

    @contextmanager
    def _holding(self, client: bytes) -> Iterator[None]:
        """Release the batches of an answer at its end. The answer sets ``holds`` for each batch."""
        try:
            yield
        finally:
            self._stream.holds.pop(client, None)

    @contextmanager
    def _pinned(self) -> Iterator[None]:
        """Keep the snapshot and the start of the replay buffer unchanged while the snapshot is cut into chunks."""
        self._stream.pins += 1
        try:
            yield
        finally:
            self._stream.pins -= 1

    @contextmanager
    def _sharing_plan(self) -> Iterator[_SnapshotPlan]:
        """Join the plan under way, or begin one. A fleet of readers that joins together pays for one plan."""
        plan = self._plan = self._plan or _SnapshotPlan(self._stream)
        plan.num_clients += 1
        try:
            with self._pinned():
                yield plan
        finally:
            plan.num_clients -= 1
            if not plan.num_clients:
                self._plan = None

    @contextmanager
    def _receiving_snapshot(self, client: bytes) -> Iterator[None]:
        """Mark ``client`` as one whose answer keeps chunks of the snapshot in memory."""
        self._receiving.add(client)
        try:
            yield
        finally:
            self._receiving.discard(client)

    def _extended(self, client: bytes, request: ReplayRequest) -> ReplyMessages:
        stream = self._stream
        is_in_buffer = request.epoch == stream.epoch and stream.first <= request.start <= stream.next_sequence
        start = request.start if is_in_buffer else stream.first
        if request.verb is ReplayVerb.STATUS:
            yield self._meta(request, ReplayMetaKind.STATUS, start)
        elif request.verb is ReplayVerb.SNAPSHOT or not is_in_buffer:
            yield from self._wait_for_folding()
            with self._holding(client):
                yield from self._snapshot_then_batches(client, request)
        else:
            begin, stop, end = self._begin_and_end(request, start)
            with self._holding(client):
                stream.holds[client] = start
                yield begin
                yield from self._batches(client, start, stop, end)

    def _snapshot_then_batches(self, client: bytes, request: ReplayRequest) -> ReplyMessages:
        stream = self._stream
        with self._receiving_snapshot(client):
            with self._sharing_plan() as plan:
                start = stream.holds[client] = plan.start
                yield self._meta(request, ReplayMetaKind.BEGIN, start, snap=True)
                plan.step()
                while plan.chunks is None:
                    yield None
                    plan.step()
                chunks = plan.chunks.copy()
                begin, stop, end = self._begin_and_end(request, start, chunks=len(chunks))
            for number in range(len(chunks)):
                yield from self._chunk(number, chunks.pop(0), clear=number == 0)
        yield begin
        yield from self._batches(client, start, stop, end)

    def _begin_and_end(
        self, request: ReplayRequest, start: int, *, chunks: int | None = None
    ) -> tuple[NumberedPayload, int, NumberedPayload]:
        """Return the META before the batches from ``start``, the number after the newest one, and the META after it.

        They are made together, because the stream forgets the digest of a position when it folds the batch.
        """
        stop = self._stream.next_sequence
        begin = self._meta(request, ReplayMetaKind.BEGIN, start, chunks=chunks)
        return begin, stop, self._meta(request, ReplayMetaKind.END, stop)

    def _batches(self, client: bytes, start: int, stop: int, end: NumberedPayload) -> ReplyMessages:
        """Yield the batches from ``start`` to ``stop - 1``, then ``end``."""
        stream = self._stream
        for sequence in range(start, stop):
            if sequence < stream.oldest:
                # Without the closing META the client knows that it must request again.
                self.num_truncated += 1
                yield _END
                return
            stream.holds[client] = sequence
            yield _numbered(sequence, stream.payload(sequence))
        yield end

    def _meta(
        self, request: ReplayRequest, kind: ReplayMetaKind, start: int, *, snap: bool = False, chunks: int | None = None
    ) -> NumberedPayload:
        stream = self._stream
        chain = stream.digest_before(start)
        meta = ReplayMeta(
            request.token, stream.epoch, stream.first, stream.next_sequence, kind, snap, start, chain, chunks,
            self.upstream,
        )  # fmt: skip
        return END_SEQ, meta.encode()

    def message(self, client: bytes) -> tuple[bytes, ...] | None:
        """Return the next message for ``client`` with all frames, or None while it is being prepared.

        It stays the same message until ``on_sent``.
        """
        message = self._sessions[client].message
        if message is None:
            return None
        return (client, *(self._end_prefix if message[0] == END_SEQ else self._prefix), *message)

    def on_sent(self, client: bytes) -> bool:
        """Advance after the message was sent, or prepare it further. Return True when the answer has ended."""
        cursor = self._sessions[client]
        taken = cursor.message
        if taken is not None and taken[0] != END_SEQ:
            self.num_batches += 1
        try:
            cursor.take()
        except StopIteration:
            if taken is None:  # a signal handler's exception ended the answer before its end marker
                self._end_early(client)
                return client not in self._sessions
            del self._sessions[client]
            self.num_served += 1
            self._admit()
            return True
        return False

    def on_full(self, client: bytes, now_s: float) -> None:
        """Note that ``client`` can take no message now. Drop it if it is stuck and a request waits."""
        cursor = self._sessions[client]
        cursor.full(now_s)
        if cursor.is_stuck(now_s) and self._waiting:
            self.num_truncated += 1
            self.drop(client)

    def end_all(self) -> None:
        """End every open answer with a bare end marker, because the publisher closes. Waiting requests get nothing."""
        self._waiting.clear()
        for client in self.clients:
            self._cut(client)

    def cancel_pinned(self) -> None:
        """Cut the answers that are too slow (``EventStream.is_too_slow``): their clients must request again.

        A client that has received the snapshot only loses its hold: it is cut, or gets the snapshot again, when it
        takes its next message and the batch is gone.
        """
        stream = self._stream
        for client, sequence in tuple(stream.holds.items()):
            if not stream.is_too_slow(sequence):
                continue
            if client not in self._receiving:
                del stream.holds[client]
            else:
                self._end_early(client)

    def _end_early(self, client: bytes) -> None:
        """Cut an answer. A plain client gets no end marker, because it would read it as the complete answer."""
        if self._sessions[client].is_plain:
            self.num_truncated += 1
            self.drop(client)
        else:
            self._cut(client)

    def _cut(self, client: bytes) -> None:
        self._forget(client)
        self._sessions[client] = _Session(_end_marker_alone(), is_plain=True)
        self.num_truncated += 1

    def drop(self, client: bytes) -> None:
        """Forget a client that has disconnected."""
        self._waiting.pop(client, None)
        self._forget(client)
        self._admit()

    def _forget(self, client: bytes) -> None:
        """Close a client's session without opening another."""
        cursor = self._sessions.pop(client, None)
        if cursor is not None:
            cursor.messages.close()
        # The answer does the same at its end, unless a signal handler raises just then.
        self._stream.holds.pop(client, None)
        self._receiving.discard(client)

    def rotate(self, client: bytes) -> None:
        """Move ``client`` to the end: it was served, or can take no more now."""
        if client in self._sessions:
            self._sessions.move_to_end(client)
