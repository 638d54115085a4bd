"""The stream of one publisher: numbers, digest, window and base. Pure: no socket, no clock."""

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

# The theory of the stream.
#
# A stream is one publisher's life of one KV cache's events: a sequence of batches. A reader that applies all of them
# in order knows which blocks the cache holds. The publisher must be able to bring any reader there at any time: one
# that starts late, one that lost messages, one that missed a restart. It must do so within bounded memory, and within
# microseconds per batch, since it works on the scheduler's thread.
#
# Numbers. Batch n is sent with the sequence number n. Numbers go up by one, without a gap. A batch is encoded before
# it takes its number, so a batch that cannot be encoded takes none. A reader that sees a gap has lost something.
#
# Epoch. Each life of a publisher has 16 random bytes. Numbers of two lives cannot be compared; a reader that sees
# another epoch starts over.
#
# Digest. digest(epoch) = BLAKE2b-64(epoch); digest after batch n = BLAKE2b-64(digest, n, CRC-32(payload)). Two sides
# with
# the same epoch, number and digest have read the same bytes. So a reader that asks for what follows number n can prove
# that what it has is a prefix of this stream and not of a similar one. The digest finds accidents, not attackers.
#
# Window and base. The last batches are kept as they were sent: the window, bounded in batches and in bytes. What
# leaves the window is folded into the base: the set of blocks that stand after all batches before the window.
#
# Invariant: base + window = the state of the whole stream. That is, for every reader R:
#
#     R applies AllBlocksCleared, then the base, then the window   ==>   R is where a reader of all batches is.
#
# Folding is therefore the only way out of the window; nothing is dropped.
#
# ``base.py`` has the rules of folding. A run of blocks of which a part stands is cut into segments when it is sent.
#
# Pins. A base that is being sent must not change, so a replay of it pins it: nothing is folded and the window grows.
# When the window has grown to twice its bounds, the publisher cuts the replays that pin it; these readers ask again.
#
# Folding is bounded per drain, so that a window that has grown is folded over many steps and not in one.

_FOLDS_PER_DRAIN = 8
"""Batches folded in one drain, besides as many as came in it: more would show in the scheduler's step."""

_CHUNK_BYTES = 256 * 1024
"""Size at which a chunk of the base is full: large enough to amortise a send, small enough for one drain."""

_MAX_CHUNK_BYTES = 2 * 1024 * 1024
"""Where there are fewer numbers than chunks, several become one message; half of what readers take, never more."""


_SEGMENTS_PER_STEP = 500
"""Segments planned between two looks at anything else, or ``_CHUNK_BYTES`` of them: about half a millisecond."""


SnapshotChunk: TypeAlias = list[msgspec.Raw | RunSegment[msgspec.Raw]]
"""Events of the base for one message: whole ones, and those that are to be cut."""


