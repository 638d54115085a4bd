"""Generate workloads with Hypothesis, and search for one on which two versions differ. Needs the extra ``testing``."""

from __future__ import annotations

from typing import Generic, TypeVar

from scheduler_components._internal.extras import naming_extras
from scheduler_refactor.harness import Harness, compare_versions, play
from scheduler_refactor.module_tree import ModuleTree
from scheduler_refactor.recording import Coverage, Difference, Recording

with naming_extras:
    from hypothesis import HealthCheck, Phase, given, settings

W = TypeVar("W")


class FoundDifference(Exception, Generic[W]):
    """A workload on which two versions differ, as small as Hypothesis could make it.

    Attributes:
        workload: the workload.
        difference: the first difference on it.
    """

    def __init__(self, workload: W, difference: Difference) -> None:
        self.workload = workload
        self.difference = difference
        super().__init__(str(difference))


def record_workloads(
    harness: Harness[W], tree: ModuleTree, *, count: int, fresh: bool = True
) -> tuple[list[W], list[Recording]]:
    """Generate workloads, the same in each run, and play them on a version.

    Args:
        harness: the user's.
        tree: the version to record.
        count: the largest number of workloads; fewer if the strategy has fewer.
        fresh: as for `play`.
    """
    workloads: list[W] = []
    recordings: list[Recording] = []

    @_search(count, shrink=False, derandomize=True)
    @given(harness.workloads())
    def run(workload: W) -> None:
        workloads.append(workload)
        recordings.append(play(harness, tree, workload, fresh=fresh))

    run()
    return workloads, recordings


def find_difference(
    harness: Harness[W],
    old: ModuleTree,
    new: ModuleTree,
    *,
    count: int = 100,
    derandomize: bool = False,
    fresh: bool = True,
) -> tuple[Coverage, FoundDifference[W] | None]:
    """Play generated workloads on two versions; return what they covered, and the smallest difference or None.

    Raises:
        NotReproducibleError: the old version differs from itself.
    """
    coverage = Coverage()

    @_search(count, shrink=True, derandomize=derandomize)
    @given(harness.workloads())
    def run(workload: W) -> None:
        expected, found = compare_versions(harness, old, new, workload, fresh=fresh)
        coverage.add(expected)
        if found is not None:
            raise FoundDifference(workload, found)

    try:
        run()
    except FoundDifference as found:
        return coverage, found
    return coverage, None


def _search(count: int, *, shrink: bool, derandomize: bool) -> settings:
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    return settings(
        max_examples=count,
        phases=phases,
        derandomize=derandomize,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
