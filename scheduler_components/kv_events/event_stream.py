"""The pure core of a stream: numbers, digest, the window of recent batches, and the base that older ones fold into.

State = base + window, always servable: a batch that leaves the window is folded into the base, never lost. Every
life of a publisher has an epoch of 16 random bytes, and after every batch a chained digest of 8 bytes over all
(sequence, payload) so far, so that loss, restart and splice are seen by whoever compares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from zlib import crc32

import msgspec

from scheduler_components.kv_events.block_state import BlockState, Segment
from scheduler_components.kv_events.codec import BatchEncoder
from scheduler_components.kv_events.events import AllBlocksCleared
from scheduler_components.kv_events.folding import fold_payload, segment_event

__all__ = ["CHAIN_BYTES", "EPOCH_BYTES", "EventStream", "chain_after", "chain_at_start"]

EPOCH_BYTES = 16
CHAIN_BYTES = 8

_FOLDS_A_TURN = 8
"""Batches folded in one turn, besides as many as came in it: more would show in the scheduler's step."""

_CHUNK_BYTES = 256 * 1024
"""Size at which a chunk of the base is full: large enough to amortise a send, small enough for one turn."""


def chain_at_start(epoch: bytes) -> bytes:
    """The digest before the first batch of an epoch."""
    return blake2b(epoch, digest_size=CHAIN_BYTES).digest()


def chain_after(chain: bytes, sequence: int, payload: bytes) -> bytes:
    """The digest after one more batch: 8 bytes of BLAKE2b over chain, sequence (8 bytes) and CRC-32 of the payload (4).

    It proves that two sides have read the same, not who wrote it. A checksum is enough for that, and of a payload of
    40 KB it costs a sixth of what hashing all of it does.
    """
    return blake2b(chain + (sequence << 32 | crc32(payload)).to_bytes(12, "big"), digest_size=CHAIN_BYTES).digest()


_SEGMENTS_A_STEP = 500
"""Segments planned between two looks at anything else: about half a millisecond."""


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
        chain: the digest after the last batch.
        kept_bytes: payload bytes in the window.
        has_folded: whether anything has left the window yet; before that, the base is empty by definition.
        pins: open snapshots of the base; while there are any, nothing is folded and the window grows.
    """

    __slots__ = (
        "_base",
        "_max_bytes",
        "_max_steps",
        "_num_unfolded",
        "_window",
        "_window_chains",
        "chain",
        "epoch",
        "first",
        "has_folded",
        "kept_bytes",
        "next_sequence",
        "pins",
    )

    def __init__(self, *, epoch: bytes, max_steps: int, max_bytes: int, first_sequence: int = 0) -> None:
        self.epoch = epoch
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        # Two queues of plain bytes: neither the garbage collector nor a growing table ever walks the window.
        self._window: deque[bytes] = deque()
        self._window_chains: deque[bytes] = deque()
        self._base: BlockState[bytes] = BlockState()
        self.first = self.next_sequence = first_sequence
        self.chain = chain_at_start(epoch)
        self.kept_bytes = self._num_unfolded = 0
        self.has_folded = False
        self.pins = 0

    def __len__(self) -> int:
        """Batches in the window."""
        return len(self._window)

    @property
    def num_base_blocks(self) -> int:
        return len(self._base)

    def append(self, payload: bytes) -> int:
        """Give ``payload`` the next sequence number and keep it; returns the number."""
        sequence = self.next_sequence
        self.next_sequence = sequence + 1
        if not self._max_steps:
            self.first = self.next_sequence
            return sequence
        self._window.append(payload)
        self._window_chains.append(self.chain)
        self.chain = chain_after(self.chain, sequence, payload)
        self.kept_bytes += len(payload)
        self._num_unfolded += 1
        return sequence

    def fold_some(self) -> None:
        """Fold a bounded number of batches that the window has no room for; call it once a turn, sent or not."""
        most = self._num_unfolded + _FOLDS_A_TURN
        self._num_unfolded = 0
        while most and self.is_behind and not self.pins:
            payload = self._window.popleft()
            self._window_chains.popleft()
            self.first += 1
            self.has_folded = True
            self.kept_bytes -= len(payload)
            fold_payload(self._base, payload)
            most -= 1

    @property
    def is_behind(self) -> bool:
        """True while there is more in the window than it has room for: it was pinned, and folds now."""
        num = len(self._window)
        return num > self._max_steps or (self.kept_bytes > self._max_bytes and num > 1)

    @property
    def is_held_up(self) -> bool:
        """True when pinned snapshots have let the window grow to twice its bounds: they must be cut."""
        num = len(self._window)
        is_over_twice = num > 2 * self._max_steps or (self.kept_bytes > 2 * self._max_bytes and num > 1)
        return bool(self.pins) and is_over_twice

    def payload(self, sequence: int) -> bytes:
        """The payload numbered ``sequence``, from ``first`` to ``next_sequence - 1``.

        Raises:
            LookupError: it is not in the window.
        """
        return self._window[self._index(sequence)]

    def chain_before(self, sequence: int) -> bytes:
        """The digest of everything below ``sequence``, from ``first`` to ``next_sequence``."""
        return self.chain if sequence == self.next_sequence else self._window_chains[self._index(sequence)]

    def _index(self, sequence: int) -> int:
        if not self.first <= sequence < self.next_sequence:
            raise LookupError(f"batch {sequence} is not in the window of {self.first} to {self.next_sequence - 1}")
        return sequence - self.first

    def plan_base(self, *, max_chunks: int | None = None) -> Iterator[list[list[Segment[bytes]]] | None]:
        """Cut the base into chunks of a size to send; yields None while it is still at it, the chunks at last.

        The base must not change from the first step until the last chunk is encoded: ``pins`` is the caller's to
        hold. There is at least one chunk and at most ``max_chunks``, the last then as large as it must be.
        """
        chunks: list[list[Segment[bytes]]] = [[]]
        size = 0
        for number, segment in enumerate(self._base.segments(), start=1):
            length = len(segment.run.source)
            if size and size + length > _CHUNK_BYTES and (max_chunks is None or len(chunks) < max_chunks):
                chunks.append([])
                size = 0
            chunks[-1].append(segment)
            size += length
            if number % _SEGMENTS_A_STEP == 0:
                yield None
        yield chunks

    def encode_chunk(self, segments: list[Segment[bytes]], encoder: BatchEncoder, rank: int, *, clear: bool) -> bytes:
        """A chunk of the base as the payload of a batch; ``clear`` puts AllBlocksCleared first."""
        events = [encoder.encode_event(AllBlocksCleared())] if clear else []
        for segment in segments:
            events.append(segment.run.source if segment.is_whole else encoder.encode_event(segment_event(segment)))
        # The time of a folded batch is 0: what it says happened at many times.
        return msgspec.msgpack.encode((0.0, [msgspec.Raw(event) for event in events], rank))
