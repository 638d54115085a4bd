"""The stream of one publisher: block state, folding, numbers, digest, window and base. Pure: no socket, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from hashlib import blake2b
from itertools import repeat
from operator import or_
from typing import Any, Generic, TypeVar, get_type_hints
from zlib import crc32

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.events import (
    BULK_FIELDS,
    HERE,
    MEDIUM_GPU,
    WIRE_EVENTS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVEventBatch,
    Site,
    WireEvent,
    signed_block_hash,
    site_of,
)
from scheduler_components.kv_events.codec import ENCODE_ERRORS, BatchEncoder, part_of, rank_of, read_event
from scheduler_components.kv_events.native import NATIVE, cut_event, told_of

__all__ = [
    "CHAIN_BYTES",
    "EPOCH_BYTES",
    "BlockState",
    "EventStream",
    "Run",
    "Segment",
    "chain_after",
    "chain_at_start",
    "PayloadFolder",
    "collapse",
    "segment_bytes",
]

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
# Digest. chain(epoch) = BLAKE2b-64(epoch); chain after batch n = BLAKE2b-64(chain, n, CRC-32(payload)). Two sides with
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
# Fold rules, by event. A block is a hash at a site (medium, KV-cache group, remote or here, owner); None and GPU are
# one medium. An engine's hashes are compared as the signed integers that readers make of them.
#
#     BlockStored        its blocks stand, and belong to this event (its run), also those that stood before
#     BlockRemoved       its blocks at that site stand no more; blocks that do not stand are no error
#     AllBlocksCleared   nothing stands
#     anything else      nothing: the encoder refuses it, and readers drop it
#
# A run keeps the bytes of its event for as long as one of its blocks stands. So folding costs one dictionary update
# per run, token ids are not copied or even parsed, and a whole run goes out again as it came. A run of which a part
# stands is cut into segments when it is sent, as msgpack: fields that this kit does not know are kept.
#
# Order of the base: parents first. Runs are written in the order of storing. A block that was stored again belongs to
# a younger run than its children; that run is written before them. (Only a hostile history has cycles; they end.)
#
# Pins. A base that is being sent must not change, so a replay of it pins it: nothing is folded and the window grows.
# When the window has grown to twice its bounds, the publisher cuts the replays that pin it; these readers ask again.
#
# Folding is bounded per drain, so that a window that has grown is folded over many steps and not in one.

T = TypeVar("T")


# Which blocks stand.


class Run(msgspec.Struct, Generic[T], gc=False):
    """The blocks of one stored event, in order, each the parent of the next.

    Attributes:
        site: where they were stored.
        block_hashes: all of them, standing or not.
        parent: hash of the block before the first, None at a root.
        source: what the run was made from.
        serial: its number among all runs of its state, by the time of storing.
        num_bytes: size of what it was made from.
        num_standing: how many have been neither removed nor stored again since.
    """

    site: Site
    block_hashes: Sequence[int]
    parent: int | None
    source: T
    serial: int
    num_bytes: int = 0
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
    """The standing blocks by site and hash. A block belongs to the run that stored it last.

    Attributes:
        num_bytes: size of what the standing runs were made from. A run counts whole until its last block is gone.
    """

    __slots__ = ("_num_stored", "_sites", "_runs", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        self._sites: dict[Site, dict[int, Run[T]]] = {}
        self._runs: dict[int, Run[T]] = {}
        self._num_stored = 0

    def __len__(self) -> int:
        """Standing blocks, over all sites."""
        return sum(map(len, self._sites.values()))

    def store(self, site: Site, block_hashes: Sequence[int], parent: int | None, source: T, num_bytes: int = 0) -> None:
        """Fold a stored event; ``num_bytes`` is the size of ``source``."""
        owners = self._sites.get(site)
        if owners is None:
            owners = self._sites[site] = {}
        serial = self._num_stored = self._num_stored + 1
        run = Run(site, block_hashes, parent, source, serial, num_bytes)
        if len(block_hashes) == 1:  # most events of a decoding step; what follows costs twice as much
            block_hash = block_hashes[0]
            if block_hash in owners:
                self._discard(owners, block_hashes)
            owners[block_hash] = self._runs[serial] = run
            run.num_standing = 1
            self.num_bytes += num_bytes
            return
        if not owners.keys().isdisjoint(block_hashes):
            self._discard(owners, block_hashes)
        num_before = len(owners)
        owners.update(zip(block_hashes, repeat(run)))
        run.num_standing = len(owners) - num_before
        if run.num_standing:
            self._runs[serial] = run
            self.num_bytes += num_bytes

    def remove(self, site: Site, block_hashes: Sequence[int]) -> None:
        """Fold a removed event; blocks that do not stand are nothing to remove."""
        self._discard(self._sites.get(site, {}), block_hashes)

    def _discard(self, owners: dict[int, Run[T]], block_hashes: Sequence[int]) -> None:
        for block_hash in block_hashes:
            run = owners.pop(block_hash, None)
            if run is not None:
                run.num_standing -= 1
                if not run.num_standing:
                    del self._runs[run.serial]
                    self.num_bytes -= run.num_bytes

    def clear(self) -> None:
        """Fold a cleared event."""
        self._sites.clear()
        self._runs.clear()
        self.num_bytes = 0

    def hashes(self, site: Site) -> set[int]:
        """Hashes standing at one site."""
        return set(self._sites.get(site, ()))

    def segments(self) -> Iterator[Segment[T]]:
        """Yield what stands, each block once, a block's parent before it; the state must not change meanwhile.

        Runs come in the order in which they were stored, so that only what comes out of order has to be remembered.
        """
        ahead: dict[int, set[int]] = {}
        for run in self._runs.values():
            for segment in self._standing(run):
                yield from self._with_ancestors(segment, run.serial, ahead)
            ahead.pop(run.serial, None)

    def _standing(self, run: Run[T]) -> Iterator[Segment[T]]:
        owners = self._sites[run.site]
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

        ``ahead`` has the segments yielded of the run ``serial``, which is being yielded, and of later ones.
        """
        chain: list[Segment[T]] = []
        wanted: Segment[T] | None = segment
        while wanted is not None and wanted.run.serial >= serial:
            firsts = ahead.setdefault(wanted.run.serial, set())
            if wanted.first in firsts:
                break
            firsts.add(wanted.first)
            chain.append(wanted)
            wanted = self._segment_of(wanted.run.site, wanted.parent)
        yield from reversed(chain)

    def _segment_of(self, site: Site, block_hash: int | None) -> Segment[T] | None:
        run = self._sites[site].get(block_hash) if block_hash is not None else None
        if run is None:
            return None
        return next(each for each in self._standing(run) if block_hash in run.block_hashes[each.first : each.stop])


