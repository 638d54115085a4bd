"""A forked child calls what was asked for, of what still lives."""

from __future__ import annotations

import gc
import os

import pytest

from scheduler_components.fork_hook import tell_of_forks


class Owner:
    def __init__(self, notes: list[str], name: str) -> None:
        self.notes, self.name = notes, name
        tell_of_forks(self)

    def disown(self) -> None:
        self.notes.append(self.name)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12 warns of what is tested here
def test_a_child_is_told_and_its_parent_is_not() -> None:
    notes: list[str] = []
    kept, lost = Owner(notes, "kept"), Owner(notes, "lost")
    del lost
    gc.collect()
    child = os.fork()
    if child == 0:
        os._exit(0 if notes == ["kept"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (notes, kept.name) == ([], "kept")
