"""BlockTableRecorder: record the events of an engine that keeps a table of hashed blocks instead of a prefix tree.

Such an engine (vLLM, transformers' continuous batching, TensorRT-LLM) maps a block hash to the blocks of its pool that
hold this content. The engine reports single copies to the recorder. The recorder turns the reports into events that
keep the rules of the wire:

- Copies. Two requests that compute the same prompt concurrently leave two copies under one hash. The recorder publishes
  the first copy, and publishes the removal when the last copy is gone, per medium.
- Reachability. A request can use a block only if all its ancestors are present, on any medium of its group. The
  recorder publishes only such blocks. It keeps and counts an orphan (a block whose parent is absent), and publishes it
  directly after its parent. When a block is removed before its children, the recorder first publishes the removal of
  its descendants, the deepest first. They become orphans, and the recorder publishes them again when the block returns.
- Order. Parents are stored before their children and removed after them, on each medium. When a block leaves one medium
  and stays on another, the recorder removes its descendants on the first medium and stores them again, below the
  parent that remains.

So the events always add up to the blocks that are reachable from a root, in whichever order the engine calls.
``num_unreachable_blocks`` counts the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from scheduler_components._internal.validators import check_integer
from scheduler_components.cache.block_hash import (
    DEFAULT_NAMESPACE,
    TOKEN_BYTES,
    PrefixNamespace,
    pack_tokens,
    unpack_tokens,
)
from scheduler_components.cache.recorder import MAX_EVENT_TOKENS, EventBacklog
from scheduler_components.errors import ConfigError
from scheduler_components.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    signed_block_hash,
)

__all__ = ["BlockTableRecorder"]

_ExtraKeys: TypeAlias = tuple[str | int, ...] | None

_MAX_PENDING_BLOCKS = 131_072
"""About 10 MB of events of 16-token blocks: more than one step of any engine stores or removes."""

_ON_DEVICE: tuple[str | None, ...] = (None,)  # nearly every block has these copies, so they share one tuple


def _wire_hash(block_hash: int | bytes) -> int:
    try:
        return signed_block_hash(block_hash)
    except TypeError:
        raise ConfigError("block_hash", block_hash, "is not a block hash", "give an integer or bytes") from None


class _Block:
    """One hash of one group. An entry without copies represents the absent parent of orphans."""

    __slots__ = (
        "block_hash",
        "children",
        "extra_keys",
        "group_idx",
        "is_published",
        "media",
        "namespace",
        "parent",
        "tokens",
    )

    def __init__(self, block_hash: int, group_idx: int | None) -> None:
        self.block_hash = block_hash
        self.group_idx = group_idx
        self.is_published = False
        self.media: tuple[str | None, ...] = ()  # one entry per copy
        self.children: dict[int, _Block] | None = None  # all of them have copies
        self.forget()

    def forget(self) -> None:
        """Forget the content, because no copy is left."""
        self.parent: _Block | None = None
        self.tokens = b""
        self.namespace = DEFAULT_NAMESPACE
        self.extra_keys: _ExtraKeys = None

    @property
    def parent_hash(self) -> int | None:
        return None if self.parent is None else self.parent.block_hash

    def descendants(self, on_medium: tuple[str | None] | None = None) -> Iterator[_Block]:
        """Yield the descendants depth-first, parents first; with a medium, only those connected on that medium."""
        stack = list(reversed((self.children or {}).values()))
        while stack:
            block = stack.pop()
            if on_medium is None or on_medium[0] in block.media:
                yield block
                stack.extend(reversed((block.children or {}).values()))


class _StoredRun:
    """Consecutive blocks of one prefix that become one BlockStored."""

    __slots__ = ("extra_keys", "hashes", "parent_hash", "place", "tokens")

    def __init__(self, place: tuple[str | None, int | None, PrefixNamespace], parent_hash: int | None) -> None:
        self.place = place
        self.parent_hash = parent_hash
        self.hashes: list[int] = []
        self.tokens = bytearray()
        self.extra_keys: list[_ExtraKeys] = []

    def event(self) -> BlockStored:
        medium, group_idx, namespace = self.place
        tokens = unpack_tokens(self.tokens)
        has_keys = any(keys is not None for keys in self.extra_keys)
        return BlockStored(
            block_hashes=tuple(self.hashes),
            parent_block_hash=self.parent_hash,
            token_ids=tokens,
            block_size=len(tokens) // len(self.hashes),
            lora_id=namespace.lora_id,
            medium=medium,
            lora_name=namespace.lora_name,
            extra_keys=tuple(self.extra_keys) if has_keys else None,
            group_idx=group_idx,
            cache_salt=namespace.cache_salt,
            session_id=namespace.session_id,
        )


class _RemovedRun:
    """Blocks of one medium and group that become one BlockRemoved."""

    __slots__ = ("hashes", "place")

    def __init__(self, place: tuple[str | None, int | None]) -> None:
        self.place = place
        self.hashes: list[int] = []

    def event(self) -> BlockRemoved:
        return BlockRemoved(block_hashes=tuple(self.hashes), medium=self.place[0], group_idx=self.place[1])


class _PendingEvents:
    """Events that wait to be taken. Consecutive blocks become one event."""

    __slots__ = ("_run", "backlog")

    def __init__(self, max_blocks: int) -> None:
        self.backlog = EventBacklog(max_blocks)
        self._run: _StoredRun | _RemovedRun | None = None

    def stored(self, block: _Block, medium: str | None) -> None:
        if self.backlog.admit(1):
            self.add_stored(block, medium)

    def add_stored(self, block: _Block, medium: str | None) -> None:
        """Add a stored block without counting it: the whole table after a collapse has no bound."""
        run, place = self._run, (medium, block.group_idx, block.namespace)
        parent_hash = block.parent_hash
        continues = isinstance(run, _StoredRun) and run.hashes[-1] == parent_hash and run.place == place
        if not continues or len(run.tokens) + len(block.tokens) > MAX_EVENT_TOKENS * TOKEN_BYTES:  # type: ignore[union-attr]
            self._close_run()
            run = self._run = _StoredRun(place, parent_hash)
        assert isinstance(run, _StoredRun)
        run.hashes.append(block.block_hash)
        run.tokens += block.tokens
        run.extra_keys.append(block.extra_keys)

    def removed(self, block: _Block, medium: str | None) -> None:
        if not self.backlog.admit(1):
            return
        run, place = self._run, (medium, block.group_idx)
        if not isinstance(run, _RemovedRun) or run.place != place or len(run.hashes) >= MAX_EVENT_TOKENS:
            self._close_run()
            run = self._run = _RemovedRun(place)
        run.hashes.append(block.block_hash)

    def cleared(self) -> None:
        """Add AllBlocksCleared and drop the events before it."""
        self._run = None
        self.backlog.reset()
        self.backlog.events.append(AllBlocksCleared())

    def take(self) -> tuple[KVCacheEvent, ...]:
        self._close_run()
        events = tuple(self.backlog.events)
        self.backlog.reset()
        return events

    def _close_run(self) -> None:
        if self._run is not None:
            self.backlog.events.append(self._run.event())
            self._run = None


class BlockTableRecorder:
    """The ``KvEventSource`` of an engine with a table of hashed blocks.

    Call ``store`` where the engine enters blocks into its table, ``remove`` where it takes copies out, and ``clear``
    where it empties the table. Each stored block is one more copy; each removed block is one copy less. Hashes may have
    the engine's form; events carry them as ``signed_block_hash`` returns them. The media None and ``GPU`` both mean the
    device; events carry None. Each group of a hybrid model has its own table.

    The recorder keeps one entry per block, and at most one more per orphan. An ``EventBacklog`` bounds the events:
    after a collapse, the next ``take_events`` returns AllBlocksCleared and the whole table.

    Not thread-safe. Equal calls give equal events.

    Args:
        block_size: tokens per block, in every group.
        max_pending_blocks: stored and removed blocks to keep until they are taken.

    Attributes:
        num_blocks: hashes in the tables of all groups, orphans included.
        num_orphans: blocks that were stored without all their ancestors, since the start.
        num_unknown_removals: removals of copies that were never stored, since the start; they change nothing.
        num_conflicts: copies whose parent or tokens differ from those first stored under their hash, since the start.
            The copy counts and the first content stays. A collision-free hash makes this impossible.

    Raises:
        ConfigError: a size below 1.
    """

    __slots__ = (
        "_block_bytes",
        "_groups",
        "_num_published",
        "_pending",
        "num_blocks",
        "num_conflicts",
        "num_orphans",
        "num_unknown_removals",
    )

    def __init__(self, block_size: int, max_pending_blocks: int = _MAX_PENDING_BLOCKS) -> None:
        check_integer("block_size", block_size)
        check_integer("max_pending_blocks", max_pending_blocks)
        self._block_bytes = block_size * TOKEN_BYTES
        self._groups: dict[int | None, dict[int, _Block]] = {}
        self._pending = _PendingEvents(max_pending_blocks)
        self.num_blocks = self._num_published = 0
        self.num_orphans = self.num_unknown_removals = self.num_conflicts = 0

    def __repr__(self) -> str:
        return f"<BlockTableRecorder {self.num_blocks} blocks, {self.num_unreachable_blocks} hidden>"

    # --- called by the engine ---

    def store(
        self,
        block_hashes: Sequence[int | bytes],
        token_ids: Sequence[int],
        parent_block_hash: int | bytes | None = None,
        *,
        medium: str | None = None,
        group_idx: int | None = None,
        namespace: PrefixNamespace = DEFAULT_NAMESPACE,
        extra_keys: Sequence[Sequence[str | int] | None] | None = None,
    ) -> None:
        """Record that one more copy of each of these blocks is usable.

        Args:
            block_hashes: consecutive blocks of one prefix, parents first.
            token_ids: their tokens, ``block_size`` per hash.
            parent_block_hash: the block before the first one; None at the root of a prefix.
            medium: where the copies are; None is the device.
            group_idx: KV-cache group of a hybrid model.
            namespace: adapter, salt, extra key and session of the prefix.
            extra_keys: other inputs of the hashes, one entry per block; events put ``namespace.extra_key`` first.

        Raises:
            ConfigError: the number of tokens or extra keys does not fit the number of hashes, or a hash or a token is
                invalid. Nothing has changed.
        """
        hashes = [_wire_hash(each) for each in block_hashes]
        above = None if parent_block_hash is None else _wire_hash(parent_block_hash)
        packed, size = pack_tokens(token_ids), self._block_bytes
        if len(packed) != len(hashes) * size:
            problem = f"is not {size // TOKEN_BYTES} tokens for each of {len(hashes)} blocks"
            raise ConfigError("token_ids", len(packed) // TOKEN_BYTES, problem, "give block_size tokens per hash")
        if extra_keys is not None and len(extra_keys) != len(hashes):
            raise ConfigError("extra_keys", len(extra_keys), "is not one entry per block", "give None for plain blocks")
        shared = () if namespace.extra_key is None else (namespace.extra_key,)
        medium = None if medium == MEDIUM_GPU else medium
        table = self._groups.setdefault(group_idx, {})
        for index, block_hash in enumerate(hashes):
            block = table.get(block_hash) or table.setdefault(block_hash, _Block(block_hash, group_idx))
            tokens = packed[index * size : (index + 1) * size]
            if not block.media:
                block.tokens, block.namespace = tokens, namespace
                block.extra_keys = (*shared, *((extra_keys and extra_keys[index]) or ())) or None
                self._enter(table, block, above)
            elif block.parent_hash != above or block.tokens != tokens:
                self.num_conflicts += 1
            self._add_copy(block, medium)
            above = block_hash

    def remove(
        self, block_hashes: Iterable[int | bytes], *, medium: str | None = None, group_idx: int | None = None
    ) -> None:
        """Record that one copy of each of these blocks has left a medium, in any order.

        Raises:
            ConfigError: a hash is invalid. Nothing has changed.
        """
        hashes = [_wire_hash(each) for each in block_hashes]
        medium = None if medium == MEDIUM_GPU else medium
        table = self._groups.get(group_idx, {})
        for block_hash in hashes:
            block = table.get(block_hash)
            if block is None or medium not in block.media:
                self.num_unknown_removals += 1
            else:
                self._drop_copy(table, block, medium)

    def clear(self) -> None:
        """Record that no copy of any block is left, in any group and on any medium."""
        self._groups.clear()
        self.num_blocks = self._num_published = 0
        self._pending.cleared()

    # --- read by a publisher and by an operator ---

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return the events since the last call, in order, and forget them."""
        if self._pending.backlog.is_collapsed:
            self._pending.cleared()
            roots = [block for table in self._groups.values() for block in table.values() if block.parent is None]
            for root in roots:
                for block in (root, *root.descendants()) if root.is_published else ():
                    for medium in dict.fromkeys(block.media):
                        self._pending.add_stored(block, medium)
        return self._pending.take()

    def block_hashes(self, medium: str | None = None, group_idx: int | None = None) -> Iterator[int]:
        """Iterate over the published blocks of one medium, as a reader of all events has them. None is the device."""
        medium = None if medium == MEDIUM_GPU else medium
        blocks = self._groups.get(group_idx, {}).values()
        return (block.block_hash for block in blocks if block.is_published and medium in block.media)

    @property
    def num_collapses(self) -> int:
        """Collapses of the event backlog, since the start."""
        return self._pending.backlog.num_collapses

    @property
    def num_unreachable_blocks(self) -> int:
        """Blocks of the tables that are not published because an ancestor is absent."""
        return self.num_blocks - self._num_published

    # --- the table ---

    def _enter(self, table: dict[int, _Block], block: _Block, above: int | None) -> None:
        """Link the first copy of a block to its parent; the parent may be absent."""
        self.num_blocks += 1
        if above is None:
            return
        parent = table.get(above) or table.setdefault(above, _Block(above, block.group_idx))
        block.parent = parent
        if parent.children is None:
            parent.children = {}
        parent.children[block.block_hash] = block
        self.num_orphans += not parent.is_published

    def _add_copy(self, block: _Block, medium: str | None) -> None:
        is_first_on_medium = medium not in block.media
        block.media = _ON_DEVICE if medium is None and not block.media else (*block.media, medium)
        if block.is_published:
            if is_first_on_medium:
                self._pending.stored(block, medium)
        elif block.parent is None or block.parent.is_published:
            for each in (block, *block.descendants()):
                each.is_published = True
                self._num_published += 1
                for each_medium in dict.fromkeys(each.media):
                    self._pending.stored(each, each_medium)

    def _drop_copy(self, table: dict[int, _Block], block: _Block, medium: str | None) -> None:
        remaining = list(block.media)
        remaining.remove(medium)
        block.media = _ON_DEVICE if remaining == [None] else tuple(remaining)
        if medium in remaining:
            return
        if block.is_published and remaining:
            self._leave_medium(block, medium)
        elif block.is_published:
            self._hide_descendants(block)
            self._pending.removed(block, medium)
            block.is_published = False
            self._num_published -= 1
        if not remaining:
            self._leave_table(table, block)

    def _leave_medium(self, block: _Block, medium: str | None) -> None:
        """Publish that a block has left one of its media, and store its descendants there again."""
        descendants = list(block.descendants((medium,)))
        for each in reversed(descendants):
            self._pending.removed(each, medium)
        self._pending.removed(block, medium)
        for each in descendants:
            self._pending.stored(each, medium)

    def _hide_descendants(self, block: _Block) -> None:
        for each in reversed(list(block.descendants())):
            for medium in dict.fromkeys(each.media):
                self._pending.removed(each, medium)
            each.is_published = False
            self._num_published -= 1

    def _leave_table(self, table: dict[int, _Block], block: _Block) -> None:
        """Remove a block without copies. Keep its entry while orphans refer to it; remove its parent's if unused."""
        self.num_blocks -= 1
        parent = block.parent
        if parent is not None and parent.children is not None:
            del parent.children[block.block_hash]
            if not parent.children:
                parent.children = None
                if not parent.media:
                    del table[parent.block_hash]
        block.forget()
        if block.children is None:
            table.pop(block.block_hash, None)
