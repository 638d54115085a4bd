"""StreamSnapshot: fold the batches that have left the replay buffer into the set of cached blocks. Pure: no socket, no
clock.

The module folds payloads, keeps the cached blocks, and encodes them as events again. A stream uses it for its snapshot,
and the publisher for a queue that has grown too long (``merge_batches``).
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from struct import Struct
from typing import Any, Generic, TypeAlias, TypeVar, get_type_hints

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.events import (
    LOCAL_GPU,
    MEDIUM_GPU,
    UNFOLDED_FIELDS,
    WIRE_EVENTS,
    AllBlocksCleared,
    BlockLocation,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVEventBatch,
    WireEvent,
    block_location,
    signed_block_hash,
    true_runs,
)
from scheduler_components.kv_events.codec import ENCODE_ERRORS, batch_rank, slice_event
from scheduler_components.kv_events.dialects import BlockChange, BlockChanges
from scheduler_components.kv_events.native_events import summarize_event, validated_native_event

__all__ = [
    "CachedBlocks",
    "StreamSnapshot",
    "PayloadReader",
    "BlockRun",
    "RunSegment",
    "PayloadRef",
    "merge_batches",
]

# The theory of folding.
#
# Fold rules, by event. A block is a hash at a location (medium, KV-cache group, remote or local, owner); None and GPU
# are one medium. An engine's hashes are compared as the signed integers that readers convert them to.
#
#     BlockStored        its blocks are cached and belong to this event, also those that were cached before
#     BlockRemoved       its blocks at that location are no longer cached; unknown blocks are no error
#     AllBlocksCleared   no block is cached
#     anything else      no effect: the encoder refuses it, and readers drop it
#
# Every scheduler step folds a batch, while sending the snapshot is rare. So folding creates as little as possible: one
# entry per block, from its key to the payload reference that stored it. A reference holds a payload as it was sent, or
# several small ones concatenated; nothing of it is decoded or copied. The encoder supplies the blocks that a batch
# stores and removes (``BlockChanges``); otherwise the payload is decoded. The garbage collector tracks neither the
# references nor the tables, because they hold only numbers and bytes.
#
# Invariant: owner(location, hash) is a reference  <=>  the block is cached, and belongs to the last event of that
# reference that stores it.
#
# So the event of a block is determined when the snapshot is sent: the reference's content is decoded into runs. A run
# whose blocks are all cached is sent as the bytes that were received, which preserves unknown fields. A run of which
# only a part is cached is cut into segments, as msgpack.
#
# A reference lives as long as one of its blocks. When half of them are gone, its content may be rewritten without the
# events that have no cached block; but only while all references together have more gone blocks than cached ones,
# because most references that are half gone are soon gone completely.
#
# Order: parents first. References are sent in the order of storing, and the blocks of each in the order of its runs. A
# block that was stored again belongs to a later reference than its children, so its segment is sent before theirs, out
# of order. (Only a hostile history has cycles; the walk ends on them, too.)

T = TypeVar("T")


# The cached blocks.


class BlockRun(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """The blocks of one stored event, in order, each the parent of the next.

    Attributes:
        location: where they were stored.
        block_hashes: all of them, cached or not.
        parent: hash of the block before the first, None at a root.
        event: the event itself.
    """

    location: BlockLocation
    block_hashes: Sequence[int]
    parent: int | None
    event: T


class RunSegment(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """Consecutive blocks ``first`` to ``stop - 1`` of a run that are all cached."""

    run: BlockRun[T]
    first: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.first == len(self.run.block_hashes)

    @property
    def parent(self) -> int | None:
        return self.run.block_hashes[self.first - 1] if self.first else self.run.parent


class PayloadRef(msgspec.Struct, gc=False):
    """The events that stored some blocks. Their runs are decoded on demand.

    Attributes:
        serial: its number among all references of its state, in the order of storing.
        content: the events, in a form that the state knows.
        num_bytes: size of ``content``; 0 until it is complete.
        num_stored: blocks in it; a block that was stored twice counts twice.
        num_cached: blocks that have been neither removed nor stored again since.
        half_gone_at: number of cached blocks at which ``content`` may be rewritten; below 0 for never.
    """

    serial: int
    content: Any = None
    num_bytes: int = 0
    num_stored: int = 0
    num_cached: int = 0
    half_gone_at: int = -1


# The tables of a location. Python copies a table in one go when it has grown, which stalls the step: with 131,072
# blocks, p99.9 of folding 512 took 10.2 to 12.2 ms with one table. The first byte of a hash chooses its table. The
# tables have different shares of its 256 values, so they grow one after the other, and their unused room is an average
# one at any number of blocks.
#
# A key is the hash with its first byte replaced by the number of that byte within its table, below 16. So it has 60
# bits, which Python stores in 32 bytes; a hash of 64 bits takes 48.

_SHARES = (*range(16, 8, -1), *range(16, 8, -1), *[8] * 7)
"""Values of the first byte per table; at most 16. Their sum is 256."""

_TABLE_OF = bytes([table for table, share in enumerate(_SHARES) for _ in range(share)])
_NUMBER_IN_TABLE = bytes([number for share in _SHARES for number in range(share)])
_FIRST_BYTES = slice(7 if sys.byteorder == "little" else 0, None, 8)
_LOW_BITS = (1 << 56) - 1

_Tables: TypeAlias = "list[dict[int, PayloadRef]]"
"""The references of the blocks at one location, by key."""


def _new_tables() -> _Tables:
    return [{} for _ in _SHARES]


def _place_of(block_hash: int) -> tuple[int, int]:
    """Return the key of a signed hash and its table."""
    first = block_hash >> 56 & 0xFF
    return _NUMBER_IN_TABLE[first] << 56 | block_hash & _LOW_BITS, _TABLE_OF[first]


_unpack_one = Struct("q").unpack


def _places_of(block_hashes: bytes) -> list[tuple[int, int]] | zip[tuple[int, int]]:
    """Return key and table of each hash. Integer arithmetic in Python would take five times as long for many."""
    if len(block_hashes) == 8:
        return [_place_of(*_unpack_one(block_hashes))]
    keys = bytearray(block_hashes)
    first = keys[_FIRST_BYTES]
    keys[_FIRST_BYTES] = first.translate(_NUMBER_IN_TABLE)
    return zip(memoryview(keys).cast("q").tolist(), first.translate(_TABLE_OF), strict=True)


class CachedBlocks(Generic[T]):
    """The cached blocks by location and hash. A block belongs to the reference that stored it last.

    Args:
        runs_of: returns the stored events of a reference's content, in order.

    Attributes:
        num_bytes, num_stored: size of the complete contents with a cached block, and the number of their blocks.
        half_gone: references of which half is gone; the owner of the state processes them.
    """

    __slots__ = ("_num_refs", "_runs_of", "_refs", "_locations", "half_gone", "num_bytes", "num_stored")

    def __init__(self, runs_of: Callable[[Any], Sequence[BlockRun[T]]]) -> None:
        self.num_bytes = self.num_stored = 0
        self.half_gone: deque[PayloadRef] = deque()
        self._runs_of: Callable[[Any], Sequence[BlockRun[T]]] = runs_of  # noqa: SCH004 of changes in any form
        self._locations: dict[BlockLocation, _Tables] = {}
        self._refs: dict[int, PayloadRef] = {}  # with content, by serial
        self._num_refs = 0

    def __len__(self) -> int:
        """Cached blocks at all locations."""
        return sum(sum(map(len, tables)) for tables in self._locations.values())

    def new_ref(self, content: Any = None) -> PayloadRef:
        """Return the reference of the next blocks. No earlier reference stores any more."""
        self._num_refs += 1
        ref = PayloadRef(self._num_refs, content)
        if content is not None:
            self._refs[ref.serial] = ref
        return ref

    def store(self, location: BlockLocation, block_hashes: bytes, ref: PayloadRef) -> None:
        """Fold one or several stored events of one location. ``block_hashes`` are signed integers of 8 bytes."""
        tables = self._locations.get(location)
        if tables is None:
            tables = self._locations[location] = _new_tables()
        num_blocks = len(block_hashes) // 8
        ref.num_stored += num_blocks
        ref.num_cached += num_blocks
        for key, table in _places_of(block_hashes):
            owners = tables[table]
            if key in owners:
                self._release(owners.pop(key), 1)
            owners[key] = ref

    def remove(self, location: BlockLocation, block_hashes: bytes) -> None:
        """Fold a removed event, as ``store``. Unknown blocks are ignored."""
        tables = self._locations.get(location)
        if tables is None:
            return
        last: PayloadRef | None = None
        num_released = 0
        for key, table in _places_of(block_hashes):
            ref = tables[table].pop(key, None)
            if ref is last:  # blocks that were stored together often leave together
                num_released += 1
                continue
            if last is not None:
                self._release(last, num_released)
            last, num_released = ref, 1
        if last is not None:
            self._release(last, num_released)

    def _release(self, ref: PayloadRef, num_blocks: int) -> None:
        left = ref.num_cached = ref.num_cached - num_blocks
        if left <= ref.half_gone_at:
            self._note_gone(ref)

    def _note_gone(self, ref: PayloadRef) -> None:
        if ref.num_cached:
            ref.half_gone_at = 0
            self.half_gone.append(ref)
        else:
            self.num_bytes -= ref.num_bytes
            self.num_stored -= ref.num_stored
            ref.content = None  # it may be in ``half_gone``
            del self._refs[ref.serial]

    def complete(self, ref: PayloadRef, content: bytes) -> None:
        """Set the content of ``ref``, which stores no further blocks."""
        if ref.num_cached:
            ref.num_bytes = len(content)
            ref.content = content
            self._refs[ref.serial] = ref
            self.num_bytes += ref.num_bytes
            self.num_stored += ref.num_stored
            ref.half_gone_at = ref.num_stored // 2
            if ref.num_cached <= ref.half_gone_at:
                self._note_gone(ref)

    def rewrite(self, ref: PayloadRef, content: bytes, num_stored: int) -> None:
        """Replace the content of ``ref`` by one with ``num_stored`` blocks, which include all its cached blocks."""
        self.num_bytes += len(content) - ref.num_bytes
        self.num_stored += num_stored - ref.num_stored
        ref.content, ref.num_bytes, ref.num_stored = content, len(content), num_stored
        ref.half_gone_at = ref.num_cached // 2

    def clear(self) -> None:
        """Fold a cleared event."""
        self._locations.clear()
        self._refs.clear()
        self.half_gone.clear()
        self.num_bytes = self.num_stored = 0

    def recount(self) -> None:
        """Count what each reference has cached, after an exception interrupted a change. The tables are always true."""
        owners = [ref for tables in self._locations.values() for table in tables for ref in table.values()]
        for ref in (*self._refs.values(), *owners):
            ref.num_cached = 0
        for ref in owners:
            ref.num_cached += 1
        complete = {ref.serial: ref for ref in owners if ref.content is not None}
        self._refs = dict(sorted(complete.items()))
        self.num_bytes = sum(ref.num_bytes for ref in complete.values())
        self.num_stored = sum(ref.num_stored for ref in complete.values())

    def owner(self, location: BlockLocation, block_hash: int) -> PayloadRef | None:
        """Return the reference that a cached block belongs to; None for a block that is not cached."""
        tables = self._locations.get(location)
        if tables is None:
            return None
        key, table = _place_of(block_hash)
        return tables[table].get(key)

    def runs_of(self, ref: PayloadRef) -> Sequence[BlockRun[T]]:
        """Return the runs of a reference, in order."""
        return self._runs_of(ref.content)

    def cached_runs(self, ref: PayloadRef) -> list[BlockRun[T]]:
        """Return the runs of a reference of which at least one block is cached and belongs to it."""
        return [
            run for run in self.runs_of(ref) if any(self.owner(run.location, each) is ref for each in run.block_hashes)
        ]

    def segments(self) -> Iterator[RunSegment[T]]:
        """Yield the cached blocks, each once, parents before children. The state must not change meanwhile."""
        return _SnapshotWalk(self).segments(self._refs.values())


class _RefRuns(Generic[T]):
    """The runs of one reference, and the position of each block in them."""

    __slots__ = ("_places", "_ref", "_state", "runs")

    def __init__(self, ref: PayloadRef, state: CachedBlocks[T]) -> None:
        self.runs = state.runs_of(ref)
        self._ref = ref
        self._state = state
        self._places: dict[tuple[BlockLocation, int], tuple[int, int]] | None = None

    @property
    def places(self) -> dict[tuple[BlockLocation, int], tuple[int, int]]:
        """The number of a block's run and its index there; the last occurrence counts."""
        if self._places is None:
            self._places = {
                (run.location, block_hash): (number, index)
                for number, run in enumerate(self.runs)
                for index, block_hash in enumerate(run.block_hashes)
            }
        return self._places

    @property
    def are_whole(self) -> bool:
        """True if every block of the reference is cached, each stored once."""
        return self._ref.num_cached == self._ref.num_stored

    def segments(self, number: int) -> Iterator[RunSegment[T]]:
        """Yield the cached segments of one run."""
        run, ref = self.runs[number], self._ref
        if self.are_whole:
            yield RunSegment(run, 0, len(run.block_hashes))
            return
        owner, location, places = self._state.owner, run.location, self.places
        are_cached = [
            owner(location, block_hash) is ref and places[location, block_hash] == (number, index)
            for index, block_hash in enumerate(run.block_hashes)
        ]
        for first, stop in true_runs(are_cached):
            yield RunSegment(run, first, stop)


