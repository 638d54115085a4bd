"""``once_per_block``: readers that keep a set and readers that count always hold the blocks of vLLM's pool.

The tests use vLLM's own block pool where vLLM is installed, and a double elsewhere.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import sha256
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from kit.searches import num_examples

from scheduler_components import ConfigError
from scheduler_components.engines.vllm_published_blocks import VllmPublishedBlocks, patch_removed_events_to_last_copy

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

SIZE = 4


@pytest.fixture(autouse=True)
def unhooked(vllm_events: Any) -> Iterator[None]:
    """Give the pool vLLM's own method at the start of each test, and what it had before at the end."""
    pool = import_module("vllm.v1.core.block_pool").BlockPool
    before = pool._emit_block_removed_events
    pool._emit_block_removed_events = inspect.unwrap(before)
    yield
    pool._emit_block_removed_events = before


def request_of(words: Iterable[int]) -> Any:
    """Return the attributes of a request that the pool reads. One word of the prompt is one block of tokens."""
    hashes, tokens, above = [], [], b""
    for word in words:
        tokens += [word] * SIZE
        above = sha256(above + bytes([word])).digest()
        hashes.append(above)
    plain = dict.fromkeys(("lora_request", "session_id", "cache_salt", "prompt_embeds"))
    return SimpleNamespace(block_hashes=hashes, all_token_ids=tokens, mm_features=[], **plain)


class SetReader:
    """A reader that keeps a set of hashes, as this kit's view and gateways do."""

    def __init__(self) -> None:
        self.held: set[Any] = set()

    def apply(self, event: Any) -> None:
        kind = type(event).__name__
        if kind == "BlockStored":
            self.held.update(event.block_hashes)
        elif kind == "BlockRemoved":
            self.held.difference_update(event.block_hashes)
        else:
            self.held.clear()


class CountingReader:
    """A reader that counts stores and removals of each hash, as Dynamo and llm-d do."""

    def __init__(self) -> None:
        self.counts: Counter[Any] = Counter()

    @property
    def held(self) -> set[Any]:
        return {each for each, count in self.counts.items() if count > 0}

    def apply(self, event: Any) -> None:
        kind = type(event).__name__
        if kind == "BlockStored":
            self.counts.update(event.block_hashes)
        elif kind == "BlockRemoved":
            self.counts.subtract(event.block_hashes)
        else:
            self.counts.clear()


class UnfilteredBlocks:
    """A filter that keeps every event, as vLLM does."""

    def drop_published(self, batch: Any) -> Any:
        return batch


class Pool:
    """vLLM's block pool, the requests that hold its blocks, and readers of its events."""

    def __init__(self, published: Any = None) -> None:
        self.vllm: Any = import_module("vllm.v1.core.block_pool").BlockPool(
            num_gpu_blocks=12, enable_caching=True, hash_block_size=SIZE, enable_kv_cache_events=True
        )
        self.batch_of = import_module("vllm.distributed.kv_events").KVEventBatch
        self.published: Any = VllmPublishedBlocks() if published is None else published
        self.running: list[list[Any]] = []
        self.readers = (SetReader(), CountingReader())
        self.events: list[Any] = []

    def compute(self, words: Iterable[int], *, reads_cache: bool = True, reports: bool = False) -> bool:
        """Admit a request; return False if the pool has no room."""
        request = request_of(words)
        hits: list[Any] = []
        while reads_cache and len(hits) < len(request.block_hashes):
            found = self.vllm.get_cached_block(request.block_hashes[len(hits)], [0])
            if not found:
                break
            hits += found
        if reports and hits:
            self.vllm.emit_cached_block_events(request, len(hits), SIZE, 0)
        self.vllm.touch(hits)
        num_new = len(request.block_hashes) - len(hits)
        if num_new > self.vllm.get_num_free_blocks():
            self.vllm.free_blocks(hits)
            return False
        blocks = hits + self.vllm.get_new_blocks(num_new)
        self.vllm.cache_full_blocks(request, blocks, len(hits), len(blocks), SIZE, 0)
        self.running.append(blocks)
        return True

    def finish(self, index: int) -> None:
        self.vllm.free_blocks(reversed(self.running.pop(index)))

    def held(self) -> set[Any]:
        utils = import_module("vllm.v1.core.kv_cache_utils")
        cached = self.vllm.cached_block_hash_to_block._cache
        return {utils.maybe_convert_block_hash(utils.get_block_hash(key)) for key in cached}

    def publish(self) -> None:
        """Publish the events of a step."""
        batch = self.published.drop_published(self.batch_of(ts=0.0, events=self.vllm.take_events()))
        for event in batch.events if batch is not None else ():
            if type(event).__name__ == "BlockStored":
                assert len(event.token_ids) == SIZE * len(event.block_hashes)
            self.events.append(event)
            for reader in self.readers:
                reader.apply(event)

    def check(self) -> None:
        self.publish()
        held = self.held()
        for reader in self.readers:
            assert reader.held == held, type(reader).__name__
        assert len(self.published) == len(held)


