"""Checks of a waiting queue whose ranks must agree. Run each of ``AGREEMENT_CHECKS`` on a queue of your own.

A check takes a function that opens the queue of one rank (``interfaces.WaitingRank``), and a ``RankRunner``, which runs
the ranks: ``ThreadRanks`` as threads, ``TorchRanks`` as processes over gloo. The check gives every rank the same calls
and different facts, clocks and moments, and compares what leaves. For processes the function must be importable by its
name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from random import Random
from typing import TypeAlias

import msgspec

from scheduler_components.agreement import ParallelGroups
from scheduler_components.parallel_state import ParallelState
from scheduler_components.testing.check_trace import CheckTrace, checks_in
from scheduler_components.testing.interfaces import OpenWaitingRank, RankRunner

__all__ = ["AGREEMENT_CHECKS"]

_LIMIT_S = 50.0
_MAX_IDLE_STEPS = 4
"""Steps within which a request leaves once it may."""

_TOLERANCE_S = 0.002
"""A queue may round the agreed time to milliseconds."""

_DRIFT = 0.3
"""How much faster the clock of each rank runs than that of the rank before it."""

_NUM_STUCK = 100
"""Requests that no rank ever becomes ready for: more than can be asked about in ``_MAX_IDLE_STEPS`` steps."""

_NUM_WAITING = 40
"""Requests that wait together: more than a queue has room for in one agreement."""


_Fact: TypeAlias = tuple[int, str, bool]
"""What one rank reports about one request: its rank, the request, and whether it is ready."""


class _Turn(msgspec.Struct, frozen=True):
    """What happens before a step: at ``now_s`` of the leading rank all ranks cancel, then add, and some report."""

    now_s: float
    cancel: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    facts: tuple[_Fact, ...] = ()


_Script: TypeAlias = tuple[_Turn, ...]


class _Plan(msgspec.Struct, frozen=True):
    """A history, and what goes wrong in it.

    Attributes:
        script: the turns.
        skew_s: how much the clock of rank r differs at first from that of the leading rank, times r. It also runs
            ``_DRIFT`` times r faster.
        dead_rank: takes no step from ``wrong_step`` on.
        deaf_rank: misses the additions before ``wrong_step``.
        wrong_step: counted from 0.
    """

    script: _Script
    skew_s: float = -1000.5
    dead_rank: int | None = None
    deaf_rank: int | None = None
    wrong_step: int = 0


class _Record(msgspec.Struct):
    """What one rank saw.

    Attributes:
        left: (step, id, reason) of each request that left.
        refused: requests that ``add`` refused.
        error: the error that ended the history, and its step.
    """

    left: list[tuple[int, str, str]]
    refused: list[str]
    error: str = ""
    error_step: int | None = None


def _play(open_rank: OpenWaitingRank, plans: tuple[_Plan, ...], groups: ParallelGroups) -> list[_Record]:
    """Play histories on one rank, perhaps in a process of its own."""
    return [_play_one(open_rank, plan, groups) for plan in plans]


def _play_one(open_rank: OpenWaitingRank, plan: _Plan, groups: ParallelGroups) -> _Record:
    record, rank = _Record([], []), groups.rank
    now_s = [plan.skew_s * rank]
    number = 0
    try:
        queue = open_rank(groups, lambda: now_s[0], rank == 0)
        for number, turn in enumerate(plan.script):
            if rank == plan.dead_rank and number >= plan.wrong_step:
                return record
            now_s[0] = turn.now_s * (1 + _DRIFT * rank) + plan.skew_s * rank
            for rid in turn.cancel:
                queue.cancel(rid)
            if rank != plan.deaf_rank or number != plan.wrong_step:
                record.refused += [rid for rid in turn.add if not queue.add(rid, _LIMIT_S)]
            for reporting, rid, is_ready in turn.facts:
                if reporting == rank:
                    queue.report(rid, is_ready)
            record.left += [(number, rid, reason) for rid, reason in queue.step(number)]
    except Exception as error:  # noqa: BLE001 - the checks compare it with what the other ranks saw
        record.error, record.error_step = f"{type(error).__name__}: {error}", number
    return record


def check_ranks_let_the_same_requests_go(open_rank: OpenWaitingRank, ranks: RankRunner) -> None:
    """Whatever arrives when on which rank, the same requests leave in the same steps, in one order, on all ranks."""
    for world in ranks.worlds:
        use = _Use("All ranks let the same requests go in the same steps", open_rank, ranks, world)
        plans = [_Plan(_random_script(seed, use.num_ranks)) for seed in range(4)]
        for records in use.play(*plans):
            use.expect_equal(records)


def check_reasons_follow_the_facts(open_rank: OpenWaitingRank, ranks: RankRunner) -> None:
    """``ready`` if all ranks are, ``failed`` if one has failed, ``expired`` by the leading rank's clock."""
    for world in ranks.worlds:
        use = _Use("A request leaves for a reason that the facts of all ranks give", open_rank, ranks, world)
        plans = [_Plan(_random_script(seed, use.num_ranks), skew_s=skew) for seed, skew in enumerate(_SKEWS)]
        for plan, records in zip(plans, use.play(*plans), strict=True):
            use.expect_equal(records)
            _check_reasons(use, plan, records[0])


