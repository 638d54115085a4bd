"""Which blocks a stream has left standing: what its events amount to, folded.

Folding is compaction: whoever applies the folded state ends where whoever applied every event ends. A stored event
is kept as one run of blocks for as long as any of them stands, with whatever it was made from (its bytes, or the
event), so that folding costs a dictionary update a run and no copy of its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import repeat
from typing import Any, Generic, TypeVar
from zlib import crc32

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVEventBatch,
)
from scheduler_components.kv_events.codec import BatchEncoder, read_event

__all__ = [
    "BlockState",
    "Run",
    "Segment",
    "Tier",
    "tier_of",
    "collapse",
    "fold_payload",
    "segment_event",
    "CHAIN_BYTES",
    "EPOCH_BYTES",
    "EventStream",
    "chain_after",
    "chain_at_start",
]

T = TypeVar("T")
Tier = tuple[str, int | None]
"""A medium (None and GPU are the same one) and a KV-cache group."""


_DEVICE: Tier = ("GPU", None)


def tier_of(medium: str | None, group_idx: int | None = None) -> Tier:
    """The tier that an event speaks of."""
    return _DEVICE if medium is None and group_idx is None else (medium or "GPU", group_idx)


class Run(msgspec.Struct, Generic[T], gc=False):
    """The blocks of one stored event, in order, each the parent of the next.

    Attributes:
        tier: where they were stored.
        block_hashes: all of them, standing or not.
        parent: hash of the block before the first, None at a root.
        source: what the run was made from.
        serial: its place among all runs of its state, by the time of storing.
        num_standing: how many have been neither removed nor stored again since.
    """

    tier: Tier
    block_hashes: Sequence[int]
    parent: int | None
    source: T
    serial: int
    num_standing: int = 0


class Segment(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """Neighbouring blocks ``first`` to ``stop - 1`` of a run that all stand."""

    run: Run[T]
    first: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.first == len(self.run.block_hashes)

    @property
    def parent(self) -> int | None:
        return self.run.block_hashes[self.first - 1] if self.first else self.run.parent


class BlockState(Generic[T]):
    """The standing blocks by tier and hash. A block belongs to the run that stored it last."""

    __slots__ = ("_num_stored", "_runs", "_tiers")

    def __init__(self) -> None:
        self._tiers: dict[Tier, dict[int, Run[T]]] = {}
        self._runs: dict[int, Run[T]] = {}
        self._num_stored = 0

    def __len__(self) -> int:
        """Standing blocks, over all tiers."""
        return sum(map(len, self._tiers.values()))

    def store(self, tier: Tier, block_hashes: Sequence[int], parent: int | None, source: T) -> None:
        """Fold a stored event."""
        owners = self._tiers.get(tier)
        if owners is None:
            owners = self._tiers[tier] = {}
        serial = self._num_stored = self._num_stored + 1
        run = Run(tier, block_hashes, parent, source, serial)
        if len(block_hashes) == 1:  # most events of a decoding step; what follows costs twice as much
            block_hash = block_hashes[0]
            if block_hash in owners:
                self._discard(owners, block_hashes)
            owners[block_hash] = self._runs[serial] = run
            run.num_standing = 1
            return
        if not owners.keys().isdisjoint(block_hashes):
            self._discard(owners, block_hashes)
        num_before = len(owners)
        owners.update(zip(block_hashes, repeat(run)))
        run.num_standing = len(owners) - num_before
        if run.num_standing:
            self._runs[serial] = run

    def remove(self, tier: Tier, block_hashes: Sequence[int]) -> None:
        """Fold a removed event; blocks that do not stand are nothing to remove."""
        self._discard(self._tiers.get(tier, {}), block_hashes)

    def _discard(self, owners: dict[int, Run[T]], block_hashes: Sequence[int]) -> None:
        for block_hash in block_hashes:
            run = owners.pop(block_hash, None)
            if run is not None:
                run.num_standing -= 1
                if not run.num_standing:
                    del self._runs[run.serial]

    def clear(self) -> None:
        """Fold a cleared event."""
        self._tiers.clear()
        self._runs.clear()

    def hashes(self, tier: Tier) -> set[int]:
        """Hashes standing in one tier."""
        return set(self._tiers.get(tier, ()))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(self._tiers)

    def segments(self) -> Iterator[Segment[T]]:
        """Yield what stands, each block once, a block's parent before it; the state must not change meanwhile.

        Runs come in the order in which they were stored, so that only what is taken out of turn has to be remembered.
        """
        ahead: dict[int, set[int]] = {}
        for run in self._runs.values():
            for segment in self._standing(run):
                yield from self._with_ancestors(segment, run.serial, ahead)
            ahead.pop(run.serial, None)

    def _standing(self, run: Run[T]) -> Iterator[Segment[T]]:
        owners = self._tiers[run.tier]
        if run.num_standing == len(run.block_hashes):
            yield Segment(run, 0, len(run.block_hashes))
            return
        first = None
        for index, block_hash in enumerate(run.block_hashes):
            stands = owners.get(block_hash) is run
            if stands and first is None:
                first = index
            elif not stands and first is not None:
                yield Segment(run, first, index)
                first = None
        if first is not None:
            yield Segment(run, first, len(run.block_hashes))

    def _with_ancestors(self, segment: Segment[T], serial: int, ahead: dict[int, set[int]]) -> Iterator[Segment[T]]:
        """A block that was stored again stands in a younger run than its children: that run comes first.

        ``ahead`` has the segments yielded of the run ``serial``, whose turn it is, and of later ones.
        """
        chain: list[Segment[T]] = []
        wanted: Segment[T] | None = segment
        while wanted is not None and wanted.run.serial >= serial:
            firsts = ahead.setdefault(wanted.run.serial, set())
            if wanted.first in firsts:
                break
            firsts.add(wanted.first)
            chain.append(wanted)
            wanted = self._segment_of(wanted.run.tier, wanted.parent)
        yield from reversed(chain)

    def _segment_of(self, tier: Tier, block_hash: int | None) -> Segment[T] | None:
        run = self._tiers[tier].get(block_hash) if block_hash is not None else None
        if run is None:
            return None
        return next(each for each in self._standing(run) if block_hash in run.block_hashes[each.first : each.stop])


# Folding events into a block state, and writing a block state as events again.
#
# Two users: the stream folds payloads that leave its window, keeping each stored event's bytes; the publisher
# collapses batches that wait too long into the one batch that they amount to.


class _StoredHead(msgspec.Struct, frozen=True, gc=False):
    """What folding needs of a stored event. Token ids, the bulk of it, are skipped and not made into integers."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw | None = None
    group_idx: int | None = None

    def fold_into(self, state: BlockState[bytes], raw: bytes) -> None:
        state.store(tier_of(self.medium, self.group_idx), self.block_hashes, self.parent_block_hash, raw)


