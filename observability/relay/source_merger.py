"""Several sources of one worker become one stream, without sockets: what subscribers say in, events to publish out."""

# The theory
# ==========
#
# A worker's blocks may be told by more than one source: its engine, an offload tier beside it. Each source is followed
# by a subscriber, which is told of batches, of snapshots, of lives that end. A relay publishes one stream of all that.
#
#     published  =  union over the sources of (what the source holds  +  what its snapshot, while one comes, holds)
#
# That is kept after every call, and each call returns the events that lead there from what was published before. From
# it follows what happens to an event of one source:
#
#     stored      is published, unless all of it stands already (a snapshot tells again what is known)
#     removed     is published without the blocks that another source still holds
#     cleared     becomes the removal of what only this source held; where nothing else stands, it is a clear itself
#     snapshot    its stores are published as they come; when it has replaced the view, what it lacks is removed; when
#                 it came to nothing, what only it had is removed
#
# So a restart of a source never empties the stream in between: readers see the difference. And a worker with one source
# sees its events unchanged.
#
# The relay's own knowledge is as good as the worst of its sources. ``upstream`` says it to readers: None only while
# every source is LIVE. While a snapshot comes, its source is not.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from observability.kv_stream import StreamState
from observability.relay.block_set import BlockSet
from observability.relay.passthrough import split_removal
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.events import MEDIUM_GPU, BlockLocation, block_location

__all__ = ["SourceMerger", "least_trusted_state"]

_WORST_FIRST = (
    StreamState.DEAD,
    StreamState.CONNECTING,
    StreamState.SYNCING,
    StreamState.RECOVERING,
    StreamState.PARTIAL,
    StreamState.LIVE,
)

_Blocks = dict[BlockLocation, BlockSet]
"""Hashes by where they are."""

Events = tuple[KVCacheEvent, ...]


def least_trusted_state(states: Iterable[StreamState]) -> StreamState:
    """The state of what was put together from streams in ``states``; ``CONNECTING`` for none."""
    return min(states, key=_WORST_FIRST.index, default=StreamState.CONNECTING)


@dataclass(slots=True)
class _Source:
    """What one source holds; ``staged`` is what its snapshot holds so far, None while none comes."""

    state: StreamState = StreamState.CONNECTING
    held: _Blocks = field(default_factory=dict)
    staged: _Blocks | None = None

    def has(self, location: BlockLocation, block_hash: int) -> bool:
        staged = self.staged
        return block_hash in self.held.get(location, ()) or (
            staged is not None and block_hash in staged.get(location, ())
        )


