"""EventRecorder: record the events of a prefix tree where the tree changes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from scheduler_components.cache.block_hash import (
    DEFAULT_NAMESPACE,
    DIGEST_BYTES,
    PrefixNamespace,
    block_hash_array,
    block_hashes_of,
    unpack_tokens,
)
from scheduler_components.cache.radix_tree import RadixNode, RadixTree
from scheduler_components.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, ValidatedEvents

__all__ = ["MAX_EVENT_TOKENS", "EventBacklog", "EventRecorder", "device_medium"]

MAX_EVENT_TOKENS = 65_536
"""Maximum tokens of one BlockStored, and hashes of one BlockRemoved. A longer run becomes several events.

A token takes at most 5 bytes on the wire, so one event stays far below the 4 MiB that readers accept."""


def device_medium(_: RadixNode) -> tuple[str | None, ...]:
    """Return the media of a node in a cache without lower tiers: the device."""
    return (None,)


_NAME_TYPES = frozenset({str, type(None)})


def _has_valid_types(namespace: PrefixNamespace) -> bool:
    names = (namespace.lora_name, namespace.cache_salt, namespace.extra_key, namespace.session_id)
    return _NAME_TYPES.issuperset(map(type, names)) and type(namespace.lora_id) in (int, type(None))


class EventBacklog:
    """Recorded events that wait for ``take_events``, bounded in blocks.

    When the events have more blocks than ``max_blocks``, the backlog collapses: it drops its events and admits no more.
    Its recorder then returns AllBlocksCleared and the present content instead. A reader ends in the same state.

    Args:
        max_blocks: stored and removed blocks to keep.

    Attributes:
        events: the events, in order.
        is_collapsed: True from a collapse until ``reset``.
        num_collapses: collapses since the start.
    """

    __slots__ = ("_max_blocks", "_num_blocks", "events", "is_collapsed", "num_collapses")

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self.events: list[KVCacheEvent] = []
        self.is_collapsed = False
        self.num_collapses = 0

    def admit(self, num_blocks: int) -> bool:
        """Count the blocks of one more event. Return False if the backlog has collapsed: do not record the event."""
        if self.is_collapsed:
            return False
        self._num_blocks += num_blocks
        if self._num_blocks <= self._max_blocks:
            return True
        self.reset()
        self.is_collapsed = True
        self.num_collapses += 1
        return False

    def reset(self) -> None:
        """Drop the events and end a collapse."""
        self.events = []
        self._num_blocks = 0
        self.is_collapsed = False


class EventRecorder:
    """Record the events of a tree until they are taken, in order.

    The events are bounded by an ``EventBacklog``. ``medium=None`` means the device: every consumer reads it so, and the
    encoder leaves it out.

    Args:
        tree: a hashed tree; after a collapse, its content is the events.
        max_pending_blocks: stored and removed blocks to keep.
        media_of: returns the media that hold a node, for the events after a collapse; by default the device alone.
    """

    __slots__ = ("_are_validated", "_backlog", "_media_of", "_removed", "_removed_medium", "_tree")

    def __init__(
        self,
        tree: RadixTree,
        max_pending_blocks: int,
        media_of: Callable[[RadixNode], tuple[str | None, ...]] = device_medium,
    ) -> None:
        self._tree = tree
        self._media_of = media_of
        self._backlog = EventBacklog(max_pending_blocks)
        self._removed = array("q")  # consecutive removals, which become one event
        self._removed_medium: str | None = None
        self._are_validated = True  # False after a namespace of wrong types; tokens and hashes are always valid

    @property
    def num_collapses(self) -> int:
        """Collapses of the backlog since the start."""
        return self._backlog.num_collapses

    def record_stored(self, node: RadixNode, medium: str | None = None) -> None:
        """Record that a node's pages became usable on a medium."""
        if self._backlog.admit(node.num_pages):
            self._flush_removed()
            self._backlog.events.extend(self._stored_events(node, medium))

    def record_removed(self, node: RadixNode, medium: str | None = None) -> None:
        """Record that a node's pages left a medium. Consecutive removals become one event, the deepest pages first."""
        if self._backlog.admit(node.num_pages):
            if medium != self._removed_medium:
                self._flush_removed()
                self._removed_medium = medium
            self._removed += block_hash_array(node.digests)[::-1]

    def record_cleared(self) -> None:
        """Record that every page left every medium, and drop the events before it."""
        self._reset()
        self._backlog.events.append(AllBlocksCleared())

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return the events since the last call, in order, and forget them."""
        if self._backlog.is_collapsed:
            self.record_cleared()
            for node in self._tree.walk():
                for medium in self._media_of(node):
                    self._backlog.events.extend(self._stored_events(node, medium))
        self._flush_removed()
        events = self._backlog.events
        taken = ValidatedEvents(events) if self._are_validated else tuple(events)
        self._reset()
        return taken

    def _reset(self) -> None:
        self._backlog.reset()
        self._removed = array("q")
        self._removed_medium = None
        self._are_validated = True

    def _flush_removed(self) -> None:
        removed, self._removed = self._removed, array("q")
        for first in range(0, len(removed), MAX_EVENT_TOKENS):
            hashes = tuple(removed[first : first + MAX_EVENT_TOKENS])
            self._backlog.events.append(BlockRemoved(block_hashes=hashes, medium=self._removed_medium))

    def _stored_events(self, node: RadixNode, medium: str | None) -> Iterator[BlockStored]:
        assert node.parent is not None
        page_size, namespace = self._tree.page_size, node.namespace
        if namespace is not DEFAULT_NAMESPACE and not _has_valid_types(namespace):
            self._are_validated = False
        hashes, tokens = block_hashes_of(node.digests), unpack_tokens(node.tokens)
        preceding = block_hashes_of(node.parent.digests[-DIGEST_BYTES:])
        pages_per_event = max(1, MAX_EVENT_TOKENS // page_size)
        for first in range(0, node.num_pages, pages_per_event):
            stop = first + pages_per_event
            run = hashes[first:stop]
            yield BlockStored(
                block_hashes=run,
                parent_block_hash=preceding[-1] if preceding else None,
                token_ids=tokens[first * page_size : stop * page_size],
                block_size=page_size,
                lora_id=namespace.lora_id,
                medium=medium,
                lora_name=namespace.lora_name,
                extra_keys=None if namespace.extra_key is None else ((namespace.extra_key,),) * len(run),
                cache_salt=namespace.cache_salt,
                session_id=namespace.session_id,
            )
            preceding = run
