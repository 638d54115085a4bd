"""PoolInvariantChecker: looks between two steps whether all pools still add up, and says what, whose and since when.

Three depths, by what they cost. In most steps: a counter. Every few steps, and whenever the scheduler is idle: the
counts of each pool. When these are wrong, when pages are protected though nobody holds any (a lock that was lost moves
no page, so it shows in no sum), and now and then while idle: a census of every page, lock and told block.
What is found is told once for as long as it stands. ``census`` has the rules.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import attrs
import msgspec

from scheduler_components.errors import ConfigError, PoolInvariantError
from scheduler_components.failure_log import FailureLog
from scheduler_components.invariant_rules import PoolViolation, find_event_violations, find_pool_violations
from scheduler_components.ports import AuditedPool, HeldBlocksSource, NullHeldBlocksSource, NullOwnerTrails, OwnerTrails
from scheduler_components.step_progress import StepProgress
from scheduler_components.validators import integer_validator
from scheduler_components.values import IntegrityStats, PageHolding, PoolCount

__all__ = ["CheckAction", "CheckPolicy", "PoolInvariantChecker", "PoolReport"]

logger = logging.getLogger(__name__)

CheckAction: TypeAlias = Literal["count", "log", "dump", "raise"]
CHECK_ACTIONS = ("count", "log", "dump", "raise")

_CHECKING = "checking the pools"


def _check_action(_: CheckPolicy, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in CHECK_ACTIONS:
        raise ConfigError(attribute.name, value, "is no action", f"give one of {', '.join(CHECK_ACTIONS)}")


@attrs.frozen(kw_only=True)
class CheckPolicy:
    """How often to look, and what to do about what is found.

    Attributes:
        action: ``count`` counts it for the metrics; ``log`` also logs each problem once; ``dump`` also logs every
            pool and who holds what; ``raise`` also raises into the step, which is for tests.
        count_every_steps: how often a busy scheduler adds its pools up. A leak is found by then.
        full_check_every_steps: how often every page is looked at without a suspicion: at the next idle moment after so
            many steps. 36,000 pages take some 10 ms, which a request that comes just then waits.
        is_full_check_in_steps: do not wait for an idle moment. For tests.

    Raises:
        ConfigError: naming the value that cannot work.
    """

    action: CheckAction = attrs.field(default="log", validator=_check_action)
    count_every_steps: int = attrs.field(default=16, validator=integer_validator())
    full_check_every_steps: int = attrs.field(default=4096, validator=integer_validator())
    is_full_check_in_steps: bool = False


class PoolReport(msgspec.Struct, frozen=True):
    """What one census found; as text, a line per pool and problem.

    Attributes:
        step: after which it was taken.
        last_sound_step: step after which the counts last added up; -1 before the first time.
        counts: of each pool.
        problems: none in a sound scheduler.
    """

    step: int
    last_sound_step: int
    counts: tuple[PoolCount, ...]
    problems: tuple[PoolViolation, ...]

    @property
    def head(self) -> str:
        """The first line."""
        return (
            f"step {self.step}: {len(self.problems)} problems; counts last added up after step {self.last_sound_step}"
        )

    def __str__(self) -> str:
        return "\n  ".join((self.head, *map(str, self.counts), *map(str, self.problems)))


@dataclass(slots=True, kw_only=True)
class PoolInvariantChecker:
    """Checks any number of pools after steps. Nothing that a pool raises reaches the step, and nothing that is found
    does, unless the policy says ``raise``. Changes nothing.

    Attributes:
        pools: all pools of one scheduler, of pages and of request slots.
        policy: how often, and what then.
        progress: gives the number of the step.
        owners: names who took and gave a page; a ledger.
        published: what the events add up to; an ``PublishedBlocks``.
        cached: what the cache holds. Compared with ``told``, in the places that it names.
        failures: pools that raised instead of answering.
    """

    pools: Sequence[AuditedPool]
    policy: CheckPolicy = field(default_factory=CheckPolicy)
    progress: StepProgress = field(default_factory=StepProgress)
    owners: OwnerTrails = field(default_factory=NullOwnerTrails)
    published: HeldBlocksSource = field(default_factory=NullHeldBlocksSource)
    cached: HeldBlocksSource = field(default_factory=NullHeldBlocksSource)
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _schedule: _Schedule = field(init=False, repr=False)
    _found: _Found = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._schedule = _Schedule(
            counts_every=self.policy.count_every_steps, census_every=self.policy.full_check_every_steps
        )
        self._found = _Found()

    def after_step(self, *, is_idle: bool) -> None:
        """Look, if it is time to. Call it after each step, and when the scheduler becomes idle.

        Args:
            is_idle: no request holds pages and no page is on its way; requests may wait.

        Raises:
            PoolInvariantError: something new is wrong, and the policy is to raise.
        """
        schedule = self._schedule
        schedule.steps_to_counts -= 1
        if schedule.steps_to_counts > 0 and not is_idle:
            return
        try:
            report = self._look(is_idle=is_idle)
        except Exception as error:  # noqa: BLE001 - a broken check must not take the engine down; counted and logged
            self.failures.failed(_CHECKING, error)
            return
        self.failures.succeeded(_CHECKING)
        if report is not None:
            self._tell(report)

    def check_fully(self) -> PoolReport:
        """Look at every page, lock and told block now, and return what is wrong. Tells nobody.

        Raises:
            Exception: whatever a pool raises.
        """
        counts = tuple(pool.count() for pool in self.pools)
        problems = [problem for pool in self.pools for problem in find_pool_violations(pool, self.owners)]
        problems += find_event_violations(self.published, self.cached)
        found = self._found
        found.num_censuses += 1
        self._schedule.counted(counts, is_census=True)
        return PoolReport(self.progress.step, found.last_sound_step, counts, tuple(problems))

    def stats(self) -> IntegrityStats:
        """Return the counters of this moment."""
        return self._found.stats(checks_failed=self.failures.total, stalls=self.progress.num_stalls)

    @property
    def last_report(self) -> PoolReport | None:
        """The last census that found something; None before the first one."""
        return self._found.last_report

    def _look(self, *, is_idle: bool) -> PoolReport | None:
        """Count, and take a census where the counts or the calendar ask for one."""
        schedule, found = self._schedule, self._found
        counts = tuple(pool.count() for pool in self.pools)
        found.num_checks += 1
        is_suspicious = schedule.counted(counts, is_census=False)
        if is_idle:
            is_suspicious |= schedule.protected_at_rest(sum(count.protected for count in counts))
        if not any(schedule.missing):
            found.last_sound_step = self.progress.step
        is_due = schedule.steps_to_census <= 0 and (is_idle or self.policy.is_full_check_in_steps)
        return self.check_fully() if is_suspicious or is_due else None

    def _tell(self, report: PoolReport) -> None:
        """Do what the policy says about what is new."""
        new = self._found.take(report)
        if not new or self.policy.action == "count":
            return
        logger.error("%s", "\n  ".join((report.head, *map(str, report.counts), *map(str, new))))
        if self.policy.action == "dump":
            logger.error("%s", "\n".join(describe_pools(self.pools)))
        if self.policy.action == "raise":
            raise PoolInvariantError(report.step, tuple(map(str, new)))


def describe_pools(pools: Sequence[AuditedPool]) -> Iterator[str]:
    """A line per pool and holder: what a person reads beside a report."""
    for pool in pools:
        yield str(pool.count())
        for holding in pool.holdings():
            yield f"  {_description(holding)}"


def _description(holding: PageHolding) -> str:
    shown = ", ".join(map(str, holding.pages[:8])) + (", ..." if len(holding.pages) > 8 else "")
    own = f"{len(holding.pages)} own pages ({shown})" if holding.pages else "no own page"
    return f"{holding.kind} {holding.holder}: {own}, {len(holding.shared)} of the cache"


@dataclass(slots=True, kw_only=True)
class _Schedule:
    """When to look again.

    A leak stays until the engine restarts. So it is not searched for anew at each count, but when the counts are wrong
    in another way than at the last census.
    """

    counts_every: int
    census_every: int
    steps_to_counts: int = 0
    steps_to_census: int = 0
    missing: tuple[int, ...] = ()
    _missing_at_census: tuple[int, ...] = ()
    _num_protected: int = 0

    def counted(self, counts: Sequence[PoolCount], *, is_census: bool) -> bool:
        """The pools were counted; returns whether that asks for a census."""
        self.missing = tuple(count.num_missing for count in counts)
        if is_census:
            self._missing_at_census = self.missing
            self.steps_to_census = self.census_every
            return False
        self.steps_to_census -= self.counts_every - self.steps_to_counts
        self.steps_to_counts = self.counts_every
        return self.missing != (self._missing_at_census or (0,) * len(counts))

    def protected_at_rest(self, num_pages: int) -> bool:
        """So many pages are protected while no request holds any; returns whether that asks for a census.

        Sessions may protect some, so it does when there are others than the last time.
        """
        before, self._num_protected = self._num_protected, num_pages
        return num_pages not in (0, before)


@dataclass(slots=True, kw_only=True)
class _Found:
    """What was found so far; a problem that stands is new once."""

    num_checks: int = 0
    num_censuses: int = 0
    num_problems: int = 0
    num_pages_lost: int = 0
    last_sound_step: int = -1
    last_report: PoolReport | None = None
    _open: dict[tuple[str, str, object], PoolViolation] = field(default_factory=dict)

    def take(self, report: PoolReport) -> list[PoolViolation]:
        """Remember what stands now; returns what did not stand before."""
        now = {problem.key: problem for problem in report.problems}
        new = [problem for key, problem in now.items() if key not in self._open]
        known_lost = {page for problem in self._open.values() if problem.rule == "lost" for page in _named(problem)}
        now_lost = {page for problem in new if problem.rule == "lost" for page in _named(problem)}
        self.num_problems += len(new)
        self.num_pages_lost += len(now_lost - known_lost)
        self._open = now
        if report.problems:
            self.last_report = report
        return new

    def stats(self, *, checks_failed: int, stalls: int) -> IntegrityStats:
        return IntegrityStats(
            checks=self.num_checks,
            censuses=self.num_censuses,
            checks_failed=checks_failed,
            problems=self.num_problems,
            pages_lost=self.num_pages_lost,
            stalls=stalls,
            problems_open=len(self._open),
        )


def _named(problem: PoolViolation) -> Iterator[tuple[str, int]]:
    return ((problem.pool, page) for page in problem.pages)
