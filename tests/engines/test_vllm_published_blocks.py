"""``once_per_block``: whatever vLLM's pool does, readers that keep a set and readers that count hold what it holds.

Over vLLM's own block pool where vLLM is installed, and over a double of it elsewhere.
"""

from __future__ import annotations

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

from scheduler_components import ConfigError
from scheduler_components.engines.vllm_published_blocks import PublishedBlocks, patch_removed_events_to_last_copy

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

SIZE = 4


@pytest.fixture(autouse=True)
def unhooked(vllm_events: Any) -> Iterator[None]:
    """The pool is put back after each test."""
    pool = import_module("vllm.v1.core.block_pool").BlockPool
    tell = pool._emit_block_removed_events
    yield
    pool._emit_block_removed_events = tell


def request_of(words: Iterable[int]) -> Any:
    """What the pool reads of a request: one word of the prompt stands for a block of tokens."""
    hashes, tokens, above = [], [], b""
    for word in words:
        tokens += [word] * SIZE
        above = sha256(above + bytes([word])).digest()
        hashes.append(above)
    plain = dict.fromkeys(("lora_request", "session_id", "cache_salt", "prompt_embeds"))
    return SimpleNamespace(block_hashes=hashes, all_token_ids=tokens, mm_features=[], **plain)


class SetReader:
    """Keeps a set of hashes: this kit's view, gateways."""

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
    """Counts stores and removals of each hash: Dynamo, llm-d."""

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


class AllTold:
    """Tells everything, as vLLM does."""

    def drop_published(self, batch: Any) -> Any:
        return batch


class Pool:
    """vLLM's block pool, the requests that hold blocks of it, and who reads its events."""

    def __init__(self, told: Any = None) -> None:
        self.vllm: Any = import_module("vllm.v1.core.block_pool").BlockPool(
            num_gpu_blocks=12, enable_caching=True, hash_block_size=SIZE, enable_kv_cache_events=True
        )
        self.batch_of = import_module("vllm.distributed.kv_events").KVEventBatch
        self.told: Any = PublishedBlocks() if told is None else told
        self.running: list[list[Any]] = []
        self.readers = (SetReader(), CountingReader())
        self.events: list[Any] = []

    def compute(self, words: Iterable[int], *, reads_cache: bool = True, reports: bool = False) -> bool:
        """A request is admitted; False when the pool has no room."""
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
        """A step ends."""
        batch = self.told.drop_published(self.batch_of(ts=0.0, events=self.vllm.take_events()))
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
        assert len(self.told) == len(held)


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

    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=200, stateful_step_count=30))


def test_without_it_a_block_is_lost_with_its_first_copy(vllm_events: Any) -> None:
    """What vLLM 0.32 tells."""
    pool = Pool(AllTold())
    pool.compute([1, 2], reads_cache=False)
    pool.compute([1, 2], reads_cache=False)
    pool.vllm.evict_blocks({pool.running[0][0].block_id})
    pool.publish()
    assert len(pool.held()) == 2
    assert [len(reader.held) for reader in pool.readers] == [1, 2]


def test_reports_of_blocks_that_are_there_fool_who_counts_events(vllm_events: Any) -> None:
    """So the counting is left to the pool."""
    pool = Pool(AllTold())
    pool.compute([1, 2])
    pool.compute([1, 2], reports=True)
    pool.vllm.evict_blocks({block.block_id for block in pool.running[0]})
    pool.publish()
    assert pool.held() == set()
    assert [len(reader.held) for reader in pool.readers] == [0, 2]


def test_of_a_prompt_that_is_there_in_part_the_new_parts_are_told(vllm_events: Any) -> None:
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
    assert pool.told.num_repeated == 2


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


def summarize_event(events: Any, told: PublishedBlocks, *each: Any) -> list[Any]:
    batch = told.drop_published(events.KVEventBatch(ts=1.0, events=list(each), data_parallel_rank=3))
    if batch is None:
        return []
    assert (batch.ts, batch.data_parallel_rank) == (1.0, 3)
    return batch.events


def test_a_hole_in_the_middle_gives_two_events_with_their_own_lists(vllm_events: Any) -> None:
    told = PublishedBlocks()
    summarize_event(vllm_events, told, stored(vllm_events, [2]))
    keys = [("a",), None, ("c",), ("d",)]
    whole = stored(vllm_events, [1, 2, 3, 4], token_ids=list(range(16)), extra_keys=keys, session_id="s")
    left, right = summarize_event(vllm_events, told, whole)
    assert (left.block_hashes, left.parent_block_hash, left.token_ids) == ([1], None, [0, 1, 2, 3])
    assert (right.block_hashes, right.parent_block_hash, right.token_ids) == ([3, 4], 2, list(range(8, 16)))
    assert (left.extra_keys, right.extra_keys) == (keys[:1], keys[2:])
    assert left.session_id == right.session_id == "s"


def test_groups_are_apart_and_other_media_pass(vllm_events: Any) -> None:
    told = PublishedBlocks()
    first = stored(vllm_events, [1])
    assert summarize_event(vllm_events, told, first) == [first]
    others = [stored(vllm_events, [1], group_idx=1), *[stored(vllm_events, [1], medium="CPU")] * 2]
    assert summarize_event(vllm_events, told, *others) == others
    assert summarize_event(vllm_events, told, first) == []
    removed = vllm_events.BlockRemoved(block_hashes=[1], medium="GPU", group_idx=1)
    assert summarize_event(vllm_events, told, removed, first, others[0]) == [removed, others[0]]
    cleared = vllm_events.AllBlocksCleared()
    assert summarize_event(vllm_events, told, cleared, first) == [cleared, first]


def test_an_event_whose_tokens_cannot_be_divided_is_told_whole(vllm_events: Any) -> None:
    """vLLM leaves blocks out of groups with a window, and not their tokens."""
    told = PublishedBlocks()
    masked = stored(vllm_events, [1, 2], token_ids=[0] * SIZE * 5)
    assert summarize_event(vllm_events, told, stored(vllm_events, [1])) != []
    assert summarize_event(vllm_events, told, masked) == [masked]
    assert summarize_event(vllm_events, told, masked) == []


def test_what_is_no_event_passes_for_the_encoder_to_refuse(vllm_events: Any) -> None:
    told = PublishedBlocks()
    odd = [None, "text", stored(vllm_events, None, token_ids=[]), stored(vllm_events, [[1]]), vllm_events.KVEventBatch]
    first = stored(vllm_events, [1])
    assert summarize_event(vllm_events, told, *odd, first, first) == [*odd, first]


def test_a_vllm_without_the_place_is_named(vllm_events: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_removed_events_to_last_copy()
    pool = import_module("vllm.v1.core.block_pool").BlockPool
    hooked = pool._emit_block_removed_events
    patch_removed_events_to_last_copy()
    assert pool._emit_block_removed_events is hooked
    monkeypatch.delattr(pool, "_emit_block_removed_events")
    with pytest.raises(ConfigError, match="does not support this version of vLLM"):
        patch_removed_events_to_last_copy()