class _RemovedHead(msgspec.Struct, frozen=True, gc=False):
    block_hashes: tuple[int, ...]
    medium: str | None = None
    group_idx: int | None = None

    def fold_into(self, state: BlockState[bytes], raw: bytes) -> None:  # noqa: ARG002 - nothing of it is kept
        state.remove(tier_of(self.medium, self.group_idx), self.block_hashes)


class _ClearedHead(msgspec.Struct, frozen=True, gc=False):
    def fold_into(self, state: BlockState[bytes], raw: bytes) -> None:  # noqa: ARG002 - nothing of it is kept
        state.clear()


class _ArrayStored(_StoredHead, frozen=True, array_like=True, tag="BlockStored"):
    pass


class _ArrayRemoved(_RemovedHead, frozen=True, array_like=True, tag="BlockRemoved"):
    pass


class _ArrayCleared(_ClearedHead, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _MapStored(_StoredHead, frozen=True, tag_field="type", tag="BlockStored"):
    pass


class _MapRemoved(_RemovedHead, frozen=True, tag_field="type", tag="BlockRemoved"):
    pass


class _MapCleared(_ClearedHead, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    pass


_Raw = msgspec.Raw
_Head = _StoredHead | _RemovedHead | _ClearedHead
_events = msgspec.msgpack.Decoder(tuple[_Raw, list[_Raw], _Raw]).decode
_array_heads = msgspec.msgpack.Decoder(tuple[_Raw, list[_ArrayStored | _ArrayRemoved | _ArrayCleared], _Raw]).decode
_map_heads = msgspec.msgpack.Decoder(tuple[_Raw, list[_MapStored | _MapRemoved | _MapCleared], _Raw]).decode
_ARRAY_FIRST_BYTES = frozenset(range(0x90, 0xA0)) | {0xDC, 0xDD}
_HEADER_BYTES = 11
"""An array of three, eight bytes of time behind their tag, and the length of a list of up to fifteen events."""
_LIST_OF_ONE = 0x91
_ANY_RANK = b"\x00"


def fold_payload(state: BlockState[bytes], payload: bytes) -> None:
    """Fold one batch that a ``BatchEncoder`` wrote, in either dialect; a stored run keeps its event's bytes."""
    try:
        if payload[_HEADER_BYTES - 1] == _LIST_OF_ONE:
            # Its bytes, which may be all of a large payload, are found without reading through them again.
            _, heads, rank = _heads_decoder(payload[_HEADER_BYTES])(payload)
            heads[0].fold_into(state, payload[_HEADER_BYTES : len(payload) - len(bytes(rank))])
            return
        events = [bytes(event) for event in _events(payload)[1]]
        if events:
            for head, event in zip(_heads_decoder(events[0][0])(payload)[1], events, strict=True):
                head.fold_into(state, event)
    except msgspec.ValidationError:
        events = [bytes(event) for event in _events(payload)[1]]
        if len(events) == 1:
            _fold_odd_event(state, events[0])
            return
        for event in events:  # as batches of one, so that only the odd one is read as such
            fold_payload(state, payload[: _HEADER_BYTES - 1] + bytes([_LIST_OF_ONE]) + event + _ANY_RANK)


def _heads_decoder(first_byte: int) -> Callable[[bytes], tuple[_Raw, Sequence[_Head], _Raw]]:
    return _array_heads if first_byte in _ARRAY_FIRST_BYTES else _map_heads


def _fold_odd_event(state: BlockState[bytes], raw: bytes) -> None:
    """A scheduler's odd event was encoded as it was given. What readers make of it is what is folded."""
    try:
        event = read_event(raw)
    except DecodeError:
        return
    if isinstance(event, BlockStored):
        state.store(tier_of(event.medium, event.group_idx), event.block_hashes, event.parent_block_hash, raw)
    elif isinstance(event, BlockRemoved):
        state.remove(tier_of(event.medium, event.group_idx), event.block_hashes)
    else:
        state.clear()


def segment_event(segment: Segment[bytes]) -> BlockStored:
    """The stored event of a segment that is only a part of its run."""
    event = read_event(segment.run.source)
    assert isinstance(event, BlockStored)
    return _part(event, segment)


def _part(event: BlockStored, segment: Segment[Any]) -> BlockStored:
    if segment.is_whole:
        return event
    first, stop, size = segment.first, segment.stop, event.block_size
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[first:stop],
        parent_block_hash=segment.parent,
        token_ids=event.token_ids[first * size : stop * size],
        extra_keys=None if event.extra_keys is None else event.extra_keys[first:stop],
    )


def collapse(batches: Iterable[EventBatch]) -> KVEventBatch | None:
    """The one batch that ``batches`` amount to: cleared, then removed, then stored, parents first.

    Nothing is lost by it, so no consumer has to start over. Of a block that was stored and removed among them only
    the removal is left, 9 bytes on the wire, and a later clear takes that too. None when there were no batches.
    Events that are none of the three are kept, to be refused by name when they are encoded.
    """
    state: BlockState[BlockStored] = BlockState()
    removed: dict[Tier, dict[int, None]] = {}
    others: list[KVCacheEvent] = []
    cleared, last = False, None
    for last in batches:
        for event in last.events:
            if isinstance(event, BlockStored):
                tier = tier_of(event.medium, event.group_idx)
                state.store(tier, event.block_hashes, event.parent_block_hash, event)
            elif isinstance(event, BlockRemoved):
                tier = tier_of(event.medium, event.group_idx)
                state.remove(tier, event.block_hashes)
                removed.setdefault(tier, {}).update(dict.fromkeys(event.block_hashes))
            elif isinstance(event, AllBlocksCleared):
                state.clear()
                removed.clear()
                cleared = True
            else:
                others.append(event)
    if last is None:
        return None
    events = [*([AllBlocksCleared()] if cleared else []), *others, *_removals(removed)]
    events += [_part(segment.run.source, segment) for segment in state.segments()]
    return KVEventBatch(ts=last.ts, events=tuple(events), attn_dp_rank=last.attn_dp_rank)


def _removals(removed: dict[Tier, dict[int, None]]) -> Iterator[BlockRemoved]:
    for (medium, group_idx), hashes in removed.items():
        if hashes:
            yield BlockRemoved(tuple(hashes), None if medium == "GPU" else medium, group_idx)


# The pure core of a stream: numbers, digest, the window of recent batches, and the base that older ones fold into.
#
# State = base + window, always servable: a batch that leaves the window is folded into the base, never lost. Every
# life of a publisher has an epoch of 16 random bytes, and after every batch a chained digest of 8 bytes over all
# (sequence, payload) so far, so that loss, restart and splice are seen by whoever compares.

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