# Folding events into a block state, and writing a block state as events again.
#
# There are two users. The stream folds payloads that leave its window and keeps each stored event's bytes. The
# publisher collapses batches that wait too long into one batch.


# Most events speak of the device alone: that they do is asked here, since a call would cost as much as the rest.


def _fold_stored(event: Any, state: BlockState[bytes], raw: bytes) -> None:
    site = HERE
    if not (event.medium is event.group_idx is event.locality is event.ownership is None):
        site = site_of(event.medium, event.group_idx, event.locality, event.ownership)
    state.store(site, event.block_hashes, event.parent_block_hash, raw, len(raw))


def _fold_removed(event: Any, state: BlockState[bytes], raw: bytes) -> None:  # noqa: ARG001 - nothing of it is kept
    state.remove(site_of(event.medium, event.group_idx, event.locality, event.ownership), event.block_hashes)


def _fold_cleared(event: Any, state: BlockState[bytes], raw: bytes) -> None:  # noqa: ARG001 - as above
    state.clear()


def _fold_peers_stored(event: Any, state: BlockState[bytes], raw: bytes) -> None:
    parent = event.parent_block_hash
    parent = None if parent is None else signed_block_hash(parent)
    hashes = tuple(map(signed_block_hash, event.block_hashes))
    site = site_of(event.medium, event.group_idx, event.locality, event.ownership)
    state.store(site, hashes, parent, raw, len(raw))