def _check_reasons(use: _Use, plan: _Plan, record: _Record) -> None:
    """Check each request that left, and that each one left as soon as it could."""
    turns = list(plan.script)
    added: dict[str, int] = {}
    ready: dict[str, set[int]] = {}
    failed = set[str]()
    leaving = {(step, rid): reason for step, rid, reason in record.left}
    for step, turn in enumerate(turns):
        for rid in turn.cancel:
            added.pop(rid, None)
        for rid in turn.add:
            added[rid], ready[rid] = step, set()
            failed.discard(rid)
        for rank, rid, is_ready in turn.facts:
            if rid in added and is_ready:
                ready[rid].add(rank)
            elif rid in added:
                failed.add(rid)
        for rid in list(added):
            reason = leaving.get((step, rid))
            if reason is None:
                continue
            waited_s = turn.now_s - turns[added.pop(rid)].now_s
            holds = {
                "ready": len(ready[rid]) == use.num_ranks,
                "failed": rid in failed,
                "expired": waited_s >= _LIMIT_S - _TOLERANCE_S,
            }.get(reason, False)
            facts = f"ready on ranks {sorted(ready[rid])} of {use.num_ranks}, failed: {rid in failed}"
            use.trace.require(
                holds, f"{rid} leaves for a reason that holds", f"{reason} in step {step}: {facts}, {waited_s:g} s"
            )


def check_each_request_leaves_once(open_rank: OpenWaitingRank, ranks: RankRunner) -> None:
    """Every request that was added and not cancelled leaves exactly once, also behind many others."""
    for world in ranks.worlds:
        use = _Use("Each request leaves exactly once", open_rank, ranks, world)
        plans = [*(_Plan(_random_script(seed, use.num_ranks)) for seed in range(10, 13)), _Plan(_crowd(use.num_ranks))]
        for plan, records in zip(plans, use.play(*plans), strict=True):
            use.expect_equal(records)
            use.expect_left_once(plan, records[0])


def check_no_request_waits_without_bound(open_rank: OpenWaitingRank, ranks: RankRunner) -> None:
    """A request that never becomes ready on one rank expires, and keeps no other one from leaving."""
    for world in ranks.worlds:
        use = _Use("No request waits without bound", open_rank, ranks, world)
        stuck = tuple(f"stuck-{number}" for number in range(3))
        facts = _facts_of_all(use.num_ranks, ("good",)) + _facts_of_all(use.num_ranks - 1, (*stuck, "bad"))
        facts += ((use.num_ranks - 1, "bad", False),)
        idle = tuple(_Turn(0.01 * number) for number in range(2, 2 + _MAX_IDLE_STEPS))
        later = tuple(_Turn(_LIMIT_S + number) for number in range(1, 2 + _MAX_IDLE_STEPS))
        plans = [
            _Plan((_Turn(0.0, add=(*stuck, "good", "bad")), _Turn(0.01, facts=facts), *idle, *later), skew)
            for skew in _SKEWS
        ]
        for records in use.play(*plans):
            use.expect_equal(records)
            left = {rid: (step, reason) for step, rid, reason in records[0].left}
            for rid, expected in (("good", "ready"), ("bad", "failed")):
                step, reason = left.get(rid, (99, "nothing"))
                use.trace.expect(expected, reason, f"the end of {rid}, which is {expected} by the facts of all ranks")
                use.trace.require(step <= 1 + _MAX_IDLE_STEPS, f"{rid} leaves within {_MAX_IDLE_STEPS} steps", step)
            if use.num_ranks > 1:
                found = {rid: left.get(rid, (None, "still waits"))[1] for rid in stuck}
                use.trace.expect(dict.fromkeys(stuck, "expired"), found, f"requests after {_LIMIT_S:g} s")


