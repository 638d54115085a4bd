"""The base of a stream: what batches add up to that nobody is sent any more. Pure: no socket, no clock.

Folding, the state of standing blocks, and writing it as events again; for a stream's base, and for a publisher's queue
that has grown too long (``collapse``).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, get_type_hints

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
)
from scheduler_components.kv_events.codec import ENCODE_ERRORS, batch_rank, decode_event, slice_event
from scheduler_components.kv_events.dialects import BlockChange, BlockChanges
from scheduler_components.kv_events.native_events import NATIVE_WRITER, slice_raw_event, summarize_event

__all__ = [
    "CachedBlocks",
    "StreamSnapshot",
    "PayloadReader",
    "BlockRun",
    "RunSegment",
    "PayloadRef",
    "merge_batches",
    "encode_segment",
]

# The theory of folding.
#
# Fold rules, by event. A block is a hash at a location (medium, KV-cache group, remote or here, owner); None and GPU
# are
# one medium. An engine's hashes are compared as the signed integers that readers make of them.
#
#     BlockStored        its blocks stand, and belong to this event, also those that stood before
#     BlockRemoved       its blocks at that location stand no more; blocks that do not stand are no error
#     AllBlocksCleared   nothing stands
#     anything else      nothing: the encoder refuses it, and readers drop it
#
# Folding happens in each of a scheduler's steps, sending the base hardly ever. So folding makes as little as can be:
# one entry per block, from its hash to the source that stored it. A source is a payload as it was sent, or some small
# ones one after the other; nothing of it is read or copied. Which blocks a batch stores and removes, its encoder has
# told (``BlockChanges``); where it has not, the payload is read for it. Neither sources nor the tables that lead to
# them are
# known to the garbage collector: they hold nothing but numbers and bytes.
#
# Invariant: owner[location][hash] is a source  <=>  the block stands, and the last event in that source which stores it
# is
# the one that it belongs to.
#
# So which event a block belongs to is found when the base is sent: the source is read into runs. A run of which all
# stands goes out in the bytes in which it came: fields that this kit does not know are kept. One of which a part stands
# is cut into segments, as msgpack.
#
# A source lives as long as one of its blocks. Once half of them are gone, it is written anew without the events of
# which none stands; but only while there are more gone blocks than standing ones in all sources together: most sources
# that are half gone are soon gone whole, for nothing.
#
# Order: parents first. A location's table has sources in the order of storing, for a block that is stored again is
# taken
# out first; a source's blocks are neighbours there, and go out in the order of its runs. A block that was stored again
# comes later than its children: its segment is written before them all the same. (Only a hostile history has cycles;
# they end.)

T = TypeVar("T")


# Which blocks stand.


class BlockRun(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """The blocks of one stored event, in order, each the parent of the next.

    Attributes:
        location: where they were stored.
        block_hashes: all of them, standing or not.
        parent: hash of the block before the first, None at a root.
        event: the event itself.
    """

    location: BlockLocation
    block_hashes: Sequence[int]
    parent: int | None
    event: T


class RunSegment(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """Neighbouring blocks ``first`` to ``stop - 1`` of a run that all stand."""

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
    """What stored some blocks: events, of which the runs are read when somebody asks for them.

    Attributes:
        serial: its number among all sources of its state, by the time of storing.
        content: the events, in a form that the state's reader of runs knows.
        num_bytes: size of ``content``; 0 until it is complete.
        num_stored: blocks in it; one that was stored twice counts twice.
        num_standing: how many have been neither removed nor stored again since.
        half_gone_at: with so few standing, ``content`` may be written anew; below 0 for never.
    """

    serial: int
    content: Any = None
    num_bytes: int = 0
    num_stored: int = 0
    num_standing: int = 0
    half_gone_at: int = -1


class RunReader(Protocol[T]):
    """Knows the form of the sources' content."""

    def runs(self, content: Any, /) -> Sequence[BlockRun[T]]:
        """Read the stored events of a content, in order."""
        ...


