"""Broken waiting queues, as authors of engines write them: the checks of agreement find each of them.

Their author did not write the checks. All but a few are one right queue, written by hand over ``ParallelGroups``, with
one decision taken by a local fact, or one rule left out.
"""

from __future__ import annotations

from functools import cached_property
from threading import Event
from zlib import crc32

import pytest
from kit.variants import found, instead_of, variants

from scheduler_components import ParallelState
from scheduler_components.agreement import MIN_NEUTRAL, ParallelGroups, Proposal
from scheduler_components.errors import SyncTimeoutError
from scheduler_components.testing import AGREEMENT_CHECKS, ConformanceError, ThreadRanks

LANES = 16
FAILED, WAITING, READY = 0, 1, 2
PASSES = "passes"


class Queue:
    """A right queue by hand."""

    def __init__(self, groups, clock, leads):
        self.groups, self.clock, self.leads = groups, clock, leads
        self.limits = {}
        self.deadlines = {}
        self.facts = {}
        self.digest = 0

    def add(self, rid, timeout_s):
        self.limits[rid] = timeout_s
        self.facts[rid] = WAITING
        self.digest = crc32(f"add {rid}".encode(), self.digest)
        return True

    def report(self, rid, is_ready):
        if self.facts.get(rid) == WAITING:
            self.facts[rid] = READY if is_ready else FAILED

    def cancel(self, rid):
        self.digest = crc32(f"cancel {rid}".encode(), self.digest)
        self.remove(rid)

    def remove(self, rid):
        self.limits.pop(rid, None)
        self.deadlines.pop(rid, None)
        self.facts.pop(rid, None)

    def in_lanes(self):
        return list(self.limits)[:LANES]

    def step(self, step):
        try:
            agreed = self.agree(self.proposal(step))
        except SyncTimeoutError as error:
            return self.on_timeout(error)
        if not agreed.flags["digest"]:
            raise RuntimeError(f"the ranks hold different requests at step {step}")
        now_us = agreed.numbers["now"]
        for rid, limit_s in self.limits.items():
            self.deadlines.setdefault(rid, now_us / 1e6 + limit_s)
        left = [(rid, reason) for rid in list(self.limits) if (reason := self.reason(rid, agreed))]
        for rid, _ in left:
            self.remove(rid)
        return left

    def on_timeout(self, error):
        raise error

    def proposal(self, step):
        proposal = Proposal("step", step=step)
        proposal.min("now", round(self.clock() * 1e6) if self.leads else MIN_NEUTRAL)
        proposal.equal("digest", self.digest)
        lanes = [self.facts[rid] for rid in self.in_lanes()]
        for lane, fact in enumerate([*lanes, *[WAITING] * LANES][:LANES]):
            self.slot(proposal, f"lane {lane}", fact)
        return proposal

    def slot(self, proposal, name, fact):
        proposal.min(name, fact)

    def agree(self, proposal):
        return self.groups.reduce(proposal)

    def reason(self, rid, agreed):
        lanes = self.in_lanes()
        fact = agreed.numbers[f"lane {lanes.index(rid)}"] if rid in lanes else WAITING
        if fact != WAITING:
            return "failed" if fact == FAILED else "ready"
        return "expired" if self.now_s(agreed) >= self.deadlines[rid] else ""

    def now_s(self, agreed):
        return agreed.numbers["now"] / 1e6