def check_a_crowd_expires(open_rank: OpenWaitingRank, ranks: RankRunner) -> None:
    """Requests that nothing happens to expire together, however many they are."""
    for world in ranks.worlds:
        use = _Use("All requests of a crowd expire in time", open_rank, ranks, world)
        rids = tuple(f"stuck-{number}" for number in range(_NUM_STUCK))
        idle = tuple(_Turn(_LIMIT_S * number) for number in (0.5, *range(1, 2 + _MAX_IDLE_STEPS)))
        [records] = use.play(_Plan((_Turn(0.0, add=rids), *idle)))
        use.expect_equal(records)
        expired = [rid for _, rid, reason in records[0].left if reason == "expired"]
        waiting = sorted(set(rids) - set(expired) - set(records[0].refused))
        use.trace.expect([], waiting, f"requests that have not expired {_MAX_IDLE_STEPS} steps after their limit")


def check_cancelled_requests_do_not_leave(open_rank: OpenWaitingRank, ranks: RankRunner) -> None:
    """A request may be cancelled at any moment: before, between and after the facts. Its id may wait again."""
    for world in ranks.worlds:
        use = _Use("A cancelled request does not leave", open_rank, ranks, world)
        scripts = [_cancelled(use.num_ranks, moment) for moment in range(5)]
        for script, records in zip(scripts, use.play(*map(_Plan, scripts)), strict=True):
            use.expect_equal(records)
            use.expect_left_once(_Plan(script), records[0])
            _check_reasons(use, _Plan(script), records[0])


def check_stray_facts_change_nothing(open_rank: OpenWaitingRank, ranks: RankRunner) -> None:
    """Facts about unknown, departed and cancelled requests, and repeated ones, end nothing and raise nothing."""
    for world in ranks.worlds:
        use = _Use("Stray facts change nothing", open_rank, ranks, world)
        everyone = _facts_of_all(use.num_ranks, ("a",))
        strays = tuple((0, rid, is_ready) for rid in ("never", "a", "c") for is_ready in (True, False))
        script = (
            _Turn(0.0, add=("a", "b", "c"), facts=_facts_of_all(1, ("never",))),
            _Turn(0.1, facts=everyone + everyone),
            _Turn(0.15, facts=((0, "b", True),) * 3 if use.num_ranks > 1 else ()),
            *(_Turn(0.2 + 0.1 * number, cancel=("c",) if number == 0 else (), facts=strays) for number in range(3)),
            _Turn(0.6, facts=_facts_of_all(use.num_ranks, ("b",))),
            *(_Turn(0.7 + 0.1 * number) for number in range(_MAX_IDLE_STEPS)),
        )
        [records] = use.play(_Plan(script))
        use.expect_equal(records)
        use.trace.expect([("a", "ready"), ("b", "ready")], [each[1:] for each in records[0].left], "what leaves")


def check_ranks_with_other_calls_notice(open_rank: OpenWaitingRank, ranks: RankRunner) -> None:
    """If one rank misses an addition, all ranks raise an error, or what leaves is still the same on all of them."""
    for world in ranks.worlds:
        use = _Use("A rank that missed a call is noticed on all ranks", open_rank, ranks, world)
        if use.num_ranks == 1:
            continue
        script = (
            _Turn(0.0, add=("a",)),
            _Turn(0.1, add=("b",)),
            *(_Turn(0.2 + 0.1 * number, facts=_facts_of_all(use.num_ranks, ("a", "b"))) for number in range(3)),
            *(_Turn(_LIMIT_S * number) for number in (1.5, 2.5, 3.5)),
        )
        for deaf_rank in (0, use.num_ranks - 1):
            [records] = use.play(_Plan(script, deaf_rank=deaf_rank, wrong_step=1), may_raise=True)
            raised = [rank for rank, record in records.items() if record.error]
            if len(raised) < use.num_ranks:
                use.trace.expect([], raised, "ranks that raise an error while others do not")
                use.expect_equal(records)


