"""DecisionLog: every rank names the same first decision that differed, and none while all ranks decide alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rank_grid import Hops, on_threads
from kit.searches import num_examples

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups, Proposal
from scheduler_components.agreement.decision_log import (
    DECISION_KINDS,
    DecisionLog,
    NullDecisionLog,
    describe_divergence,
    note_calls,
)
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.errors import ConfigError, DecisionDivergenceError, LockstepError, SyncTimeoutError
from scheduler_components.testing.in_process_groups import InProcessGroups, agree_on_decisions
from scheduler_components.values import Decision, DecisionDump, DecisionKind, DecisionStats, DivergenceReport

KIND = st.sampled_from(["admit", "evict", "of no kind"])
NOTE = st.tuples(KIND, st.lists(st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5), max_size=3).map(tuple))
Note = tuple[str, tuple[int | str, ...]]
Steps = list[list[Note]]


def hops_of(cp: int, tp: int, pp: int) -> Hops:
    parallel = ParallelState.from_tp_rank(0, tp_size=cp * tp, attn_cp_size=cp, pp_size=pp)
    return {each.rank: each.reduce_groups for each in world_rank_groups(parallel)}


GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)).map(lambda sizes: hops_of(*sizes))


@dataclass
class InProcessLogs:
    """The logs of all ranks of a replica in this thread."""

    hops: Hops
    policy: str = "count"
    ring_bytes: int = 65_536
    logs: dict[int, DecisionLog] = field(init=False)

    def __post_init__(self) -> None:
        self.logs = {
            rank: DecisionLog(groups=ParallelGroups(rank=rank), policy=self.policy, ring_bytes=self.ring_bytes)  # type: ignore[arg-type]
            for rank in self.hops
        }
        self.groups = InProcessGroups(self.hops)
        self.num_gathers = 0

    def agree(self, step: int) -> None:
        self.num_gathers += not agree_on_decisions(self.groups, self.logs, step=step)

    def note(self, rank: int, notes: Sequence[Note]) -> None:
        for kind, values in notes:
            self.logs[rank].note(kind, *values)

    def report(self) -> DivergenceReport | None:
        """Return the report, the same on every rank."""
        reports = [log.last_divergence for log in self.logs.values()]
        assert all(report == reports[0] for report in reports)
        return reports[0]


@attrs.frozen
class Plant:
    """One rank decides something else than the others at one place."""

    rank: int
    step: int
    index: int
    change: str

    def notes_of(self, rank: int, step: int, notes: list[Note]) -> list[Note]:
        if (rank, step) != (self.rank, self.step):
            return notes
        if self.change == "omit":
            return notes[: self.index] + notes[self.index + 1 :]
        other: Note = ("planted", (step,))
        return [*notes[: self.index], other, *notes[self.index + (self.change == "replace") :]]


@settings(deadline=None, max_examples=num_examples(1))
@given(hops=GRIDS, steps=st.lists(st.lists(NOTE, max_size=6), min_size=1, max_size=6), data=st.data())
def test_the_first_differing_decision_is_named_on_every_rank(hops: Hops, steps: Steps, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, len(steps) - 1))
    change = data.draw(st.sampled_from(["insert", *(["omit", "replace"] if steps[step] else [])]))
    index = data.draw(st.integers(0, len(steps[step]) - (change != "insert")))
    plant = Plant(data.draw(st.sampled_from(sorted(hops))), step, index, change)
    replica = InProcessLogs(hops)
    for number, notes in enumerate(steps):
        for rank in hops:
            replica.note(rank, plant.notes_of(rank, number, notes))
        replica.agree(number + 1)
        if number < step:
            assert replica.report() is None
    changed = plant.notes_of(plant.rank, step, steps[step])
    first = (
        next(at for at in range(len(steps[step]) + 2) if changed[at : at + 1] != steps[step][at : at + 1])
        if (len(hops) > 1 and changed != steps[step])
        else None
    )
    report = replica.report()
    if first is None:  # the omitted note equals its neighbour at the end, or no other rank exists
        assert report is None
        assert replica.num_gathers == 0
        return
    assert report is not None
    assert (report.step, report.found_at_step, report.index) == (step, step + 1, first)
    assert not report.is_unknown
    for rank, decision in report.decisions.items():
        own = changed if rank == plant.rank else steps[step]
        assert decision == (Decision(*own[first]) if first < len(own) else None)
    assert report.culprits == ((plant.rank,) if len(hops) > 2 else ())
    assert replica.num_gathers == 1, "the digests agree again after the restart"
    assert {log.num_divergences for log in replica.logs.values()} == {1}


@settings(deadline=None, max_examples=num_examples(1))
@given(
    notes=st.lists(NOTE, max_size=40),
    reads=st.sets(st.integers(0, 40)),
    cuts=st.sets(st.integers(0, 40)),
)
def test_the_tip_depends_on_the_notes_alone(notes: list[Note], reads: set[int], cuts: set[int]) -> None:
    """Not on when it is read, nor on the agreements between the notes."""
    plain, read = DecisionLog(), DecisionLog()
    for at, (kind, values) in enumerate(notes):
        plain.note(kind, *values)
        read.note(kind, *values)
        if at in reads:
            assert read.tip == plain.tip
        if at in cuts:
            read.fill(Proposal("step", step=at))
    assert plain.tip == read.tip
    assert -(2**63) <= plain.tip < 2**63
    assert plain.stats().num_decisions == len(notes)


def test_many_notes_without_an_agreement_are_digested_in_bounded_memory() -> None:
    log, other = DecisionLog(ring_bytes=100), DecisionLog(ring_bytes=100)
    for number in range(5000):
        log.note("admit", number)
        other.note("admit", number)
        if number == 4000:
            other.note("admit", number)
    assert len(log._pending) < 1025
    assert log.tip != other.tip
    assert len(log._chain.open.body) <= 100


def stepped(groups: ParallelGroups, log: DecisionLog, step: int) -> None:
    proposal = Proposal("step", step=step)
    log.fill(proposal)
    log.apply(step, groups.reduce(proposal))


def test_threads_make_one_collective_more_for_a_difference_and_none_without() -> None:
    def work(groups: ParallelGroups) -> tuple[DivergenceReport | None, list[int]]:
        log = DecisionLog(groups=groups, policy="count")
        calls = [groups.num_calls]
        for step in range(1, 7):
            log.note("evict", step, 5 if (step, groups.rank) == (3, 2) else 4)
            stepped(groups, log, step)
            calls.append(groups.num_calls)
        return log.first_divergence, [after - before for before, after in pairwise(calls)]

    results = on_threads(hops_of(2, 2, 2), work)
    decisions: dict[int, Decision | None] = dict.fromkeys(range(8), Decision("evict", (3, 4)))
    report = DivergenceReport(2, 3, 0, decisions | {2: Decision("evict", (3, 5))}, (2,))
    assert results == [(report, [1, 1, 2, 1, 1, 1])] * 8
    found, _ = results[0]  # type: ignore[misc]
    assert list(found.decisions) == list(range(8)), "shown in order of the ranks"


def test_a_rank_that_dies_before_the_gather_is_named() -> None:
    def work(groups: ParallelGroups) -> object:
        log = DecisionLog(groups=groups, policy="count")
        log.note("evict", groups.rank)
        proposal = Proposal("step", step=1)
        log.fill(proposal)
        agreed = groups.reduce(proposal)
        return None if groups.rank == 1 else log.apply(1, agreed)

    first, second, *others = on_threads(hops_of(1, 3, 1), work, timeout_s=0.2)
    assert second is None
    for error in (first, *others):
        assert isinstance(error, SyncTimeoutError)
        assert (error.operation, error.missing_ranks) == ("decisions", (1,))


def pair(policy: str = "count", ring_bytes: int = 65_536) -> InProcessLogs:
    return InProcessLogs(hops_of(1, 2, 1), policy, ring_bytes)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_ring_too_short_to_find_the_difference_says_so(kept: int) -> None:
    record = len(msgspec.msgpack.encode(("admit", (7,))))
    replica = pair(ring_bytes=record * kept + 1)
    for rank in (0, 1):
        replica.note(rank, [("admit", (7,))] * 3 + [("admit", (rank,))])
    replica.agree(1)
    report = replica.report()
    assert report is not None
    assert report.is_unknown
    assert report.reason == f"the ring is too short: it kept the first {kept} of 4 decisions; raise ring_bytes"
    assert replica.logs[0].stats().num_unknown == 1
    assert "but the decision is unknown: the ring is too short" in describe_divergence(report)


def test_a_short_ring_keeps_no_decision_behind_one_that_it_has_left_out() -> None:
    replica = pair(ring_bytes=30)
    for rank, log in replica.logs.items():
        log.note("admit", "x" * 40)
        assert log.tip
        log.note("admit", rank)
    replica.agree(1)
    report = replica.report()
    assert report is not None
    assert report.reason == "the ring is too short: it kept the first 0 of 2 decisions; raise ring_bytes"


def test_a_difference_before_the_end_of_a_short_ring_is_found() -> None:
    record = len(msgspec.msgpack.encode(("admit", (7,))))
    replica = pair(ring_bytes=record * 3)
    for rank in (0, 1):
        replica.note(rank, [("admit", (7,)), ("admit", (rank,))] + [("admit", (7,))] * 9)
    replica.agree(1)
    report = replica.report()
    assert report is not None
    assert report.index == 1


def test_logs_that_began_at_different_moments_are_reported_and_agree_afterwards() -> None:
    replica = pair()
    replica.logs[0]._chain.digest.update(b"an earlier decision")
    replica.agree(1)
    report = replica.report()
    assert report is not None
    assert "began at different moments" in report.reason
    replica.agree(2)
    assert replica.num_gathers == 1


def test_an_unregistered_kind_is_counted_compared_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log = DecisionLog(kinds={**DECISION_KINDS, "route": DecisionKind(("expert",))})
    log.note("route", 3)
    tip = log.tip
    for _ in range(3):
        log.note("rout", 3)
    assert log.tip != tip
    assert log.stats() == DecisionStats(num_decisions=4, num_unregistered=3)
    [record] = caplog.records
    assert "the decision log has no kind 'rout'" in record.message


def test_a_value_that_cannot_be_encoded_is_replaced_and_counted() -> None:
    replica = pair()
    for rank, log in replica.logs.items():
        log.note("admit", 2**70, "\ud800", object(), 1)  # type: ignore[arg-type]
        log.note("admit", rank)
    replica.agree(1)
    report = replica.report()
    assert report is not None
    assert report.index == 1
    assert replica.logs[0].stats().num_replaced_values == 3
    [(_, [first, _])] = replica.logs[0].recent()
    assert first == Decision("admit", (str(2**70), "'\\ud800'", "<object>", 1))


def test_a_value_of_another_type_cannot_stop_the_comparison() -> None:
    replica = pair()
    for rank, log in replica.logs.items():
        log.note("admit", [rank])  # type: ignore[arg-type]
    replica.agree(1)
    report = replica.report()
    assert report is not None
    assert report.reason == "rank 0 noted a value that is neither a number nor a string"
    assert replica.logs[0].recent() == ((0, ()),)


class ListDivergenceSink:
    """Keeps every dump, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.dumps: list[DecisionDump] = []

    def write(self, dump: DecisionDump) -> None:
        if self.error is not None:
            raise self.error
        self.dumps.append(dump)


