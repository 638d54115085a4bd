"""One agreement per step for several components, and a clock that is equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from kit.rank_grid import grid, on_threads

from scheduler_components import ConfigError
from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.errors import SyncDivergenceError


@dataclass
class Part:
    """Contributes one number per step, and records what it was given."""

    name: str
    numbers: Iterator[int] = field(default_factory=count)
    calls: list[tuple[str, str, int]] = field(default_factory=list)

    def fill(self, proposal: Proposal) -> None:
        proposal.min(self.name, next(self.numbers))

    def apply(self, step: int, agreed: AgreedValues) -> None:
        self.calls.append((self.name, f"{agreed.now_s:g} s", agreed.numbers[self.name]))


def run_steps(
    groups: ParallelGroups, names: Sequence[str] = ("a", "b"), *, leads: bool, first_s: int
) -> list[tuple[str, str, int]]:
    calls: list[tuple[str, str, int]] = []
    clock = count(first_s)
    parts = [Part(name, count(groups.rank), calls) for name in names]
    agreement = StepAgreement(groups=groups, parts=parts, clock=lambda: float(next(clock)), leads=leads)
    for step in range(1, 3):
        agreement.step(step)
        calls.append(("now", f"{agreement.now_s:g} s", groups.num_collectives))
    return calls


def test_all_parts_share_one_reduction_per_hop_and_read_the_clock_of_the_leading_rank() -> None:
    outcomes = on_threads(
        grid(2, 2), lambda groups: run_steps(groups, leads=groups.rank == 1, first_s=100 * groups.rank)
    )
    steps = [
        *(("a", "100 s", 0), ("b", "100 s", 0), ("now", "100 s", 2)),
        *(("a", "101 s", 1), ("b", "101 s", 1), ("now", "101 s", 4)),
    ]
    assert outcomes == [steps] * 4


def test_of_several_leading_ranks_the_smallest_clock_counts() -> None:
    outcomes = on_threads(grid(1, 2), lambda groups: run_steps(groups, leads=True, first_s=7 + groups.rank))
    assert outcomes[0] == outcomes[1]
    assert ("now", "7 s", 1) in run_steps_of(outcomes[0])


def run_steps_of(outcome: object) -> list[object]:
    assert isinstance(outcome, list), outcome
    return outcome


def test_without_a_leading_rank_no_clock_is_agreed() -> None:
    def step(groups: ParallelGroups) -> None:
        with pytest.raises(ConfigError, match="leads=False: on all ranks, so no clock is agreed"):
            StepAgreement(groups=groups, leads=False).step(1)

    assert on_threads(grid(1, 2), step) == [None, None]


@pytest.mark.parametrize("names", [("b", "a"), ("a",), ("a", "b", "c")])
def test_ranks_with_other_parts_are_reported(names: Sequence[str]) -> None:
    outcomes = on_threads(
        grid(1, 2),
        lambda groups: run_steps(groups, ("a", "b") if groups.rank else names, leads=not groups.rank, first_s=0),
    )
    assert [type(each) for each in outcomes] == [SyncDivergenceError] * 2


def test_a_replica_of_one_rank_reduces_nothing() -> None:
    groups = ParallelGroups()
    assert run_steps(groups, leads=True, first_s=5)[:3] == [("a", "5 s", 0), ("b", "5 s", 0), ("now", "5 s", 0)]
    assert not groups.num_collectives
