"""All ranks of one replica with a GrammarQueue each, in one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kit.grammars import PathGrammar
from scheduler_components import ParallelState
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.testing.in_process_groups import InProcessGroups
from scheduler_components.values import GrammarKey, GrammarStats, RequestHints
from scheduler_components.waiting.agreed_queue import AgreedQueue
from scheduler_components.waiting.grammar_queue import CompileResult, GrammarCompiler, GrammarQueue
from scheduler_components.waiting.held_request import RequestGrammar

MAX_WAIT_S = 6.0


@dataclass
class GrammarUser:
    """A request on one rank."""

    rid: str
    grammar_key: GrammarKey | None
    num_prompt_tokens: int = 0
    grammar: RequestGrammar | None = None
    hints: RequestHints = field(default_factory=RequestHints)
    lora_id: int | None = None


@dataclass
class ManualCompiler:
    """A ``GrammarCompiler`` whose compilations end when the test says so. It keeps what it compiled."""

    waiting: dict[str, GrammarKey] = field(default_factory=dict)
    known: dict[GrammarKey, CompileResult] = field(default_factory=dict)
    results: list[CompileResult] = field(default_factory=list)

    def start(self, rid: str, key: GrammarKey) -> None:
        self.waiting[rid] = key
        if key in self.known:
            self._end(key)

    def finish(self, key: GrammarKey, problem: str = "", *, is_error: bool = False) -> None:
        self.known.setdefault(key, CompileResult("", None if problem else PathGrammar([[1]]), problem, is_error))
        self._end(key)

    def _end(self, key: GrammarKey) -> None:
        known = self.known[key]
        for rid in [each for each, wanted in self.waiting.items() if wanted == key]:
            del self.waiting[rid]
            self.results.append(msgspec.structs.replace(known, rid=rid))

    def poll(self) -> Sequence[CompileResult]:
        results, self.results = self.results, []
        return results

    def cancel(self, rid: str) -> None:
        self.waiting.pop(rid, None)
        self.results = [each for each in self.results if each.rid != rid]

    def stats(self) -> GrammarStats:
        return GrammarStats(compiled=len(self.known))

    def close(self) -> None: ...


@dataclass
class GrammarRank:
    """One rank: its queue, its own objects of the requests, and what left in which step."""

    queue: GrammarQueue[GrammarUser]
    agreement: StepAgreement
    users: dict[str, GrammarUser] = field(default_factory=dict)
    departed: list[tuple[int, str, str]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


class GrammarReplica:
    """The ranks of ``world``, stepped together.

    Args:
        world: sizes of the replica.
        compilers: one per rank.
        queue_type: the class of the queues, which a test replaces by a broken one.
    """

    def __init__(
        self,
        world: ParallelState,
        compilers: Mapping[int, GrammarCompiler],
        *,
        queue_type: type[GrammarQueue[GrammarUser]] = GrammarQueue,
        max_waiting: int = 5,
    ) -> None:
        self.groups = InProcessGroups({each.rank: each.reduce_groups for each in world_rank_groups(world)})
        self.num_steps, self.now_s = 0, 0.0
        self.ranks: dict[int, GrammarRank] = {}
        for rank, compiler in compilers.items():
            waits = AgreedQueue[GrammarUser](
                name="grammar", max_wait_s=MAX_WAIT_S, num_lanes=2, max_waiting=max_waiting
            )
            queue = queue_type(compiler=compiler, queue=waits)
            agreement = StepAgreement(parts=[queue], leads=rank == 0, clock=lambda: self.now_s)
            self.ranks[rank] = GrammarRank(queue, agreement)

    @property
    def leader(self) -> GrammarRank:
        return self.ranks[0]

    def enter(self, rid: str, key: GrammarKey | None) -> bool:
        for rank in self.ranks.values():
            user = rank.users[rid] = GrammarUser(rid, key)
            waits = rank.queue.enter(user)
        return waits

    def end(self, rid: str) -> None:
        for rank in self.ranks.values():
            rank.queue.end(rank.users[rid])

    def step(self, seconds: float = 1.0) -> list[tuple[str, str]]:
        """Take a step on all ranks. Return id and reason of each departure, which are equal on all ranks."""
        self.num_steps += 1
        self.now_s += seconds
        agreed = self.groups.reduce({at: rank.agreement.propose(self.num_steps) for at, rank in self.ranks.items()})
        for at, rank in self.ranks.items():
            rank.agreement.apply(self.num_steps, agreed[at])
            for departure in rank.queue.queue.pop_departures():
                assert departure.item is rank.users[departure.rid]
                rank.departed.append((self.num_steps, departure.rid, departure.reason))
                rank.problems[departure.rid] = departure.problem
                if departure.reason == "ready":
                    assert departure.item.grammar is not None, f"rank {at} has no grammar of {departure.rid}"
                else:
                    rank.queue.end(departure.item)
        for at, rank in self.ranks.items():
            assert rank.departed == self.leader.departed, f"rank {at} departs otherwise"
        return [(rid, reason) for step, rid, reason in self.leader.departed if step == self.num_steps]