_Position: TypeAlias = tuple[int, int, int]
"""Position of a segment: serial of its reference, number of its run there, first block."""

_MAX_READ = 16
"""References whose runs are kept in memory, so that segments of others find their parents there."""


class _SnapshotWalk(Generic[T]):
    """Walk the cached blocks, parents first. Remembers only segments that were sent out of order."""

    __slots__ = ("_ahead", "_read", "_state")

    def __init__(self, state: CachedBlocks[T]) -> None:
        self._state = state
        self._read: dict[int, _RefRuns[T]] = {}
        self._ahead: set[_Position] = set()  # segments that were sent before their turn

    def segments(self, refs: Iterable[PayloadRef]) -> Iterator[RunSegment[T]]:
        for ref in refs:
            if ref.num_cached:
                found = self._runs_in(ref)
                if found.are_whole and not self._ahead:
                    yield from self._whole(ref, found)
                else:
                    yield from self._parts(ref, found, 0)

    def _whole(self, ref: PayloadRef, found: _RefRuns[T]) -> Iterator[RunSegment[T]]:
        """Yield a reference whose blocks are all cached, the common case.

        Parents are in older references or earlier in this one.
        """
        passed = set[tuple[BlockLocation, int]]()
        for number, run in enumerate(found.runs):
            location, parent = run.location, run.parent
            if parent is not None and (location, parent) not in passed:
                above = self._state.owner(location, parent)
                if above is not None and above.serial >= ref.serial:
                    yield from self._parts(ref, found, number)
                    return
            passed.update([(location, block_hash) for block_hash in run.block_hashes])
            yield RunSegment(run, 0, len(run.block_hashes))

    def _parts(self, ref: PayloadRef, found: _RefRuns[T], first: int) -> Iterator[RunSegment[T]]:
        """Yield the cached segments of a reference from its run ``first`` on."""
        for number in range(first, len(found.runs)):
            for segment in found.segments(number):
                at = (ref.serial, number, segment.first)
                if at in self._ahead:
                    self._ahead.discard(at)
                    continue
                above = self._owner_of_parent(segment)
                if above is None or above.serial < ref.serial:
                    yield segment
                else:
                    yield from self._with_ancestors(at, segment)

    def _owner_of_parent(self, segment: RunSegment[T]) -> PayloadRef | None:
        parent = segment.parent
        return None if parent is None else self._state.owner(segment.run.location, parent)

    def _with_ancestors(self, at: _Position, segment: RunSegment[T]) -> Iterator[RunSegment[T]]:
        """Yield a segment after those of its ancestors that come later because they were stored again."""
        chain = [segment]
        above = self._above(segment, at[0])
        while above is not None and above[0] > at and above[0] not in self._ahead:
            self._ahead.add(above[0])
            chain.append(above[1])
            above = self._above(above[1], at[0])
        yield from reversed(chain)

    def _above(self, segment: RunSegment[T], serial: int) -> tuple[_Position, RunSegment[T]] | None:
        """Return the segment that ends with the parent, unless it is older than the reference ``serial``."""
        ref = self._owner_of_parent(segment)
        if ref is None or ref.serial < serial:
            return None
        found = self._runs_in(ref)
        number, index = found.places[segment.run.location, segment.parent]  # type: ignore[index]
        for each in found.segments(number):
            if each.first <= index < each.stop:
                return (ref.serial, number, each.first), each
        return None

    def _runs_in(self, ref: PayloadRef) -> _RefRuns[T]:
        found = self._read.get(ref.serial)
        if found is None:
            if len(self._read) >= _MAX_READ:
                self._read.clear()
            found = self._read[ref.serial] = _RefRuns(ref, self._state)
        return found


