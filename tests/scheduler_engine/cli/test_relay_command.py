"""A relay's process collects garbage between two polls, a little at a time."""

from __future__ import annotations

import gc
import weakref

from scheduler_engine.cli.relay_command import ScheduledGarbageCollector


class Node:
    """One of a cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_when_it_is_due() -> None:
    now_s = [0.0]
    with ScheduledGarbageCollector(lambda: now_s[0]) as garbage:
        assert not gc.isenabled()
        young = Node()
        gone = weakref.ref(young)
        del young
        garbage.collect_due()
        assert gone() is not None
        now_s[0] = 0.03
        garbage.collect_due()
        assert gone() is None
    assert gc.isenabled()


def test_old_objects_are_collected_with_an_older_generation() -> None:
    now_s = [0.0]
    with ScheduledGarbageCollector(lambda: now_s[0]) as garbage:
        old = Node()
        gone = weakref.ref(old)
        for now_s[0] in (1.0, 6.0):
            garbage.collect_due()
        del old
        now_s[0] = 12.0
        garbage.collect_due()
        assert gone() is not None
        now_s[0] = 61.0
        garbage.collect_due()
        assert gone() is None


def test_objects_of_the_start_are_never_collected() -> None:
    now_s = [0.0]
    with ScheduledGarbageCollector(lambda: now_s[0]) as garbage:
        num_frozen = gc.get_freeze_count()
        now_s[0] = 100.0
        garbage.collect_due()
        assert gc.get_freeze_count() == num_frozen > 10_000
    assert gc.get_freeze_count() == 0
