"""Merging several sources of one worker into one stream, without sockets: changes of sources in, events out."""

# The theory of merging
# =====================
#
# A worker's blocks may come from more than one source: its engine, and an offload tier next to it. A subscriber follows
# each source and reports batches, snapshots and restarts. The relay publishes one stream of all sources.
#
#     published  =  union over the sources of (blocks of the source  +  blocks of its snapshot, while one is received)
#
# This holds after every call, and each call returns the events that lead to it from the published state before. It
# follows for an event of one source:
#
#     stored      is published, unless all its blocks are published already (a snapshot repeats known blocks)
#     removed     is published without the blocks that another source still holds
#     cleared     becomes the removal of the blocks that only this source held; if no block is left, it stays a clear
#     snapshot    its stores are published as they come; when it replaces the view, the missing blocks are removed; when
#                 it is discarded, the blocks that only it had are removed
#
# So a restart of a source never empties the stream in between: readers see the difference. Readers of a worker with one
# source see its events unchanged.
#
# The relay knows the stream as well as its least trusted source. ``upstream`` publishes that state: None only while
# every source is LIVE. A source is not LIVE while its snapshot is received.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from observability.kv_stream import StreamState
from observability.kv_stream.view import location_of
from observability.relay.block_set import BlockSet
from observability.relay.passthrough import split_removal
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.events import MEDIUM_GPU, BlockLocation

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
"""Hashes by location."""

Events = tuple[KVCacheEvent, ...]


def least_trusted_state(states: Iterable[StreamState]) -> StreamState:
    """Return the state of a stream merged from streams in ``states``; ``CONNECTING`` for none."""
    return min(states, key=_WORST_FIRST.index, default=StreamState.CONNECTING)


@dataclass(slots=True)
class _Source:
    """The blocks of one source. ``staged`` has those of its snapshot so far, None while none is received."""

    state: StreamState = StreamState.CONNECTING
    held: _Blocks = field(default_factory=dict)
    staged: _Blocks | None = None

    def has(self, location: BlockLocation, block_hash: int) -> bool:
        staged = self.staged
        return block_hash in self.held.get(location, ()) or (
            staged is not None and block_hash in staged.get(location, ())
        )


class SourceMerger:
    """Merges several sources into one stream. The caller identifies each source by a key.

    Publish the returned events in order, before the next call. A new key adds a source, which is connecting and has no
    blocks.
    """

    __slots__ = ("_sources",)

    def __init__(self, sources: Iterable[int] = ()) -> None:
        self._sources: dict[int, _Source] = {key: _Source() for key in sources}

    def __repr__(self) -> str:
        counts = {key: (str(source.state), _count(source.held)) for key, source in self._sources.items()}
        return f"<SourceMerger {counts}>"

    # --- changes of a source ---

    def on_batch_applied(self, key: int, events: Events) -> Events:
        """The subscriber applied a batch of the source, or of its snapshot."""
        source = self._source(key)
        if source.staged is None and len(self._sources) == 1:
            _fold_all(source.held, events)
            return events
        into = source.held if source.staged is None else source.staged
        return tuple(each for event in events for each in self._apply(into, event))

    def on_view_cleared(self, key: int) -> Events:
        """The subscriber cleared the source's view, because the source restarted or is dead."""
        source = self._source(key)
        gone, source.held = source.held, {}
        return self._remove_unheld(gone)

    def on_snapshot_begin(self, key: int) -> None:
        """The following batches of this source belong to a snapshot."""
        self._source(key).staged = {}

    def on_snapshot_end(self, key: int, *, was_used: bool) -> Events:
        """The snapshot replaced the source's blocks, or was discarded."""
        source = self._source(key)
        staged, source.staged = source.staged or {}, None
        if was_used:
            staged, source.held = source.held, staged
        return self._remove_unheld(staged)

    def on_state_changed(self, key: int, state: StreamState) -> None:
        """The state of the source changed."""
        self._source(key).state = state

    def add_source(self, key: int) -> None:
        """Add a source, unless the stream has it."""
        self._source(key)

    def on_source_lost(self, key: int) -> Events:
        """The source is no longer followed. Its blocks stay until it is followed again or removed."""
        source = self._source(key)
        source.state = StreamState.CONNECTING
        staged, source.staged = source.staged or {}, None
        return self._remove_unheld(staged)

    def remove_source(self, key: int) -> Events:
        """Remove a source, its blocks and those of its unfinished snapshot."""
        source = self._sources.pop(key, None)
        if source is None:
            return ()
        gone = source.held
        for location, hashes in (source.staged or {}).items():
            gone.setdefault(location, BlockSet()).update(hashes)
        return self._remove_unheld(gone)

    # --- the state ---

    @property
    def state(self) -> StreamState:
        """The state of the least trusted source."""
        return least_trusted_state(source.state for source in self._sources.values())

    @property
    def upstream(self) -> str | None:
        """The ``upstream`` field of ``ReplayMeta``: None while every source is LIVE."""
        state = self.state
        return None if state is StreamState.LIVE else state.value

    @property
    def num_sources(self) -> int:
        """Number of sources, reachable or not."""
        return len(self._sources)

    def num_blocks(self, key: int) -> int:
        """Return the number of blocks of one source, over all locations."""
        return _count(self._source(key).held)

    # --- from one source's event to the stream's ---

    def _source(self, key: int) -> _Source:
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = _Source()
        return source

    def _apply(self, into: _Blocks, event: KVCacheEvent) -> Iterator[KVCacheEvent]:
        if isinstance(event, BlockStored):
            location = location_of(event)
            is_new = not all(self._is_held(location, each) for each in event.block_hashes)
            _fold_all(into, (event,))
            if is_new:
                yield event
        elif isinstance(event, BlockRemoved):
            location = location_of(event)
            _fold_all(into, (event,))
            gone = {each for each in event.block_hashes if not self._is_held(location, each)}
            if len(gone) == len(set(event.block_hashes)):
                yield event
            elif gone:
                yield from split_removal(event, gone)
        else:
            gone_blocks = dict(into)
            into.clear()
            yield from self._remove_unheld(gone_blocks)

    def _is_held(self, location: BlockLocation, block_hash: int) -> bool:
        return any(source.has(location, block_hash) for source in self._sources.values())

    def _remove_unheld(self, blocks: _Blocks) -> Events:
        """Return events that remove those of ``blocks`` that no source holds: one event per location, in any order."""
        if not any(blocks.values()):
            return ()
        if not any(_count(each.held) or _count(each.staged or {}) for each in self._sources.values()):
            return (AllBlocksCleared(),)
        removals: list[KVCacheEvent] = []
        for location, hashes in blocks.items():
            gone = tuple([each for each in hashes if not self._is_held(location, each)])
            if gone:
                medium, group_idx, locality, ownership = location
                wire_medium = None if medium == MEDIUM_GPU else medium
                removals.append(BlockRemoved(gone, wire_medium, group_idx, locality, ownership))
        return tuple(removals)


def _fold_all(blocks: _Blocks, events: Events) -> None:
    """Fold events in order. Adjacent events of one kind and location are folded together."""
    hashes: list[int] = []
    of: tuple[type[KVCacheEvent], BlockLocation] | None = None
    for event in events:
        if isinstance(event, BlockStored | BlockRemoved):
            before, of = of, (type(event), location_of(event))
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
