"""KV-cache events: what a cache reports about its blocks.

The three structs here are the only declaration of the wire's fields: names, types, order and defaults. All other code
derives positions, names, readers and writers from them at import (``codec``, ``snapshot``). A new field is one line at
the end of a struct and one in the condition of ``DialectWriter.rows_with_changes``, plus golden vectors.

An event is frozen and holds tuples: a publisher can rely on it after ``publish``. The first seven fields of
``BlockStored`` have the names and the order of ``sglang.srt.disaggregation.kv_events`` (SGLang 0.5.x), so code written
for that module works here. ``extra_keys`` and ``group_idx`` follow in vLLM's order, then SGLang's ``cache_salt`` and
``session_id``, then the fields that vLLM 0.32 and 0.33 added. The order is fixed, because released readers read arrays
by position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

__all__ = [
    "DEFAULT_WEIGHT_VERSION",
    "UNFOLDED_FIELDS",
    "FULL_ATTENTION_KINDS",
    "LOCAL_GPU",
    "MEDIUM_GPU",
    "TIER_MEDIUM",
    "REMOTE",
    "VLLM_NIL_FIELDS",
    "WIRE_EVENTS",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "ValidatedEvents",
    "EventBatch",
    "KVCacheEvent",
    "KVEventBatch",
    "MediumGroup",
    "BlockLocation",
    "Tier",
    "WireEvent",
    "medium_group",
    "signed_block_hash",
    "block_location",
    "medium_tier",
    "true_runs",
]

DEFAULT_WEIGHT_VERSION = "default"
"""Version of the weights that an engine starts with, as in SGLang. Block hashes are seeded by every other version."""

MEDIUM_GPU = "GPU"
"""The device's medium. ``medium=None`` means the same to every consumer."""


class Tier(IntEnum):
    """The memory tier of a block, nearest first. An event's medium names it more finely."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


TIER_MEDIUM: dict[Tier, str | None] = {Tier.DEVICE: None, Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}
"""The medium that this kit's own caches name in events of each tier."""

_TIERS: dict[str | None, Tier] = {
    None: Tier.DEVICE,
    MEDIUM_GPU: Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.STORAGE,
    "EXTERNAL": Tier.STORAGE,
    "STORAGE": Tier.STORAGE,
    "FS": Tier.STORAGE,
    "OBJ": Tier.STORAGE,
}


def medium_tier(medium: str | None) -> Tier | None:
    """Return the tier of an event's medium, or None for a medium that the field does not know."""
    return _TIERS.get(medium)


BlockHash = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
BlockSize = Annotated[int, msgspec.Meta(gt=0)]
ExtraKey: TypeAlias = str | int | tuple[str | int, ...]
"""A name, a number, or vLLM's pair of a multimodal input and its offset."""


def _freeze(struct: msgspec.Struct, *names: str) -> None:
    """Replace lists by tuples, so that the caller cannot change the event later."""
    for name in names:
        value = getattr(struct, name)
        if isinstance(value, list):
            msgspec.structs.force_setattr(struct, name, tuple(value))


class KVCacheEvent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Base of all KV-cache events; the tag on the wire is the class's name."""


class BlockStored(KVCacheEvent, frozen=True):
    """Whole blocks of one prefix became usable on a medium.

    Attributes:
        block_hashes: one signed 64-bit hash per block, parents first.
        parent_block_hash: hash of the block before the first one; None at the root of a prefix, never 0.
        token_ids: ``len(block_hashes) * block_size`` token ids, each below 2**32.
        block_size: tokens per block.
        lora_id: adapter number, None for the base model.
        medium: ``GPU`` (or None), ``CPU``, ``CPU_PINNED``, ``DISK``, ``EXTERNAL``, ``STORAGE``, ``FS`` or ``OBJ``.
        lora_name: adapter name (vLLM).
        extra_keys: other inputs of the hashes, one entry per block (vLLM: multimodal hashes, salts).
        group_idx: KV-cache group of a hybrid model (vLLM).
        cache_salt: isolates tenants that share a prefix (SGLang).
        session_id: the session of the blocks (SGLang, vLLM).
        kv_cache_spec_kind: the group's kind of attention, such as ``full_attention`` or ``sliding_window`` (vLLM).
        kv_cache_spec_sliding_window: size of the sliding window in tokens (vLLM).
        locality: ``LOCAL`` or ``REMOTE`` as seen by the publisher; a remote block belongs to another worker (vLLM).
        ownership: which of several tiers on one medium holds the blocks (vLLM).
        lookahead_token_ids: tokens that follow the blocks, for drafting (vLLM).
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[TokenId, ...]
    block_size: BlockSize
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...] | None = None
    group_idx: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    lookahead_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # The common case comes first, because this runs for every event on the scheduler's thread.
        are_frozen = type(self.block_hashes) is tuple and type(self.token_ids) is tuple
        if are_frozen and self.extra_keys is None and self.lookahead_token_ids is None:
            return
        _freeze(self, "block_hashes", "token_ids", "extra_keys", "lookahead_token_ids")


class BlockRemoved(KVCacheEvent, frozen=True):
    """Blocks are no longer usable on a medium."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None

    def __post_init__(self) -> None:
        if type(self.block_hashes) is not tuple:
            _freeze(self, "block_hashes")


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """This rank holds no block any more, on any medium."""


WireEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
"""The events of the wire. A reader reports any other event of a peer as an error."""

WIRE_EVENTS: tuple[type[WireEvent], ...] = (BlockStored, BlockRemoved, AllBlocksCleared)

VLLM_NIL_FIELDS = frozenset({"medium", "lora_name"})
"""vLLM's typed decoder requires these fields. The ``vllm`` dialect writes them as nil where other maps omit them."""

UNFOLDED_FIELDS = frozenset({"token_ids", "extra_keys", "lookahead_token_ids"})
"""Fields that do not affect which blocks are cached. They are most of an event's bytes, so folding does not read them.
"""


if TYPE_CHECKING:
    _BatchEvent: TypeAlias = KVCacheEvent  # a publisher accepts any event, and refuses unknown ones by name
else:
    _BatchEvent = WireEvent  # the type that ``msgspec.msgpack.Decoder(KVEventBatch)`` reads


class ValidatedEvents(tuple[KVCacheEvent, ...]):
    """Events whose values are valid, because the cache that recorded them validates its inputs.

    An encoder checks every value of other events before it writes them. It skips the check for these.
    """

    __slots__ = ()


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events of one scheduler step.

    Attributes:
        ts: wall-clock time of the step, seconds since the epoch; never None on the wire.
        events: in the order in which they happened.
        attn_dp_rank: the stream's index; None lets the publisher stamp its own.
    """

    ts: float
    events: tuple[_BatchEvent, ...]
    attn_dp_rank: int | None = None

    def __post_init__(self) -> None:
        if type(self.events) is not tuple:
            _freeze(self, "events")


class KVEventBatch(EventBatch, frozen=True):
    """A batch of KV-cache events; on the wire always the three elements ``[ts, events, rank]``."""


MediumGroup: TypeAlias = tuple[str, int | None]
"""A medium and a KV-cache group of one worker. The same hash in two places is two blocks."""

_DEVICE: MediumGroup = (MEDIUM_GPU, None)


def medium_group(medium: str | None, group_idx: int | None = None) -> MediumGroup:
    """Return the medium and group of an event. A medium of None is the device; a medium of ``""`` is an unknown one."""
    if medium is None:
        return _DEVICE if group_idx is None else (MEDIUM_GPU, group_idx)
    return medium, group_idx


BlockLocation: TypeAlias = tuple[str, int | None, str | None, str | None]
"""Medium, group, ``REMOTE`` or None, and owner: the four properties by which events distinguish equal hashes."""

REMOTE = "REMOTE"
"""The locality of blocks of another worker. Any other locality means this worker."""

LOCAL_GPU: BlockLocation = (MEDIUM_GPU, None, None, None)
"""The location of an event that names no medium, group, locality or owner."""


def block_location(
    medium: str | None, group_idx: int | None, locality: str | None, ownership: str | None
) -> BlockLocation:
    """Return the location of an event's blocks."""
    if medium is None and group_idx is None and locality is None and ownership is None:
        return LOCAL_GPU
    return MEDIUM_GPU if medium is None else medium, group_idx, REMOTE if locality == REMOTE else None, ownership


FULL_ATTENTION_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Values of ``kv_cache_spec_kind`` for groups that keep every block of a prefix. Routers need these groups."""


def signed_block_hash(block_hash: object) -> int:
    """Return an engine's block hash as this kit's wire carries it: the low 64 bits as a signed integer.

    Args:
        block_hash: an integer of any size and sign, or bytes, big-endian. vLLM uses both; the smg gateway also folds
            bytes to their last 8.

    Raises:
        TypeError: the value is neither an integer nor bytes, or the bytes are empty.
    """
    if isinstance(block_hash, bytes) and block_hash:
        block_hash = int.from_bytes(block_hash[-8:], "big")
    if not isinstance(block_hash, int) or isinstance(block_hash, bool):
        raise TypeError(f"a block hash is an integer or non-empty bytes, not {block_hash!r:.60}")
    low = block_hash & 0xFFFF_FFFF_FFFF_FFFF
    return low - 2**64 if low >= 2**63 else low


def true_runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) for each run of consecutive true flags."""
    first = None
    for index, flag in enumerate((*flags, False)):
        if flag and first is None:
            first = index
        elif not flag and first is not None:
            yield first, index
            first = None