def diverge(replica: InProcessLogs, step: int, *, differ: bool = True) -> None:
    for rank in replica.logs:
        replica.note(rank, [("evict", (rank if differ else 0, 4))])
    replica.agree(step)


@pytest.mark.parametrize(("policy", "num_logged", "num_dumped"), [("count", 0, 0), ("log", 1, 0), ("dump", 1, 1)])
def test_a_policy_that_continues_reports_an_episode_once(
    policy: str, num_logged: int, num_dumped: int, caplog: pytest.LogCaptureFixture
) -> None:
    replica = pair(policy)
    log = replica.logs[1]
    sink = ListDivergenceSink()
    log.sink = sink.write
    diverge(replica, 1, differ=False)
    for step in (2, 3, 4):
        diverge(replica, step)
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(logged) == 2 * num_logged  # of two ranks
    assert len(sink.dumps) == num_dumped
    assert {each.num_divergences for each in replica.logs.values()} == {3}
    assert log.first_divergence is not None
    assert log.last_divergence is not None
    assert (log.first_divergence.found_at_step, log.last_divergence.found_at_step) == (2, 4)
    for step in range(5, 104):
        diverge(replica, step, differ=False)
    assert "decide alike again" not in caplog.text
    diverge(replica, 104, differ=False)
    assert ("decide alike again; 3 divergences so far" in caplog.text) == (policy != "count")
    caplog.clear()
    diverge(replica, 105)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 2 * num_logged
    if sink.dumps:
        dump, _ = sink.dumps
        assert dump.rank == 1
        assert dump.steps == ((0, (Decision("evict", (0, 4)),)), (1, (Decision("evict", (1, 4)),)))
        assert msgspec.json.decode(msgspec.json.encode(dump), type=DecisionDump) == dump


