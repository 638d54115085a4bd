"""The blocks that a stream's events add up to, and the rules that the events break.

``EventLedger`` is stricter than a router: it reports events that a router silently accepts. The checks of caches and
schedulers, the state machines and the stream verifier read events with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, ConfigError, KVCacheEvent
from scheduler_components.cache import PrefixNamespace
from scheduler_components.cache.block_hash import block_hashes_of, pack_tokens, page_digests
from scheduler_components.events import MediumGroup, medium_group, medium_tier
from scheduler_components.kv_events.codec import first_token_mismatch
from scheduler_components.testing.rules import Violation

__all__ = [
    "Block",
    "EventLedger",
]

_Identity = tuple[object, ...]


class Block(msgspec.Struct, frozen=True):
    """The content of one hash.

    ``identity`` has the other inputs of the hash: LoRA number and name, salt, and the block's extra keys.
    """

    parent: int | None
    token_ids: tuple[int, ...]
    identity: _Identity = (None, None, None, None)


class EventLedger:
    """Applies events in order, and keeps the stored blocks.

    Args:
        block_size: the advertised size; None uses that of the first event.
        is_complete: the events begin with an empty cache. Otherwise references to earlier events are not verified
            until an AllBlocksCleared makes the ledger complete.

    Attributes:
        num_chained: blocks whose hash was compared with SGLang's page chain: plain tokens after a known prefix.
        num_off_chain: those with another hash. This is allowed, because readers accept any hash.
    """

    __slots__ = ("_children", "_contents", "_digests", "_live", "block_size", "is_complete", "num_chained",
                 "num_off_chain")  # fmt: skip

    def __init__(self, *, block_size: int | None = None, is_complete: bool = True) -> None:
        self.block_size = block_size
        self.is_complete = is_complete
        self.num_chained = self.num_off_chain = 0
        self._live: dict[MediumGroup, dict[int, Block]] = {}
        self._contents: dict[int, Block] = {}
        self._digests: dict[int, bytes] = {}
        self._children: dict[MediumGroup, Counter[int]] = {}

    def apply(self, event: KVCacheEvent) -> list[Violation]:
        """Apply one event as far as possible, and return its violations."""
        if isinstance(event, BlockStored):
            return list(self._store(event))
        if isinstance(event, BlockRemoved):
            return list(self._remove(event))
        if isinstance(event, AllBlocksCleared):
            self._live.clear()
            self._children.clear()
            self.is_complete = True
            return []
        return [Violation("event", f"{type(event).__name__} is not an event of the wire")]

    def apply_all(self, events: Iterable[KVCacheEvent]) -> list[Violation]:
        """Apply events in order, and return all violations."""
        return [violation for event in events for violation in self.apply(event)]

    def hashes(self, medium: str | None = None, group_idx: int | None = None) -> set[int]:
        """Return the stored hashes of one medium; None is the device."""
        return set(self._live.get(medium_group(medium, group_idx), ()))

    def blocks(self) -> dict[tuple[MediumGroup, int], Block]:
        """Return every stored block by place and hash."""
        return {(place, each): block for place, held in self._live.items() for each, block in held.items()}

    def prefix(self, block_hash: int) -> tuple[int, ...]:
        """Return all tokens from the root to the end of a block.

        Raises:
            KeyError: the block or an ancestor was never stored, or the block is its own ancestor.
        """
        pages: dict[int, tuple[int, ...]] = {}
        above: int | None = block_hash
        while above is not None:
            if above in pages:
                raise KeyError(above)
            block = self._contents[above]
            pages[above] = block.token_ids
            above = block.parent
        return tuple(token for page in reversed(pages.values()) for token in page)

    def identity(self, block_hash: int) -> tuple[object, ...]:
        """Return LoRA number, LoRA name, salt and extra keys of a stored block; raise KeyError for others."""
        return self._contents[block_hash].identity

    def _store(self, event: BlockStored) -> Iterator[Violation]:
        size = self.block_size = self.block_size or event.block_size
        if event.block_size != size:
            yield Violation("block-size", f"a block of {event.block_size} tokens instead of {size}")
        if event.block_size < 1 or first_token_mismatch((event,)) is not None:
            sizes = f"{len(event.token_ids)} tokens for {len(event.block_hashes)} blocks of {event.block_size}"
            yield Violation("event", sizes)
            return
        try:
            pack_tokens(event.token_ids)
        except ConfigError as error:
            yield Violation("event", str(error))
            return
        if medium_tier(event.medium) is None:
            yield Violation("medium", f"medium {event.medium!r:.40}")
        parent = event.parent_block_hash
        if parent is not None and not self._is_live(parent):
            if parent == 0:
                yield Violation("root-parent", f"block {_first(event)} has the parent 0")
            elif self.is_complete:
                yield Violation(
                    "parents-first", f"block {_first(event)} was stored below {parent}, which is not stored"
                )
        yield from self._store_blocks(event)

    def _store_blocks(self, event: BlockStored) -> Iterator[Violation]:
        place = medium_group(event.medium, event.group_idx)
        held, children = self._live.setdefault(place, {}), self._children.setdefault(place, Counter())
        parent, size = event.parent_block_hash, event.block_size
        for index, block_hash in enumerate(event.block_hashes):
            extra = event.extra_keys[index] if event.extra_keys and index < len(event.extra_keys) else None
            tokens = event.token_ids[index * size : (index + 1) * size]
            block = Block(parent, tokens, (event.lora_id, event.lora_name, event.cache_salt, extra))
            known = self._contents.setdefault(block_hash, block)
            if known != block:
                yield Violation(
                    "one-content", f"hash {block_hash} had {_describe(known)}, and now has {_describe(block)}"
                )
            if block_hash in held:
                yield Violation("stored-once", f"block {block_hash} is already stored on {place[0]}")
            elif parent is not None:
                children[parent] += 1
            held[block_hash] = block
            self._compare_chain(block_hash, block)
            parent = block_hash

    def _compare_chain(self, block_hash: int, block: Block) -> None:
        lora_id, lora_name, salt, extra = block.identity
        if block.parent is None and extra is None:
            namespace = PrefixNamespace(lora_id=lora_id, lora_name=lora_name, cache_salt=salt)  # type: ignore[arg-type]
            try:
                prior = namespace.seed()
            except ConfigError:
                return  # This kit's chain has no seed for the identity.
        elif block.parent in self._digests:
            prior = self._digests[block.parent]
        else:
            return
        digest = page_digests(pack_tokens(block.token_ids), len(block.token_ids), prior)
        self._digests[block_hash] = digest
        self.num_chained += 1
        self.num_off_chain += block_hashes_of(digest) != (block_hash,)

    def _remove(self, event: BlockRemoved) -> Iterator[Violation]:
        if medium_tier(event.medium) is None:
            yield Violation("medium", f"medium {event.medium!r:.40}")
        place = medium_group(event.medium, event.group_idx)
        held, children = self._live.get(place, {}), self._children.get(place, Counter())
        removed = []
        for block_hash in event.block_hashes:
            block = held.pop(block_hash, None)
            if block is None:
                if self.is_complete:
                    yield Violation(
                        "removed-stands", f"block {block_hash} was removed from {place[0]}, but is not stored there"
                    )
                continue
            removed.append(block_hash)
            if block.parent is not None:
                children[block.parent] -= 1
        for block_hash in removed:  # Verified after the whole event, because the order within an event has no meaning.
            if children[block_hash] > 0:
                yield Violation("children-first", f"block {block_hash} was removed from {place[0]} before its children")

    def _is_live(self, block_hash: int) -> bool:
        return any(block_hash in held for held in self._live.values())


def _first(event: BlockStored) -> int | None:
    return event.block_hashes[0] if event.block_hashes else None


def _describe(block: Block) -> str:
    return f"tokens {block.token_ids!r:.60} below {block.parent} with {block.identity!r:.60}"