class CachedBlocks(Generic[T]):
    """The standing blocks by location and hash. A block belongs to the source that stored it last.

    Args:
        reader: reads the runs of its sources.

    Attributes:
        num_bytes, num_stored: size of the complete contents of which a block stands, and the blocks in them.
        half_gone: their sources of which half is gone; whoever owns the state takes them out.
    """

    __slots__ = ("_num_sources", "_reader", "_sites", "half_gone", "num_bytes", "num_stored")

    def __init__(self, reader: RunReader[T]) -> None:
        self.num_bytes = self.num_stored = 0
        self.half_gone: deque[PayloadRef] = deque()
        self._reader = reader
        self._sites: dict[BlockLocation, dict[int, PayloadRef]] = {}
        self._num_sources = 0

    def __len__(self) -> int:
        """Standing blocks, over all sites."""
        return sum(map(len, self._sites.values()))

    def new_source(self, content: Any = None) -> PayloadRef:
        """Return what stores the next blocks; no earlier one stores any more."""
        self._num_sources += 1
        return PayloadRef(self._num_sources, content)

    def store(self, location: BlockLocation, block_hashes: Sequence[int], source: PayloadRef) -> None:
        """Fold a stored event, or several of one location."""
        owners = self._sites.get(location)
        if owners is None:
            owners = self._sites[location] = {}
        if not owners.keys().isdisjoint(block_hashes):
            self._discard(owners, block_hashes)
        num_before = len(owners)
        for block_hash in block_hashes:
            owners[block_hash] = source
        source.num_stored += len(block_hashes)
        source.num_standing += len(owners) - num_before

    def remove(self, location: BlockLocation, block_hashes: Iterable[int]) -> None:
        """Fold a removed event; blocks that do not stand are nothing to remove."""
        owners = self._sites.get(location)
        if owners is not None:
            self._discard(owners, block_hashes)

    def _discard(self, owners: dict[int, PayloadRef], block_hashes: Iterable[int]) -> None:
        for block_hash in block_hashes:
            source = owners.pop(block_hash, None)
            if source is not None:
                left = source.num_standing = source.num_standing - 1
                if left <= source.half_gone_at:
                    self._note_gone(source)

    def _note_gone(self, source: PayloadRef) -> None:
        if source.num_standing:
            source.half_gone_at = 0
            self.half_gone.append(source)
        else:
            self.num_bytes -= source.num_bytes
            self.num_stored -= source.num_stored
            source.content = None  # it may be among the half gone ones

    def complete(self, source: PayloadRef, content: bytes) -> None:
        """Give ``source`` its content: nothing more is stored by it."""
        if source.num_standing:
            source.content = content
            source.num_bytes = len(content)
            self.num_bytes += source.num_bytes
            self.num_stored += source.num_stored
            source.half_gone_at = source.num_stored // 2
            if source.num_standing <= source.half_gone_at:
                self._note_gone(source)

    def rewrite(self, source: PayloadRef, content: bytes, num_stored: int) -> None:
        """Give ``source`` another content, in which ``num_stored`` blocks are; the standing ones are among them."""
        self.num_bytes += len(content) - source.num_bytes
        self.num_stored += num_stored - source.num_stored
        source.content, source.num_bytes, source.num_stored = content, len(content), num_stored
        source.half_gone_at = source.num_standing // 2

    def clear(self) -> None:
        """Fold a cleared event."""
        self._sites.clear()
        self.half_gone.clear()
        self.num_bytes = self.num_stored = 0

    def standing_runs(self, source: PayloadRef) -> list[BlockRun[T]]:
        """The runs of a source of which at least one block stands and is this source's."""
        return [
            run
            for run in self._reader.runs(source.content)
            if any(self._sites.get(run.location, {}).get(each) is source for each in run.block_hashes)
        ]

    def segments(self) -> Iterator[RunSegment[T]]:
        """Yield what stands, each block once, a block's parent before it; the state must not change meanwhile."""
        for location in self._sites:
            yield from _SiteWalk(location, self._sites[location], self._reader).segments()


