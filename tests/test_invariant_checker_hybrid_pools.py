"""Six leaks that took SGLang servers down, rebuilt in the reference scheduler: each is found and its cause named.

SGLang reports for each the number of missing pages when the server is idle, and stops it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest
from kit.hybrid_scheduler import (
    HybridPages,
    KeepsStateOfAborted,
    LosesWindowPages,
    SideHolders,
    checker_of,
    hybrid_scheduler,
    serve,
)
from kit.variants import found, instead_of, variants

from scheduler_components.values import AllocationRecord, PageHolding, RequestState


class LeakyPages(HybridPages):
    @instead_of("free", "lost", "full", "RequestKvCache.grow", "batch")
    def loses_page_of_retracted(self, request):
        """#11970: the page that the current step allocated for a retracted request is not freed."""
        if self.progress.phase == "batch" and request.state is RequestState.RUNNING:
            own = len(request.pages) - request.num_cached_pages
            num_full = request.num_computed_tokens // self.cache.page_size - request.num_cached_pages
            if own > num_full:
                request.pages.pop()
        super().free(request)

    @instead_of("free", "owned-and-free", "full", "FreesTwice.release", "results")
    def frees_twice(self, request):
        """#6888: more is free and evictable than there is: the last page of a prompt is freed although it is cached."""
        shared = request.pages[: request.num_cached_pages]
        super().free(request)
        if shared and request.state is RequestState.FINISHED:
            self.cache.pool._push(array("I", shared[-1:]))  # a pool without states lets it
            self.allocation_log.record("freed", "full", request.rid, "FreesTwice.release", shared[-1:])

    @found("lost", "mamba", "HybridPages.attach", "batch")
    class keeps_state_of_refused(HybridPages):
        """#16067: a request takes its state, is then not admitted, and forgets it."""

        def match_length(self, request):
            return self.base.match_length(request)

        def give_state(self, request):
            if self.progress.phase == "batch" and request.state is RequestState.WAITING:
                self.state_of.pop(request.rid, None)
            else:
                super().give_state(request)

    loses_window_pages = found("lost", "swa", "HybridPages.slide", "batch")(LosesWindowPages)
    keeps_state_of_aborted = found("lost", "mamba", "HybridPages.match_length", "submit")(KeepsStateOfAborted)


LEAKS = variants(LeakyPages)


class CountsRunningAlone(SideHolders):
    """#20185: no page is lost, but the states of waiting requests are left out of the count."""

    def holdings(self) -> Iterator[PageHolding]:
        running = {each.rid for each in self.queues.running}
        return (each for each in super().holdings() if each.holder in running)


def test_the_workload_covers_all_leaks() -> None:
    scheduler, pages = hybrid_scheduler()
    assert serve(scheduler) is None
    totals = scheduler.request_metrics.stats()
    assert totals.num_retractions_total > 5
    assert totals.num_aborted_requests_total > 5
    stats = checker_of(scheduler).stats()
    assert (stats.problems, stats.checks_failed) == (0, 0)
    assert stats.censuses >= scheduler.num_steps
    assert not pages.state_of
    assert len(pages.window) == 64


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_found_and_named(name: str) -> None:
    broken, rule, *cause = LEAKS[name]
    scheduler, _ = hybrid_scheduler(broken)
    report = serve(scheduler)
    assert report is not None, "not found"
    assert report.last_sound_step == report.step - 1, "found in the step that lost it"
    [problem] = [each for each in report.violations if each.rule == rule]
    culprit = problem.culprit
    assert isinstance(culprit, AllocationRecord)
    assert [problem.pool, culprit.component, culprit.phase] == cause
    assert culprit.action == ("freed" if name == "frees_twice" else "allocated")
    assert culprit.step <= report.step
    assert culprit.holder in str(problem)
    assert set(problem.pages) & set(culprit.pages)


def test_a_false_leak_names_the_request_that_has_the_page() -> None:
    scheduler, pages = hybrid_scheduler()
    pool = checker_of(scheduler).pools[-1]
    pool.holders = CountsRunningAlone(pages.state_of, scheduler.queues)  # type: ignore[misc]
    report = serve(scheduler)
    assert report is not None
    [problem] = [each for each in report.violations if each.rule == "lost"]
    assert problem.culprit is not None
    waiting = scheduler.queues.find(problem.culprit.holder)
    assert waiting is not None
    assert waiting.state is RequestState.WAITING, "it holds the page, so it is the count that is wrong"
    assert problem.culprit.component == "HybridPages.match_length"