# Decode payloads: their changes, and the runs that they store.


_Summary = tuple[type[WireEvent], BlockLocation, Sequence[int], int | None]
"""An event's kind, location, hashes, and the parent of a stored event. See ``EventSummary``."""


def _location_of_head(head: Any) -> BlockLocation:
    return block_location(head.medium, head.group_idx, head.locality, head.ownership)


def _summarize_stored(head: Any) -> _Summary:
    return BlockStored, _location_of_head(head), head.block_hashes, head.parent_block_hash


def _summarize_removed(head: Any) -> _Summary:
    return BlockRemoved, _location_of_head(head), head.block_hashes, None


def _summarize_cleared(head: Any) -> _Summary:  # the event has no fields
    return AllBlocksCleared, LOCAL_GPU, (), None


def _summarize_peers_stored(head: Any) -> _Summary:
    parent = head.parent_block_hash
    hashes = tuple(map(signed_block_hash, head.block_hashes))
    return BlockStored, _location_of_head(head), hashes, None if parent is None else signed_block_hash(parent)


def _summarize_peers_removed(head: Any) -> _Summary:
    return BlockRemoved, _location_of_head(head), tuple(map(signed_block_hash, head.block_hashes)), None


_SUMMARIZERS: dict[type[WireEvent], Callable[[Any], _Summary]] = {
    BlockStored: _summarize_stored,
    BlockRemoved: _summarize_removed,
    AllBlocksCleared: _summarize_cleared,
}
_PEERS_SUMMARIZERS = _SUMMARIZERS | {BlockStored: _summarize_peers_stored, BlockRemoved: _summarize_peers_removed}
_PEERS_HINTS: dict[str, Any] = {"block_hashes": tuple[int | bytes, ...], "parent_block_hash": int | bytes | None}