class SourceMerger:
    """The one stream of several sources; each is known by a key of the caller's.

    Methods that return events expect them to be published in order, before the next call. A source that was not named
    before is new: connecting, and holding nothing.
    """

    __slots__ = ("_sources",)

    def __init__(self, sources: Iterable[int] = ()) -> None:
        self._sources: dict[int, _Source] = {key: _Source() for key in sources}

    def __repr__(self) -> str:
        counts = {key: (str(source.state), _count(source.held)) for key, source in self._sources.items()}
        return f"<SourceMerger {counts}>"

    # --- what a subscriber says of a source ---

    def on_batch_applied(self, key: int, events: Events) -> Events:
        """A batch of the source, or of its snapshot while one comes."""
        source = self._source(key)
        if source.staged is None and len(self._sources) == 1:
            _fold_all(source.held, events)
            return events
        into = source.held if source.staged is None else source.staged
        return tuple(each for event in events for each in self._apply(into, event))

    def on_view_cleared(self, key: int) -> Events:
        """What was known of the source is known no more: it restarted, or is dead."""
        source = self._source(key)
        gone, source.held = source.held, {}
        return self._no_longer_standing(gone)

    def on_snapshot_begin(self, key: int) -> None:
        """Batches of this source belong to a snapshot from now on."""
        self._source(key).staged = {}

    def on_snapshot_end(self, key: int, *, was_used: bool) -> Events:
        """The snapshot is what the source holds, or came to nothing."""
        source = self._source(key)
        staged, source.staged = source.staged or {}, None
        if was_used:
            staged, source.held = source.held, staged
        return self._no_longer_standing(staged)

    def on_state_changed(self, key: int, state: StreamState) -> None:
        """How far the source can be trusted from now on."""
        self._source(key).state = state

    def add_source(self, key: int) -> None:
        """The source is one of this stream's; it is connecting, if it was not before."""
        self._source(key)

    def on_source_lost(self, key: int) -> Events:
        """Nobody follows the source now; what it held stays until somebody says more."""
        source = self._source(key)
        source.state = StreamState.CONNECTING
        staged, source.staged = source.staged or {}, None
        return self._no_longer_standing(staged)

    def remove_source(self, key: int) -> Events:
        """The source is none of this stream's any more."""
        source = self._sources.pop(key, None)
        return () if source is None else self._no_longer_standing(source.held)

    # --- what is known ---

    @property
    def state(self) -> StreamState:
        """That of the source that is known least."""
        return least_trusted_state(source.state for source in self._sources.values())

    @property
    def upstream(self) -> str | None:
        """What readers are told of this stream, see ``Meta``; None while all sources are known whole."""
        state = self.state
        return None if state is StreamState.LIVE else state.value

    @property
    def num_sources(self) -> int:
        """Sources that the stream is made of, whether or not they are there."""
        return len(self._sources)

    def num_blocks(self, key: int) -> int:
        """Blocks that one source holds, over all sites."""
        return _count(self._source(key).held)

    # --- from one source's event to the stream's ---

    def _source(self, key: int) -> _Source:
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = _Source()
        return source

    def _apply(self, into: _Blocks, event: KVCacheEvent) -> Iterator[KVCacheEvent]:
        if isinstance(event, BlockStored):
            location = _site_of(event)
            is_new = not all(self._stands(location, each) for each in event.block_hashes)
            _fold_all(into, (event,))
            if is_new:
                yield event
        elif isinstance(event, BlockRemoved):
            location = _site_of(event)
            _fold_all(into, (event,))
            gone = {each for each in event.block_hashes if not self._stands(location, each)}
            if len(gone) == len(set(event.block_hashes)):
                yield event
            elif gone:
                yield from split_removal(event, gone)
        else:
            gone_blocks = dict(into)
            into.clear()
            yield from self._no_longer_standing(gone_blocks)

    def _stands(self, location: BlockLocation, block_hash: int) -> bool:
        return any(source.has(location, block_hash) for source in self._sources.values())

    def _no_longer_standing(self, blocks: _Blocks) -> Events:
        """Take back those of ``blocks`` that no source holds: one event per location, in which order means nothing."""
        if not any(blocks.values()):
            return ()
        if not any(_count(each.held) or _count(each.staged or {}) for each in self._sources.values()):
            return (AllBlocksCleared(),)
        removals: list[KVCacheEvent] = []
        for location, hashes in blocks.items():
            gone = tuple([each for each in hashes if not self._stands(location, each)])
            if gone:
                medium, group_idx, locality, ownership = location
                told = None if medium == MEDIUM_GPU else medium
                removals.append(BlockRemoved(gone, told, group_idx, locality, ownership))
        return tuple(removals)


def _site_of(event: BlockStored | BlockRemoved) -> BlockLocation:
    return block_location(event.medium, event.group_idx, event.locality, event.ownership)


def _fold_all(blocks: _Blocks, events: Events) -> None:
    """Fold events in order; those of one kind and location that follow each other, as one."""
    hashes: list[int] = []
    of: tuple[type[KVCacheEvent], BlockLocation] | None = None
    for event in events:
        if isinstance(event, BlockStored | BlockRemoved):
            before, of = of, (type(event), _site_of(event))
            if of != before and before is not None:
                _change(blocks, before, hashes)
                hashes = []
            hashes += event.block_hashes
        else:
            blocks.clear()
            hashes, of = [], None
    if of is not None:
        _change(blocks, of, hashes)


def _change(blocks: _Blocks, of: tuple[type[KVCacheEvent], BlockLocation], hashes: list[int]) -> None:
    kind, location = of
    held = blocks.get(location)
    if issubclass(kind, BlockStored):
        if held is None:
            held = blocks[location] = BlockSet()
        held.update(hashes)
    elif held is not None:
        held.difference_update(hashes)


def _count(blocks: _Blocks) -> int:
    return sum(map(len, blocks.values()))
