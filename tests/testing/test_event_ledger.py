"""EventLedger: the blocks that a stream of events holds, and every rule that an event breaks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from kit.events import stored

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from scheduler_components.cache import hash_pages
from scheduler_components.testing import EventLedger
from scheduler_components.testing.chain_event_generator import ChainEventGenerator
from scheduler_components.testing.rules import RULES
from scheduler_components.testing.strategies import cache_histories, events, invalid_histories


@settings(deadline=None)
@given(history=cache_histories())
def test_the_events_of_a_real_cache_are_valid_and_chained(history: list[KVEventBatch]) -> None:
    ledger = EventLedger()
    for batch in history:
        assert batch.events
        assert ledger.apply_all(batch.events) == []
    assert ledger.num_off_chain == 0
    for each in ledger.hashes():
        assert ledger.prefix(each)


@settings(deadline=None)
@given(history=invalid_histories(), more=events())
def test_invalid_histories_yield_violations_of_known_rules(
    history: list[KVEventBatch], more: tuple[KVCacheEvent, ...]
) -> None:
    ledger = EventLedger()
    violations = [each for batch in history for each in ledger.apply_all(batch.events)] + ledger.apply_all(more)
    assert {violation.rule for violation in violations} <= RULES.keys()


def test_generated_chain_events_are_valid() -> None:
    history, ledger = ChainEventGenerator(), EventLedger()
    for number in range(200):
        assert ledger.apply(history.next(number)) == []
        assert ledger.hashes() == set(history.live_hashes)
    assert ledger.num_off_chain == 0


def test_media_and_groups_are_separate_and_a_clear_removes_all() -> None:
    ledger = EventLedger()
    group = BlockStored((5,), None, (5,), 1, None, group_idx=2)
    assert ledger.apply_all([stored(1), stored(1, medium="CPU"), group, BlockRemoved((1,), "GPU")]) == []
    assert (ledger.hashes(), ledger.hashes("CPU"), ledger.hashes(None, 2)) == (set(), {1}, {5})
    assert ledger.apply(AllBlocksCleared()) == []
    assert ledger.blocks() == {}


def test_a_parent_may_be_on_another_medium() -> None:
    assert EventLedger().apply_all([stored(1, medium="CPU"), stored(2, parent=1)]) == []


def test_the_order_within_a_removal_does_not_matter() -> None:
    assert EventLedger().apply_all([stored(1, 2, 3), BlockRemoved((1, 2, 3))]) == []


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        ([stored(2, parent=1)], ["parents-first"]),
        ([stored(2, parent=0)], ["root-parent"]),
        ([stored(1), stored(1)], ["stored-once"]),
        ([stored(1), BlockStored((1,), None, (9,), 1, None)], ["one-content", "stored-once"]),
        ([BlockRemoved((1,))], ["removed-stands"]),
        ([stored(1, 2), BlockRemoved((1,))], ["children-first"]),
        ([stored(1, medium="TAPE")], ["medium"]),
        ([BlockStored((1,), None, (1, 2), 1, None)], ["event"]),
        ([stored(1), BlockStored((2,), None, (1, 2), 2, None)], ["block-size"]),
        ([KVCacheEvent()], ["event"]),
        ([BlockStored((), None, (), 0, None)], ["event"]),
        ([BlockStored((1,), None, (1 << 32,), 1, None)], ["event"]),
    ],
)
def test_each_invalid_event_breaks_its_rule(given: list[KVCacheEvent], rules: list[str]) -> None:
    assert [violation.rule for violation in EventLedger().apply_all(given)] == rules


def test_an_incomplete_history_may_refer_to_unknown_blocks_until_a_clear() -> None:
    ledger = EventLedger(is_complete=False)
    assert ledger.apply_all([stored(2, parent=1), BlockRemoved((9,))]) == []
    broken = ledger.apply_all([AllBlocksCleared(), stored(2, parent=1)])
    assert [violation.rule for violation in broken] == ["parents-first"]


def test_a_block_that_is_its_own_ancestor_has_no_prefix() -> None:
    ledger = EventLedger(is_complete=False)
    ledger.apply_all([stored(1, parent=2), stored(2, parent=1)])
    for unknown in (1, 3):
        with pytest.raises(KeyError):
            ledger.prefix(unknown)


def test_a_block_whose_salt_has_no_seed_is_kept_and_not_counted_as_chained() -> None:
    ledger = EventLedger()
    assert ledger.apply(BlockStored((1,), None, (1,), 1, None, cache_salt="\ud800")) == []
    assert (ledger.num_chained, ledger.hashes()) == (0, {1})


def test_hashes_off_the_chain_are_counted_and_valid() -> None:
    ledger = EventLedger()
    on_chain = BlockStored(hash_pages([1, 2], 2), None, (1, 2), 2, None)
    assert ledger.apply_all([on_chain, BlockStored((5,), None, (3, 4), 2, None)]) == []
    assert (ledger.num_chained, ledger.num_off_chain) == (2, 1)
