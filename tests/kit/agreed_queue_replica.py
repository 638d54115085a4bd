"""All ranks of one replica with an AgreedQueue each, in one thread, and schedules of facts, aborts and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import msgspec
from hypothesis import strategies as st

from scheduler_components import ParallelState
from scheduler_components.agreement import AgreedValues, Proposal
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.testing.in_process_groups import InProcessGroups
from scheduler_components.waiting.agreed_queue import AgreedQueue, Departure

MAX_WAIT_S = 6.0
RIDS = "abcdefgh"


class Fact(msgspec.Struct, frozen=True):
    """What one rank reports about one request before a step. The rank is taken modulo the number of ranks."""

    rank: int
    rid: str
    is_ok: bool
    is_error: bool = False  # of the rank, not of the request


class Call(msgspec.Struct, frozen=True):
    """What all ranks call before a step."""

    verb: Literal["add", "cancel"]
    rid: str
    timeout_s: float | None = None


class Turn(msgspec.Struct, frozen=True):
    """What happens before a step: the calls of all ranks, the facts of some, and the seconds since the last step."""

    calls: tuple[Call, ...] = ()
    facts: tuple[Fact, ...] = ()
    seconds: float = 1.0


_rids = st.sampled_from(RIDS)
_calls = st.builds(
    Call, st.sampled_from(["add", "add", "add", "cancel"]), _rids, st.sampled_from([None, None, 0.0, 2.0])
)
_facts = st.builds(Fact, st.integers(0, 7), _rids, st.sampled_from([True] * 5 + [False]), st.booleans())
turns = st.lists(
    st.builds(
        Turn,
        st.lists(_calls, max_size=3).map(tuple),
        st.lists(_facts, max_size=8).map(tuple),
        st.sampled_from([0.0, 1.0, 1.0, 4.0]),
    ),
    min_size=1,
    max_size=20,
)
worlds = st.builds(
    lambda cp, tp, pp: ParallelState.from_tp_rank(0, tp_size=cp * tp, attn_cp_size=cp, pp_size=pp),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 2),
)


class Reduction(Protocol):
    """Returns each rank's agreed values: ``InProcessGroups``, or a broken one."""

    def reduce(self, proposals: Mapping[int, Proposal]) -> Mapping[int, AgreedValues]: ...


Outcome: TypeAlias = "tuple[str, str]"
"""Id and reason of a departure."""


@dataclass
class RankRun:
    """One rank: its queue, its agreement, and what left in which step."""

    queue: AgreedQueue[str]
    agreement: StepAgreement
    clock_s: float
    departed: list[tuple[int, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def call(self, call: Call) -> object:
        if call.verb == "cancel":
            return self.queue.cancel(call.rid)
        if call.rid in self.queue:
            return None
        return self.queue.add(call.rid, call.rid.upper(), timeout_s=call.timeout_s)

    def report(self, fact: Fact) -> None:
        if fact.is_ok:
            self.queue.on_ready(fact.rid)
        elif fact.is_error:
            self.queue.on_error(fact.rid, f"rank {fact.rank} broke")
        else:
            self.queue.on_failed(fact.rid, f"rank {fact.rank} cannot")

    def pop(self, step: int) -> Sequence[Departure[str]]:
        departures = self.queue.pop_departures()
        self.departed += ((step, each.rid, each.reason) for each in departures)
        self.problems += (each.problem for each in departures)
        return departures


class QueueReplica:
    """The ranks of ``world``, stepped together. Their clocks differ; rank 0 leads.

    Args:
        world: sizes of the replica.
        queue_type: the class of the queues, which a test replaces by a broken one.
        reduction: agrees; by default over all ranks of ``world``.
        leading_ranks: whose clock counts.
    """

    def __init__(
        self,
        world: ParallelState,
        *,
        queue_type: type[AgreedQueue[str]] = AgreedQueue,
        num_lanes: int = 2,
        max_waiting: int = 5,
        reduction: Reduction | None = None,
        leading_ranks: Sequence[int] = (0,),
    ) -> None:
        hops = {each.rank: each.reduce_groups for each in world_rank_groups(world)}
        self.reduction: Reduction = reduction if reduction is not None else InProcessGroups(hops)
        self.num_steps, self.now_s = 0, 0.0
        self.ranks: dict[int, RankRun] = {}
        for rank in hops:
            queue = queue_type(name="grammar", max_wait_s=MAX_WAIT_S, num_lanes=num_lanes, max_waiting=max_waiting)
            run = RankRun(queue, StepAgreement(parts=[queue], leads=rank in leading_ranks), -1000.5 * rank)
            run.agreement.clock = lambda run=run: self.now_s + run.clock_s  # type: ignore[misc]
            self.ranks[rank] = run

    @property
    def leader(self) -> RankRun:
        return self.ranks[0]

    def step(self, turn: Turn) -> Sequence[Departure[str]]:
        """Take a step on all ranks; return the departures of rank 0."""
        self.num_steps += 1
        self.now_s += turn.seconds
        for call in turn.calls:
            answers = {repr(rank.call(call)) for rank in self.ranks.values()}
            assert len(answers) == 1, f"{call}: ranks answered {answers}"
        for fact in turn.facts:
            self.ranks[fact.rank % len(self.ranks)].report(fact)
        proposals = {number: rank.agreement.propose(self.num_steps) for number, rank in self.ranks.items()}
        agreed = self.reduction.reduce(proposals)
        for number, rank in self.ranks.items():
            rank.agreement.apply(self.num_steps, agreed[number])
        departures = [rank.pop(self.num_steps) for rank in self.ranks.values()]
        return departures[0]

    def run(self, schedule: Sequence[Turn]) -> None:
        """Take a step per turn and check after each that the ranks are equal."""
        for turn in schedule:
            self.step(turn)
            self.check()

    def check(self) -> None:
        for rank in self.ranks.values():
            assert rank.departed == self.leader.departed, "departures differ"
            assert list(rank.queue) == list(self.leader.queue), "waiting requests differ"
            assert rank.agreement.now_s == self.now_s, "the agreed clock is not the leading rank's"
            theirs, ours = rank.queue.stats(), self.leader.queue.stats()
            theirs.unknown = ours.unknown = 0
            assert theirs == ours, "counters differ"
