"""PoolInvariantChecker: check between steps that every page of every pool is in exactly one place.

The rules hold between any two steps:

1. **Counts.** available + evictable + protected + session_held + uncached + in_transfer = total, idle and busy; each
   term equals the length of its lists. A pool of request slots is a pool: free + held = size.
2. **Places.** Every page is in one place: once in the free list, or in one node of the tree, or with one holder. A page
   in no place is *lost*; a page in two places is *owned twice* or *owned and free*. The cached pages that a holder uses
   are in the tree.
3. **Locks.** The locks of a tree node equal the holders whose prefix ends in it or below it.
4. **Events.** The blocks that the published events add up to are those that the cache holds.

Checks have three depths. Most steps only decrement a counter. Every few steps, and whenever the scheduler is idle, the
counts of each pool are added up. A lost lock moves no page, so no sum of pages shows it. Therefore the number of locks
is compared with the number of their holders from time to time. A full check of every page, lock and published block
runs if the counts or the locks are wrong, if pages are protected while no request holds any, and occasionally while
idle. Counts show that something is wrong; the full check shows which pages, which holders, and with an `AllocationLog`
which call caused it. Each violation is reported once for as long as it lasts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

import attrs
import msgspec

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components._internal.validators import integer_validator
from scheduler_components.checks.allocation_log import AllocationLog, pair_records
from scheduler_components.errors import ConfigError, PoolInvariantError
from scheduler_components.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    MediumGroup,
    medium_group,
)
from scheduler_components.ports import HeldBlocksSource, KvEventSource
from scheduler_components.values import AllocationAction, AllocationRecord, IntegrityStats, PageHolding, PoolCount
from scheduler_components.watchdog import StepProgress

if TYPE_CHECKING:  # the frontend process reads CheckPolicy and must not load the cache
    from scheduler_components.checks.pool_stats_observer import AuditedNode, AuditedPool

__all__ = [
    "CheckPolicy",
    "PoolInvariantChecker",
    "PoolReport",
    "PoolViolation",
    "PublishedBlocks",
    "find_event_violations",
    "find_pool_violations",
]

logger = logging.getLogger(__name__)

ViolationRule: TypeAlias = Literal[
    "count", "lost", "owned-and-free", "owned-twice", "free-twice", "no-such-page", "not-cached", "locks",
    "event-missing", "event-extra",
]  # fmt: skip

CheckAction: TypeAlias = Literal["count", "log", "dump", "raise"]

_CHECKING = "checking the pools"
_CACHE = "the cache"
_MAX_SHOWN = 8
_MAX_HISTORY = 12

_RULES_OF_LOCKS = ("locks", "not-cached")
_UNLOCKING: tuple[AllocationAction, ...] = ("unlocked",)
_RELEASING: tuple[AllocationAction, ...] = ("freed", "cached")


class PoolViolation(msgspec.Struct, frozen=True):
    """One broken rule of one pool. `str` gives a sentence.

    Attributes:
        rule: the rule, as described at the top of this file.
        pool: name of the pool, or the medium of published blocks.
        detail: the arithmetic, as a clause.
        pages: affected pages, or hashes of blocks, in ascending order.
        holders: current holders of these pages.
        history: the newest entries of the allocation log about them, oldest first.
        culprit: the log entry that caused the violation; None if the log does not show it. It is found in the whole
            log: an action without its counterpart, for example an allocation without a release. A holder that returned
            everything that it took is never named.
    """

    rule: ViolationRule
    pool: str
    detail: str
    pages: tuple[int, ...] = ()
    holders: tuple[str, ...] = ()
    history: tuple[AllocationRecord, ...] = ()
    culprit: AllocationRecord | None = None

    @property
    def key(self) -> tuple[str, str, object]:
        """Equal for the same violation found by two checks."""
        return self.rule, self.pool, self.pages or self.detail

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.pages[:_MAX_SHOWN])) + (", ..." if len(self.pages) > _MAX_SHOWN else "")
        text = f"[{self.pool}] {self.rule}: {self.detail}" + (f": {shown}" if shown else "")
        held = f"; held by {', '.join(self.holders[:_MAX_SHOWN])}" if self.holders else ""
        if self.culprit is not None:
            return f"{text}{held}; {self.culprit}"
        return f"{text}{held}; the culprit is unknown" if self.history else text + held


def find_pool_violations(pool: AuditedPool, log: AllocationLog | None = None) -> list[PoolViolation]:
    """Check every page and every lock of a pool. The cost is proportional to its pages.

    Args:
        pool: the pool to check.
        log: adds the history of the affected pages to each violation.
    """
    holdings, nodes = list(pool.holdings()), list(pool.tree_nodes())
    count, free = pool.count(), pool.free_pages()
    found = [
        *_check_counts(count, free, nodes, holdings),
        *_check_places(count, free, nodes, holdings),
        *_check_locks(count.name, nodes, holdings),
    ]
    return found if log is None else [_with_history(violation, log) for violation in found]


def _with_history(violation: PoolViolation, log: AllocationLog) -> PoolViolation:
    if violation.rule == "count" or not violation.pages:
        return violation
    records = log.history(violation.pool, violation.pages)
    culprit = _find_culprit(violation, records, is_complete=log.is_complete)
    return msgspec.structs.replace(violation, history=tuple(records[-_MAX_HISTORY:]), culprit=culprit)


def _find_culprit(
    violation: PoolViolation, records: Sequence[AllocationRecord], *, is_complete: bool
) -> AllocationRecord | None:
    """Return the newest entry that explains the violation, or None.

    An entry explains it if it has no counterpart. A page that was properly returned says nothing about its last holder,
    because a holder that is not sampled may have taken it afterwards.
    """
    holders = violation.holders
    if violation.rule in _RULES_OF_LOCKS:
        locks = pair_records(records, violation.pages, "locked", _UNLOCKING, is_complete=is_complete)
        kept = locks.unreturned(Counter(holders)) if violation.rule == "locks" else []
        return _newest(records, kept) or _newest(records, locks.strays) or _newest(records, locks.last_returns(holders))
    taken = pair_records(records, violation.pages, "allocated", _RELEASING, is_complete=is_complete)
    if violation.rule == "lost":
        return _newest(records, taken.unreturned(Counter()))
    found = _newest(records, taken.strays) or _newest(records, taken.last_returns(holders))
    if found is None and violation.rule == "owned-twice" and set(holders) == taken.holders:
        return _newest(records, taken.unreturned(Counter()))
    return found


def _newest(records: Sequence[AllocationRecord], found: Collection[AllocationRecord]) -> AllocationRecord | None:
    return next((record for record in reversed(records) if any(record is each for each in found)), None)


def _check_counts(
    count: PoolCount, free: Sequence[int], nodes: Iterable[AuditedNode], holdings: Iterable[PageHolding]
) -> Iterator[PoolViolation]:
    if count.num_missing:
        yield PoolViolation("count", count.name, f"{count.num_missing} pages are missing")
    listed = Counter(available=len(free))
    for node in nodes:
        listed["protected" if node.lock_count else "evictable"] += len(node.pages)
    terms = {"request": "uncached", "session": "session_held", "transfer": "in_transfer"}
    for holding in holdings:
        listed[terms[holding.kind]] += len(holding.pages)
    for term in ("available", "evictable", "protected", "session_held", "uncached", "in_transfer"):
        counted: int = getattr(count, term)
        if counted != listed[term]:
            # Only the difference: it stays constant while the pool works, so the violation keeps its key.
            yield PoolViolation(
                "count", count.name, f"{term} differs from the lists by {counted - listed[term]:+d} pages"
            )


def _check_places(
    count: PoolCount, free: Sequence[int], nodes: Iterable[AuditedNode], holdings: Sequence[PageHolding]
) -> Iterator[PoolViolation]:
    name, places = count.name, _PageOwners(count.name)
    for node in nodes:
        places.claim(_CACHE, node.pages)
    cached = set(places.owner_of)
    for holding in holdings:
        places.claim(holding.holder, holding.pages)
    yield from places.violations
    is_free = _FreePages.of(free)
    if twice := is_free.twice:
        yield PoolViolation(
            "free-twice", name, f"{len(twice)} pages are in the free list more than once", _sorted(twice)
        )
    both = is_free.also_in(places.owner_of)
    if both:
        holders = tuple(sorted({places.owner_of[page] for page in both}))
        yield PoolViolation("owned-and-free", name, f"{len(both)} pages are free and owned", _sorted(both), holders)
    for holding in holdings:
        if not cached.issuperset(holding.shared):
            stale = set(holding.shared) - cached
            detail = f"{len(stale)} pages that {holding.holder} uses are not in the cache"
            yield PoolViolation("not-cached", name, detail, _sorted(stale), (holding.holder,))
    pages = range(count.first_page, count.first_page + count.total)
    wrong = {*_outside(places.owner_of, pages), *_outside(is_free.pages, pages)}
    if wrong:
        yield PoolViolation("no-such-page", name, f"{len(wrong)} pages do not belong to this pool", _sorted(wrong))
    num_lost = len(pages) - (len(is_free.pages) + len(places.owner_of) - len(both) - len(wrong))
    if num_lost:
        lost = [page for page in is_free.gaps(pages) if page not in places.owner_of]
        yield PoolViolation("lost", name, f"{len(lost)} pages are neither free nor owned", _sorted(lost))


@dataclass(slots=True, kw_only=True, frozen=True)
class _FreePages:
    """A free list as a set. A list that is a range stays one, so that ten million free slots cost as much as ten.

    Attributes:
        pages: the free pages.
        twice: pages that are listed more than once.
    """

    pages: AbstractSet[int] | range
    twice: Sequence[int] = ()

    @classmethod
    def of(cls, free: Sequence[int]) -> _FreePages:
        if isinstance(free, range) and free.step == 1:
            return cls(pages=free)
        pages = frozenset(free)
        if len(pages) == len(free):
            return cls(pages=pages)
        return cls(pages=pages, twice=[page for page, times in Counter(free).items() if times > 1])

    def also_in(self, owner_of: Mapping[int, str]) -> Collection[int]:
        """Return the free pages that have an owner."""
        if isinstance(self.pages, range):
            return [page for page in owner_of if page in self.pages]
        return self.pages & owner_of.keys()

    def gaps(self, pages: range) -> Iterator[int]:
        """Yield the pages of `pages` that are not free."""
        free = self.pages
        if isinstance(free, range) and free:
            yield from range(pages.start, min(pages.stop, max(pages.start, free.start)))
            yield from range(max(pages.start, min(pages.stop, free.stop)), pages.stop)
        else:
            yield from (page for page in pages if page not in free)


def _outside(found: Collection[int], pages: range) -> Iterable[int]:
    """Return the elements that are not in `pages`, a range without gaps. It mostly compares two bounds."""
    if not found or (pages and pages[0] <= _smallest(found) and _largest(found) <= pages[-1]):
        return ()
    return (page for page in found if page not in pages)


def _smallest(found: Collection[int]) -> int:
    return found[0] if isinstance(found, range) else min(found)


def _largest(found: Collection[int]) -> int:
    return found[-1] if isinstance(found, range) else max(found)


class _PageOwners:
    """Records the owner of each page and reports pages with two owners."""

    __slots__ = ("_name", "owner_of", "violations")

    def __init__(self, name: str) -> None:
        self._name = name
        self.owner_of: dict[int, str] = {}
        self.violations: list[PoolViolation] = []

    def claim(self, owner: str, pages: Sequence[int]) -> None:
        owner_of = self.owner_of
        if not owner_of.keys().isdisjoint(pages):
            both = {page for page in pages if page in owner_of}
            holders = tuple(sorted({owner, *(owner_of[page] for page in both)}))
            self._report(f"{len(both)} pages have two owners", both, holders)
        if len(set(pages)) != len(pages):
            twice = {page for page, times in Counter(pages).items() if times > 1}
            self._report(f"{owner} lists {len(twice)} pages twice", twice, (owner,))
        owner_of.update(dict.fromkeys(pages, owner))

    def _report(self, detail: str, pages: Collection[int], holders: tuple[str, ...]) -> None:
        self.violations.append(PoolViolation("owned-twice", self._name, detail, _sorted(pages), holders))


def _check_locks(name: str, nodes: Iterable[AuditedNode], holdings: Iterable[PageHolding]) -> Iterator[PoolViolation]:
    in_tree = dict.fromkeys(nodes)
    holders_of: dict[AuditedNode, list[str]] = {}
    for holding in holdings:
        node = cast("AuditedNode | None", holding.node)
        if node is not None and node.parent is None and holding.shared:
            yield _not_in_tree(name, holding)
        while node is not None and node.parent is not None:
            if node not in in_tree:
                yield _not_in_tree(name, holding)
                break
            holders_of.setdefault(node, []).append(holding.holder)
            node = node.parent
    for node in in_tree:
        holders = holders_of.get(node, [])
        if node.lock_count != len(holders):
            detail = f"a node has {node.lock_count} locks and {len(holders)} holders"
            yield PoolViolation("locks", name, detail, tuple(node.pages), tuple(sorted(holders)))


def _not_in_tree(name: str, holding: PageHolding) -> PoolViolation:
    detail = f"the prefix that {holding.holder} has locked is not in the tree"
    return PoolViolation("locks", name, detail, tuple(holding.shared), (holding.holder,))


def find_event_violations(published: HeldBlocksSource, cached: HeldBlocksSource) -> Iterator[PoolViolation]:
    """Compare the published blocks with the cached ones, in the places that the cache names."""
    published_blocks, cached_blocks = published.held_blocks(), cached.held_blocks()
    for place, hashes in cached_blocks.items():
        held, sent = set(hashes), set(published_blocks.get(place, ()))
        name = place[0]
        if missing := held - sent:
            yield PoolViolation(
                "event-missing", name, f"{len(missing)} cached blocks were never published", _sorted(missing)
            )
        if extra := sent - held:
            yield PoolViolation("event-extra", name, f"{len(extra)} published blocks are not cached", _sorted(extra))


def _sorted(pages: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(pages))


@dataclass(slots=True, kw_only=True)
class PublishedBlocks:
    """A `KvEventSource` between a cache and its publisher, and the `HeldBlocksSource` of the events that passed.

    Costs one set operation per block, and 60 bytes per cached block.

    Attributes:
        source: the cache.
    """

    source: KvEventSource
    _blocks: dict[MediumGroup, set[int]] = field(default_factory=dict, init=False, repr=False)

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return the cache's events since the last call, and apply them."""
        events = self.source.take_events()
        for event in events:
            if isinstance(event, BlockStored):
                self._blocks.setdefault(medium_group(event.medium, event.group_idx), set()).update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self._blocks.setdefault(medium_group(event.medium, event.group_idx), set()).difference_update(
                    event.block_hashes
                )
            elif isinstance(event, AllBlocksCleared):
                self._blocks.clear()
        return events

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        """Return the blocks that a reader knows that has missed no event."""
        return self._blocks


