"""Hypothesis strategies: events, histories of events, workloads and network faults.

``cache_histories`` are the events of a real cache. ``invalid_histories`` are events that no cache publishes.
"""

from __future__ import annotations

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from scheduler_components._internal.extras import naming_extras
from scheduler_components.cache import PrefixNamespace, RadixCache
from scheduler_components.testing.faulty_network import Fault
from scheduler_components.testing.interfaces import Workload

with naming_extras:
    from hypothesis import strategies as st

__all__ = [
    # events
    "HASHES",
    "cache_histories",
    "events",
    "invalid_histories",
    "removed_events",
    "stored_events",
    # requests and networks
    "fault_plans",
    "workloads",
]

# Events, valid histories of a cache, and invalid histories.

HASHES = st.integers(-(2**63), 2**63 - 1)
"""Any signed 64-bit hash."""

_NAMES = st.none() | st.text(max_size=8)
_MEDIA = (None, "GPU", "CPU")
_TOKEN_IDS = st.integers(0, 2**32 - 1)
_SPACES = (None, PrefixNamespace(cache_salt="tenant"), PrefixNamespace(lora_id=1, lora_name="adapter"))


@st.composite
def stored_events(draw: st.DrawFn) -> BlockStored:
    """Any encodable stored event: with or without each optional field, hashes unrelated to tokens."""
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
        kv_cache_spec_kind=draw(_NAMES),
        kv_cache_spec_sliding_window=draw(st.none() | st.integers(0, 9)),
        locality=draw(_NAMES),
        ownership=draw(_NAMES),
        lookahead_token_ids=draw(st.none() | st.lists(_TOKEN_IDS, max_size=3).map(tuple)),
    )


def removed_events() -> st.SearchStrategy[BlockRemoved]:
    """Any encodable removed event."""
    hashes, group = st.lists(HASHES, max_size=4).map(tuple), st.none() | st.integers(0, 3)
    return st.builds(BlockRemoved, hashes, _NAMES, group, _NAMES, _NAMES)


def events() -> st.SearchStrategy[tuple[KVCacheEvent, ...]]:
    """Any events, for codecs."""
    return st.lists(stored_events() | removed_events() | st.just(AllBlocksCleared()), max_size=5).map(tuple)


@st.composite
def cache_histories(draw: st.DrawFn, *, max_steps: int = 12) -> list[KVEventBatch]:
    """The batches of a small real cache after random requests, evictions and clears, one batch per step.

    The events keep all rules, and hashes are SGLang's chain. No batch is empty.
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
        taken = cache.take_events()
        if taken:
            batches.append(KVEventBatch(float(number + 1), taken))
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


def invalid_histories() -> st.SearchStrategy[list[KVEventBatch]]:
    """Encodable histories that no cache publishes: orphans, cycles, removals of unknown blocks.

    They use nine hashes on three media, so that events concern the same blocks. Batches may be empty.
    """
    removed = st.builds(
        BlockRemoved, st.lists(st.integers(1, 9), max_size=4).map(tuple), medium=st.sampled_from(_MEDIA)
    )
    steps = st.lists(_hostile_stored() | removed | st.just(AllBlocksCleared()), max_size=4)
    return st.lists(steps, max_size=8).map(
        lambda batches: [KVEventBatch(float(number), tuple(each)) for number, each in enumerate(batches)]
    )


# Requests that share prefixes, in order of arrival.


@st.composite
def workloads(
    draw: st.DrawFn,
    *,
    max_requests: int = 8,
    max_prompt_tokens: int = 48,
    max_new_tokens: int = 160,
    vocabulary: int = 4,
) -> Workload:
    """Requests for ``SCHEDULER_CHECKS``: pairs of a prompt and its maximum number of tokens to generate.

    Every second prompt begins with a part of an earlier one, and a small vocabulary makes other parts equal too. Half
    of the outputs are short. Two long ones overfill ``interfaces.MIN_POOL_TOKENS``.
    """
    num_new_tokens = st.integers(1, min(8, max_new_tokens)) | st.integers(
        max(1, max_new_tokens * 3 // 4), max_new_tokens
    )
    tokens = st.integers(0, vocabulary - 1)
    prompts: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, max_requests))):
        earlier = draw(st.sampled_from([(), *prompts]))
        head = earlier[: draw(st.integers(0, len(earlier)))]
        tail = draw(st.lists(tokens, min_size=0 if head else 1, max_size=max(1, max_prompt_tokens - len(head))))
        prompts.append((head + tuple(tail))[:max_prompt_tokens])
    return tuple((prompt, draw(num_new_tokens)) for prompt in prompts)


# Plans of network faults for ``FaultyNetwork``.


def fault_plans(*, max_messages: int = 30, faults: tuple[Fault, ...] = tuple(Fault)) -> st.SearchStrategy[list[Fault]]:
    """One fault per message, mostly ``NONE``.

    Args:
        max_messages: maximum length of a plan.
        faults: the possible faults.
    """
    return st.lists(st.just(Fault.NONE) | st.sampled_from(faults), max_size=max_messages)