def test_true_and_one_are_different_decisions() -> None:
    """They are equal in Python and have different digests."""
    replica = InProcessLogs({0: ((0, 1, 2),), 1: ((0, 1, 2),), 2: ((0, 1, 2),)})
    for rank in replica.hops:
        replica.note(rank, [("match", (True if rank == 1 else 1,))])
    replica.agree(1)
    report = replica.report()
    assert report is not None
    assert (report.index, report.culprits) == (0, (1,))


def test_the_policy_stop_raises_on_every_rank_after_the_report() -> None:
    def work(groups: ParallelGroups) -> tuple[str, dict[int, str], DivergenceReport | None]:
        log = DecisionLog(groups=groups, policy="stop")
        log.note("evict", 12, 4 + groups.rank)
        with pytest.raises(DecisionDivergenceError) as raised:
            stepped(groups, log, 1)
        assert isinstance(raised.value, LockstepError)
        assert raised.value.rank == f"rank {groups.rank}"
        assert raised.value.found == f"evict(first page=12, pages={4 + groups.rank})"
        assert raised.value.expected == "evict(first page=12, pages=4)"
        return str(raised.value), raised.value.decisions, log.last_divergence

    (text, decisions, report), second = on_threads(hops_of(1, 2, 1), work)  # type: ignore[misc]
    assert second == (text, decisions, report)
    assert text == (
        "step 0: the ranks decided differently at decision 0: rank 0: evict(first page=12, pages=4); rank 1: "
        "evict(first page=12, pages=5); no majority says which rank is wrong (found at step 1)"
    )