@pytest.mark.soak
def test_whatever_the_pool_does_both_kinds_of_readers_hold_what_it_holds(vllm_events: Any) -> None:
    patch_removed_events_to_last_copy()
    words = st.lists(st.integers(0, 2), min_size=1, max_size=4)

    class PoolMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.pool = Pool()

        @rule(words=words, reads_cache=st.booleans(), reports=st.booleans())
        def compute(self, words: list[int], reads_cache: bool, reports: bool) -> None:
            self.pool.compute(words, reads_cache=reads_cache, reports=reports)

        @rule(words=words, count=st.integers(2, 3))
        def compute_side_by_side(self, words: list[int], count: int) -> None:
            for _ in range(count):
                self.pool.compute(words, reads_cache=False)

        @precondition(lambda self: self.pool.running)
        @rule(data=st.data())
        def finish(self, data: Any) -> None:
            self.pool.finish(data.draw(st.integers(0, len(self.pool.running) - 1)))

        @rule(block_ids=st.sets(st.integers(1, 11), max_size=3))
        def evict(self, block_ids: set[int]) -> None:
            self.pool.vllm.evict_blocks(block_ids)

        @precondition(lambda self: not self.pool.running)
        @rule()
        def reset(self) -> None:
            self.pool.vllm.reset_prefix_cache()

        @rule()
        def publish(self) -> None:
            self.pool.publish()

        def teardown(self) -> None:
            self.pool.check()

    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=num_examples(3), stateful_step_count=30))


def test_without_the_switch_a_set_reader_loses_a_block_with_its_first_copy(vllm_events: Any) -> None:
    """These are the events of vLLM 0.32."""
    pool = Pool(UnfilteredBlocks())
    pool.compute([1, 2], reads_cache=False)
    pool.compute([1, 2], reads_cache=False)
    pool.vllm.evict_blocks({pool.running[0][0].block_id})
    pool.publish()
    assert len(pool.held()) == 2
    assert [len(reader.held) for reader in pool.readers] == [1, 2]


def test_repeated_stores_of_cached_blocks_mislead_a_counting_reader(vllm_events: Any) -> None:
    """This is why the pool counts the copies."""
    pool = Pool(UnfilteredBlocks())
    pool.compute([1, 2])
    pool.compute([1, 2], reports=True)
    pool.vllm.evict_blocks({block.block_id for block in pool.running[0]})
    pool.publish()
    assert pool.held() == set()
    assert [len(reader.held) for reader in pool.readers] == [0, 2]


def test_only_the_new_blocks_of_a_partly_cached_prompt_are_published(vllm_events: Any) -> None:
    patch_removed_events_to_last_copy()
    pool = Pool()
    pool.compute([1, 2], reads_cache=False)
    pool.check()
    pool.compute([1, 2, 3, 4], reads_cache=False)
    pool.check()
    first, second = pool.events
    assert second.block_hashes[0] not in first.block_hashes
    assert second.parent_block_hash == first.block_hashes[1]
    assert list(second.token_ids) == [3] * SIZE + [4] * SIZE
    assert second.group_idx == first.group_idx == 0
    assert pool.published.num_repeated == 2