def _fold_peers_removed(event: Any, state: BlockState[bytes], raw: bytes) -> None:  # noqa: ARG001 - as above
    site = site_of(event.medium, event.group_idx, event.locality, event.ownership)
    state.remove(site, tuple(map(signed_block_hash, event.block_hashes)))


_FOLD: dict[type[WireEvent], Callable[[Any, BlockState[bytes], bytes], None]] = {
    BlockStored: _fold_stored,
    BlockRemoved: _fold_removed,
    AllBlocksCleared: _fold_cleared,
}


_PEERS_FOLD = {**_FOLD, BlockStored: _fold_peers_stored, BlockRemoved: _fold_peers_removed}
_PEERS_HINTS: dict[str, Any] = {"block_hashes": tuple[int | bytes, ...], "parent_block_hash": int | bytes | None}


def _head(kind: type[WireEvent], *, are_peers: bool, **dialect: Any) -> Any:
    """What folding reads of an event: all fields but the bulk, which is skipped and not made into objects.

    The encoder has checked all of them. Hashes are read as this kit writes them, or ``are_peers``, as engines do.
    """
    hints = get_type_hints(kind, include_extras=not are_peers) | (_PEERS_HINTS if are_peers else {})
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        is_bulk = field.name in BULK_FIELDS
        read_as = msgspec.Raw if is_bulk else hints[field.name]
        default = msgspec.Raw(b"") if is_bulk else field.default
        fields.append((field.name, read_as) if field.required else (field.name, read_as, default))
    return msgspec.defstruct(
        f"{kind.__name__}Head",
        fields,
        namespace={"fold_into": (_PEERS_FOLD if are_peers else _FOLD)[kind]},
        frozen=True,
        gc=False,
        tag=kind.__name__,
        **dialect,
    )


_Heads = tuple[msgspec.Raw, Sequence[Any], msgspec.Raw]
"""A batch of which the events' heads are read; time and rank are not."""


def _heads_reader(*, are_peers: bool, **dialect: Any) -> Callable[[bytes], _Heads]:
    any_head: Any = reduce(or_, [_head(kind, are_peers=are_peers, **dialect) for kind in WIRE_EVENTS])
    decoder: Any = msgspec.msgpack.Decoder(tuple[msgspec.Raw, list[any_head], msgspec.Raw])
    decode: Callable[[bytes], _Heads] = decoder.decode
    return decode


_Readers = tuple[Callable[[bytes], _Heads], Callable[[bytes], _Heads]]
"""One for events that are arrays, one for maps."""


def _readers(*, are_peers: bool) -> _Readers:
    arrays = _heads_reader(are_peers=are_peers, array_like=True)
    return arrays, _heads_reader(are_peers=are_peers, tag_field="type")


_OUR_READERS, _PEERS_READERS = _readers(are_peers=False), _readers(are_peers=True)
_read_events = msgspec.msgpack.Decoder(tuple[msgspec.Raw, list[msgspec.Raw], msgspec.Raw]).decode
_ARRAY_FIRST_BYTES = frozenset(range(0x90, 0xA0)) | {0xDC, 0xDD}
_HEADER_BYTES = 11
"""An array of three, eight bytes of time behind their tag, and the length of a list of up to fifteen events."""
_LIST_OF_ONE = 0x91


class PayloadFolder:
    """Folds the payloads of one stream, of any dialect; a stored run keeps its event's bytes.

    A stream is of one dialect: whether its hashes are an engine's own, the first batch that has such hashes tells.
    """

    __slots__ = ("_readers",)

    def __init__(self) -> None:
        self._readers = _OUR_READERS

    def fold(self, state: BlockState[bytes], payload: bytes) -> None:
        """Fold one batch."""
        try:
            _fold(state, payload, self._readers)
            return
        except msgspec.ValidationError:
            pass  # nothing was folded: all events are read before the first one is
        try:
            _fold(state, payload, _PEERS_READERS)
            self._readers = _PEERS_READERS
        except msgspec.ValidationError:
            for raw in _read_events(payload)[1]:
                _fold_odd_event(state, bytes(raw))