class _SourceRuns(Generic[T]):
    """The runs of one source at one location, and where each block is in them."""

    __slots__ = ("_owners", "_places", "_source", "runs")

    def __init__(self, source: PayloadRef, runs: Sequence[BlockRun[T]], owners: dict[int, PayloadRef]) -> None:
        self.runs = runs
        self._source = source
        self._owners = owners
        self._places: dict[int, tuple[int, int]] | None = None

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """Of each block the number of its run and its index there, where it was stored last."""
        if self._places is None:
            self._places = {
                block_hash: (number, index)
                for number, run in enumerate(self.runs)
                for index, block_hash in enumerate(run.block_hashes)
            }
        return self._places

    @property
    def are_whole(self) -> bool:
        """True when every block of the source stands, each stored once."""
        return self._source.num_standing == self._source.num_stored

    def segments(self, number: int) -> Iterator[RunSegment[T]]:
        """Yield what stands of one run."""
        run, source = self.runs[number], self._source
        if self.are_whole:
            yield RunSegment(run, 0, len(run.block_hashes))
            return
        owners, places = self._owners, self.places
        first = None
        for index, block_hash in enumerate(run.block_hashes):
            stands = owners.get(block_hash) is source and places[block_hash] == (number, index)
            if stands and first is None:
                first = index
            elif not stands and first is not None:
                yield RunSegment(run, first, index)
                first = None
        if first is not None:
            yield RunSegment(run, first, len(run.block_hashes))


_Position: TypeAlias = tuple[int, int, int]
"""Where a segment is among all of its location: serial of its source, number of its run there, first block."""

_MAX_READ = 16
"""Sources whose runs are kept: segments of others look for their parents there."""


class _SiteWalk(Generic[T]):
    """Walks the standing blocks of one location, parents first. Only what goes out of order is remembered."""

    __slots__ = ("_ahead", "_owners", "_read", "_reader", "_site")

    def __init__(self, location: BlockLocation, owners: dict[int, PayloadRef], reader: RunReader[T]) -> None:
        self._site = location
        self._owners = owners
        self._reader = reader
        self._read: dict[int, _SourceRuns[T]] = {}
        self._ahead: set[_Position] = set()  # of segments that went before their turn

    def segments(self) -> Iterator[RunSegment[T]]:
        last = None
        for source in self._owners.values():
            if source is not last:
                last, found = source, self._runs_in(source)
                if found.are_whole and not self._ahead:
                    yield from self._whole(source, found)
                else:
                    yield from self._parts(source, found, 0)

    def _whole(self, source: PayloadRef, found: _SourceRuns[T]) -> Iterator[RunSegment[T]]:
        """Most sources: all stands, in order. Parents are older, or before their children in this source."""
        owners, passed, serial = self._owners, set[int](), source.serial
        for number, run in enumerate(found.runs):
            if run.parent is not None and run.parent not in passed:
                above = owners.get(run.parent)
                if above is not None and above.serial >= serial:
                    yield from self._parts(source, found, number)
                    return
            passed.update(run.block_hashes)
            yield RunSegment(run, 0, len(run.block_hashes))

    def _parts(self, source: PayloadRef, found: _SourceRuns[T], first: int) -> Iterator[RunSegment[T]]:
        """What stands of a source, from its run number ``first`` on."""
        for number in range(first, len(found.runs)):
            for segment in found.segments(number):
                at = (source.serial, number, segment.first)
                if at in self._ahead:
                    self._ahead.discard(at)
                    continue
                parent = segment.parent
                above = None if parent is None else self._owners.get(parent)
                if above is None or above.serial < source.serial:
                    yield segment
                else:
                    yield from self._with_ancestors(at, segment)

    def _with_ancestors(self, at: _Position, segment: RunSegment[T]) -> Iterator[RunSegment[T]]:
        """A block that was stored again comes later than its children: it goes before them."""
        chain = [segment]
        above = self._above(segment, at[0])
        while above is not None and above[0] > at and above[0] not in self._ahead:
            self._ahead.add(above[0])
            chain.append(above[1])
            above = self._above(above[1], at[0])
        yield from reversed(chain)

    def _above(self, segment: RunSegment[T], serial: int) -> tuple[_Position, RunSegment[T]] | None:
        """The segment that ends with the parent, unless it is older than the source ``serial``."""
        source = None if segment.parent is None else self._owners.get(segment.parent)
        if source is None or source.serial < serial:
            return None
        found = self._runs_in(source)
        number, index = found.places[segment.parent]  # type: ignore[index]
        for each in found.segments(number):
            if each.first <= index < each.stop:
                return (source.serial, number, each.first), each
        return None

    def _runs_in(self, source: PayloadRef) -> _SourceRuns[T]:
        found = self._read.get(source.serial)
        if found is None:
            if len(self._read) >= _MAX_READ:
                self._read.clear()
            runs = [run for run in self._reader.runs(source.content) if run.location == self._site]
            found = self._read[source.serial] = _SourceRuns(source, runs, self._owners)
        return found