class EventStream:
    """One publisher's life of one stream.

    Args:
        epoch: 16 random bytes, new in every life.
        max_steps: batches kept in the window; 0 keeps neither window nor base: there is no replay.
        max_bytes: payload bytes kept in the window; the newest batch stays even when it alone is larger.
        first_sequence: number that the first batch gets.

    Attributes:
        first: the oldest number in the window.
        next_sequence: the number that the next batch will get.
        digest: the digest after the last batch.
        buffered_bytes: payload bytes in the window.
        has_folded: whether anything has left the window yet; before that, the base is empty by definition.
        pins: open snapshots of the base; while there are any, nothing is folded and the window grows.
    """

    __slots__ = (
        "_snapshot",
        "_max_bytes",
        "_max_steps",
        "_num_unfolded",
        "_replay_buffer",
        "_replay_digests",
        "_replay_changes",
        "digest",
        "epoch",
        "first",
        "has_folded",
        "buffered_bytes",
        "next_sequence",
        "pins",
    )

    def __init__(self, *, epoch: bytes, max_steps: int, max_bytes: int, first_sequence: int = 0) -> None:
        self.epoch = epoch
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        # Two queues of plain bytes: neither the garbage collector nor a growing table ever walks the window.
        self._replay_buffer: deque[bytes] = deque()
        self._replay_digests: deque[bytes] = deque()
        self._replay_changes: deque[BlockChanges | None] = deque()
        self._snapshot = StreamSnapshot()
        self.first = self.next_sequence = first_sequence
        self.digest = initial_digest(epoch)
        self.buffered_bytes = self._num_unfolded = 0
        self.has_folded = False
        self.pins = 0

    def __len__(self) -> int:
        """Batches in the window."""
        return len(self._replay_buffer)

    @property
    def num_snapshot_blocks(self) -> int:
        return len(self._snapshot)

    @property
    def num_snapshot_bytes(self) -> int:
        """Bytes of the payloads of which a block stands; of those that are half gone, of what stands."""
        return self._snapshot.num_bytes

    def append(self, payload: bytes, changes: BlockChanges | None = None) -> int:
        """Give ``payload`` the next sequence number and keep it; returns the number.

        ``changes`` is what its encoder has told; without it, the payload is read when it leaves the window.
        """
        sequence = self.next_sequence
        self.next_sequence = sequence + 1
        if not self._max_steps:
            self.first = self.next_sequence
            return sequence
        self._replay_buffer.append(payload)
        self._replay_digests.append(self.digest)
        self._replay_changes.append(changes)
        self.digest = digest_after(self.digest, sequence, payload)
        self.buffered_bytes += len(payload)
        self._num_unfolded += 1
        return sequence

    def fold_oldest(self) -> None:
        """Fold a bounded number of batches that the window has no room for; call it once per drain, sent or not."""
        most = self._num_unfolded + _FOLDS_PER_DRAIN
        self._num_unfolded = 0
        while most and self.is_over_limit and not self.pins:
            payload = self._replay_buffer.popleft()
            self._replay_digests.popleft()
            self.first += 1
            self.has_folded = True
            self.buffered_bytes -= len(payload)
            self._snapshot.fold(payload, self._replay_changes.popleft())
            most -= 1

    @property
    def is_over_limit(self) -> bool:
        """True while there is more in the window than it has room for: it was pinned, and folds now."""
        num = len(self._replay_buffer)
        return num > self._max_steps or (self.buffered_bytes > self._max_bytes and num > 1)

    @property
    def has_stuck_pins(self) -> bool:
        """True when pinned snapshots have let the window grow to twice its bounds: they must be cut."""
        num = len(self._replay_buffer)
        is_over_twice = num > 2 * self._max_steps or (self.buffered_bytes > 2 * self._max_bytes and num > 1)
        return bool(self.pins) and is_over_twice

    def payload(self, sequence: int) -> bytes:
        """The payload numbered ``sequence``, from ``first`` to ``next_sequence - 1``.

        Raises:
            LookupError: it is not in the window.
        """
        return self._replay_buffer[self._index(sequence)]

    def digest_before(self, sequence: int) -> bytes:
        """The digest of everything below ``sequence``, from ``first`` to ``next_sequence``."""
        return self.digest if sequence == self.next_sequence else self._replay_digests[self._index(sequence)]

    def _index(self, sequence: int) -> int:
        if not self.first <= sequence < self.next_sequence:
            raise LookupError(f"batch {sequence} is not in the window of {self.first} to {self.next_sequence - 1}")
        return sequence - self.first

    def plan_snapshot(self, *, max_chunks: int | None = None) -> Iterator[list[SnapshotChunk] | None]:
        """Cut the base into chunks of a size to send; yields None while it goes on, and at last the chunks.

        The base must not change from the first step until the last chunk is encoded: the caller holds ``pins``.
        There is at least one chunk, save where ``max_chunks`` are too few for messages that readers take: then there
        is none.
        """
        chunks: list[SnapshotChunk] = [[]]
        sizes = [0]
        num_planned = num_read = 0
        for segment in self._snapshot.segments():
            length = len(segment.run.event)
            if sizes[-1] and sizes[-1] + length > _CHUNK_BYTES:
                chunks.append([])
                sizes.append(0)
            chunks[-1].append(segment.run.event if segment.is_whole else segment)
            sizes[-1] += length
            num_planned += 1
            num_read += length
            if num_planned == _SEGMENTS_PER_STEP or num_read > _CHUNK_BYTES:
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
        """Write a chunk of the base as the payload of a batch; ``clear`` puts AllBlocksCleared first.

        Yields None while it goes on, after each ``_CHUNK_BYTES`` that were looked at, and at last the payload.
        """
        events = [msgspec.Raw(encoder.encode_event(AllBlocksCleared()))] if clear else []
        num_read = 0
        for each in chunk:
            if num_read > _CHUNK_BYTES:
                yield None
                num_read = 0
            event = each.run.event if isinstance(each, RunSegment) else each
            num_read += len(event)
            events.append(slice_raw_event(event, each.first, each.stop) if isinstance(each, RunSegment) else event)
        # The time of a folded batch is 0: what it says happened at many times.
        yield msgspec.msgpack.encode((0.0, events, rank))


def _joined(chunks: list[SnapshotChunk], sizes: list[int]) -> list[SnapshotChunk]:
    """Neighbouring chunks as one, up to the largest size of a message."""
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