def _head(kind: type[WireEvent], *, are_peers: bool, **dialect: Any) -> Any:
    """Return a struct of the fields that folding reads: all but the large ones, which are skipped.

    The encoder has checked them. Hashes are read as this kit encodes them, or with ``are_peers`` as engines do.
    """
    hints = get_type_hints(kind, include_extras=not are_peers) | (_PEERS_HINTS if are_peers else {})
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        is_bulk = field.name in UNFOLDED_FIELDS
        read_as = msgspec.Raw if is_bulk else hints[field.name]
        default = msgspec.Raw(b"") if is_bulk else field.default
        fields.append((field.name, read_as) if field.required else (field.name, read_as, default))
    summary = (_PEERS_SUMMARIZERS if are_peers else _SUMMARIZERS)[kind]
    return msgspec.defstruct(
        f"{kind.__name__}Head",
        fields,
        namespace={"summary": summary},
        frozen=True,
        gc=False,
        tag=kind.__name__,
        **dialect,
    )


_Heads = tuple[msgspec.Raw, Sequence[Any], msgspec.Raw]
"""A batch whose events are decoded without their large fields; time and rank are skipped."""


def _heads_reader(
    *, are_peers: bool, **dialect: Any
) -> tuple[Callable[[bytes], _Heads], Callable[[bytes], list[_Heads]]]:
    """Return the decoders of a batch and of a list of batches, without the large fields of events."""
    any_head: Any = reduce(or_, [_head(kind, are_peers=are_peers, **dialect) for kind in WIRE_EVENTS])
    batch: Any = tuple[msgspec.Raw, list[any_head], msgspec.Raw]
    batches: Any = list[batch]
    return msgspec.msgpack.Decoder(batch).decode, msgspec.msgpack.Decoder(batches).decode