# Reading payloads: what they change, and the runs that they store.


_Told = tuple[type[WireEvent], BlockLocation, Sequence[int], int | None]
"""What an event says of blocks: its kind, where, their hashes, and of a stored one its parent. See ``EventSummary``."""


def _site_of_head(head: Any) -> BlockLocation:
    return block_location(head.medium, head.group_idx, head.locality, head.ownership)


def _told_by_stored(head: Any) -> _Told:
    return BlockStored, _site_of_head(head), head.block_hashes, head.parent_block_hash


def _told_by_removed(head: Any) -> _Told:
    return BlockRemoved, _site_of_head(head), head.block_hashes, None


def _told_by_cleared(head: Any) -> _Told:  # noqa: ARG001 - it has no fields
    return AllBlocksCleared, LOCAL_GPU, (), None


def _told_by_peers_stored(head: Any) -> _Told:
    parent = head.parent_block_hash
    hashes = tuple(map(signed_block_hash, head.block_hashes))
    return BlockStored, _site_of_head(head), hashes, None if parent is None else signed_block_hash(parent)


def _told_by_peers_removed(head: Any) -> _Told:
    return BlockRemoved, _site_of_head(head), tuple(map(signed_block_hash, head.block_hashes)), None


_TOLD: dict[type[WireEvent], Callable[[Any], _Told]] = {
    BlockStored: _told_by_stored,
    BlockRemoved: _told_by_removed,
    AllBlocksCleared: _told_by_cleared,
}
_PEERS_TOLD = _TOLD | {BlockStored: _told_by_peers_stored, BlockRemoved: _told_by_peers_removed}
_PEERS_HINTS: dict[str, Any] = {"block_hashes": tuple[int | bytes, ...], "parent_block_hash": int | bytes | None}


def _head(kind: type[WireEvent], *, are_peers: bool, **dialect: Any) -> Any:
    """What folding reads of an event: all fields but the bulk, which is skipped and not made into objects.

    The encoder has checked all of them. Hashes are read as this kit writes them, or ``are_peers``, as engines do.
    """
    hints = get_type_hints(kind, include_extras=not are_peers) | (_PEERS_HINTS if are_peers else {})
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        is_bulk = field.name in UNFOLDED_FIELDS
        read_as = msgspec.Raw if is_bulk else hints[field.name]
        default = msgspec.Raw(b"") if is_bulk else field.default
        fields.append((field.name, read_as) if field.required else (field.name, read_as, default))
    told = (_PEERS_TOLD if are_peers else _TOLD)[kind]
    return msgspec.defstruct(
        f"{kind.__name__}Head", fields, namespace={"told": told}, frozen=True, gc=False, tag=kind.__name__, **dialect
    )


_Heads = tuple[msgspec.Raw, Sequence[Any], msgspec.Raw]
"""A batch of which the events' heads are read; time and rank are not."""


class _HeadsReader(NamedTuple):
    """Reads the heads of a batch, and of a list of batches."""

    batch: Callable[[bytes], _Heads]
    batches: Callable[[bytes], list[_Heads]]


def _heads_reader(*, are_peers: bool, **dialect: Any) -> _HeadsReader:
    any_head: Any = reduce(or_, [_head(kind, are_peers=are_peers, **dialect) for kind in WIRE_EVENTS])
    batch: Any = tuple[msgspec.Raw, list[any_head], msgspec.Raw]
    batches: Any = list[batch]
    return _HeadsReader(msgspec.msgpack.Decoder(batch).decode, msgspec.msgpack.Decoder(batches).decode)


_HEADS_READERS = tuple(
    _heads_reader(are_peers=are_peers, **dialect)
    for are_peers in (False, True)
    for dialect in ({"array_like": True}, {"tag_field": "type"})
)
_Events = tuple[msgspec.Raw, list[msgspec.Raw], msgspec.Raw]
_read_events = msgspec.msgpack.Decoder(_Events).decode
_read_events_of_many = msgspec.msgpack.Decoder(list[_Events]).decode
_LIST = 0xDC
"""First byte of a list of up to 65,535 elements; a batch, which has three, never begins with it."""


