"""Every recorder check passes on the kit's recorder, and fails, with its trace, on one that breaks its promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.cache import BlockTableRecorder, signed_block_hash
from scheduler_components.testing import ConformanceError, RecorderMachine
from scheduler_components.testing import recorder_checks as checks


@pytest.mark.parametrize("check", checks.RECORDER_CHECKS)
def test_the_kits_recorder_passes(check: Callable[[checks.OpenRecorder], None]) -> None:
    check(lambda: BlockTableRecorder(2))


class TellsTheFirstRemoval(BlockTableRecorder):
    """Knows of one copy only."""

    def store(self, block_hashes: Sequence[int | bytes], token_ids: Sequence[int], *parent: Any, **where: Any) -> None:
        place = {name: where.get(name) for name in ("medium", "group_idx")}
        known = set(self.block_hashes(**place))
        super().remove([each for each in block_hashes if signed_block_hash(each) in known], **place)
        super().store(block_hashes, token_ids, *parent, **where)


class TellsChildrenFirst(BlockTableRecorder):
    """Stores what it stored last first."""

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        return tuple(reversed(super().take_events()))


class RemovesParentsFirst(BlockTableRecorder):
    def take_events(self) -> tuple[KVCacheEvent, ...]:
        return tuple(one for event in super().take_events() for one in self._ones(event))

    def _ones(self, event: KVCacheEvent) -> Iterable[KVCacheEvent]:
        if not isinstance(event, BlockRemoved):
            return (event,)
        return [msgspec.structs.replace(event, block_hashes=(each,)) for each in reversed(event.block_hashes)]


class TellsOrphans(BlockTableRecorder):
    """Makes a root of each block that it is given without its parent in the same call."""

    def store(self, block_hashes: Sequence[int | bytes], token_ids: Sequence[int], *_: Any, **where: Any) -> None:
        super().store(block_hashes, token_ids, **where)


class TellsUnsignedHashes(BlockTableRecorder):
    def take_events(self) -> tuple[KVCacheEvent, ...]:
        return tuple(self._unsigned(event) for event in super().take_events())

    def _unsigned(self, event: KVCacheEvent) -> KVCacheEvent:
        if not isinstance(event, BlockStored | BlockRemoved):
            return event
        event = msgspec.structs.replace(event, block_hashes=tuple(each % 2**64 for each in event.block_hashes))
        if isinstance(event, BlockStored) and event.parent_block_hash is not None:
            return msgspec.structs.replace(event, parent_block_hash=event.parent_block_hash % 2**64)
        return event


class MixesGroupsUp(BlockTableRecorder):
    def store(self, *what: Any, **where: Any) -> None:
        super().store(*what, **{**where, "group_idx": None})

    def remove(self, *what: Any, **where: Any) -> None:
        super().remove(*what, **{**where, "group_idx": None})


class MixesMediaUp(BlockTableRecorder):
    def store(self, *what: Any, **where: Any) -> None:
        super().store(*what, **{**where, "medium": None})


class ClearsInSilence(BlockTableRecorder):
    def clear(self) -> None:
        super().clear()
        self.take_events()


class ForgetsToClear(BlockTableRecorder):
    """Says that all is gone, and counts on with the copies of before."""

    cleared = False

    def clear(self) -> None:
        self.cleared = True

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        cleared, self.cleared = self.cleared, False
        return (*super().take_events(), *((AllBlocksCleared(),) if cleared else ()))


class ForgetsWho(BlockTableRecorder):
    def take_events(self) -> tuple[KVCacheEvent, ...]:
        replace = msgspec.structs.replace
        return tuple(
            replace(each, extra_keys=None) if isinstance(each, BlockStored) else each for each in super().take_events()
        )


class TellsEveryRemoval(BlockTableRecorder):
    def remove(
        self, block_hashes: Iterable[int | bytes], *, medium: str | None = None, group_idx: int | None = None
    ) -> None:
        block_hashes = list(block_hashes)
        unknown = self.num_unknown_removals
        super().remove(block_hashes, medium=medium, group_idx=group_idx)
        if self.num_unknown_removals > unknown:
            super().store(block_hashes, [0] * (2 * len(block_hashes)), medium=medium, group_idx=group_idx)
            super().remove(block_hashes, medium=medium, group_idx=group_idx)


BROKEN: tuple[tuple[Callable[[checks.OpenRecorder], None], type[BlockTableRecorder], str], ...] = (
    (checks.check_parents_are_published_first, TellsOrphans, "the tokens|broken rules|the blocks in"),
    (checks.check_removal_is_published_with_the_last_copy, TellsTheFirstRemoval, "broken rules|the blocks in"),
    (checks.check_children_are_removed_before_parents, RemovesParentsFirst, "children-first"),
    (checks.check_orphans_wait_for_their_parent, TellsOrphans, "the blocks in (None, None): []"),
    (checks.check_hashes_are_signed, TellsUnsignedHashes, "the blocks in (None, None): [-9, -5]"),
    (checks.check_groups_and_media_are_separate, MixesGroupsUp, "the blocks in (None, 0)"),
    (checks.check_groups_and_media_are_separate, MixesMediaUp, "the blocks in"),
    (checks.check_chain_may_span_media, MixesMediaUp, "the blocks in"),
    (checks.check_clear_removes_everything, ClearsInSilence, "AllBlocksCleared among the events"),
    (checks.check_clear_removes_everything, ForgetsToClear, "the blocks in"),
    (checks.check_identity_is_published, ForgetsWho, "poems"),
    (checks.check_unknown_block_is_not_removed, TellsEveryRemoval, "broken rules|the blocks in"),
    (checks.check_random_history_matches_the_table, TellsChildrenFirst, "broken rules"),
    (checks.check_random_history_matches_the_table, TellsTheFirstRemoval, "broken rules|the blocks in"),
)
"""Each check, a recorder that breaks its promise, and what the failure says."""


@pytest.mark.broken_variants
@pytest.mark.parametrize(("check", "broken", "message"), BROKEN)
def test_a_broken_recorder_fails_with_its_trace(
    check: Callable[[checks.OpenRecorder], None], broken: type[BlockTableRecorder], message: str
) -> None:
    with pytest.raises(ConformanceError) as failed:
        check(lambda: broken(2))
    assert any(each in str(failed.value) for each in message.split("|")), str(failed.value)
    assert "1. opened a recorder" in str(failed.value)


def test_every_check_has_a_broken_recorder() -> None:
    assert {check for check, _, _ in BROKEN} == set(checks.RECORDER_CHECKS)


FOUND = {kind for _, kind, _ in BROKEN} - {ForgetsWho}  # the machine has one tenant
LONG_SEARCH = {TellsTheFirstRemoval}  # in make test, two checks find it


@pytest.mark.broken_variants
@pytest.mark.parametrize(
    "broken",
    [pytest.param(each, marks=pytest.mark.soak_only if each in LONG_SEARCH else ()) for each in sorted(FOUND, key=str)],
)
def test_the_machine_finds_a_broken_recorder(broken: type[BlockTableRecorder]) -> None:
    class Broken(RecorderMachine):
        def open_recorder(self) -> BlockTableRecorder:
            return broken(2)

    quick = settings(
        max_examples=1_000,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    with pytest.raises((AssertionError, ExceptionGroup)):  # a group where it breaks several rules
        run_state_machine_as_test(Broken, settings=quick)