_HEADS_READERS = tuple(
    _heads_reader(are_peers=are_peers, **dialect)
    for are_peers in (False, True)
    for dialect in ({"array_like": True}, {"tag_field": "type"})
)
_Events = tuple[msgspec.Raw, list[msgspec.Raw], msgspec.Raw]
_read_events = msgspec.msgpack.Decoder(_Events).decode
_read_events_of_many = msgspec.msgpack.Decoder(list[_Events]).decode
_LIST = 0xDC
"""First byte of a list of up to 65,535 elements. A batch, which has three, never begins with it."""


class PayloadReader:
    """Decode the changes and the runs of payloads of one stream, in any dialect.

    A stream has one dialect, and either this kit's hashes or an engine's. The first batch shows which.
    """

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads = _HEADS_READERS[0]

    def _summaries(self, content: bytes) -> list[_Summary | None]:
        """Return the summary of each event of a content; None for an event that readers drop."""
        for reader in (self._heads, *_HEADS_READERS):
            read_batch, read_batches = reader
            try:
                if content[0] == _LIST:
                    heads = [head for batch in read_batches(content) for head in batch[1]]
                else:
                    heads = read_batch(content)[1]  # type: ignore[assignment]
            except msgspec.ValidationError:
                continue
            self._heads = reader
            return [head.summary() for head in heads]
        # The events have different forms: decode each as readers do.
        return [_summarize_unusual_event(bytes(event)) for event in _events_of(content)]

    def changes(self, payload: bytes) -> BlockChanges:
        """Return the changes of a payload, as its encoder could have supplied them."""
        changes: list[tuple[type[WireEvent], BlockLocation, list[int]]] = []
        for summary in self._summaries(payload):
            if summary is None:
                continue
            kind, location, hashes, _ = summary
            if not changes or changes[-1][0] is not kind or changes[-1][1] != location:
                changes.append((kind, location, []))
            changes[-1][2].extend(hashes)
        return tuple([BlockChange(kind, location, _packed(hashes)) for kind, location, hashes in changes])

    def runs(self, content: bytes) -> list[BlockRun[msgspec.Raw]]:
        """Return the runs of a content: of one payload, or of a list of payloads."""
        return [
            BlockRun(summary[1], summary[2], summary[3], event)
            for summary, event in zip(self._summaries(content), _events_of(content), strict=True)
            if summary is not None and summary[0] is BlockStored
        ]