class PayloadReader:
    """Reads what payloads of one stream say of blocks, in any dialect.

    A stream is of one dialect, and its hashes are this kit's or an engine's: which, its first batch tells.
    """

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads = _HEADS_READERS[0]

    def _told(self, content: bytes) -> list[_Told | None]:
        """What each event of a source tells; None for one that readers drop."""
        for reader in (self._heads, *_HEADS_READERS):
            try:
                if content[0] == _LIST:
                    heads = [head for batch in reader.batches(content) for head in batch[1]]
                else:
                    heads = reader.batch(content)[1]  # type: ignore[assignment]
            except msgspec.ValidationError:
                continue
            self._heads = reader
            return [head.told() for head in heads]
        # Some events are of one form and some of the other: what readers make of each is what counts.
        return [_told_of_odd_event(bytes(event)) for event in _events_of(content)]

    def changes(self, payload: bytes) -> BlockChanges:
        """What a payload changes, as its encoder might have said."""
        changes: list[tuple[type[WireEvent], BlockLocation, list[int]]] = []
        for told in self._told(payload):
            if told is None:
                continue
            kind, location, hashes, _ = told
            if not changes or changes[-1][0] is not kind or changes[-1][1] != location:
                changes.append((kind, location, []))
            changes[-1][2].extend(hashes)
        return tuple([BlockChange(kind, location, array("q", hashes).tobytes()) for kind, location, hashes in changes])

    def runs(self, content: bytes) -> list[BlockRun[msgspec.Raw]]:
        """The runs of a source: of one payload, or of a list of them."""
        return [
            BlockRun(told[1], told[2], told[3], event)
            for told, event in zip(self._told(content), _events_of(content), strict=True)
            if told is not None and told[0] is BlockStored
        ]


def _events_of(content: bytes) -> list[msgspec.Raw]:
    if content[0] == _LIST:
        return [event for batch in _read_events_of_many(content) for event in batch[1]]
    events: list[msgspec.Raw] = _read_events(content)[1]
    return events


def _told_of_odd_event(raw: bytes) -> _Told | None:
    try:
        told = summarize_event(decode_event(raw))
    except DecodeError:
        return None
    return told.kind, told.location, told.block_hashes, told.parent


# The base of a stream.

_SHARED_BYTES = 4 * 1024
"""Payloads up to this size together are one source: a source costs some 150 bytes, and their own headers 50 each."""

_LOOKS_PER_FOLD = 4
"""Half gone sources looked at in one fold: more than become so, as a rule."""

_MAX_GONE_BLOCKS = 1_000
"""So many may be kept in vain, and as many again as stand."""