def _fold(state: BlockState[bytes], payload: bytes, readers: _Readers) -> None:
    if payload[_HEADER_BYTES - 1] == _LIST_OF_ONE:
        # Its bytes, which may be all of a large payload, are found without reading through them again.
        _, heads, rank = readers[payload[_HEADER_BYTES] not in _ARRAY_FIRST_BYTES](payload)
        heads[0].fold_into(state, payload[_HEADER_BYTES : len(payload) - len(bytes(rank))])
        return
    events = [bytes(event) for event in _read_events(payload)[1]]
    if events:
        for head, event in zip(readers[events[0][0] not in _ARRAY_FIRST_BYTES](payload)[1], events, strict=True):
            head.fold_into(state, event)


def _fold_odd_event(state: BlockState[bytes], raw: bytes) -> None:
    """Of a payload whose events are of both forms: what readers make of an event is what is folded."""
    try:
        event = read_event(raw)
    except DecodeError:
        return
    _FOLD[type(event)](event, state, raw)


def segment_bytes(segment: Segment[bytes]) -> bytes:
    """Return the stored event of a segment of a run that was made from an event's bytes; its unknown fields, too."""
    source = segment.run.source
    return source if segment.is_whole else bytes(cut_event(source, segment.first, segment.stop))


def collapse(batches: Iterable[EventBatch]) -> KVEventBatch | None:
    """Return the one batch with the effect of ``batches``: cleared, then removed, then stored, parents first.

    Nothing is lost by it, so no consumer has to start over. Of a block that was stored and removed among them only
    the removal is left, 9 bytes on the wire, and a later clear takes that too. None when there were no batches.
    Events that cannot be written are kept, to be refused by name when they are encoded.
    """
    state: BlockState[Any] = BlockState()
    removed: dict[Site, dict[int, None]] = {}
    engines_removed: list[Any] = []  # as they are, for a field of theirs may be unknown here
    others: list[KVCacheEvent] = []
    cleared, last = False, None
    for last in batches:
        for given in last.events:
            try:
                event = NATIVE.sound(given)  # a hash may be unsigned, and an event that is refused changes nothing
            except ENCODE_ERRORS:
                others.append(given)
                continue
            told = told_of(event)
            if told.kind is BlockStored:
                state.store(told.site, told.block_hashes, told.parent, event)
            elif told.kind is BlockRemoved:
                state.remove(told.site, told.block_hashes)
                if isinstance(event, BlockRemoved):
                    removed.setdefault(told.site, {}).update(dict.fromkeys(told.block_hashes))
                else:
                    engines_removed.append(event)
            else:
                state.clear()
                removed.clear()
                engines_removed.clear()
                cleared = True
    if last is None:
        return None
    events = [*([AllBlocksCleared()] if cleared else []), *others, *_removals(removed), *engines_removed]
    events += [
        segment.run.source if segment.is_whole else part_of(segment.run.source, segment.first, segment.stop)
        for segment in state.segments()
    ]
    return KVEventBatch(ts=last.ts, events=tuple(events), attn_dp_rank=rank_of(last))


def _removals(removed: dict[Site, dict[int, None]]) -> Iterator[BlockRemoved]:
    for (medium, group_idx, locality, ownership), hashes in removed.items():
        if hashes:
            yield BlockRemoved(tuple(hashes), None if medium == MEDIUM_GPU else medium, group_idx, locality, ownership)


# The stream itself.

EPOCH_BYTES = 16
CHAIN_BYTES = 8

_FOLDS_PER_DRAIN = 8
"""Batches folded in one drain, besides as many as came in it: more would show in the scheduler's step."""

