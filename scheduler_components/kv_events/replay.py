"""Replay sessions: the open answers of one stream. Pure: no socket, no clock."""

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

# Answers to replay requests, without sockets: one cursor per client, served one after the other, each a generator.

NumberedPayload = tuple[bytes, bytes]
"""Sequence and payload of one message of an answer."""

ReplyMessages = Generator[NumberedPayload | None, None, None]
"""An answer's messages; None where preparing the next one goes on."""

_END: NumberedPayload = (END_SEQ, b"")


def _numbered(sequence: int, payload: bytes) -> NumberedPayload:
    return sequence.to_bytes(8, "big"), payload


def _bare_end() -> ReplyMessages:
    yield _END


_STUCK_AFTER_S = 2.0
"""A client that takes less than ``_PROGRESS`` in this time gives way to one who waits. A pause of 1.5 s is usual."""

_PROGRESS = 64
"""ReplyMessages, or 16 KiB parts of large ones: what libzmq queues for one client anyway."""

_BYTES_PER_PROGRESS = 16 * 1024

_MAX_WAITING = 1_024
"""Requests that wait for a place; each costs some hundred bytes."""


class _Cursor:
    """One client's answer: the message to send next (None while it is being prepared), and the rest of them.

    ``full_since_s`` is when the client began to take nothing more, None while it takes what it is given; ``num_taken``
    is its progress since then.
    """

    __slots__ = ("full_since_s", "is_plain", "message", "messages", "num_taken")

    def __init__(self, messages: ReplyMessages, *, is_plain: bool) -> None:
        self.messages = messages
        self.message = next(messages)
        self.is_plain = is_plain
        self.full_since_s: float | None = None
        self.num_taken = 0

    def take(self) -> None:
        """The client took the message: go on to the next. StopIteration when that was the last."""
        if self.full_since_s is not None and self.message is not None:
            self.num_taken += 1 + len(self.message[1]) // _BYTES_PER_PROGRESS
            if self.num_taken >= _PROGRESS:
                self.full_since_s = None
        self.message = next(self.messages)

    def full(self, now_s: float) -> None:
        """The client took nothing just now."""
        if self.full_since_s is None:
            self.full_since_s, self.num_taken = now_s, 0

    def is_stuck(self, now_s: float) -> bool:
        """True when the client has hardly taken anything for a while."""
        return self.full_since_s is not None and now_s - self.full_since_s >= _STUCK_AFTER_S