def _packed(block_hashes: Iterable[int]) -> bytes:
    return array("q", block_hashes).tobytes()


def _events_of(content: bytes) -> list[msgspec.Raw]:
    if content[0] == _LIST:
        return [event for batch in _read_events_of_many(content) for event in batch[1]]
    events: list[msgspec.Raw] = _read_events(content)[1]
    return events


def _summarize_unusual_event(raw: bytes) -> _Summary | None:
    # Imported here, because a publisher does not decode what its own encoder wrote.
    from scheduler_components.kv_events.decoder import decode_event

    try:
        summary = summarize_event(decode_event(raw))
    except DecodeError:
        return None
    return summary.kind, summary.location, summary.block_hashes, summary.parent


# The snapshot of a stream.

_SHARED_BYTES = 4 * 1024
"""Payloads up to this total size share one reference: a reference takes some 150 bytes, and their headers 50 each."""

_CHECKS_PER_FOLD = 4
"""Half-gone references checked in one fold. Usually fewer become half gone."""

_MAX_GONE_BLOCKS = 1_000
"""Gone blocks that may be kept in addition to as many as are cached."""


class StreamSnapshot:
    """The blocks that are cached after some payloads of one stream, and the bytes of their events.

    Args:
        shared_bytes: payloads up to this total size share one reference.
        max_gone_blocks: gone blocks that may be kept in addition to as many as are cached.

    Attributes:
        is_torn: True if an exception, such as a signal handler's, interrupted ``fold``. Fold the same batch again.
    """

    __slots__ = (
        "_filling",
        "_gathered",
        "_max_gone_blocks",
        "_num_gathered_bytes",
        "_reader",
        "_shared_bytes",
        "_state",
        "is_torn",
    )

    def __init__(self, *, shared_bytes: int = _SHARED_BYTES, max_gone_blocks: int = _MAX_GONE_BLOCKS) -> None:
        self._shared_bytes = shared_bytes
        self._max_gone_blocks = max_gone_blocks
        self._reader = PayloadReader()
        self._state = CachedBlocks(self._reader.runs)
        self._filling: PayloadRef | None = None  # gathers payloads until they are large enough
        self._gathered: list[bytes] = []
        self._num_gathered_bytes = 0
        self.is_torn = False

    def __len__(self) -> int:
        """Cached blocks at all locations."""
        return len(self._state)

    @property
    def num_bytes(self) -> int:
        """Bytes of the payloads with a cached block, and of the events in rewritten ones."""
        return self._state.num_bytes + self._num_gathered_bytes

    def fold(self, payload: bytes, changes: BlockChanges | None = None) -> None:
        """Fold one batch. ``changes`` comes from its encoder; None decodes the payload."""
        state, ref = self._state, None
        if self.is_torn:
            self._mend()
        self.is_torn = True
        for change in self._reader.changes(payload) if changes is None else changes:
            if change.kind is BlockStored:
                if ref is None:
                    ref = self._ref_for(len(payload))
                state.store(change.location, change.hashes, ref)
            elif change.kind is BlockRemoved:
                state.remove(change.location, change.hashes)
            else:
                state.clear()
                if self._filling is not None:
                    self._filling.num_cached = 0
        if ref is not None:
            self._gathered.append(payload)
            self._num_gathered_bytes += len(payload)
            if self._num_gathered_bytes >= self._shared_bytes:
                self._fill_up()
        if state.half_gone:
            self._rewrite_some()
        self.is_torn = False

    def _mend(self) -> None:
        """Restore the counts after an interrupted fold."""
        self._state.recount()
        if self._filling is not None and self._filling.content is not None:  # complete, and still noted as filling
            self._filling, self._gathered, self._num_gathered_bytes = None, [], 0

    def _ref_for(self, num_bytes: int) -> PayloadRef:
        if self._filling is not None and num_bytes >= self._shared_bytes:
            self._fill_up()  # a large payload is not copied
        if self._filling is None:
            self._filling = self._state.new_ref()
        return self._filling

    def _fill_up(self) -> None:
        """Complete the reference that gathers payloads."""
        ref, payloads = self._filling, self._gathered
        if ref is None:
            return
        content = payloads[0] if len(payloads) == 1 else _as_list(payloads)
        self._state.complete(ref, content)
        self._filling = None
        self._gathered = []
        self._num_gathered_bytes = 0

    def _rewrite_some(self) -> None:
        """Check some half-gone references. If too many gone blocks are kept, drop the events without cached blocks."""
        state = self._state
        max_stored = 2 * len(state) + self._max_gone_blocks
        for _ in range(min(_CHECKS_PER_FOLD, len(state.half_gone))):
            ref = state.half_gone.popleft()
            if not ref.num_cached:
                continue
            if state.num_stored <= max_stored:
                state.half_gone.append(ref)
                continue
            runs = state.cached_runs(ref)
            content = msgspec.msgpack.encode((0.0, [run.event for run in runs], 0))
            state.rewrite(ref, content, sum(len(run.block_hashes) for run in runs))

    def segments(self) -> Iterator[RunSegment[msgspec.Raw]]:
        """Yield the cached blocks, each once, parents before children. Nothing may be folded meanwhile."""
        self._fill_up()
        yield from self._state.segments()


