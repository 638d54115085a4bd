"""EventStream: sequence numbers, digest, replay buffer and snapshot of one publisher's stream. Pure: no socket, no
clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from scheduler_components.events import AllBlocksCleared
from scheduler_components.kv_events.codec import BatchEncoder
from scheduler_components.kv_events.dialects import BlockChanges
from scheduler_components.kv_events.native_events import slice_raw_event
from scheduler_components.kv_events.snapshot import RunSegment, StreamSnapshot
from scheduler_components.kv_events.stream_digest import digest_after, initial_digest

__all__ = ["EventStream", "SnapshotChunk"]

# The theory of delivery.
#
# A stream is the sequence of event batches of one publisher in one epoch. A reader that applies all of them in order
# knows which blocks the cache holds. The publisher must be able to bring any reader to that state at any time: a reader
# that starts late, that lost messages, or that missed a restart. It must do so in bounded memory and within
# microseconds per batch, because it runs on the scheduler's thread.
#
# Sequence. Batch n is sent with the sequence number n. Numbers increase by one, without a gap. A batch is encoded
# before it takes its number, so a batch that cannot be encoded takes none. A reader that sees a gap has lost a batch.
#
# Epoch. Each run of a publisher has 16 random bytes. Numbers of two epochs cannot be compared. A reader that sees
# another epoch starts over.
#
# Digest. digest(epoch) = BLAKE2b-64(epoch); digest after batch n = BLAKE2b-64(digest, n, CRC-32(payload)). Two sides
# with the same epoch, number and digest have read the same bytes. So a reader that requests the batches after number n
# can prove that it has a prefix of this stream and not of a similar one. The digest finds accidents, not attackers.
#
# Replay buffer and snapshot. The replay buffer keeps the last batches as they were sent, bounded in batches and in
# bytes. A batch that leaves the buffer is folded into the snapshot: the set of blocks that are cached after all batches
# before the buffer.
#
# Invariant: snapshot + replay buffer = the state of the whole stream. That is, for every reader R:
#
#     R applies AllBlocksCleared, then the snapshot, then the buffer   ==>   R has the state of a reader of all batches.
#
# Folding is therefore the only way out of the buffer; no batch is dropped. ``snapshot.py`` has the rules of folding. A
# run of blocks of which only a part is cached is cut into segments when it is sent.
#
# Pins. A snapshot must not change while it is cut into chunks, so a replay pins it for this time: nothing is folded and
# the buffer grows. Each drain folds a bounded number of batches, so a buffer that has grown is folded over many steps
# and not in one.
#
# Trail. A reader that joins gets the snapshot, then the buffer from its oldest batch on. If the next fold took that
# batch away, the answer would be cut just where it begins, and no reader of a busy publisher would ever arrive. So an
# answer holds the number of the batch that it sends next. The stream keeps folded batches behind the buffer (the trail)
# from the lowest held number on. The bound: buffer and trail together have at most twice the bounds of the buffer. An
# answer that needs more is too slow: it is cut, and its reader requests again.
#
# Interruption. A signal handler may raise in the middle of any method. So each change takes effect with one assignment,
# its last one: ``_end`` moves past a batch that was appended, ``_folded`` past one that was folded. What an interrupted
# call has left beyond ``_end`` is replaced, and a fold is repeated, which has the same effect as folding once.

_FOLDS_PER_DRAIN = 8
"""Batches folded in one drain in addition to those that it added. More would show in the scheduler's step."""

_TRIMS_PER_DRAIN = 128
"""Folded batches dropped in one drain after the last answer that needed them."""

_CHUNK_BYTES = 256 * 1024
"""Size of a full snapshot chunk: large enough to amortise a send, small enough for one drain."""

_MAX_CHUNK_BYTES = 2 * 1024 * 1024
"""Maximum size of joined chunks, if a request has fewer numbers than chunks: half of what readers accept."""


_SEGMENTS_PER_STEP = 500
"""Segments planned before the plan yields, or those of one full chunk: about half a millisecond."""


SnapshotChunk: TypeAlias = list[msgspec.Raw | RunSegment[msgspec.Raw]]
"""Events of the snapshot for one message: whole ones, and segments that remain to be cut."""


class _Batch(msgspec.Struct, frozen=True, gc=False):
    """A batch as the stream keeps it.

    Attributes:
        digest: the digest before it.
        changes: from its encoder, None if the payload must be decoded.
        num_bytes: payload bytes of all batches up to this one.
    """

    sequence: int
    payload: bytes
    digest: bytes
    changes: BlockChanges | None
    num_bytes: int


