"""The generator's events break no rule of a stream, and it knows what a reader of all of them holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored
from scheduler_components.cache import hash_pages
from scheduler_components.testing.chain_event_generator import ChainEventGenerator
from scheduler_components.testing.interfaces import BLOCK_SIZE


@settings(deadline=None, max_examples=50)
@given(actions=st.lists(st.sampled_from(["store", "store", "remove", "clear"]), max_size=30))
def test_a_reader_of_all_events_holds_the_live_hashes(actions: list[str]) -> None:
    chain, held = ChainEventGenerator(), list[int]()
    for action in actions:
        if action == "remove" and not held:
            continue
        match getattr(chain, action)():
            case BlockStored() as stored:
                assert stored.parent_block_hash == (held[-1] if held else None)
                assert len(stored.token_ids) == stored.block_size == BLOCK_SIZE
                held += stored.block_hashes
            case BlockRemoved() as removed:
                assert removed.block_hashes == (held.pop(),)
            case AllBlocksCleared():
                held.clear()
        assert chain.live_hashes == held


def test_a_hash_covers_all_tokens_before_it() -> None:
    chain = ChainEventGenerator()
    tokens = [token for stored in (chain.store(7, 8), chain.store(), chain.store(9, 9)) for token in stored.token_ids]
    assert tokens[2:4] == [1, 2]  # the default tokens are the depth of the block
    assert chain.live_hashes == list(hash_pages(tokens, BLOCK_SIZE))
    chain.remove()
    assert chain.store(9, 9).block_hashes == (hash_pages(tokens, BLOCK_SIZE)[-1],), "the removed tokens are gone"


@pytest.mark.parametrize(("number", "kind"), [(0, BlockStored), (4, BlockRemoved), (39, AllBlocksCleared)])
def test_the_mixed_sequence_has_every_kind(number: int, kind: type) -> None:
    chain = ChainEventGenerator()
    events = [chain.next(each) for each in range(number + 1)]
    assert isinstance(events[-1], kind)


def test_the_mixed_sequence_removes_nothing_from_an_empty_chain() -> None:
    assert isinstance(ChainEventGenerator().next(4), BlockStored)