def _as_list(payloads: Sequence[bytes]) -> bytes:
    return b"".join([bytes([_LIST]), len(payloads).to_bytes(2, "big"), *payloads])


# Merge the batches of a queue that has grown too long.


def merge_batches(batches: Iterable[EventBatch]) -> KVEventBatch | None:
    """Return one batch with the effect of ``batches``: cleared, then removed, then stored, parents first.

    No information is lost, so no consumer has to start over. Of a block that was stored and removed only the removal is
    left, 9 bytes on the wire, and a later clear drops that, too. Returns None without batches. Events that cannot be
    encoded are kept, so that the encoder refuses them by name.
    """
    state: CachedBlocks[Any] = CachedBlocks(lambda run: (run,))  # a reference is one run
    removed: dict[BlockLocation, dict[int, None]] = {}
    engines_removed: list[Any] = []  # unchanged, because a field may be unknown here
    others: list[KVCacheEvent] = []
    cleared, last = False, None
    for last in batches:
        for given in last.events:
            try:
                # A hash may be unsigned, and an event that is refused changes nothing.
                event = validated_native_event(given)
            except ENCODE_ERRORS:
                others.append(given)
                continue
            summary = summarize_event(event)
            if summary.kind is BlockStored:
                run = BlockRun(summary.location, summary.block_hashes, summary.parent, event)
                state.store(summary.location, _packed(summary.block_hashes), state.new_ref(run))
            elif summary.kind is BlockRemoved:
                state.remove(summary.location, _packed(summary.block_hashes))
                if isinstance(event, BlockRemoved):
                    removed.setdefault(summary.location, {}).update(dict.fromkeys(summary.block_hashes))
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
        segment.run.event if segment.is_whole else slice_event(segment.run.event, segment.first, segment.stop)
        for segment in state.segments()
    ]
    return KVEventBatch(ts=last.ts, events=tuple(events), attn_dp_rank=batch_rank(last))


def _removals(removed: dict[BlockLocation, dict[int, None]]) -> Iterator[BlockRemoved]:
    for (medium, group_idx, locality, ownership), hashes in removed.items():
        if hashes:
            yield BlockRemoved(tuple(hashes), None if medium == MEDIUM_GPU else medium, group_idx, locality, ownership)