class EventStream:
    """One publisher's stream in one epoch.

    Args:
        epoch: 16 random bytes, new in every run of the publisher.
        max_steps: batches kept in the replay buffer; 0 keeps neither buffer nor snapshot, so there is no replay.
        max_bytes: payload bytes kept in the replay buffer; the newest batch stays even if it alone is larger.
        first_sequence: number of the first batch.
        chunk_bytes: size of a full snapshot chunk.

    Attributes:
        has_folded: True once a batch has left the replay buffer; before that, the snapshot is empty.
        pins: replays that cut the snapshot into chunks; while there are any, nothing is folded and the buffer grows.
        holds: the number of the batch that each open answer sends next, by client. The answers keep it current.
    """

    __slots__ = (
        "_batches",
        "_chunk_bytes",
        "_end",
        "_folded",
        "_max_bytes",
        "_max_steps",
        "_num_unfolded",
        "_snapshot",
        "epoch",
        "has_folded",
        "holds",
        "pins",
    )

    def __init__(
        self,
        *,
        epoch: bytes,
        max_steps: int,
        max_bytes: int,
        first_sequence: int = 0,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self.epoch = epoch
        self._chunk_bytes = chunk_bytes
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        # The trail and the replay buffer, in a form that the garbage collector never walks.
        self._batches: deque[_Batch] = deque()
        self._snapshot = StreamSnapshot()
        # The next number, the digest before it, and the payload bytes before it.
        self._end = (first_sequence, initial_digest(epoch), 0)
        # The oldest number in the replay buffer, and the payload bytes before it.
        self._folded = (first_sequence, 0)
        self._num_unfolded = 0
        self.has_folded = False
        self.pins = 0
        self.holds: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Batches in the replay buffer."""
        return self._end[0] - self._folded[0]

    @property
    def next_sequence(self) -> int:
        """The number that the next batch will get."""
        return self._end[0]

    @property
    def digest(self) -> bytes:
        """The digest after the last batch."""
        return self._end[1]

    @property
    def first(self) -> int:
        """The oldest number in the replay buffer."""
        return self._folded[0]

    @property
    def oldest(self) -> int:
        """The oldest number that the stream still has, in the trail or in the replay buffer."""
        return self._batches[0].sequence if self._batches else self._folded[0]

    @property
    def buffered_bytes(self) -> int:
        """Payload bytes in the replay buffer."""
        return self._end[2] - self._folded[1]

    @property
    def kept_bytes(self) -> int:
        """Payload bytes in the trail and in the replay buffer."""
        if not self._batches:
            return 0
        oldest = self._batches[0]
        return self._end[2] - oldest.num_bytes + len(oldest.payload)

    @property
    def num_snapshot_blocks(self) -> int:
        return len(self._snapshot)

    @property
    def num_snapshot_bytes(self) -> int:
        """Bytes that the snapshot keeps: of payloads of which at least one block is cached."""
        return self._snapshot.num_bytes

    def append(self, payload: bytes, changes: BlockChanges | None = None) -> int:
        """Give ``payload`` the next sequence number, keep it, and return the number.

        ``changes`` comes from its encoder. Without it, the payload is decoded when it leaves the replay buffer.
        """
        sequence, digest, num_bytes = self._end
        if self._max_steps:
            batches = self._batches
            if batches and batches[-1].sequence == sequence:
                batches.pop()
            num_bytes += len(payload)
            batches.append(_Batch(sequence, payload, digest, changes, num_bytes))
            digest = digest_after(digest, sequence, payload)
            self._num_unfolded += 1
        else:
            self._folded = (sequence + 1, 0)
        self._end = (sequence + 1, digest, num_bytes)
        return sequence

    def fold_oldest(self) -> None:
        """Fold a bounded number of batches that exceed the replay buffer's bounds. Call it once per drain."""
        most = self._num_unfolded + _FOLDS_PER_DRAIN
        self._num_unfolded = 0
        while most and self.is_over_limit and not self.pins:
            self._fold_first()
            most -= 1
        if self._batches and self._batches[0].sequence < self._folded[0]:
            self._trim_trail()

    def _fold_first(self) -> None:
        batches = self._batches
        batch = batches[self._folded[0] - batches[0].sequence]
        self.has_folded = True
        self._snapshot.fold(batch.payload, batch.changes)
        self._folded = (batch.sequence + 1, batch.num_bytes)

    def _trim_trail(self) -> None:
        """Drop a bounded number of batches that no answer needs, and all beyond the bound."""
        batches, first = self._batches, self._folded[0]
        needed = min(self.holds.values()) if self.holds else first
        most = _TRIMS_PER_DRAIN
        while (oldest := batches[0].sequence) < first and ((most > 0 and oldest < needed) or self._is_over_twice()):
            batches.popleft()
            most -= 1

    @property
    def is_over_limit(self) -> bool:
        """True while the replay buffer exceeds its bounds, because it was pinned or has not been folded yet."""
        num = self._end[0] - self._folded[0]
        return num > self._max_steps or (num > 1 and self._end[2] - self._folded[1] > self._max_bytes)

    def _is_over_twice(self) -> bool:
        """Return True if buffer and trail exceed twice the bounds of the buffer."""
        num = self._end[0] - self.oldest
        if num <= 1:
            return False
        oldest = self._batches[0]
        num_bytes = self._end[2] - oldest.num_bytes + len(oldest.payload)
        return num > 2 * self._max_steps or num_bytes > 2 * self._max_bytes

    def is_too_slow(self, sequence: int) -> bool:
        """Return True if an answer that is still at ``sequence`` needs too many batches to be completed."""
        return sequence < self.oldest or (sequence <= self.first and self._is_over_twice())

    @property
    def has_stuck_pins(self) -> bool:
        """True if an answer is too slow: see ``is_too_slow``."""
        return bool(self.holds) and self.is_too_slow(min(self.holds.values()))

    def payload(self, sequence: int) -> bytes:
        """Return the payload of batch ``sequence``, from ``oldest`` to ``next_sequence - 1``.

        Raises:
            LookupError: the stream no longer has the batch, or does not have it yet.
        """
        return self._batch(sequence, self.oldest).payload

    def digest_before(self, sequence: int) -> bytes:
        """Return the digest of all batches below ``sequence``, from ``first`` to ``next_sequence``."""
        return self.digest if sequence == self.next_sequence else self._batch(sequence, self.first).digest

    def _batch(self, sequence: int, oldest: int) -> _Batch:
        if not oldest <= sequence < self.next_sequence:
            raise LookupError(f"batch {sequence} is not in the replay buffer of {oldest} to {self.next_sequence - 1}")
        return self._batches[sequence - self.oldest]

    def plan_snapshot(self, *, max_chunks: int | None = None) -> Iterator[list[SnapshotChunk] | None]:
        """Cut the snapshot into chunks that can be sent. Yield None while planning continues, then yield the chunks.

        The snapshot must not change from the first step until the last chunk is encoded: the caller holds ``pins``.
        There is at least one chunk, unless ``max_chunks`` are too few for messages that readers accept: then there is
        none.
        """
        if self._snapshot.is_torn:
            self._fold_first()
        chunks: list[SnapshotChunk] = [[]]
        sizes = [0]
        num_planned = num_read = 0
        for segment in self._snapshot.segments():
            length = len(segment.run.event)
            if sizes[-1] and sizes[-1] + length > self._chunk_bytes:
                chunks.append([])
                sizes.append(0)
            chunks[-1].append(segment.run.event if segment.is_whole else segment)
            sizes[-1] += length
            num_planned += 1
            num_read += length
            if num_planned == _SEGMENTS_PER_STEP or num_read > self._chunk_bytes:
                yield None
                num_planned = num_read = 0
        if max_chunks is not None and len(chunks) > max_chunks:
            yield None
            chunks = _joined(chunks, sizes)
            if len(chunks) > max_chunks:
                chunks = []
        yield chunks

    def encode_chunk(
        self, chunk: SnapshotChunk, encoder: BatchEncoder, rank: int, *, clear: bool
    ) -> Iterator[bytes | None]:
        """Encode a chunk of the snapshot as the payload of a batch; ``clear`` puts AllBlocksCleared first.

        Yield None after each ``chunk_bytes`` that were read, then yield the payload.
        """
        events = [msgspec.Raw(encoder.encode_event(AllBlocksCleared()))] if clear else []
        num_read = 0
        for each in chunk:
            if num_read > self._chunk_bytes:
                yield None
                num_read = 0
            event = each.run.event if isinstance(each, RunSegment) else each
            num_read += len(event)
            events.append(slice_raw_event(event, each.first, each.stop) if isinstance(each, RunSegment) else event)
        # A folded batch has the time 0, because its events happened at many times.
        yield msgspec.msgpack.encode((0.0, events, rank))


def _joined(chunks: list[SnapshotChunk], sizes: list[int]) -> list[SnapshotChunk]:
    """Join neighbouring chunks up to the maximum size of a message."""
    joined: list[SnapshotChunk] = []
    room = 0
    for chunk, size in zip(chunks, sizes, strict=True):
        if joined and size <= room:
            joined[-1] += chunk
            room -= size
        else:
            joined.append(chunk)
            room = _MAX_CHUNK_BYTES - size
    return joined
