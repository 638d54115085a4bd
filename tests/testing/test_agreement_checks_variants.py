"""Broken waiting queues, as authors of engines write them: the checks of agreement find each of them.

Their author did not write the checks. All but a few are one right queue, written by hand over ``ParallelGroups``, with
one decision taken by a local fact, or one rule left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Event
from zlib import crc32

import pytest

from scheduler_components import ParallelState
from scheduler_components.agreement import MIN_NEUTRAL, AgreedValues, ParallelGroups, Proposal
from scheduler_components.errors import SyncTimeoutError
from scheduler_components.testing import AGREEMENT_CHECKS, ConformanceError, ThreadRanks

LANES = 16
FAILED, WAITING, READY = 0, 1, 2
Left = tuple[str, str]


class Queue:
    """A right queue by hand."""

    def __init__(self, groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> None:
        self.groups, self.clock, self.leads = groups, clock, leads
        self.limits: dict[str, float] = {}
        self.deadlines: dict[str, float] = {}
        self.facts: dict[str, int] = {}
        self.digest = 0

    def add(self, rid: str, timeout_s: float) -> bool:
        self.limits[rid] = timeout_s
        self.facts[rid] = WAITING
        self.digest = crc32(f"add {rid}".encode(), self.digest)
        return True

    def report(self, rid: str, is_ready: bool) -> None:
        if self.facts.get(rid) == WAITING:
            self.facts[rid] = READY if is_ready else FAILED

    def cancel(self, rid: str) -> None:
        self.digest = crc32(f"cancel {rid}".encode(), self.digest)
        self.remove(rid)

    def remove(self, rid: str) -> None:
        self.limits.pop(rid, None)
        self.deadlines.pop(rid, None)
        self.facts.pop(rid, None)

    def in_lanes(self) -> list[str]:
        return list(self.limits)[:LANES]

    def step(self, step: int) -> Iterable[Left]:
        agreed = self.agree(self.proposal(step))
        if not agreed.flags["digest"]:
            raise RuntimeError(f"the ranks hold different requests at step {step}")
        now_us = agreed.numbers["now"]
        for rid, limit_s in self.limits.items():
            self.deadlines.setdefault(rid, now_us / 1e6 + limit_s)
        left = [(rid, reason) for rid in list(self.limits) if (reason := self.reason(rid, agreed))]
        for rid, _ in left:
            self.remove(rid)
        return left

    def proposal(self, step: int) -> Proposal:
        proposal = Proposal("step", step=step)
        proposal.min("now", round(self.clock() * 1e6) if self.leads else MIN_NEUTRAL)
        proposal.equal("digest", self.digest)
        lanes = [self.facts[rid] for rid in self.in_lanes()]
        for lane, fact in enumerate([*lanes, *[WAITING] * LANES][:LANES]):
            self.slot(proposal, f"lane {lane}", fact)
        return proposal

    def slot(self, proposal: Proposal, name: str, fact: int) -> None:
        proposal.min(name, fact)

    def agree(self, proposal: Proposal) -> AgreedValues:
        return self.groups.reduce(proposal)

    def reason(self, rid: str, agreed: AgreedValues) -> str:
        lanes = self.in_lanes()
        fact = agreed.numbers[f"lane {lanes.index(rid)}"] if rid in lanes else WAITING
        if fact != WAITING:
            return "failed" if fact == FAILED else "ready"
        return "expired" if self.now_s(agreed) >= self.deadlines[rid] else ""

    def now_s(self, agreed: AgreedValues) -> float:
        return agreed.numbers["now"] / 1e6


# Facts that are not agreed.


class Alone(Queue):
    """Lets a request go when this rank is ready."""

    def reason(self, rid: str, agreed: AgreedValues) -> str:
        fact = self.facts[rid]
        if fact != WAITING:
            return "failed" if fact == FAILED else "ready"
        return super().reason(rid, agreed)


class LeaderDecides(Queue):
    """The leading rank broadcasts its own facts, as SGLang 0.5.23 does for its grammar queue across stages."""

    def slot(self, proposal: Proposal, name: str, fact: int) -> None:
        proposal.min(name, fact if self.leads else MIN_NEUTRAL)


class AnyIsEnough(Queue):
    """A request is ready if one rank is."""

    def slot(self, proposal: Proposal, name: str, fact: int) -> None:
        proposal.max(name, fact)


class FirstHopOnly(Queue):
    """Agrees with the ranks of its first group."""

    def agree(self, proposal: Proposal) -> AgreedValues:
        self.few = getattr(self, "few", None) or ParallelGroups(rank=self.groups.rank, groups=self.groups.groups[:1])
        return self.few.reduce(proposal)


class FailsAlone(Queue):
    """A request that fails leaves on the rank on which it failed."""

    def reason(self, rid: str, agreed: AgreedValues) -> str:
        return "failed" if self.facts[rid] == FAILED else super().reason(rid, agreed)


class HidesFailures(Queue):
    """A failed rank says that it waits, so the request waits until it expires."""

    def slot(self, proposal: Proposal, name: str, fact: int) -> None:
        proposal.min(name, max(fact, WAITING))


class FailedIsReady(Queue):
    """Counts ranks that are done, whether they succeeded or not."""

    def slot(self, proposal: Proposal, name: str, fact: int) -> None:
        proposal.min(name, READY if fact == FAILED else fact)


class FailsIfAllFail(Queue):
    """A request that failed on one rank and is ready on the others is ready."""

    def slot(self, proposal: Proposal, name: str, fact: int) -> None:
        proposal.max(name, {FAILED: 0, WAITING: 9, READY: 1}[fact])

    def reason(self, rid: str, agreed: AgreedValues) -> str:
        lanes = self.in_lanes()
        fact = agreed.numbers[f"lane {lanes.index(rid)}"] if rid in lanes else 9
        if fact != 9:
            return "ready" if fact else "failed"
        return "expired" if self.now_s(agreed) >= self.deadlines[rid] else ""


# Time.


class OwnClock(Queue):
    """Compares the deadline with the clock of this rank."""

    def now_s(self, agreed: AgreedValues) -> float:
        return self.clock()


class EveryClock(Queue):
    """The smallest clock of all ranks is the agreed one."""

    def proposal(self, step: int) -> Proposal:
        self.leads = True
        return super().proposal(step)


class DeadlineByOwnClock(Queue):
    """Counts the wait from this rank's clock, and compares with the agreed one."""

    def add(self, rid: str, timeout_s: float) -> bool:
        self.deadlines[rid] = self.clock() + timeout_s
        return super().add(rid, timeout_s)