class BrokenQueue(Queue):
    # Facts that are not agreed.

    @instead_of("reason", "ranks_let_the_same_requests_go", "what leaves as number")
    def alone(self, rid, agreed):
        """Lets a request go when this rank is ready."""
        fact = self.facts[rid]
        if fact != WAITING:
            return "failed" if fact == FAILED else "ready"
        return super().reason(rid, agreed)

    @instead_of("slot", "reasons_follow_the_facts", "ready on ranks [")
    def leader_decides(self, proposal, name, fact):
        """The leading rank broadcasts its own facts, as SGLang 0.5.23 does for its grammar queue across stages."""
        proposal.min(name, fact if self.leads else MIN_NEUTRAL)

    # A request is ready if one rank is.
    any_is_enough = found(
        "reasons_follow_the_facts", "ready on ranks [", slot=lambda self, proposal, name, fact: proposal.max(name, fact)
    )

    @instead_of("agree", "ranks_let_the_same_requests_go", "what leaves as number")
    def first_hop_only(self, proposal):
        """Agrees with the ranks of its first group."""
        self.few = getattr(self, "few", None) or ParallelGroups(rank=self.groups.rank, groups=self.groups.groups[:1])
        return self.few.reduce(proposal)

    @instead_of("reason", "each_request_leaves_once")
    def fails_alone(self, rid, agreed):
        """A request that fails leaves on the rank on which it failed."""
        return "failed" if self.facts[rid] == FAILED else super().reason(rid, agreed)

    # A failed rank says that it waits, so the request waits until it expires.
    hides_failures = found(
        "no_request_waits_without_bound", slot=lambda self, proposal, name, fact: proposal.min(name, max(fact, WAITING))
    )

    @instead_of("slot", "reasons_follow_the_facts")
    def failed_is_ready(self, proposal, name, fact):
        """Counts ranks that are done, whether they succeeded or not."""
        proposal.min(name, READY if fact == FAILED else fact)

    @found("reasons_follow_the_facts")
    class fails_if_all_fail(Queue):
        """A request that failed on one rank and is ready on the others is ready."""

        def slot(self, proposal, name, fact):
            proposal.max(name, {FAILED: 0, WAITING: 9, READY: 1}[fact])

        def reason(self, rid, agreed):
            lanes = self.in_lanes()
            fact = agreed.numbers[f"lane {lanes.index(rid)}"] if rid in lanes else 9
            if fact != 9:
                return "ready" if fact else "failed"
            return "expired" if self.now_s(agreed) >= self.deadlines[rid] else ""

    # Time.
    # Compares the deadline with the clock of this rank.
    own_clock = found("ranks_let_the_same_requests_go", "what leaves", now_s=lambda self, agreed: self.clock())

    @instead_of("proposal", "reasons_follow_the_facts")
    def every_clock(self, step):
        """The smallest clock of all ranks is the agreed one."""
        self.leads = True
        return super().proposal(step)

    @instead_of("add", "ranks_let_the_same_requests_go")
    def deadline_by_own_clock(self, rid, timeout_s):
        """Counts the wait from this rank's clock, and compares with the agreed one."""
        self.deadlines[rid] = self.clock() + timeout_s
        return super().add(rid, timeout_s)

    never_expires = found("no_request_waits_without_bound", now_s=lambda self, agreed: float("-inf"))

    @instead_of("reason", "no_request_waits_without_bound")
    def expires_only_in_lanes(self, rid, agreed):
        """What waits behind the lanes never expires, and what is in them waits for a compiler that hangs."""
        reason = super().reason(rid, agreed)
        return "" if reason == "expired" and len(self.limits) > 1 else reason

    @instead_of("now_s", "reasons_follow_the_facts")
    def expires_early(self, agreed):
        """Halves the limit under load."""
        return super().now_s(agreed) + (25.0 if len(self.limits) > 3 else 0.0)

    # Order, membership, number.

    @found("ranks_let_the_same_requests_go")
    class order_of_facts(Queue):
        """Requests leave in the order in which this rank became ready for them."""

        arrived = cached_property(lambda self: [])

        def report(self, rid, is_ready):
            super().report(rid, is_ready)
            self.arrived.append(rid)

        def step(self, step):
            order = {rid: place for place, rid in enumerate(self.arrived)}
            return sorted(super().step(step), key=lambda left: order.get(left[0], -1))

    @instead_of("step", "ranks_let_the_same_requests_go")
    def order_of_a_set(self, step):
        """Requests leave in the order of a set, whose hashes differ between processes."""
        return sorted(super().step(step), key=lambda left: crc32(f"{self.groups.rank} {left}".encode()))

    @instead_of("step", "ranks_let_the_same_requests_go", late=())
    def one_rank_late(self, step):
        """A rank of a later stage lets requests go one step after the others."""
        left = tuple(super().step(step))
        if self.groups.rank:
            left, self.late = self.late, left
        return left

    @instead_of("add", "each_request_leaves_once", "requests that never leave")
    def forgets_the_crowd(self, rid, timeout_s):
        """What does not fit the lanes is lost."""
        super().add(rid, timeout_s)
        if len(self.limits) > LANES:
            self.remove(rid)
        return True

    @instead_of("reason", "no_request_waits_without_bound", "good leaves within 4 steps")
    def head_of_line(self, rid, agreed):
        """Only the oldest request may leave."""
        return super().reason(rid, agreed) if rid == next(iter(self.limits)) else ""

    @instead_of("reason", "a_crowd_expires")
    def expires_in_lanes(self, rid, agreed):
        """What waits behind the lanes does not expire before it has moved up."""
        return super().reason(rid, agreed) if rid in self.in_lanes() else ""

    @found("stray_facts_change_nothing")
    class leaves_twice(Queue):
        """Lets a request go again when a late fact about it arrives."""

        again = cached_property(lambda self: [])

        def report(self, rid, is_ready):
            if rid not in self.facts:
                self.again.append(rid)
            super().report(rid, is_ready)

        def step(self, step):
            again, self.again = self.again, []
            return [*super().step(step), *((rid, "ready") for rid in again)]

    @instead_of("step", "each_request_leaves_once", last=())
    def sends_again(self, step):
        """Returns what left in the last step, too: its caller did not confirm it."""
        left = tuple(super().step(step))
        both, self.last = self.last + left, left
        return both

    @instead_of("add", "ranks_let_the_same_requests_go")
    def refuses_by_local_load(self, rid, timeout_s):
        """Refuses requests while this rank's own compiler is busy."""
        busy = sum(fact == WAITING for fact in self.facts.values())
        super().add(rid, timeout_s)
        if busy > 3 and self.groups.rank:
            self.remove(rid)
            return False
        return True

    # Aborts.
    ignores_aborts = found("cancelled_requests_do_not_leave", cancel=lambda self, rid: None)

    @instead_of("cancel", "cancelled_requests_do_not_leave")
    def aborts_on_the_leader(self, rid):
        """The abort reaches the leading rank only."""
        if self.leads:
            self.remove(rid)

    @instead_of("cancel", "ranks_let_the_same_requests_go")
    def aborts_what_waits(self, rid):
        """A request for which this rank is ready is no longer aborted."""
        if self.facts.get(rid) != READY:
            super().cancel(rid)

    @found("cancelled_requests_do_not_leave", "ready on ranks [")
    class keeps_facts_of_aborted(Queue):
        """A request that is sent again under its id finds the facts of its first life."""

        kept = cached_property(lambda self: {})

        def cancel(self, rid):
            self.kept[rid] = self.facts.get(rid, WAITING)
            super().cancel(rid)

        def add(self, rid, timeout_s):
            super().add(rid, timeout_s)
            self.facts[rid] = self.kept.get(rid, WAITING)
            return True

    @found("cancelled_requests_do_not_leave")
    class aborted_ids_stay_taken(Queue):
        """Refuses the id of an aborted request for ever."""

        aborted = cached_property(lambda self: set())

        def cancel(self, rid):
            super().cancel(rid)
            self.aborted.add(rid)

        def add(self, rid, timeout_s):
            if rid in self.aborted:
                raise ValueError(f"{rid} was aborted")
            return super().add(rid, timeout_s)

    # Stray facts.

    @instead_of("report", "stray_facts_change_nothing")
    def raises_on_stray_facts(self, rid, is_ready):
        if rid not in self.facts:
            raise KeyError(rid)
        super().report(rid, is_ready)

    @instead_of("report", "stray_facts_change_nothing")
    def last_fact_wins(self, rid, is_ready):
        """A fact replaces the one before it, also in the lanes of the next step."""
        self.facts[rid] = READY if is_ready else FAILED
        self.limits.setdefault(rid, 50.0)

    @found("stray_facts_change_nothing")
    class counts_reports(Queue):
        """Counts reports instead of ranks: a rank that reports twice counts twice."""

        reports = cached_property(lambda self: {})

        def report(self, rid, is_ready):
            super().report(rid, is_ready)
            self.reports[rid] = self.reports.get(rid, 0) + is_ready

        def reason(self, rid, agreed):
            return "ready" if self.reports.get(rid, 0) > 1 else super().reason(rid, agreed)

    # Collectives, dead ranks and ranks that missed a call.

    @instead_of("step", "ranks_let_the_same_requests_go", "Error")
    def asks_when_it_has_news(self, step):
        """Saves the collective of a rank without news."""
        if any(fact != WAITING for fact in self.facts.values()):
            return super().step(step)
        return ()

    # Treats a timeout as a step without news.
    goes_on_alone = found("dead_rank_ends_in_an_error", "no error in step", on_timeout=lambda self, error: ())

    @instead_of("on_timeout", "dead_rank_ends_in_an_error")
    def names_no_rank(self, error):
        """Raises an error that does not say which rank is missing."""
        raise RuntimeError("timed out") from error

    @instead_of("on_timeout", "dead_rank_ends_in_an_error")
    def names_an_address(self, error):
        """Raises gloo's own error, whose address has the digits of some ranks."""
        raise RuntimeError("Connection closed by peer [127.0.0.1]:3") from error

    # Waits for a rank that has timed out until it comes back.
    waits_for_ever = found(
        "dead_rank_ends_in_an_error", "ranks that still wait", on_timeout=lambda self, error: Event().wait()
    )

    @instead_of("add", "ranks_with_other_calls_notice")
    def no_digest(self, rid, timeout_s):
        """Compares no digest: a rank that missed a request has other ones in its lanes."""
        is_added = super().add(rid, timeout_s)
        self.digest = 0
        return is_added

    @found(PASSES)
    class one_rank_knows(Queue):
        """The rank that differs from rank 0 stops with an error. The others miss it in their next collective."""

        def step(self, step):
            proposal = self.proposal(step)
            leading = self.groups.all_reduce_min("digest", self.digest if self.leads else MIN_NEUTRAL, step=step)
            if leading != self.digest:
                raise RuntimeError(f"other requests than rank 0 at step {step}")
            agreed = self.agree(proposal)
            left = [(rid, reason) for rid in list(self.limits) if (reason := self._known(rid, agreed))]
            for rid, _ in left:
                self.remove(rid)
            return left

        def _known(self, rid, agreed):
            self.deadlines.setdefault(rid, agreed.numbers["now"] / 1e6 + self.limits[rid])
            return self.reason(rid, agreed)

    # The lanes hold the newest requests, so the oldest of a crowd wait longest.
    serves_the_newest = found(PASSES, in_lanes=lambda self: list(self.limits)[-LANES:])


