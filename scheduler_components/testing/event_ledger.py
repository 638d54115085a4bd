"""What a stream's events add up to, block by block, and which rules of the wire they broke.

``EventLedger`` applies events and reports the rules of events. It is stricter than a router: it reports what a router
silently accepts. The cache and scheduler checks, the state machines and the judge of live engines all read events
through it.
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
    """One block's content: what its hash stands for.

    ``identity`` is what else than tokens decides it: LoRA number and name, salt, and this block's extra keys.
    """

    parent: int | None
    token_ids: tuple[int, ...]
    identity: _Identity = (None, None, None, None)


class EventLedger:
    """Applies events in order, and keeps what stands.

    Args:
        block_size: the advertised size; None takes the first event's.
        is_complete: the events begin where the cache was empty. Without it, what refers to earlier history is not
            judged, until an AllBlocksCleared makes the ledger complete.

    Attributes:
        num_chained: blocks whose hash was compared with SGLang's page chain: plain tokens below a known prefix.
        num_off_chain: those of them that have another hash. Allowed, since readers take any hash; reported for people.
    """

    __slots__ = ("_children", "_contents", "_digests", "_standing", "block_size", "is_complete", "num_chained",
                 "num_off_chain")  # fmt: skip

    def __init__(self, *, block_size: int | None = None, is_complete: bool = True) -> None:
        self.block_size = block_size
        self.is_complete = is_complete
        self.num_chained = self.num_off_chain = 0
        self._standing: dict[MediumGroup, dict[int, Block]] = {}
        self._contents: dict[int, Block] = {}
        self._digests: dict[int, bytes] = {}
        self._children: dict[MediumGroup, Counter[int]] = {}

    def apply(self, event: KVCacheEvent) -> list[Violation]:
        """Apply one event; returns the rules that it breaks. What can be understood of it is applied."""
        if isinstance(event, BlockStored):
            return list(self._store(event))
        if isinstance(event, BlockRemoved):
            return list(self._remove(event))
        if isinstance(event, AllBlocksCleared):
            self._standing.clear()
            self._children.clear()
            self.is_complete = True
            return []
        return [Violation("event", f"{type(event).__name__} is not an event of the wire")]

    def apply_all(self, events: Iterable[KVCacheEvent]) -> list[Violation]:
        """Apply events in order; returns every broken rule."""
        return [violation for event in events for violation in self.apply(event)]

    def hashes(self, medium: str | None = None, group_idx: int | None = None) -> set[int]:
        """Hashes that stand on one medium; None is the device."""
        return set(self._standing.get(medium_group(medium, group_idx), ()))

    def blocks(self) -> dict[tuple[MediumGroup, int], Block]:
        """Every standing block by place and hash."""
        return {(place, each): block for place, held in self._standing.items() for each, block in held.items()}

    def prefix(self, block_hash: int) -> tuple[int, ...]:
        """All tokens from the root to the end of a block.

        Raises:
            KeyError: the block, or one above it, was never stored, or is its own ancestor.
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
        """LoRA number, LoRA name, salt and extra keys of a block that was stored; KeyError for another."""
        return self._contents[block_hash].identity

    def _store(self, event: BlockStored) -> Iterator[Violation]:
        size = self.block_size = self.block_size or event.block_size
        if event.block_size != size:
            yield Violation("block-size", f"a block of {event.block_size} tokens where {size} are the size")
        if event.block_size < 1 or first_token_mismatch((event,)) is not None:
            told = f"{len(event.token_ids)} tokens for {len(event.block_hashes)} blocks of {event.block_size}"
            yield Violation("event", told)
            return
        try:
            pack_tokens(event.token_ids)
        except ConfigError as error:
            yield Violation("event", str(error))
            return
        if medium_tier(event.medium) is None:
            yield Violation("medium", f"medium {event.medium!r:.40}")
        parent = event.parent_block_hash
        if parent is not None and not self._stands(parent):
            if parent == 0:
                yield Violation("root-parent", f"block {_first(event)} has the parent 0")
            elif self.is_complete:
                yield Violation(
                    "parents-first", f"block {_first(event)} was stored below {parent}, which does not stand"
                )
        yield from self._store_blocks(event)

    def _store_blocks(self, event: BlockStored) -> Iterator[Violation]:
        place = medium_group(event.medium, event.group_idx)
        held, children = self._standing.setdefault(place, {}), self._children.setdefault(place, Counter())
        parent, size = event.parent_block_hash, event.block_size
        for index, block_hash in enumerate(event.block_hashes):
            extra = event.extra_keys[index] if event.extra_keys and index < len(event.extra_keys) else None
            tokens = event.token_ids[index * size : (index + 1) * size]
            block = Block(parent, tokens, (event.lora_id, event.lora_name, event.cache_salt, extra))
            known = self._contents.setdefault(block_hash, block)
            if known != block:
                yield Violation("one-content", f"hash {block_hash} stood for {_told(known)}, now for {_told(block)}")
            if block_hash in held:
                yield Violation("stored-once", f"block {block_hash} stands on {place[0]} already")
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
                return  # an identity that this kit's chain has no seed for
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
        held, children = self._standing.get(place, {}), self._children.get(place, Counter())
        removed = []
        for block_hash in event.block_hashes:
            block = held.pop(block_hash, None)
            if block is None:
                if self.is_complete:
                    yield Violation(
                        "removed-stands", f"block {block_hash} was removed from {place[0]}, where it is not"
                    )
                continue
            removed.append(block_hash)
            if block.parent is not None:
                children[block.parent] -= 1
        for block_hash in removed:  # judged after the whole event: within one, order means nothing
            if children[block_hash] > 0:
                yield Violation("children-first", f"block {block_hash} was removed from {place[0]} before its children")

    def _stands(self, block_hash: int) -> bool:
        return any(block_hash in held for held in self._standing.values())


def _first(event: BlockStored) -> int | None:
    return event.block_hashes[0] if event.block_hashes else None


def _told(block: Block) -> str:
    return f"tokens {block.token_ids!r:.60} below {block.parent} with {block.identity!r:.60}"