def check_dead_rank_ends_in_an_error(open_rank: OpenWaitingRank, ranks: RankRunner) -> None:
    """A rank that takes no further step ends on all others in an error that names it ("rank 3"), within the bound."""
    for number, world in enumerate(ranks.worlds):
        use = _Use("A dead rank is named on all others", open_rank, ranks, world, timeout_s=ranks.short_timeout_s)
        if use.num_ranks == 1:
            continue
        dead_rank = use.num_ranks - 1 if number % 2 else 0
        script = (_Turn(0.0, add=("a", "b")), *(_Turn(0.1 * step) for step in range(1, 6)))
        [records] = use.play(_Plan(script, dead_rank=dead_rank, wrong_step=3), may_raise=True)
        for rank, record in records.items():
            if rank != dead_rank:
                is_named = re.search(rf"\branks?\b[^.;()]*\b{dead_rank}\b", record.error) is not None
                use.trace.require(
                    is_named and record.error_step == 3,
                    f"an error in step 3 on rank {rank} that names rank {dead_rank}",
                    f"{record.error or 'no error'} in step {record.error_step}",
                )


class _Use:
    """One queue, played on one world.

    Args:
        title: the promise that is checked.
        open_rank: opens the queue of a rank.
        ranks: runs the ranks.
        world: sizes of the replica.
        timeout_s: longest wait of a rank for the others in one collective; None for the runner's own.
    """

    def __init__(
        self,
        title: str,
        open_rank: OpenWaitingRank,
        ranks: RankRunner,
        world: ParallelState,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self.trace = CheckTrace(title)
        self.num_ranks = world.tp_size * world.pp_size
        sizes = f"CP {world.attn_cp_size} x TP {world.attn_tp_size} x PP {world.pp_size}"
        self.trace.note(f"{sizes}: {self.num_ranks} ranks of {type(ranks).__name__}")
        self._open_rank, self._ranks, self._world, self._timeout_s = open_rank, ranks, world, timeout_s

    def play(self, *plans: _Plan, may_raise: bool = False) -> list[dict[int, _Record]]:
        """Play histories one after another; return what each rank saw of each. Every rank must end in time."""
        for plan in plans:
            self.trace.note(_described(plan))
        found = self._ranks.run(self._world, partial(_play, self._open_rank, plans), timeout_s=self._timeout_s)
        missing = sorted(set(range(self.num_ranks)) - set(found))
        self.trace.expect([], missing, "ranks that still wait after the bound")
        histories = [{rank: found[rank][number] for rank in sorted(found)} for number in range(len(plans))]
        for records in histories:
            errors = {
                rank: f"{record.error} in step {record.error_step}" for rank, record in records.items() if record.error
            }
            if errors and not may_raise:
                raise self.trace.failure("no error", str(errors))
        return histories

    def expect_equal(self, records: Mapping[int, _Record]) -> None:
        """Compare what each rank saw with what rank 0 saw."""
        for rank, record in records.items():
            for step, (mine, theirs) in enumerate(zip(record.left, records[0].left, strict=False)):
                self.trace.expect(theirs, mine, f"what leaves as number {step} on rank {rank}: (step, id, reason)")
            self.trace.expect(records[0].left, record.left, f"what leaves on rank {rank}")
            self.trace.expect(records[0].refused, record.refused, f"what is refused on rank {rank}")

    def expect_left_once(self, plan: _Plan, record: _Record) -> None:
        """Check that each request left as often as it was added, without the cancelled ones."""
        expected: Counter[str] = Counter()
        waiting, left = set[str](), {(step, rid) for step, rid, _ in record.left}
        for step, turn in enumerate(plan.script):
            waiting -= set(turn.cancel)
            for rid in turn.add:
                if rid not in record.refused:
                    waiting.add(rid)
            gone = {rid for rid in waiting if (step, rid) in left}
            expected.update(gone)
            waiting -= gone
        self.trace.expect([], sorted(waiting), "requests that never leave")
        found = Counter(rid for _, rid, _ in record.left)
        self.trace.expect(dict(expected), dict(found), "how often each request leaves while it waits")


def _described(plan: _Plan) -> str:
    num_added = sum(len(turn.add) for turn in plan.script)
    wrong = f", rank {plan.dead_rank} dies in step {plan.wrong_step}" if plan.dead_rank is not None else ""
    wrong += (
        f", rank {plan.deaf_rank} misses what is added in step {plan.wrong_step}" if plan.deaf_rank is not None else ""
    )
    return (
        f"{len(plan.script)} steps, {num_added} requests, the clock of rank r differs by {plan.skew_s:g} s x r{wrong}"
    )


def _facts_of_all(num_ranks: int, rids: Sequence[str]) -> tuple[_Fact, ...]:
    return tuple((rank, rid, True) for rid in rids for rank in range(num_ranks))


@lru_cache(maxsize=64)
def _random_script(seed: int, num_ranks: int) -> _Script:
    """Return a history of arrivals, aborts, failures and late ranks, whose end lets everything expire."""
    random = Random(seed)
    turns, waiting, now_s, number = list[_Turn](), list[str](), 0.0, 0
    for _ in range(25):
        now_s += random.choice((0.001, 0.5, 0.5, 7.0, 20.0))
        added = tuple(f"r{number + index}" for index in range(random.choice((0, 0, 1, 2, 5))))
        number += len(added)
        cancelled = tuple(random.sample(waiting, min(len(waiting), random.choice((0, 0, 0, 1, 2)))))
        waiting = [rid for rid in (*waiting, *added) if rid not in cancelled]
        facts = [
            (random.randrange(num_ranks), rid, random.random() > 0.04)
            for rid in waiting
            for _ in range(random.choice((0, 1, num_ranks)))
        ]
        random.shuffle(facts)
        turns.append(_Turn(now_s, cancelled, added, tuple(facts)))
    return (*turns, *(_Turn(now_s + (1 + step) * _LIMIT_S) for step in range(_MAX_IDLE_STEPS)))


def _crowd(num_ranks: int) -> _Script:
    """Return a history in which many wait together, the ranks are ready for them in opposite orders, and one fails."""
    rids = [f"r{number}" for number in range(_NUM_WAITING)]
    turns = [_Turn(0.0, add=tuple(rids))]
    for number in range(_NUM_WAITING):
        facts = [(rank, rids[-1 - number if rank % 2 else number], True) for rank in range(num_ranks)]
        if not number:
            facts.append((num_ranks - 1, rids[-5], False))
        turns.append(_Turn(0.01 * number, facts=tuple(facts)))
    return (*turns, *(_Turn(0.5 + 0.01 * number) for number in range(_NUM_WAITING)))


def _cancelled(num_ranks: int, moment: int) -> _Script:
    """Return a history in which a request is cancelled in one step, and added again in a later one."""
    facts = _facts_of_all(num_ranks, ("a", "b"))
    steps: list[tuple[_Fact, ...]] = [(), facts[:1], facts[1:], (), ()]
    turns = [
        _Turn(0.1 * step, ("a",) if step == moment else (), ("a", "b") if step == 0 and moment else (), each)
        for step, each in enumerate(steps)
    ]
    if not moment:  # cancelled before it waits, then added in the same turn
        turns[0] = _Turn(0.0, ("a",), ("a", "b"))
    early = _facts_of_all(num_ranks - 1, ("again",))
    again = (_Turn(1.0, add=("again",), facts=early), _Turn(1.1, ("again",)), _Turn(1.2, add=("again",)))
    return (
        *turns,
        *again,
        _Turn(1.3, facts=((num_ranks - 1, "again", True),)),
        _Turn(1.4),
        _Turn(1.5, facts=_facts_of_all(num_ranks, ("again",))),
        *(_Turn(2.0 + _LIMIT_S * step) for step in range(_MAX_IDLE_STEPS)),
    )


_SKEWS = (-1000.5, 0.0, 0.3, 1000.5)

AGREEMENT_CHECKS: tuple[Callable[[OpenWaitingRank, RankRunner], None], ...] = checks_in(globals())
"""All checks of a waiting queue."""