class NeverExpires(Queue):
    def now_s(self, agreed: AgreedValues) -> float:
        return float("-inf")


class ExpiresOnlyInLanes(Queue):
    """What waits behind the lanes never expires, and what is in them waits for a compiler that hangs."""

    def reason(self, rid: str, agreed: AgreedValues) -> str:
        reason = super().reason(rid, agreed)
        return "" if reason == "expired" and len(self.limits) > 1 else reason


class ExpiresEarly(Queue):
    """Halves the limit under load."""

    def now_s(self, agreed: AgreedValues) -> float:
        return super().now_s(agreed) + (25.0 if len(self.limits) > 3 else 0.0)


# Order, membership, number.


class OrderOfFacts(Queue):
    """Requests leave in the order in which this rank became ready for them."""

    def __init__(self, groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> None:
        super().__init__(groups, clock, leads)
        self.arrived: list[str] = []

    def report(self, rid: str, is_ready: bool) -> None:
        super().report(rid, is_ready)
        self.arrived.append(rid)

    def step(self, step: int) -> list[Left]:
        order = {rid: place for place, rid in enumerate(self.arrived)}
        return sorted(super().step(step), key=lambda left: order.get(left[0], -1))


class OrderOfASet(Queue):
    """Requests leave in the order of a set, whose hashes differ between processes."""

    def step(self, step: int) -> list[Left]:
        return sorted(super().step(step), key=lambda left: crc32(f"{self.groups.rank} {left}".encode()))


class OneRankLate(Queue):
    """A rank of a later stage lets requests go one step after the others."""

    late: tuple[Left, ...] = ()

    def step(self, step: int) -> Iterable[Left]:
        left = tuple(super().step(step))
        if self.groups.rank:
            left, self.late = self.late, left
        return left


class ForgetsTheCrowd(Queue):
    """What does not fit the lanes is lost."""

    def add(self, rid: str, timeout_s: float) -> bool:
        super().add(rid, timeout_s)
        if len(self.limits) > LANES:
            self.remove(rid)
        return True


class HeadOfLine(Queue):
    """Only the oldest request may leave."""

    def reason(self, rid: str, agreed: AgreedValues) -> str:
        return super().reason(rid, agreed) if rid == next(iter(self.limits)) else ""


class ExpiresInLanes(Queue):
    """What waits behind the lanes does not expire before it has moved up."""

    def reason(self, rid: str, agreed: AgreedValues) -> str:
        return super().reason(rid, agreed) if rid in self.in_lanes() else ""


class LeavesTwice(Queue):
    """Lets a request go again when a late fact about it arrives."""

    def __init__(self, groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> None:
        super().__init__(groups, clock, leads)
        self.again: list[str] = []

    def report(self, rid: str, is_ready: bool) -> None:
        if rid not in self.facts:
            self.again.append(rid)
        super().report(rid, is_ready)

    def step(self, step: int) -> list[Left]:
        again, self.again = self.again, []
        return [*super().step(step), *((rid, "ready") for rid in again)]


class SendsAgain(Queue):
    """Returns what left in the last step, too: its caller did not confirm it."""

    last: tuple[Left, ...] = ()

    def step(self, step: int) -> tuple[Left, ...]:
        left = tuple(super().step(step))
        both, self.last = self.last + left, left
        return both


class RefusesByLocalLoad(Queue):
    """Refuses requests while this rank's own compiler is busy."""

    def add(self, rid: str, timeout_s: float) -> bool:
        busy = sum(fact == WAITING for fact in self.facts.values())
        super().add(rid, timeout_s)
        if busy > 3 and self.groups.rank:
            self.remove(rid)
            return False
        return True


# Aborts.


class IgnoresAborts(Queue):
    def cancel(self, rid: str) -> None:
        pass


class AbortsOnTheLeader(Queue):
    """The abort reaches the leading rank only."""

    def cancel(self, rid: str) -> None:
        if self.leads:
            self.remove(rid)


class AbortsWhatWaits(Queue):
    """A request for which this rank is ready is no longer aborted."""

    def cancel(self, rid: str) -> None:
        if self.facts.get(rid) != READY:
            super().cancel(rid)


class KeepsFactsOfAborted(Queue):
    """A request that is sent again under its id finds the facts of its first life."""

    def __init__(self, groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> None:
        super().__init__(groups, clock, leads)
        self.kept: dict[str, int] = {}

    def cancel(self, rid: str) -> None:
        self.kept[rid] = self.facts.get(rid, WAITING)
        super().cancel(rid)

    def add(self, rid: str, timeout_s: float) -> bool:
        super().add(rid, timeout_s)
        self.facts[rid] = self.kept.get(rid, WAITING)
        return True


class AbortedIdsStayTaken(Queue):
    """Refuses the id of an aborted request for ever."""

    def __init__(self, groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> None:
        super().__init__(groups, clock, leads)
        self.aborted: set[str] = set()

    def cancel(self, rid: str) -> None:
        super().cancel(rid)
        self.aborted.add(rid)

    def add(self, rid: str, timeout_s: float) -> bool:
        if rid in self.aborted:
            raise ValueError(f"{rid} was aborted")
        return super().add(rid, timeout_s)


# Stray facts.


class RaisesOnStrayFacts(Queue):
    def report(self, rid: str, is_ready: bool) -> None:
        if rid not in self.facts:
            raise KeyError(rid)
        super().report(rid, is_ready)


class LastFactWins(Queue):
    """A fact replaces the one before it, also in the lanes of the next step."""

    def report(self, rid: str, is_ready: bool) -> None:
        self.facts[rid] = READY if is_ready else FAILED
        self.limits.setdefault(rid, 50.0)


class CountsReports(Queue):
    """Counts reports instead of ranks: a rank that reports twice counts twice."""

    def __init__(self, groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> None:
        super().__init__(groups, clock, leads)
        self.reports: dict[str, int] = {}

    def report(self, rid: str, is_ready: bool) -> None:
        super().report(rid, is_ready)
        self.reports[rid] = self.reports.get(rid, 0) + is_ready

    def reason(self, rid: str, agreed: AgreedValues) -> str:
        return "ready" if self.reports.get(rid, 0) > 1 else super().reason(rid, agreed)


# Collectives, dead ranks and ranks that missed a call.


class AsksWhenItHasNews(Queue):
    """Saves the collective of a rank without news."""

    def step(self, step: int) -> Iterable[Left]:
        if any(fact != WAITING for fact in self.facts.values()):
            return super().step(step)
        return ()


class GoesOnAlone(Queue):
    """Treats a timeout as a step without news."""

    def step(self, step: int) -> Iterable[Left]:
        try:
            return super().step(step)
        except SyncTimeoutError:
            return ()


class NamesNoRank(Queue):
    """Raises an error that does not say which rank is missing."""

    def step(self, step: int) -> Iterable[Left]:
        try:
            return super().step(step)
        except SyncTimeoutError as error:
            raise RuntimeError("timed out") from error


class NamesAnAddress(Queue):
    """Raises gloo's own error, whose address has the digits of some ranks."""

    def step(self, step: int) -> Iterable[Left]:
        try:
            return super().step(step)
        except SyncTimeoutError as error:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:3") from error


class WaitsForEver(Queue):
    """Waits for a rank that has timed out until it comes back."""

    def step(self, step: int) -> Iterable[Left]:
        try:
            return super().step(step)
        except SyncTimeoutError:
            Event().wait()
            raise


class NoDigest(Queue):
    """Compares no digest: a rank that missed a request has other ones in its lanes."""

    def add(self, rid: str, timeout_s: float) -> bool:
        is_added = super().add(rid, timeout_s)
        self.digest = 0
        return is_added


class OneRankKnows(Queue):
    """The rank that differs from rank 0 stops with an error. The others miss it in their next collective."""

    def step(self, step: int) -> Iterable[Left]:
        proposal = self.proposal(step)
        leading = self.groups.all_reduce_min("digest", self.digest if self.leads else MIN_NEUTRAL, step=step)
        if leading != self.digest:
            raise RuntimeError(f"other requests than rank 0 at step {step}")
        agreed = self.agree(proposal)
        left = [(rid, reason) for rid in list(self.limits) if (reason := self._known(rid, agreed))]
        for rid, _ in left:
            self.remove(rid)
        return left

    def _known(self, rid: str, agreed: AgreedValues) -> str:
        self.deadlines.setdefault(rid, agreed.numbers["now"] / 1e6 + self.limits[rid])
        return self.reason(rid, agreed)


class ServesTheNewest(Queue):
    """The lanes hold the newest requests, so the oldest of a crowd wait longest."""

    def in_lanes(self) -> list[str]:
        return list(self.limits)[-LANES:]


BROKEN: dict[type[Queue], str] = {
    Alone: "ranks_let_the_same_requests_go",
    LeaderDecides: "reasons_follow_the_facts",
    AnyIsEnough: "reasons_follow_the_facts",
    FirstHopOnly: "ranks_let_the_same_requests_go",
    FailsAlone: "each_request_leaves_once",
    HidesFailures: "no_request_waits_without_bound",
    FailedIsReady: "reasons_follow_the_facts",
    FailsIfAllFail: "reasons_follow_the_facts",
    OwnClock: "ranks_let_the_same_requests_go",
    EveryClock: "reasons_follow_the_facts",
    DeadlineByOwnClock: "ranks_let_the_same_requests_go",
    NeverExpires: "no_request_waits_without_bound",
    ExpiresOnlyInLanes: "no_request_waits_without_bound",
    ExpiresEarly: "reasons_follow_the_facts",
    OrderOfFacts: "ranks_let_the_same_requests_go",
    OrderOfASet: "ranks_let_the_same_requests_go",
    OneRankLate: "ranks_let_the_same_requests_go",
    ForgetsTheCrowd: "each_request_leaves_once",
    HeadOfLine: "no_request_waits_without_bound",
    ExpiresInLanes: "a_crowd_expires",
    LeavesTwice: "stray_facts_change_nothing",
    SendsAgain: "each_request_leaves_once",
    RefusesByLocalLoad: "ranks_let_the_same_requests_go",
    IgnoresAborts: "cancelled_requests_do_not_leave",
    AbortsOnTheLeader: "cancelled_requests_do_not_leave",
    AbortsWhatWaits: "ranks_let_the_same_requests_go",
    KeepsFactsOfAborted: "cancelled_requests_do_not_leave",
    AbortedIdsStayTaken: "cancelled_requests_do_not_leave",
    RaisesOnStrayFacts: "stray_facts_change_nothing",
    LastFactWins: "stray_facts_change_nothing",
    CountsReports: "stray_facts_change_nothing",
    AsksWhenItHasNews: "ranks_let_the_same_requests_go",
    GoesOnAlone: "dead_rank_ends_in_an_error",
    NamesNoRank: "dead_rank_ends_in_an_error",
    NamesAnAddress: "dead_rank_ends_in_an_error",
    WaitsForEver: "dead_rank_ends_in_an_error",
    NoDigest: "ranks_with_other_calls_notice",
}
"""Broken queues, and a check that finds each."""

TRACED: dict[type[Queue], str] = {
    Alone: "what leaves as number",
    LeaderDecides: "ready on ranks [",
    AnyIsEnough: "ready on ranks [",
    FirstHopOnly: "what leaves as number",
    OwnClock: "what leaves",
    ForgetsTheCrowd: "requests that never leave",
    HeadOfLine: "good leaves within 4 steps",
    KeepsFactsOfAborted: "ready on ranks [",
    AsksWhenItHasNews: "Error",
    GoesOnAlone: "no error in step",
    WaitsForEver: "ranks that still wait",
}
"""What docs/how-to/property-test-your-scheduler.md quotes from the traces."""

PASSING: tuple[type[Queue], ...] = (OneRankKnows, ServesTheNewest)
"""Queues that the checks pass, although the first names the cause on one rank only, and the second is unfair."""

CHECKS = {check.__name__.removeprefix("check_"): check for check in AGREEMENT_CHECKS}
WORLD = ParallelState.from_tp_rank(0, tp_size=2, attn_cp_size=2, pp_size=2)
"""CP2 x PP2: two hops."""

RANKS = ThreadRanks(worlds=[WORLD], timeout_s=0.5, short_timeout_s=0.2)


@pytest.mark.parametrize("name", CHECKS)
def test_the_queue_of_the_variants_passes(name: str) -> None:
    CHECKS[name](Queue, ThreadRanks(worlds=[WORLD]))


@pytest.mark.broken_variants
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_queue_is_found(broken: type[Queue]) -> None:
    with pytest.raises(ConformanceError) as error:
        CHECKS[BROKEN[broken]](broken, RANKS)
    assert TRACED.get(broken, "") in str(error.value)


@pytest.mark.broken_variants
@pytest.mark.parametrize("survivor", PASSING, ids=lambda survivor: survivor.__name__)
def test_what_the_checks_do_not_ask_for_passes(survivor: type[Queue]) -> None:
    for name in ("each_request_leaves_once", "ranks_with_other_calls_notice"):
        CHECKS[name](survivor, ThreadRanks(worlds=[WORLD], timeout_s=1.0))
