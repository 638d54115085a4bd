"""Every recorder check passes on the kit's recorder, and fails, with its trace, on one that breaks its promise."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kit.variants import found, instead_of, variants
from msgspec.structs import replace

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored
from scheduler_components.cache import BlockTableRecorder, signed_block_hash
from scheduler_components.testing import ConformanceError, RecorderMachine
from scheduler_components.testing import recorder_checks as checks

CHILDREN_FIRST = checks.check_children_are_removed_before_parents
CLEAR = checks.check_clear_removes_everything
HISTORY = checks.check_random_history_matches_the_table
MEDIA = checks.check_groups_and_media_are_separate


@pytest.mark.parametrize("check", checks.RECORDER_CHECKS)
def test_the_kits_recorder_passes(check):
    check(lambda: BlockTableRecorder(2))


def unsigned(event):
    if not isinstance(event, BlockStored | BlockRemoved):
        return event
    event = replace(event, block_hashes=tuple(each % 2**64 for each in event.block_hashes))
    if isinstance(event, BlockStored) and event.parent_block_hash is not None:
        return replace(event, parent_block_hash=event.parent_block_hash % 2**64)
    return event


class BrokenRecorder(BlockTableRecorder):
    @instead_of(
        "store",
        {checks.check_removal_is_published_with_the_last_copy: "broken rules|the blocks in",
         HISTORY: "broken rules|the blocks in"},
    )  # fmt: skip
    def tells_the_first_removal(self, block_hashes, token_ids, *parent, **where):
        """Knows of one copy only."""
        place = {name: where.get(name) for name in ("medium", "group_idx")}
        known = set(self.block_hashes(**place))
        super().remove([each for each in block_hashes if signed_block_hash(each) in known], **place)
        super().store(block_hashes, token_ids, *parent, **where)

    # Stores what it stored last first.
    tells_children_first = found(
        {HISTORY: "broken rules"}, take_events=lambda self: tuple(reversed(super().take_events()))
    )

    @instead_of("take_events", {CHILDREN_FIRST: "children-first"})
    def removes_parents_first(self):
        return tuple(
            one
            for event in super().take_events()
            for one in (
                [replace(event, block_hashes=(each,)) for each in reversed(event.block_hashes)]
                if isinstance(event, BlockRemoved)
                else [event]
            )
        )

    @instead_of(
        "store",
        {checks.check_parents_are_published_first: "the tokens|broken rules|the blocks in",
         checks.check_orphans_wait_for_their_parent: "the blocks in (None, None): []"},
    )  # fmt: skip
    def tells_orphans(self, block_hashes, token_ids, *_, **where):
        """Makes a root of each block that it is given without its parent in the same call."""
        super().store(block_hashes, token_ids, **where)

    tells_unsigned_hashes = found(
        {checks.check_hashes_are_signed: "the blocks in (None, None): [-9, -5]"},
        take_events=lambda self: tuple(map(unsigned, super().take_events())),
    )
    mixes_groups_up = found(
        {MEDIA: "the blocks in (None, 0)"},
        store=lambda self, *what, **where: super().store(*what, **{**where, "group_idx": None}),
        remove=lambda self, *what, **where: super().remove(*what, **{**where, "group_idx": None}),
    )
    mixes_media_up = found(
        {MEDIA: "the blocks in", checks.check_chain_may_span_media: "the blocks in"},
        store=lambda self, *what, **where: super().store(*what, **{**where, "medium": None}),
    )

    @instead_of("clear", {CLEAR: "AllBlocksCleared among the events"})
    def clears_in_silence(self):
        super().clear()
        self.take_events()

    @found({CLEAR: "the blocks in"})
    class forgets_to_clear(BlockTableRecorder):
        """Says that all is gone, and counts on with the copies of before."""

        cleared = False

        def clear(self):
            self.cleared = True

        def take_events(self):
            cleared, self.cleared = self.cleared, False
            return (*super().take_events(), *((AllBlocksCleared(),) if cleared else ()))

    @instead_of("take_events", {checks.check_identity_is_published: "poems"})
    def forgets_who(self):
        events = super().take_events()
        return tuple(replace(each, extra_keys=None) if isinstance(each, BlockStored) else each for each in events)

    @instead_of("remove", {checks.check_unknown_block_is_not_removed: "broken rules|the blocks in"})
    def tells_every_removal(self, block_hashes, **where):
        block_hashes = list(block_hashes)
        unknown = self.num_unknown_removals
        super().remove(block_hashes, **where)
        if self.num_unknown_removals > unknown:
            super().store(block_hashes, [0] * (2 * len(block_hashes)), **where)
            super().remove(block_hashes, **where)


BROKEN = variants(BrokenRecorder)
CASES = [(name, check) for name, (_, messages) in BROKEN.items() for check in messages]


@pytest.mark.broken_variants
@pytest.mark.parametrize(("name", "check"), CASES)
def test_a_broken_recorder_fails_with_its_trace(name, check):
    broken, messages = BROKEN[name]
    with pytest.raises(ConformanceError) as failed:
        check(lambda: broken(2))
    assert any(each in str(failed.value) for each in messages[check].split("|")), str(failed.value)
    assert "1. opened a recorder" in str(failed.value)


def test_every_check_has_a_broken_recorder():
    assert {check for _, check in CASES} == set(checks.RECORDER_CHECKS)


FOUND = BROKEN.keys() - {"forgets_who"}  # the machine has one tenant
LONG_SEARCH = {"tells_the_first_removal"}  # in make test, two checks find it


@pytest.mark.broken_variants
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.soak_only if each in LONG_SEARCH else ()) for each in sorted(FOUND)]
)
def test_the_machine_finds_a_broken_recorder(name):
    machine = type("Broken", (RecorderMachine,), {"open_recorder": lambda self: BROKEN[name][0](2)})
    quick = settings(
        max_examples=1_000,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    with pytest.raises((AssertionError, ExceptionGroup)):  # a group where it breaks several rules
        run_state_machine_as_test(machine, settings=quick)
