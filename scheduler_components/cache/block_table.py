"""Events of a table of hashed blocks: for engines that keep no tree of prefixes.

Such an engine (vLLM, transformers' continuous batching, TensorRT-LLM) has a map from block hash to the blocks of its
pool that hold this content. It tells the recorder what happens to single copies; the recorder turns that into events
that break no rule of the wire. What it adds:

- Copies. Two requests that compute the same prompt side by side leave two copies under one hash. The first one is told,
  and the removal is told when the last one goes, per medium.
- Chains. A block can be used when all blocks above it stand, on whatever medium of its group; only such blocks are
  told. An orphan (its parent is not in the table) is kept, counted and not told; it is told right after its parent
  is. When a block goes whose children are still there, the children are told as removed first, the deepest first;
  they are orphans now, and told again when the block comes back.
- Order. Parents are stored before their children and removed after them, on each medium: where a block leaves one
  medium and stays on another, what hangs below it on the first is removed and stored again, under the parent that
  is left.

So at every moment the events add up to the blocks that can be reached from a root, whatever order the engine's calls
come in. ``num_unreachable_blocks`` are the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from scheduler_components.cache.block_hash import (
    DEFAULT_NAMESPACE,
    TOKEN_BYTES,
    PrefixNamespace,
    pack_tokens,
    unpack_tokens,
)
from scheduler_components.cache.recorder import MAX_EVENT_TOKENS
from scheduler_components.errors import ConfigError
from scheduler_components.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.events import signed_block_hash as wire_hash
from scheduler_components.validators import check_integer

__all__ = ["BlockTableRecorder", "signed_block_hash"]

_ExtraKeys: TypeAlias = tuple[str | int, ...] | None

_MAX_PENDING_BLOCKS = 131_072
"""Some 10 MB of events of 16-token blocks: more than a step of any engine stores or removes."""

_ON_DEVICE: tuple[str | None, ...] = (None,)  # the copies of nearly every block: one tuple for all of them


def signed_block_hash(block_hash: int | bytes) -> int:
    """Return an engine's block hash as the wire wants it: the low 64 bits, as a signed integer.

    Args:
        block_hash: an integer of any size and sign, or bytes, big-endian: both as vLLM has them.

    Raises:
        ConfigError: it is neither, or there are no bytes.
    """
    try:
        return wire_hash(block_hash)
    except TypeError:
        raise ConfigError("block_hash", block_hash, "is not a block hash", "give an integer or bytes") from None


class _Block:
    """One hash of one group. Without copies it stands for a parent that orphans wait for."""

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
        self.children: dict[int, _Block] | None = None  # each of them has copies
        self.forget()

    def forget(self) -> None:
        """Without copies, nothing is known of the content."""
        self.parent: _Block | None = None
        self.tokens = b""
        self.namespace = DEFAULT_NAMESPACE
        self.extra_keys: _ExtraKeys = None

    @property
    def parent_hash(self) -> int | None:
        return None if self.parent is None else self.parent.block_hash

    def below(self, on_medium: tuple[str | None] | None = None) -> Iterator[_Block]:
        """Everything below, parents first, each chain in one go; with a medium, what hangs on it there alone."""
        stack = list(reversed((self.children or {}).values()))
        while stack:
            block = stack.pop()
            if on_medium is None or on_medium[0] in block.media:
                yield block
                stack.extend(reversed((block.children or {}).values()))


class _StoredRun:
    """Blocks of one chain that become one BlockStored."""

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
    """Blocks of one place that become one BlockRemoved."""

    __slots__ = ("hashes", "place")

    def __init__(self, place: tuple[str | None, int | None]) -> None:
        self.place = place
        self.hashes: list[int] = []

    def event(self) -> BlockRemoved:
        return BlockRemoved(block_hashes=tuple(self.hashes), medium=self.place[0], group_idx=self.place[1])


class _PendingEvents:
    """Events that nobody has taken, in order; what follows on each other becomes one. Bounded: see ``is_collapsed``."""

    __slots__ = ("_events", "_num_blocks", "_run", "is_collapsed", "max_blocks", "num_collapses")

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_collapses = 0
        self._reset()

    def _reset(self) -> None:
        self._events: list[KVCacheEvent] = []
        self._run: _StoredRun | _RemovedRun | None = None
        self._num_blocks = 0
        self.is_collapsed = False  # there was too much: all was dropped, and only the table itself can say what stands

    def _has_room(self) -> bool:
        """Count one block; False when there is no use in recording it."""
        if self.is_collapsed:
            return False
        self._num_blocks += 1
        if self._num_blocks <= self.max_blocks:
            return True
        self._reset()
        self.is_collapsed = True
        self.num_collapses += 1
        return False

    def stored(self, block: _Block, medium: str | None) -> None:
        if self._has_room():
            self.add_stored(block, medium)

    def add_stored(self, block: _Block, medium: str | None) -> None:
        """Without a look at the room, for the whole table after a collapse."""
        run, place = self._run, (medium, block.group_idx, block.namespace)
        parent_hash = block.parent_hash
        goes_on = isinstance(run, _StoredRun) and run.hashes[-1] == parent_hash and run.place == place
        if not goes_on or len(run.tokens) + len(block.tokens) > MAX_EVENT_TOKENS * TOKEN_BYTES:  # type: ignore[union-attr]
            self._close_run()
            run = self._run = _StoredRun(place, parent_hash)
        assert isinstance(run, _StoredRun)
        run.hashes.append(block.block_hash)
        run.tokens += block.tokens
        run.extra_keys.append(block.extra_keys)

    def removed(self, block: _Block, medium: str | None) -> None:
        if not self._has_room():
            return
        run, place = self._run, (medium, block.group_idx)
        if not isinstance(run, _RemovedRun) or run.place != place or len(run.hashes) >= MAX_EVENT_TOKENS:
            self._close_run()
            run = self._run = _RemovedRun(place)
        run.hashes.append(block.block_hash)

    def cleared(self) -> None:
        """What was before a clear no longer matters."""
        self._reset()
        self._events.append(AllBlocksCleared())

    def take(self) -> tuple[KVCacheEvent, ...]:
        self._close_run()
        events = tuple(self._events)
        self._reset()
        return events

    def _close_run(self) -> None:
        if self._run is not None:
            self._events.append(self._run.event())
            self._run = None


class BlockTableRecorder:
    """The ``KvEventSource`` of an engine with a table of hashed blocks: its calls in, events out.

    Call ``store`` where the engine enters blocks into its table, ``remove`` where it takes copies out, ``clear`` where
    it empties it. Each block that is stored is one more copy; each block that is removed is one less. Hashes are taken
    as the engine has them and told as ``signed_block_hash`` gives them. Of a medium, None and ``GPU`` are the device
    and told as None. Groups of a hybrid model are tables of their own.

    Memory is one entry per block, and at most one more per orphan. What waits to be taken is bounded: past
    ``max_pending_blocks`` it is dropped, counted in ``num_collapses``, and the next ``take_events`` gives
    AllBlocksCleared and the whole table instead.

    Not locked: one thread calls. Equal calls give equal events.

    Args:
        block_size: tokens per block, in every group.
        max_pending_blocks: stored and removed blocks to keep until they are taken.

    Attributes:
        num_blocks: hashes in the table, per group; orphans included.
        num_orphans: blocks that came while a block above them did not stand, since the start.
        num_unknown_removals: removals of copies that were never stored, since the start; they change nothing.
        num_conflicts: copies whose parent or tokens were others than those that stand under their hash, since the
            start. The copy counts, and what was first stays; an engine's hash should make it impossible.

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

    # --- what the engine says ---

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
        """One more copy of each of these blocks can be used.

        Args:
            block_hashes: blocks that follow each other in one prefix, parents first.
            token_ids: their tokens: ``block_size`` per hash.
            parent_block_hash: the block before the first one; None at the root of a prefix.
            medium: where the copies are; None is the device.
            group_idx: KV-cache group of a hybrid model.
            namespace: adapter, salt, extra key and session of the prefix.
            extra_keys: what else went into the hashes, one entry per block; ``namespace.extra_key`` stands before it.

        Raises:
            ConfigError: tokens or extra keys do not fit the number of hashes, or a hash or token is none. Nothing is
                changed.
        """
        hashes = [signed_block_hash(each) for each in block_hashes]
        above = None if parent_block_hash is None else signed_block_hash(parent_block_hash)
        packed, size = pack_tokens(token_ids), self._block_bytes
        if len(packed) != len(hashes) * size:
            told = f"are not whole blocks: {len(hashes)} of {size // TOKEN_BYTES}"
            raise ConfigError("token_ids", len(packed) // TOKEN_BYTES, told, "give block_size tokens per hash")
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
        """One copy of each of these blocks is gone from a medium, in any order.

        Raises:
            ConfigError: a hash is none. Nothing is changed.
        """
        hashes = [signed_block_hash(each) for each in block_hashes]
        medium = None if medium == MEDIUM_GPU else medium
        table = self._groups.get(group_idx, {})
        for block_hash in hashes:
            block = table.get(block_hash)
            if block is None or medium not in block.media:
                self.num_unknown_removals += 1
            else:
                self._drop_copy(table, block, medium)

    def clear(self) -> None:
        """Every copy of every block is gone, in all groups, on all media."""
        self._groups.clear()
        self.num_blocks = self._num_published = 0
        self._pending.cleared()

    # --- what a publisher and an operator ask ---

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return the events since the last call, in order, and forget them."""
        if self._pending.is_collapsed:
            self._pending.cleared()
            roots = [block for table in self._groups.values() for block in table.values() if block.parent is None]
            for root in roots:
                for block in (root, *root.below()) if root.is_published else ():
                    for medium in dict.fromkeys(block.media):
                        self._pending.add_stored(block, medium)
        return self._pending.take()

    def block_hashes(self, medium: str | None = None, group_idx: int | None = None) -> Iterator[int]:
        """The blocks that were told and stand on one medium: what a reader of all events has. None is the device."""
        medium = None if medium == MEDIUM_GPU else medium
        blocks = self._groups.get(group_idx, {}).values()
        return (block.block_hash for block in blocks if block.is_published and medium in block.media)

    @property
    def num_collapses(self) -> int:
        """How often too much waited to be taken, since the start."""
        return self._pending.num_collapses

    @property
    def num_unreachable_blocks(self) -> int:
        """Blocks of the table that are not told now, because a block above them does not stand."""
        return self.num_blocks - self._num_published

    # --- the table ---

    def _enter(self, table: dict[int, _Block], block: _Block, above: int | None) -> None:
        """Link the first copy of a block to its parent, which may be absent."""
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
        is_first_there = medium not in block.media
        block.media = _ON_DEVICE if medium is None and not block.media else (*block.media, medium)
        if block.is_published:
            if is_first_there:
                self._pending.stored(block, medium)
        elif block.parent is None or block.parent.is_published:
            for each in (block, *block.below()):
                each.is_published = True
                self._num_published += 1
                for its_medium in dict.fromkeys(each.media):
                    self._pending.stored(each, its_medium)

    def _drop_copy(self, table: dict[int, _Block], block: _Block, medium: str | None) -> None:
        left = list(block.media)
        left.remove(medium)
        block.media = _ON_DEVICE if left == [None] else tuple(left)
        if medium in left:
            return
        if block.is_published and left:
            self._leave_medium(block, medium)
        elif block.is_published:
            self._hide_below(block)
            self._pending.removed(block, medium)
            block.is_published = False
            self._num_published -= 1
        if not left:
            self._leave_table(table, block)

    def _leave_medium(self, block: _Block, medium: str | None) -> None:
        """It stays on another medium, and so what is below it stays: each is told below a parent that stands."""
        below = list(block.below((medium,)))
        for each in reversed(below):
            self._pending.removed(each, medium)
        self._pending.removed(block, medium)
        for each in below:
            self._pending.stored(each, medium)

    def _hide_below(self, block: _Block) -> None:
        for each in reversed(list(block.below())):
            for medium in dict.fromkeys(each.media):
                self._pending.removed(each, medium)
            each.is_published = False
            self._num_published -= 1

    def _leave_table(self, table: dict[int, _Block], block: _Block) -> None:
        """Its last copy is gone: the entry stays where orphans wait for it, and its parent's where it is needed."""
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
