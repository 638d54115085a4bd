"""Events of a prefix tree, recorded where the tree changes."""

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

__all__ = ["MAX_EVENT_TOKENS", "EventRecorder", "NullEventRecorder", "device_medium"]

MAX_EVENT_TOKENS = 65_536
"""Tokens in one BlockStored (and hashes in one BlockRemoved); longer runs take several. At most 5 bytes per token on
the wire keep one event far below the 4 MiB that readers take."""


def device_medium(_: RadixNode) -> tuple[str | None, ...]:
    """Return the media of a node in a cache without lower tiers: the device."""
    return (None,)


_NAME_TYPES = frozenset({str, type(None)})


def _is_sound(namespace: PrefixNamespace) -> bool:
    """True when what a request said of its namespace is of the types that events have."""
    names = (namespace.lora_name, namespace.cache_salt, namespace.extra_key, namespace.session_id)
    return _NAME_TYPES.issuperset(map(type, names)) and type(namespace.lora_id) in (int, type(None))


class NullEventRecorder:
    """Records nothing: for a rank that owns no stream, so that the cache never asks whether it should."""

    __slots__ = ()

    num_collapses = 0

    def record_stored(self, node: RadixNode, medium: str | None = None) -> None:
        """Record nothing."""

    def record_removed(self, node: RadixNode, medium: str | None = None) -> None:
        """Record nothing."""

    def record_cleared(self) -> None:
        """Record nothing."""

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """There is never an event."""
        return ()


class EventRecorder:
    """Keeps the events since they were last taken, in order.

    What is kept is bounded. Past ``max_pending_blocks`` the backlog collapses: it is dropped, counted in
    ``num_collapses``, and the next ``take`` gives AllBlocksCleared and the whole present tree instead. A reader ends in
    the same state.

    ``medium=None`` means the device: every consumer reads it so, and it is trimmed from the wire.

    Args:
        tree: a hashed tree; after a collapse its content is the events.
        max_pending_blocks: stored and removed blocks to keep.
        media_of: the media that a node of the tree is on, for a collapse; the device alone by default.
    """

    __slots__ = (
        "_collapsed",
        "_events",
        "_is_checked",
        "_media_of",
        "_pending_blocks",
        "_removed",
        "_removed_medium",
        "_tree",
        "max_pending_blocks",
        "num_collapses",
    )

    def __init__(
        self,
        tree: RadixTree,
        max_pending_blocks: int,
        media_of: Callable[[RadixNode], tuple[str | None, ...]] = device_medium,
    ) -> None:
        self._tree = tree
        self._media_of = media_of
        self.max_pending_blocks = max_pending_blocks
        self.num_collapses = 0
        self._events: list[KVCacheEvent] = []
        self._removed = array("q")  # not yet an event: removals that follow each other become one
        self._removed_medium: str | None = None
        self._pending_blocks = 0
        self._collapsed = False
        self._is_checked = True  # tokens and hashes always are

    def record_stored(self, node: RadixNode, medium: str | None = None) -> None:
        """A node's pages became usable on a medium."""
        if self._has_room(node.num_pages):
            self._flush_removed()
            self._events.extend(self._stored_events(node, medium))

    def record_removed(self, node: RadixNode, medium: str | None = None) -> None:
        """A node's pages left a medium. Runs of removals become one event, the deepest pages first."""
        if self._has_room(node.num_pages):
            if medium != self._removed_medium:
                self._flush_removed()
                self._removed_medium = medium
            self._removed += block_hash_array(node.digests)[::-1]

    def record_cleared(self) -> None:
        """Every page left every medium: events that wait no longer matter."""
        self._reset()
        self._events.append(AllBlocksCleared())

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return the events since the last call, in order, and forget them."""
        if self._collapsed:
            self.record_cleared()
            for node in self._tree.walk():
                for medium in self._media_of(node):
                    self._events.extend(self._stored_events(node, medium))
        self._flush_removed()
        events = ValidatedEvents(self._events) if self._is_checked else tuple(self._events)
        self._reset()
        return events

    def _reset(self) -> None:
        self._events = []
        self._removed = array("q")
        self._removed_medium = None
        self._pending_blocks = 0
        self._collapsed = False
        self._is_checked = True

    def _has_room(self, num_blocks: int) -> bool:
        """Count blocks of an event; False when the backlog has collapsed, so that the event is not needed."""
        if self._collapsed:
            return False
        self._pending_blocks += num_blocks
        if self._pending_blocks <= self.max_pending_blocks:
            return True
        self._reset()
        self._collapsed = True
        self.num_collapses += 1
        return False

    def _flush_removed(self) -> None:
        removed, self._removed = self._removed, array("q")
        for first in range(0, len(removed), MAX_EVENT_TOKENS):
            hashes = tuple(removed[first : first + MAX_EVENT_TOKENS])
            self._events.append(BlockRemoved(block_hashes=hashes, medium=self._removed_medium))

    def _stored_events(self, node: RadixNode, medium: str | None) -> Iterator[BlockStored]:
        assert node.parent is not None
        page_size, namespace = self._tree.page_size, node.namespace
        if namespace is not DEFAULT_NAMESPACE and not _is_sound(namespace):
            self._is_checked = False
        hashes, tokens = block_hashes_of(node.digests), unpack_tokens(node.tokens)
        above = block_hashes_of(node.parent.digests[-DIGEST_BYTES:])
        pages_per_event = max(1, MAX_EVENT_TOKENS // page_size)
        for first in range(0, node.num_pages, pages_per_event):
            stop = first + pages_per_event
            run = hashes[first:stop]
            yield BlockStored(
                block_hashes=run,
                parent_block_hash=above[-1] if above else None,
                token_ids=tokens[first * page_size : stop * page_size],
                block_size=page_size,
                lora_id=namespace.lora_id,
                medium=medium,
                lora_name=namespace.lora_name,
                extra_keys=None if namespace.extra_key is None else ((namespace.extra_key,),) * len(run),
                cache_salt=namespace.cache_salt,
                session_id=namespace.session_id,
            )
            above = run