class ReplaySessions:
    """All open answers of one stream.

    An answer covers what had been sent when it was asked for; later batches reach the client live. A plain client
    whose start has left the window gets the folded base first, as ordinary batches numbered below the window, so
    that it ends with the whole state. Where these are too few numbers for messages that readers take, it gets the
    window alone: it sees the gap, and may ask from 0.

    Beyond ``max_clients`` a request waits for its turn. An open client that is stuck gives way to it: it gets no end
    marker, for a plain client would take that as "this is all". Nor does a request that has no place to wait.

    Args:
        stream: answered from.
        encoder: of the stream's dialect, for parts of runs in the base.
        rank: stamped on folded batches.
        framing: ``"seed"`` (every measured consumer reads it) or ``"topic"`` (SGLang's and vLLM's of today).
        topic: the topic frame of the ``topic`` framing.
        max_clients: open answers at once.

    Attributes:
        upstream: what every META says of it, see there; None unless a relay says more.
        num_served, num_batches, num_refused, num_truncated: answers ended, batches in them, requests that were
            malformed or had no place to wait, and answers cut before their end.

    Raises:
        ConfigError: unknown framing.
    """

    __slots__ = (
        "_sessions",
        "_encoder",
        "_end_prefix",
        "_max_clients",
        "_pinning",
        "_prefix",
        "_rank",
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
        self._sessions: OrderedDict[bytes, _Cursor] = OrderedDict()
        self._waiting: OrderedDict[bytes, ReplayRequest] = OrderedDict()
        self._pinning: set[bytes] = set()
        self.upstream: str | None = None
        self.num_served = self.num_batches = self.num_refused = self.num_truncated = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def clients(self) -> tuple[bytes, ...]:
        """Clients with an unfinished answer, the longest waiting first."""
        return tuple(self._sessions)

    def receive(self, frames: Sequence[bytes]) -> None:
        """Take one request as the ROUTER received it. Anything malformed is answered with a bare end marker.

        A client that asks again before its answer is done starts over: its earlier answer would be stale.
        """
        client = frames[0]
        try:
            if len(frames) != 3 or frames[1]:
                raise DecodeError(f"a replay request of {len(frames)} frames")
            request = ReplayRequest.parse(frames[2])
        except DecodeError:
            self.num_refused += 1
            self.drop(client)
            self._sessions[client] = _Cursor(_bare_end(), is_plain=True)
            return
        self._forget(client)
        if client in self._waiting or len(self._waiting) < _MAX_WAITING:
            self._waiting[client] = request  # one that waits already keeps its turn
            self._admit()
        else:
            self.num_refused += 1

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    def can_progress(self, now_s: float) -> bool:
        """True while an open client is not stuck, or another waits for the place of one that is."""
        return bool(self._waiting) or not all(cursor.is_stuck(now_s) for cursor in self._sessions.values())

    def _admit(self) -> None:
        """Open answers of those who wait, while there are places."""
        while self._waiting and len(self._sessions) < self._max_clients:
            client, request = self._waiting.popitem(last=False)
            is_plain = request.verb is None
            messages = self._plain(client, request.start) if is_plain else self._extended(client, request)
            self._sessions[client] = _Cursor(messages, is_plain=is_plain)

    def _plain(self, client: bytes, start: int) -> ReplyMessages:
        stream = self._stream
        stop = stream.next_sequence
        sequence = start if stream.has_folded else max(start, stream.first)
        while sequence < stop:
            if sequence < stream.first:
                # Also when a slow client is overtaken by the window: the base it gets then makes up for the gap.
                yield from self._folded(client, sequence)
                sequence = stream.first
                continue
            yield _numbered(sequence, stream.payload(sequence))
            sequence += 1
        yield _END

    def _folded(self, client: bytes, start: int) -> ReplyMessages:
        """The base as batches numbered up to ``first - 1``, at most ``first - start`` of them.

        None at all where it does not fit into so many: then the numbers have a gap, which says so.
        """
        yield from self._caught_up()
        with self._pinned(client):
            first = self._stream.first
            chunks: list[SnapshotChunk] = []
            for planned in self._stream.plan_snapshot(max_chunks=first - start):
                if planned is None:
                    yield None
                else:
                    chunks = planned
            if not chunks:
                self.num_truncated += 1
                return
            start = first - len(chunks)
            for number in range(start, first):
                # Let go of one by one: to free a large plan at once would show in the scheduler's step.
                yield from self._chunk(number, chunks.pop(0), clear=number == start)

    def _caught_up(self) -> ReplyMessages:
        """Wait until what was held up by the last client is folded: to pin the base now would hold it up at once."""
        while self._stream.is_over_limit and not self._stream.pins:
            yield None

    def _snapshot(self) -> Generator[NumberedPayload | None, None, int]:
        """The base as chunks numbered 0 and up; returns how many."""
        num_chunks = 0
        for planned in self._stream.plan_snapshot():
            if planned is None:
                yield None
                continue
            num_chunks = len(planned)
            for number in range(num_chunks):
                yield from self._chunk(number, planned.pop(0), clear=number == 0)
        return num_chunks

    def _chunk(self, number: int, chunk: SnapshotChunk, *, clear: bool) -> ReplyMessages:
        for payload in self._stream.encode_chunk(chunk, self._encoder, self._rank, clear=clear):
            yield None if payload is None else _numbered(number, payload)

    @contextmanager
    def _pinned(self, client: bytes) -> Iterator[None]:
        """Keep the base as it is, and with it the window's start, while ``client`` gets it."""
        self._stream.pins += 1
        self._pinning.add(client)
        try:
            yield
        finally:
            self._stream.pins -= 1
            self._pinning.discard(client)

    def _extended(self, client: bytes, request: ReplayRequest) -> ReplyMessages:
        stream = self._stream
        in_window = request.epoch == stream.epoch and stream.first <= request.start <= stream.next_sequence
        start = request.start if in_window else stream.first
        if request.verb is ReplayVerb.STATUS:
            yield self._meta(request, ReplayMetaKind.STATUS, start)
            return
        gets_base = request.verb is ReplayVerb.SNAPSHOT or not in_window
        if gets_base:
            yield from self._caught_up()
        # Made now: by the time that a slow client has taken the last batch, the window may have passed it.
        stop = stream.next_sequence
        end = self._meta(request, ReplayMetaKind.END, stop)
        num_chunks = None
        if gets_base:
            with self._pinned(client):
                start = stream.first
                yield self._meta(request, ReplayMetaKind.BEGIN, start, snap=True)
                num_chunks = yield from self._snapshot()
        yield self._meta(request, ReplayMetaKind.BEGIN, start, chunks=num_chunks)
        for sequence in range(start, stop):
            if sequence < stream.first:
                # Overtaken by the window: without the closing META the client knows that it must ask again.
                self.num_truncated += 1
                yield _END
                return
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
        """The next message for ``client``, all frames, the same one until ``sent``; None while it is being prepared."""
        message = self._sessions[client].message
        if message is None:
            return None
        return (client, *(self._end_prefix if message[0] == END_SEQ else self._prefix), *message)

    def on_sent(self, client: bytes) -> bool:
        """Go on after the last message went out, or to prepare it further; True when the answer is done."""
        cursor = self._sessions[client]
        if cursor.message is not None and cursor.message[0] != END_SEQ:
            self.num_batches += 1
        try:
            cursor.take()
        except StopIteration:
            del self._sessions[client]
            self.num_served += 1
            self._admit()
            return True
        return False

    def on_full(self, client: bytes, now_s: float) -> None:
        """``client`` can take no message now. When it has been stuck for a while, it gives way to one who waits."""
        cursor = self._sessions[client]
        cursor.full(now_s)
        if cursor.is_stuck(now_s) and self._waiting:
            self.num_truncated += 1
            self.drop(client)

    def end_all(self) -> None:
        """Let every open answer end with a bare end marker now: the publisher is closing. Who waits gets nothing."""
        self._waiting.clear()
        for client in self.clients:
            self._cut(client)

    def cancel_pinned(self) -> None:
        """Cut the answers that keep the base from folding: their clients take too long, and must ask again.

        An extended client is told by a bare end marker. To a plain one that would say that this was all.
        """
        for client in tuple(self._pinning):
            if self._sessions[client].is_plain:
                self.num_truncated += 1
                self.drop(client)
            else:
                self._cut(client)

    def _cut(self, client: bytes) -> None:
        self._forget(client)
        self._sessions[client] = _Cursor(_bare_end(), is_plain=True)
        self.num_truncated += 1

    def drop(self, client: bytes) -> None:
        """Forget a client that is gone."""
        self._waiting.pop(client, None)
        self._forget(client)
        self._admit()

    def _forget(self, client: bytes) -> None:
        """Close its answer without opening another."""
        cursor = self._sessions.pop(client, None)
        if cursor is not None:
            cursor.messages.close()

    def rotate(self, client: bytes) -> None:
        """Put ``client`` last: it was served, or cannot take more now."""
        if client in self._sessions:
            self._sessions.move_to_end(client)