def test_a_sink_that_fails_is_counted() -> None:
    replica = pair("dump")
    replica.logs[0].sink = ListDivergenceSink(OSError("disk full")).write
    diverge(replica, 1)
    assert replica.logs[0].failures.counts == {"writing a dump of decisions": 1}
    assert replica.report() is not None


def test_the_ring_keeps_the_latest_agreed_decisions() -> None:
    replica = pair(ring_bytes=25)
    for step in range(1, 9):
        diverge(replica, step, differ=False)
    steps = [step for step, _ in replica.logs[0].recent()]
    assert steps == [6, 7]


def test_a_long_decision_is_shown_around_its_first_difference() -> None:
    decisions: dict[int, Decision | None] = {
        rank: Decision("apply", ("queue", "x", *(100 + at + (at == 40) * rank for at in range(64)))) for rank in (0, 1)
    }
    text = describe_divergence(DivergenceReport(5, 6, 2, decisions))
    assert "rank 0: apply(..., value[37]=137, value[38]=138, value[39]=139, value[40]=140, value[41]=141, " in text
    assert "value[40]=141, value[41]=141, value[42]=142, ...)" in text
    assert "value[36]" not in text
    assert len(text) < 400


def test_a_rank_without_a_further_decision_is_described() -> None:
    report = DivergenceReport(5, 6, 2, {0: None, 1: Decision("expire", ("grammar", "r1")), 2: None}, (1,))
    assert describe_divergence(report) == (
        "step 5: the ranks decided differently at decision 2: ranks 0, 2: no decision; rank 1: "
        "expire(component='grammar', what='r1'); rank 1 against the majority (found at step 6)"
    )