def stored(events: Any, hashes: Any, **changes: Any) -> Any:
    standard = {
        "parent_block_hash": None,
        "token_ids": [0] * SIZE * len(hashes or ()),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }
    return events.BlockStored(block_hashes=hashes, **(standard | changes))


def drop_published(events: Any, published: VllmPublishedBlocks, *each: Any) -> list[Any]:
    batch = published.drop_published(events.KVEventBatch(ts=1.0, events=list(each), data_parallel_rank=3))
    if batch is None:
        return []
    assert (batch.ts, batch.data_parallel_rank) == (1.0, 3)
    return batch.events


def test_an_event_with_a_published_block_in_the_middle_is_split_in_two(vllm_events: Any) -> None:
    published = VllmPublishedBlocks()
    drop_published(vllm_events, published, stored(vllm_events, [2]))
    keys = [("a",), None, ("c",), ("d",)]
    whole = stored(vllm_events, [1, 2, 3, 4], token_ids=list(range(16)), extra_keys=keys, session_id="s")
    left, right = drop_published(vllm_events, published, whole)
    assert (left.block_hashes, left.parent_block_hash, left.token_ids) == ([1], None, [0, 1, 2, 3])
    assert (right.block_hashes, right.parent_block_hash, right.token_ids) == ([3, 4], 2, list(range(8, 16)))
    assert (left.extra_keys, right.extra_keys) == (keys[:1], keys[2:])
    assert left.session_id == right.session_id == "s"


def test_groups_are_separate_and_other_media_are_not_filtered(vllm_events: Any) -> None:
    published = VllmPublishedBlocks()
    first = stored(vllm_events, [1])
    assert drop_published(vllm_events, published, first) == [first]
    others = [stored(vllm_events, [1], group_idx=1), *[stored(vllm_events, [1], medium="CPU")] * 2]
    assert drop_published(vllm_events, published, *others) == others
    assert drop_published(vllm_events, published, first) == []
    removed = vllm_events.BlockRemoved(block_hashes=[1], medium="GPU", group_idx=1)
    assert drop_published(vllm_events, published, removed, first, others[0]) == [removed, others[0]]
    cleared = vllm_events.AllBlocksCleared()
    assert drop_published(vllm_events, published, cleared, first) == [cleared, first]


def test_an_event_whose_tokens_do_not_match_its_blocks_is_published_whole(vllm_events: Any) -> None:
    """vLLM omits blocks of groups with a sliding window, but not their tokens."""
    published = VllmPublishedBlocks()
    masked = stored(vllm_events, [1, 2], token_ids=[0] * SIZE * 5)
    assert drop_published(vllm_events, published, stored(vllm_events, [1])) != []
    assert drop_published(vllm_events, published, masked) == [masked]
    assert drop_published(vllm_events, published, masked) == []


def test_an_invalid_event_is_left_to_the_encoder(vllm_events: Any) -> None:
    published = VllmPublishedBlocks()
    odd = [None, "text", stored(vllm_events, None, token_ids=[]), stored(vllm_events, [[1]]), vllm_events.KVEventBatch]
    first = stored(vllm_events, [1])
    assert drop_published(vllm_events, published, *odd, first, first) == [*odd, first]


def test_a_vllm_without_the_patched_method_raises_a_config_error(
    vllm_events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_removed_events_to_last_copy()
    pool = import_module("vllm.v1.core.block_pool").BlockPool
    patched = pool._emit_block_removed_events
    patch_removed_events_to_last_copy()
    assert pool._emit_block_removed_events is patched
    monkeypatch.delattr(pool, "_emit_block_removed_events")
    with pytest.raises(ConfigError, match="does not support this version of vLLM"):
        patch_removed_events_to_last_copy()
