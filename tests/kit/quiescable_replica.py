"""Four ranks of one replica in one process, connected by the kit's in-process groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from scheduler_components.agreement import AgreedValues, Proposal
from scheduler_components.quiesce import QuiesceController
from scheduler_components.testing.in_process_groups import InProcessGroups
from scheduler_components.values import ControlReply, ControlRequest

RANKS = (0, 1, 2, 3)
HOPS = {0: [(0, 1), (0, 2)], 1: [(0, 1), (1, 3)], 2: [(2, 3), (0, 2)], 3: [(2, 3), (1, 3)]}
GOOD = 5  # checksum of complete parts


class OwnFacts(msgspec.Struct, frozen=True):
    """The facts that differ between ranks during a control request."""

    transfers_end_after: int = 0  # steps after the request
    clock_s: float = 0.0  # how far its clock runs ahead
    fails: bool = False
    reads: int = GOOD
    breaks: str = ""  # the part that must not fail, and does: clear, commit, roll_back or release


class Given(msgspec.Struct, frozen=True):
    """A control request, the facts of each rank, and the requests before it and after its first agreement."""

    order: ControlRequest
    facts: tuple[OwnFacts, ...] = (OwnFacts(),) * 4
    new_requests: int = 0
    late_requests: int = 0


@dataclass
class QuiescableEngine:
    """One rank's work, cache, weights and memory in one object. Each request runs for three steps."""

    facts: OwnFacts = field(default_factory=OwnFacts)
    age: int = 0
    running: list[int] = field(default_factory=list)
    num_waiting: int = 0
    did: list[str] = field(default_factory=list)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_operations(self) -> int:
        return max(0, self.facts.transfers_end_after - self.age)

    def abort_all(self) -> int:
        ended, self.running, self.num_waiting = self.num_running + self.num_waiting, [], 0
        return ended

    def retract_all(self) -> int:
        retracted, self.running = self.num_running, []
        self.num_waiting += retracted
        return retracted

    def clear(self, weight_version: str) -> None:
        assert not self.running and not self.num_operations, "cleared while requests or transfers use it"
        self._may_break("clear")
        self.did.append(f"cleared for {weight_version}")

    def clear_storage_index(self) -> None:
        assert not self.num_operations
        self.did.append("forgot storage")

    def begin(self, weight_version: str) -> None:
        self._may_fail()

    def load(self, name: str, content: bytes) -> None:
        self._may_fail()

    def checksum(self) -> int:
        self._may_fail()
        return self.facts.reads

    def commit(self) -> None:
        self._may_break("commit")
        self.did.append("new weights")

    def roll_back(self) -> None:
        self._may_break("roll_back")
        self.did.append("old weights")

    def release(self, tags: Sequence[str], *, keep_weights: bool) -> None:
        self._may_break("release")
        self.did.append(f"gave {' and '.join(sorted(tags))}, keeping: {keep_weights}")

    def resume(self, tags: Sequence[str]) -> None:
        self._may_fail()
        self.did.append(f"took {' and '.join(sorted(tags))}")

    def _may_fail(self) -> None:
        if self.facts.fails:
            raise MemoryError("no room")

    def _may_break(self, part: str) -> None:
        if self.facts.breaks == part:
            raise OSError(f"{part} failed")

    def step(self, quiesce: QuiesceController) -> None:
        state = quiesce.state
        assert not (state.can_admit and not state.can_compute)
        if state.can_compute:
            self.running = [left - 1 for left in self.running if left > 1]
        if state.can_admit:
            self.running += [3] * self.num_waiting
            self.num_waiting = 0
        self.age += 1


class QuiescableReplica:
    """Four ranks in lockstep. ``local_slot`` is the one that ranks do not agree on: each uses its own value."""

    def __init__(self, local_slot: str = "") -> None:
        self.engines = {rank: QuiescableEngine() for rank in RANKS}
        self.ranks = {
            rank: QuiesceController(work=engine, cache=engine, weights=engine, memory=engine)
            for rank, engine in self.engines.items()
        }
        self.sync = InProcessGroups(HOPS)
        self.local_slot = local_slot
        self.num_steps = 0

    def give(self, given: Given, *, request_id: int = 7) -> None:
        for rank, quiesce in self.ranks.items():
            engine = self.engines[rank]
            engine.facts, engine.age = given.facts[rank], 0
            engine.num_waiting += given.new_requests
            quiesce.enqueue(request_id, given.order, now_s=float(self.num_steps))

    def step(self) -> list[ControlReply | None]:
        self.num_steps += 1
        answers: list[ControlReply | None] = [None] * len(RANKS)
        if all(quiesce.has_pending for quiesce in self.ranks.values()):
            proposals = {
                rank: quiesce.propose(
                    self.num_steps, rank=rank, now_s=self.num_steps + self.engines[rank].facts.clock_s
                )
                for rank, quiesce in self.ranks.items()
            }
            agreed = self._with_own_values(proposals, self.sync.reduce(proposals))
            answers = [quiesce.apply(self.num_steps, agreed[rank]) for rank, quiesce in self.ranks.items()]
        for rank, engine in self.engines.items():
            engine.step(self.ranks[rank])
        return answers

    def _with_own_values(
        self, proposals: Mapping[int, Proposal], agreed: Mapping[int, AgreedValues]
    ) -> Mapping[int, AgreedValues]:
        if not self.local_slot:
            return agreed
        own = {rank: proposal.unpack(proposal.pack(0)) for rank, proposal in proposals.items()}
        slot = self.local_slot
        return {
            rank: AgreedValues(
                each.numbers | {name: own[rank].numbers[name] for name in each.numbers if name == slot},
                each.flags | {name: own[rank].flags[name] for name in each.flags if name == slot},
            )
            for rank, each in agreed.items()
        }

    def carry_out(self, given: Given) -> list[ControlReply]:
        """Give an order and step until it is over on all ranks, in one step on all of them."""
        self.give(given)
        for num_steps in range(60):
            for engine in self.engines.values():
                engine.num_waiting += given.late_requests if num_steps == 1 else 0
            answers = self.step()
            assert not self.have_parted(answers), f"ranks parted: {answers}"
            if answers[0] is not None:
                return cast("list[ControlReply]", answers)
        raise AssertionError(f"{given.order} does not come to an end")

    def have_parted(self, answers: list[ControlReply | None]) -> bool:
        replies = {
            answer and (answer.problem.partition(":")[0], answer.num_requests, answer.checksum) for answer in answers
        }
        states = {quiesce.state.digest() for quiesce in self.ranks.values()}
        did = {tuple(each for each in engine.did if not each.startswith("took")) for engine in self.engines.values()}
        counts = {(engine.num_running, engine.num_waiting) for engine in self.engines.values()}
        return any(len(values) > 1 for values in (replies, states, did, counts))