def test_a_ring_must_hold_a_byte() -> None:
    with pytest.raises(ConfigError, match="ring_bytes=0: holds no decision; give at least 1"):
        DecisionLog(ring_bytes=0)


def test_the_null_log_drops_notes() -> None:
    assert not NullDecisionLog().wants_decisions
    NullDecisionLog().note("evict", 1)


def test_a_decision_between_proposal_and_report_belongs_to_the_next_step() -> None:
    """Whether or not a rank reads its tip in between."""
    replica = pair()
    for rank in (0, 1):
        replica.note(rank, [("evict", (rank, 4))])
    proposals = {rank: Proposal("step", step=1) for rank in (0, 1)}
    for rank, log in replica.logs.items():
        log.fill(proposals[rank])
        log.note("apply", "queue", "ready")
    assert replica.logs[0].tip
    num_bytes = replica.groups.reduce(proposals)[0].numbers["decision bytes"]
    gathered = [number for log in replica.logs.values() for number in log.pack_ring(num_bytes)]
    for log in replica.logs.values():
        log.apply_rings(1, gathered)
    assert {log.agreed_tip for log in replica.logs.values()} == {1}, "equal again on all ranks"
    replica_tips = {log.tip for log in replica.logs.values()}
    assert len(replica_tips) == 1
    replica.agree(2)
    assert replica.num_gathers == 0
    assert {log.agreed_tip for log in replica.logs.values()} == replica_tips
    assert replica.logs[1].recent()[-1] == (1, (Decision("apply", ("queue", "ready")),))


# --- note_calls ---


class Engine:
    """An engine that others wrote."""

    def __init__(self) -> None:
        self.evicted = 0

    def evict(self, num_pages: int, *, force: bool = False) -> int:
        if num_pages < 0:
            raise ValueError("negative")
        self.evicted += num_pages + force
        return self.evicted

    @staticmethod
    def version() -> str:
        return "1"


class Slotted:
    __slots__ = ()

    def evict(self) -> int:
        return 1


def evicted(result: int, args: tuple[int]) -> tuple[int, ...] | None:
    return (result, *args) if result else None


def test_calls_of_an_object_are_noted_until_undone() -> None:
    engine, log = Engine(), DecisionLog()
    undo = note_calls(engine, "evict", log, kind="evict", values=evicted)
    assert engine.evict(4, force=True) == 5
    assert Engine().evict(1) == 1
    with pytest.raises(ValueError, match="negative"):
        engine.evict(-1)
    undo()
    assert "evict" not in vars(engine)
    engine.evict(7)
    stepped(ParallelGroups(), log, 1)
    assert log.recent() == ((0, (Decision("evict", (5, 4)), Decision("evict", ("raised", "ValueError")))),)


def test_calls_of_a_class_are_noted_with_their_object() -> None:
    log = DecisionLog()
    original = Engine.evict
    undo = note_calls(Engine, "evict", log, kind="evict", values=lambda result, args: (result, args[1]))
    try:
        Engine().evict(3)
    finally:
        undo()
    assert Engine.evict is original
    stepped(ParallelGroups(), log, 1)
    assert log.recent() == ((0, (Decision("evict", (3, 3)),)),)


def test_a_call_without_a_decision_is_not_noted() -> None:
    engine, log = Engine(), DecisionLog()
    note_calls(engine, "evict", log, kind="evict", values=evicted)
    engine.evict(0)
    assert log.stats().num_decisions == 0


def test_values_that_cannot_be_computed_are_counted_and_do_not_stop_the_engine() -> None:
    def broken(result: int, args: tuple[object, ...]) -> tuple[int]:
        raise KeyError("no such field")

    engine, log = Engine(), DecisionLog()
    note_calls(engine, "evict", log, kind="evict", values=broken)
    assert engine.evict(2) == 2
    assert log.failures.total == 1
    assert log.stats().num_decisions == 1


@pytest.mark.parametrize(
    ("target", "method", "problem"),
    [
        (Engine(), "evit", "no plain method"),
        (Engine, "version", "no plain method"),
        (Slotted(), "evict", "give its class instead"),
    ],
)
def test_a_method_that_cannot_be_noted_is_refused(target: object, method: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        note_calls(target, method, DecisionLog(), kind="evict")