_CHUNK_BYTES = 256 * 1024
"""Size at which a chunk of the base is full: large enough to amortise a send, small enough for one drain."""

_MAX_CHUNK_BYTES = 2 * 1024 * 1024
"""Where there are fewer numbers than chunks, several become one message; half of what readers take, never more."""


def chain_at_start(epoch: bytes) -> bytes:
    """The digest before the first batch of an epoch."""
    return blake2b(epoch, digest_size=CHAIN_BYTES).digest()


def chain_after(chain: bytes, sequence: int, payload: bytes) -> bytes:
    """The digest after one more batch: 8 bytes of BLAKE2b over chain, sequence (8 bytes) and CRC-32 of the payload (4).

    It proves that two sides have read the same, not who wrote it. A checksum is enough for that, and of a payload of
    40 KB it costs a sixth of what hashing all of it does.
    """
    return blake2b(chain + (sequence << 32 | crc32(payload)).to_bytes(12, "big"), digest_size=CHAIN_BYTES).digest()


_SEGMENTS_PER_STEP = 500
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
        "_folder",
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
        self._folder = PayloadFolder()
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

    @property
    def num_base_bytes(self) -> int:
        """Bytes of the stored events that the base keeps: each whole, for as long as one of its blocks stands."""
        return self._base.num_bytes

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
        """Fold a bounded number of batches that the window has no room for; call it once per drain, sent or not."""
        most = self._num_unfolded + _FOLDS_PER_DRAIN
        self._num_unfolded = 0
        while most and self.is_behind and not self.pins:
            payload = self._window.popleft()
            self._window_chains.popleft()
            self.first += 1
            self.has_folded = True
            self.kept_bytes -= len(payload)
            self._folder.fold(self._base, payload)
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
        """Cut the base into chunks of a size to send; yields None while it goes on, and at last the chunks.

        The base must not change from the first step until the last chunk is encoded: the caller holds ``pins``.
        There is at least one chunk, save where ``max_chunks`` are too few for messages that readers take: then there
        is none.
        """
        chunks: list[list[Segment[bytes]]] = [[]]
        sizes = [0]
        for number, segment in enumerate(self._base.segments(), start=1):
            length = len(segment.run.source)
            if sizes[-1] and sizes[-1] + length > _CHUNK_BYTES:
                chunks.append([])
                sizes.append(0)
            chunks[-1].append(segment)
            sizes[-1] += length
            if number % _SEGMENTS_PER_STEP == 0:
                yield None
        if max_chunks is not None and len(chunks) > max_chunks:
            yield None
            chunks = _joined(chunks, sizes)
            if len(chunks) > max_chunks:
                chunks = []
        yield chunks

    def encode_chunk(
        self, segments: list[Segment[bytes]], encoder: BatchEncoder, rank: int, *, clear: bool
    ) -> Iterator[bytes | None]:
        """Write a chunk of the base as the payload of a batch; ``clear`` puts AllBlocksCleared first.

        Yields None while it goes on, after each ``_CHUNK_BYTES`` that were looked at, and at last the payload.
        """
        events = [encoder.encode_event(AllBlocksCleared())] if clear else []
        num_read = 0
        for segment in segments:
            if num_read > _CHUNK_BYTES:
                yield None
                num_read = 0
            num_read += len(segment.run.source)
            events.append(segment_bytes(segment))
        # The time of a folded batch is 0: what it says happened at many times.
        yield msgspec.msgpack.encode((0.0, [msgspec.Raw(event) for event in events], rank))


def _joined(chunks: list[list[Segment[bytes]]], sizes: list[int]) -> list[list[Segment[bytes]]]:
    """Neighbouring chunks as one, up to the largest size of a message."""
    joined: list[list[Segment[bytes]]] = []
    room = 0
    for chunk, size in zip(chunks, sizes, strict=True):
        if joined and size <= room:
            joined[-1] += chunk
            room -= size
        else:
            joined.append(chunk)
            room = _MAX_CHUNK_BYTES - size
    return joined