class StreamSnapshot:
    """The blocks that stand after some payloads of one stream, and their events' bytes.

    Args:
        shared_bytes: payloads up to this size together are one source.
        max_gone_blocks: so many gone blocks may be kept, and besides as many as stand.
    """

    __slots__ = (
        "_filling",
        "_gathered",
        "_max_gone_blocks",
        "_num_gathered_bytes",
        "_reader",
        "_shared_bytes",
        "_state",
    )

    def __init__(self, *, shared_bytes: int = _SHARED_BYTES, max_gone_blocks: int = _MAX_GONE_BLOCKS) -> None:
        self._shared_bytes = shared_bytes
        self._max_gone_blocks = max_gone_blocks
        self._reader = PayloadReader()
        self._state = CachedBlocks(self._reader)
        self._filling: PayloadRef | None = None  # its payloads are gathered, until they are enough for a source
        self._gathered: list[bytes] = []
        self._num_gathered_bytes = 0

    def __len__(self) -> int:
        """Standing blocks, over all sites."""
        return len(self._state)

    @property
    def num_bytes(self) -> int:
        """Bytes of the payloads of which a block stands, and of events in those that were written anew."""
        return self._state.num_bytes + self._num_gathered_bytes

    def fold(self, payload: bytes, changes: BlockChanges | None = None) -> None:
        """Fold one batch, which changes what its encoder has told; None where it told nothing."""
        state, source = self._state, None
        for change in self._reader.changes(payload) if changes is None else changes:
            hashes = memoryview(change.hashes).cast("q").tolist()
            if change.kind is BlockStored:
                if source is None:
                    source = self._source_of(len(payload))
                state.store(change.location, hashes, source)
            elif change.kind is BlockRemoved:
                state.remove(change.location, hashes)
            else:
                state.clear()
                if self._filling is not None:
                    self._filling.num_standing = 0
        if source is not None:
            self._gathered.append(payload)
            self._num_gathered_bytes += len(payload)
            if self._num_gathered_bytes >= self._shared_bytes:
                self._fill_up()
        if state.half_gone:
            self._rewrite_some()

    def _source_of(self, num_bytes: int) -> PayloadRef:
        if self._filling is not None and num_bytes >= self._shared_bytes:
            self._fill_up()  # a large one is not copied
        if self._filling is None:
            self._filling = self._state.new_source()
        return self._filling

    def _fill_up(self) -> None:
        """Complete the source that is being filled."""
        source, payloads = self._filling, self._gathered
        if source is None:
            return
        content = payloads[0] if len(payloads) == 1 else _as_list(payloads)
        self._state.complete(source, content)
        self._filling = None
        self._gathered = []
        self._num_gathered_bytes = 0

    def _rewrite_some(self) -> None:
        """Look at some of the half gone sources; where too much is kept in vain, keep the events of standing blocks."""
        state = self._state
        for _ in range(min(_LOOKS_PER_FOLD, len(state.half_gone))):
            source = state.half_gone.popleft()
            if not source.num_standing:
                continue
            if state.num_stored <= 2 * len(state) + self._max_gone_blocks:
                state.half_gone.append(source)
                continue
            runs = state.standing_runs(source)
            content = msgspec.msgpack.encode((0.0, [run.event for run in runs], 0))
            state.rewrite(source, content, sum(len(run.block_hashes) for run in runs))

    def segments(self) -> Iterator[RunSegment[msgspec.Raw]]:
        """Yield what stands, each block once, a block's parent before it; nothing may be folded meanwhile."""
        self._fill_up()
        yield from self._state.segments()


def _as_list(payloads: Sequence[bytes]) -> bytes:
    return b"".join([bytes([_LIST]), len(payloads).to_bytes(2, "big"), *payloads])


def encode_segment(segment: RunSegment[msgspec.Raw]) -> bytes:
    """Return the stored event of a segment; its unknown fields, too."""
    event = segment.run.event
    return bytes(event if segment.is_whole else slice_raw_event(event, segment.first, segment.stop))


# A queue that has grown too long.


class _OneRun:
    """Reads sources that are one run each."""

    def runs(self, content: BlockRun[Any]) -> Sequence[BlockRun[Any]]:
        return (content,)


def merge_batches(batches: Iterable[EventBatch]) -> KVEventBatch | None:
    """Return the one batch with the effect of ``batches``: cleared, then removed, then stored, parents first.

    Nothing is lost by it, so no consumer has to start over. Of a block that was stored and removed among them only
    the removal is left, 9 bytes on the wire, and a later clear takes that too. None when there were no batches.
    Events that cannot be written are kept, to be refused by name when they are encoded.
    """
    state: CachedBlocks[Any] = CachedBlocks(_OneRun())
    removed: dict[BlockLocation, dict[int, None]] = {}
    engines_removed: list[Any] = []  # as they are, for a field of theirs may be unknown here
    others: list[KVCacheEvent] = []
    cleared, last = False, None
    for last in batches:
        for given in last.events:
            try:
                event = NATIVE_WRITER.sound(
                    given
                )  # a hash may be unsigned, and an event that is refused changes nothing
            except ENCODE_ERRORS:
                others.append(given)
                continue
            told = summarize_event(event)
            if told.kind is BlockStored:
                run = BlockRun(told.location, told.block_hashes, told.parent, event)
                state.store(told.location, told.block_hashes, state.new_source(run))
            elif told.kind is BlockRemoved:
                state.remove(told.location, told.block_hashes)
                if isinstance(event, BlockRemoved):
                    removed.setdefault(told.location, {}).update(dict.fromkeys(told.block_hashes))
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
