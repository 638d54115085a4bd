"""What a stream's events add up to, block by block, and which rules of the wire they broke.

``RULES`` is the table of all rules, those of frames and replays included; ``EventLedger`` applies events and reports
the rules of events. It is stricter than a router: it reports what a router silently accepts. The cache and scheduler
checks, the state machines and the judge of live engines all read events through it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum

import attrs
import msgspec

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, ConfigError, KVCacheEvent
from scheduler_components.cache import PrefixNamespace, block_hashes_of, pack_tokens, page_digests
from scheduler_components.kv_events import Place, first_unfilled, place_of, tier_of

__all__ = [
    "RULES",
    "Block",
    "EventLedger",
    "Rule",
    "Violation",
    "Weight",
]

# Every rule of the wire that a stream can break: what it is, how bad, whom it harms, and what repairs it.
#
# The rules are what released consumers were measured to need: Dynamo's indexer (ai-dynamo-runtime 1.6.1), the smg
# gateway 1.13.0, SGLang's 0.5.23 and vLLM's 0.33.0 readers.


class Weight(StrEnum):
    """How bad a broken rule is: an ERROR loses blocks or whole streams at some consumer, a WARNING costs hits."""

    ERROR = "error"
    WARNING = "warning"


@attrs.frozen
class Rule:
    """One rule.

    Attributes:
        name: in reports and JSON; never changes its meaning.
        weight: how bad it is to break it.
        holds: the rule as a sentence.
        hint: what its publisher can do; says who is harmed where that is not plain.
    """

    name: str
    weight: Weight
    holds: str
    hint: str


class Violation(msgspec.Struct, frozen=True):
    """One broken rule: its name, and what was seen."""

    rule: str
    seen: str


_E, _W = Weight.ERROR, Weight.WARNING

_TABLE = (
    # the engine
    Rule("descriptor", _E, "/server_info describes the streams", "publish kv_events with endpoint, topic, sizes"),
    Rule("reachable", _E, "every advertised port takes connections", "check that each rank binds its offset port"),
    Rule(
        "speaks",
        _E,
        "something is published or replayed",
        "send the engine requests while this listens, or listen longer",
    ),
    # frames
    Rule("live-frames", _E, "a live message is (topic, sequence, payload)", "send exactly three frames"),
    Rule("topic", _E, "the first frame begins with the advertised topic", "advertise the topic that is sent"),
    Rule(
        "sequence-frame",
        _E,
        "the sequence is 8 bytes, big-endian, never negative",
        "-1 is the end marker of replays; send 8 bytes",
    ),
    Rule(
        "order",
        _E,
        "sequence numbers only grow",
        "one publisher and one counter per stream; restart above the last number",
    ),
    Rule(
        "no-gap",
        _E,
        "no number is skipped: every batch comes live or by replay",
        "take a number only when its payload goes out",
    ),
    # batches
    Rule(
        "batch",
        _E,
        "a payload is msgpack [time, events, rank]",
        "send exactly three elements; Dynamo drops the batch otherwise",
    ),
    Rule("batch-time", _E, "the time is a finite number", "stamp every batch with seconds since the epoch"),
    Rule("batch-rank", _E, "the batch names its stream's rank", "offset each rank's endpoint and stamp its rank"),
    Rule(
        "event",
        _E,
        "every event can be read",
        "send BlockStored, BlockRemoved or AllBlocksCleared; others cost Dynamo the batch",
    ),
    # values
    Rule(
        "hash-type", _W, "hashes are integers of 64 bits", "bytes are folded differently by readers: send signed int64"
    ),
    Rule(
        "block-size",
        _E,
        "all blocks have the advertised size",
        "advertise the cache's size: routers hash prompts by it",
    ),
    Rule("root-parent", _E, "the parent of a root is nil, not 0", "send nil"),
    Rule(
        "parents-first",
        _E,
        "a parent is stored before its children",
        "store parents first: Dynamo drops an orphan and all below it",
    ),
    Rule(
        "one-content",
        _E,
        "one hash means one content",
        "chain the parent, tokens and identity (LoRA, salt) into the hash",
    ),
    Rule("stored-once", _W, "a block that stands is not stored again", "record transitions of the cache, not requests"),
    Rule("removed-stands", _W, "what is removed was stored", "announce stores and removals of every tier alike"),
    Rule(
        "children-first",
        _W,
        "children are removed before their parents",
        "evict leaves first: readers lose what hangs below",
    ),
    Rule("medium", _W, "a medium is one that readers know", "send GPU, CPU, CPU_PINNED, DISK, EXTERNAL or STORAGE"),
    # replay
    Rule("replay-answers", _E, "a replay request is answered", "bind a ROUTER at the replay endpoint"),
    Rule(
        "replay-frames",
        _E,
        "an answer is (sequence, payload), with or without a topic before",
        "send those frames after the empty delimiter",
    ),
    Rule("replay-end", _E, "every answer ends with the end marker", "send it always: Dynamo waits for it forever"),
    Rule("replay-order", _E, "replayed numbers grow, without holes", "answer in order, from the start asked for"),
    Rule("replay-same", _E, "a replayed payload is the live one", "keep the bytes that were sent"),
    Rule(
        "replay-past-end", _E, "a request from beyond the end gets a bare end marker", "answer it with the end marker"
    ),
    Rule(
        "replay-malformed",
        _W,
        "a malformed request gets a bare end marker",
        "answer it: a confused client must not hang",
    ),
    Rule(
        "late-joiner",
        _W,
        "a replay from 0 begins with an empty cache or a whole state",
        "offer replay, and a window that reaches back: else a late joiner can never get the whole state",
    ),
    # the pool itself, where an oracle reads it
    Rule(
        "pool-missing",
        _E,
        "a block that the pool holds stands in the stream",
        "tell every store, and remove a block when its last copy goes: routers miss hits otherwise",
    ),
    Rule(
        "pool-extra",
        _E,
        "a block that stands in the stream is in the pool",
        "tell every removal, on every tier: routers send prompts where nothing is cached otherwise",
    ),
)

RULES = {rule.name: rule for rule in _TABLE}
"""By name, in the order of a report."""

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
        self._standing: dict[Place, dict[int, Block]] = {}
        self._contents: dict[int, Block] = {}
        self._digests: dict[int, bytes] = {}
        self._children: dict[Place, Counter[int]] = {}

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
        return set(self._standing.get(place_of(medium, group_idx), ()))

    def blocks(self) -> dict[tuple[Place, int], Block]:
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
        if event.block_size < 1 or first_unfilled((event,)) is not None:
            told = f"{len(event.token_ids)} tokens for {len(event.block_hashes)} blocks of {event.block_size}"
            yield Violation("event", told)
            return
        try:
            pack_tokens(event.token_ids)
        except ConfigError as error:
            yield Violation("event", str(error))
            return
        if tier_of(event.medium) is None:
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
        place = place_of(event.medium, event.group_idx)
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
        if tier_of(event.medium) is None:
            yield Violation("medium", f"medium {event.medium!r:.40}")
        place = place_of(event.medium, event.group_idx)
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