VARIANTS = variants(BrokenQueue)
"""Broken queues, a check that finds each, and what property-test-your-scheduler.md quotes from its trace."""

PASSING = [name for name, (_, check, *_) in VARIANTS.items() if check == PASSES]
"""Queues that the checks pass, although the first names the cause on one rank only, and the second is unfair."""

CHECKS = {check.__name__.removeprefix("check_"): check for check in AGREEMENT_CHECKS}
WORLD = ParallelState.from_tp_rank(0, tp_size=2, attn_cp_size=2, pp_size=2)
"""CP2 x PP2: two hops."""

RANKS = ThreadRanks(worlds=[WORLD], timeout_s=0.5, short_timeout_s=0.2)


@pytest.mark.parametrize("name", CHECKS)
def test_the_queue_of_the_variants_passes(name):
    CHECKS[name](Queue, ThreadRanks(worlds=[WORLD]))


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in PASSING])
def test_a_broken_queue_is_found(name):
    broken, check, *trace = VARIANTS[name]
    with pytest.raises(ConformanceError) as error:
        CHECKS[check](broken, RANKS)
    assert "".join(trace) in str(error.value)


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", PASSING)
def test_what_the_checks_do_not_ask_for_passes(name):
    for check in ("each_request_leaves_once", "ranks_with_other_calls_notice"):
        CHECKS[check](VARIANTS[name][0], ThreadRanks(worlds=[WORLD], timeout_s=1.0))