def _check_action(_: CheckPolicy, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in get_args(CheckAction):
        raise ConfigError(attribute.name, value, "is no action", f"give one of {', '.join(get_args(CheckAction))}")


@attrs.frozen(kw_only=True)
class CheckPolicy:
    """How often to check, and how to report violations.

    Attributes:
        action: ``count`` counts violations for the metrics; ``log`` also logs each one once; ``dump`` also logs every
            pool and its holders; ``raise`` also raises into the step, which is for tests.
        count_every_steps: how often a busy scheduler adds its pools up. It finds a leak within so many steps.
        locks_every_steps: how often a busy scheduler compares the locks of prefixes with their holders. It finds a lost
            lock within so many steps. The holders list their pages for that, so it is less frequent than the counts.
        full_check_every_steps: how often every page is checked without a suspicion: at the first idle moment after so
            many steps. 36,000 pages take about 10 ms, which delays a request that arrives at that moment.
        is_full_check_in_steps: do not wait for an idle moment. For tests.

    Raises:
        ConfigError: naming the invalid value.
    """

    action: CheckAction = attrs.field(default="log", validator=_check_action)
    count_every_steps: int = attrs.field(default=16, validator=integer_validator())
    full_check_every_steps: int = attrs.field(default=4096, validator=integer_validator())
    is_full_check_in_steps: bool = False
    locks_every_steps: int = attrs.field(default=256, validator=integer_validator())


class PoolReport(msgspec.Struct, frozen=True):
    """Result of one full check. `str` gives one line per pool and violation.

    Attributes:
        step: the step before the check.
        last_sound_step: the last step after which the counts added up; -1 before the first.
        counts: the count of each pool.
        violations: empty for a sound scheduler.
    """

    step: int
    last_sound_step: int
    counts: tuple[PoolCount, ...]
    violations: tuple[PoolViolation, ...]

    @property
    def head(self) -> str:
        """The first line."""
        return (
            f"step {self.step}: {len(self.violations)} violations; counts last added up after step "
            f"{self.last_sound_step}"
        )

    def __str__(self) -> str:
        return "\n  ".join((self.head, *map(str, self.counts), *map(str, self.violations)))


@dataclass(slots=True, kw_only=True)
class PoolInvariantChecker:
    """Checks all pools of a scheduler after its steps.

    The scheduler calls `after_step` after each step and when it becomes idle. The checker changes nothing. No exception
    of a pool reaches the step, and no violation does, unless the policy is ``raise``.

    Attributes:
        pools: all pools of one scheduler, of pages and of request slots.
        policy: how often to check, and how to report.
        progress: the number of the step.
        log: names the calls that allocated and freed a page; None without one.
        published: the blocks that the events add up to: a `PublishedBlocks`.
        cached: the blocks in the cache, compared with `published` in the places that it names.
        failures: exceptions of the pools.
        last_report: the last full check with a violation; None before the first one.
    """

    pools: Sequence[AuditedPool]
    policy: CheckPolicy = field(default_factory=CheckPolicy)
    progress: StepProgress = field(default_factory=StepProgress)
    log: AllocationLog | None = None
    published: HeldBlocksSource | None = None
    cached: HeldBlocksSource | None = None
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    last_report: PoolReport | None = field(default=None, init=False, repr=False)
    _schedule: _Schedule = field(init=False, repr=False)
    _last_sound_step: int = field(default=-1, init=False, repr=False)
    _open: dict[tuple[str, str, object], PoolViolation] = field(default_factory=dict, init=False, repr=False)
    _counts: Counter[str] = field(default_factory=Counter, init=False, repr=False)

    def __post_init__(self) -> None:
        self._schedule = _Schedule(policy=self.policy, steps_to_locks=self.policy.locks_every_steps)

    def after_step(self, *, is_idle: bool) -> None:
        """Run the checks that are due. Call it after each step, and when the scheduler becomes idle.

        Args:
            is_idle: no request holds pages and no page is being transferred. Requests may wait.

        Raises:
            PoolInvariantError: a new violation was found, and the policy is to raise.
        """
        schedule = self._schedule
        schedule.steps_to_count -= 1
        if schedule.steps_to_count > 0 and not is_idle:
            return
        report = None
        with self.failures.guard(_CHECKING):
            report = self._check(is_idle=is_idle)
        if report is not None:
            self._report(report)

    def check_fully(self) -> PoolReport:
        """Check every page, lock and published block now and return the result, without logging or raising.

        An exception of a pool propagates.
        """
        counts = tuple(pool.count() for pool in self.pools)
        violations = [violation for pool in self.pools for violation in find_pool_violations(pool, self.log)]
        if self.published is not None and self.cached is not None:
            violations += find_event_violations(self.published, self.cached)
        self._counts["censuses"] += 1
        self._schedule.on_full_check(counts, self._count_extra_locks(counts))
        return PoolReport(self.progress.step, self._last_sound_step, counts, tuple(violations))

    def stats(self) -> IntegrityStats:
        return IntegrityStats(
            checks_failed=self.failures.total,
            stalls=self.progress.num_stalls,
            problems_open=len(self._open),
            **self._counts,
        )

    def _check(self, *, is_idle: bool) -> PoolReport | None:
        """Add up the counts; return the result of a full check if the counts or the schedule require one."""
        schedule = self._schedule
        counts = tuple(pool.count() for pool in self.pools)
        self._counts["checks"] += 1
        is_suspicious = schedule.on_count(counts)
        if is_idle:
            is_suspicious |= schedule.on_idle(sum(count.protected for count in counts))
        if schedule.steps_to_locks <= 0:
            is_suspicious |= schedule.on_locks(self._count_extra_locks(counts))
        if not any(schedule.missing):
            self._last_sound_step = self.progress.step
        is_due = schedule.steps_to_full_check <= 0 and (is_idle or self.policy.is_full_check_in_steps)
        return self.check_fully() if is_suspicious or is_due else None

    def _count_extra_locks(self, counts: Sequence[PoolCount]) -> tuple[int, ...]:
        """Return for each pool how many locks have no holder; negative if holders lack their lock."""
        return tuple(
            0 if count.num_locks is None else count.num_locks - sum(each.node is not None for each in pool.holdings())
            for pool, count in zip(self.pools, counts, strict=True)
        )

    def _report(self, report: PoolReport) -> None:
        """Report the new violations as the policy says."""
        new = self._update_open(report)
        if not new or self.policy.action == "count":
            return
        logger.error("%s", "\n  ".join((report.head, *map(str, report.counts), *map(str, new))))
        if self.policy.action == "dump":
            logger.error("%s", "\n".join(_describe_pools(self.pools)))
        if self.policy.action == "raise":
            raise PoolInvariantError(report.step, tuple(map(str, new)))

    def _update_open(self, report: PoolReport) -> list[PoolViolation]:
        """Replace the open violations by those of `report`; return the new ones. One is new once while it lasts."""
        now = {violation.key: violation for violation in report.violations}
        new = [violation for key, violation in now.items() if key not in self._open]
        known_lost = {page for each in self._open.values() if each.rule == "lost" for page in _named_pages(each)}
        now_lost = {page for each in new if each.rule == "lost" for page in _named_pages(each)}
        self._counts["problems"] += len(new)
        self._counts["pages_lost"] += len(now_lost - known_lost)
        self._open = now
        if report.violations:
            self.last_report = report
        return new


def _describe_pools(pools: Sequence[AuditedPool]) -> Iterator[str]:
    """Yield a line per pool and holder, to read next to a report."""
    for pool in pools:
        yield str(pool.count())
        for holding in pool.holdings():
            yield f"  {_describe_holding(holding)}"


def _describe_holding(holding: PageHolding) -> str:
    shown = ", ".join(map(str, holding.pages[:_MAX_SHOWN])) + (", ..." if len(holding.pages) > _MAX_SHOWN else "")
    own = f"{len(holding.pages)} own pages ({shown})" if holding.pages else "no own page"
    return f"{holding.kind} {holding.holder}: {own}, {len(holding.shared)} of the cache"


@dataclass(slots=True, kw_only=True)
class _Schedule:
    """When to check again.

    A leak stays until the engine restarts. So wrong counts require a full check only if they differ from those of the
    last full check.
    """

    policy: CheckPolicy
    steps_to_locks: int
    steps_to_count: int = 0
    steps_to_full_check: int = 0
    missing: tuple[int, ...] = ()
    _missing_at_full_check: tuple[int, ...] = ()
    _extra_locks_at_full_check: tuple[int, ...] = ()
    _num_protected: int = 0

    def on_count(self, counts: Sequence[PoolCount]) -> bool:
        """Handle a count of the pools; return whether it requires a full check."""
        self.missing = tuple(count.num_missing for count in counts)
        num_steps = self.policy.count_every_steps - self.steps_to_count
        self.steps_to_full_check -= num_steps
        self.steps_to_locks -= num_steps
        self.steps_to_count = self.policy.count_every_steps
        return self.missing != (self._missing_at_full_check or (0,) * len(counts))

    def on_locks(self, extra_locks: tuple[int, ...]) -> bool:
        """Handle the locks without holders of each pool; return whether they require a full check."""
        self.steps_to_locks = self.policy.locks_every_steps
        return extra_locks != (self._extra_locks_at_full_check or (0,) * len(extra_locks))

    def on_full_check(self, counts: Sequence[PoolCount], extra_locks: tuple[int, ...]) -> None:
        self.missing = self._missing_at_full_check = tuple(count.num_missing for count in counts)
        self._extra_locks_at_full_check = extra_locks
        self.steps_to_full_check = self.policy.full_check_every_steps

    def on_idle(self, num_protected: int) -> bool:
        """Handle the number of protected pages while no request holds any; return whether it requires a full check.

        Sessions may protect some pages, so only a changed number does.
        """
        before, self._num_protected = self._num_protected, num_protected
        return num_protected not in (0, before)


def _named_pages(violation: PoolViolation) -> Iterator[tuple[str, int]]:
    return ((violation.pool, page) for page in violation.pages)
