"""Events of every shape, valid histories of a cache, and histories that no cache would tell."""

from __future__ import annotations

from hypothesis import strategies as st

from scheduler_components.cache.namespace import PrefixNamespace
from scheduler_components.cache.radix_cache import RadixCache
from scheduler_components.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)

__all__ = ["HASHES", "cache_histories", "events", "hostile_histories", "removed_events", "stored_events"]

HASHES = st.integers(-(2**63), 2**63 - 1)
"""Any signed 64-bit hash."""

_NAMES = st.none() | st.text(max_size=8)
_MEDIA = (None, "GPU", "CPU")
_TOKEN_IDS = st.integers(0, 2**32 - 1)
_SPACES = (None, PrefixNamespace(cache_salt="tenant"), PrefixNamespace(lora_id=1, lora_name="adapter"))


@st.composite
def stored_events(draw: st.DrawFn) -> BlockStored:
    """Any stored event that can be encoded: every optional field there or not, hashes unrelated to tokens."""
    block_size = draw(st.integers(1, 4))
    block_hashes = tuple(draw(st.lists(HASHES, max_size=4)))
    count = len(block_hashes) * block_size
    return BlockStored(
        block_hashes=block_hashes,
        parent_block_hash=draw(st.none() | HASHES),
        token_ids=tuple(draw(st.lists(_TOKEN_IDS, min_size=count, max_size=count))),
        block_size=block_size,
        lora_id=draw(st.none() | st.integers(0, 9)),
        medium=draw(_NAMES),
        lora_name=draw(_NAMES),
        extra_keys=draw(st.none() | st.lists(st.none() | st.tuples(st.text(max_size=3)), max_size=2).map(tuple)),
        group_idx=draw(st.none() | st.integers(0, 3)),
        cache_salt=draw(_NAMES),
        session_id=draw(_NAMES),
    )


def removed_events() -> st.SearchStrategy[BlockRemoved]:
    """Any removed event that can be encoded."""
    return st.builds(BlockRemoved, st.lists(HASHES, max_size=4).map(tuple), _NAMES, st.none() | st.integers(0, 3))


def events() -> st.SearchStrategy[tuple[KVCacheEvent, ...]]:
    """Any events, for codecs."""
    return st.lists(stored_events() | removed_events() | st.just(AllBlocksCleared()), max_size=5).map(tuple)


@st.composite
def cache_histories(draw: st.DrawFn, *, max_steps: int = 12) -> list[KVEventBatch]:
    """A valid history: what a small real cache tells of random requests, evictions and clears, one batch a step.

    Parents come first, what is removed stands, hashes are SGLang's chain. No batch is empty.
    """
    page_size = draw(st.integers(1, 3))
    cache = RadixCache(page_size=page_size, capacity_tokens=page_size * draw(st.integers(4, 10)), record=True)
    prompts = st.lists(st.integers(0, 1), min_size=page_size, max_size=4 * page_size)
    steps = st.tuples(prompts, st.sampled_from(_SPACES)) | st.integers(1, 3) | st.none()
    batches = []
    for number, step in enumerate(draw(st.lists(steps, max_size=max_steps))):
        if step is None:
            cache.clear()
        elif isinstance(step, int):
            cache.evict(step)
        else:
            _serve(cache, *step)
        told = cache.take_events()
        if told:
            batches.append(KVEventBatch(float(number + 1), told))
    return batches


def _serve(cache: RadixCache, tokens: list[int], space: PrefixNamespace | None) -> None:
    found = cache.match_prefix(tokens, space)
    cache.lock(found.node)
    own = cache.allocate(len(tokens) // cache.page_size - len(found.pages))
    cache.insert(tokens, [*found.pages, *own], space)
    cache.unlock(found.node)


@st.composite
def _hostile_stored(draw: st.DrawFn) -> BlockStored:
    block_hashes = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)))
    tokens = tuple(token for block_hash in block_hashes for token in (block_hash, block_hash + 1))
    parent = draw(st.none() | st.integers(1, 9))
    return BlockStored(block_hashes, parent, tokens, 2, None, medium=draw(st.sampled_from(_MEDIA)))


def hostile_histories() -> st.SearchStrategy[list[KVEventBatch]]:
    """Histories that can be encoded and that no cache would tell: orphans, cycles, removals of what was never stored.

    Nine hashes on three media, so that they meet; batches may be empty.
    """
    removed = st.builds(
        BlockRemoved, st.lists(st.integers(1, 9), max_size=4).map(tuple), medium=st.sampled_from(_MEDIA)
    )
    steps = st.lists(_hostile_stored() | removed | st.just(AllBlocksCleared()), max_size=4)
    return st.lists(steps, max_size=8).map(
        lambda batches: [KVEventBatch(float(number), tuple(each)) for number, each in enumerate(batches)]
    )
