"""``AgreedQueue``, ``GrammarQueue`` and ``LoraQueue`` as the parts that ``AGREEMENT_CHECKS`` exercise.

Processes import them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kit.grammar_replica import GrammarUser, ManualCompiler
from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.values import GrammarKey, RequestHints
from scheduler_components.waiting.agreed_queue import AgreedQueue
from scheduler_components.waiting.grammar_queue import GrammarQueue
from scheduler_components.waiting.lora_queue import Adapter, AdapterFact, LoraLimits, LoraQueue

__all__ = ["AgreedRank", "GrammarRank", "LoraRank", "open_agreed_rank"]

MAX_WAIT_S = 50.0
"""What the checks ask for, as the limit of queues that have one for all of their requests."""


class AgreedRank:
    """One rank's ``AgreedQueue`` as the only part of a ``StepAgreement``."""

    def __init__(self, groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> None:
        self.queue = AgreedQueue[str](name="grammar")
        self.agreement = StepAgreement(groups=groups, parts=[self.queue], clock=clock, leads=leads)

    def add(self, rid: str, timeout_s: float) -> bool:
        return self.queue.add(rid, rid, timeout_s=timeout_s)

    def report(self, rid: str, is_ready: bool) -> None:
        if is_ready:
            self.queue.on_ready(rid)
        else:
            self.queue.on_failed(rid, "this rank cannot")

    def cancel(self, rid: str) -> object:
        return self.queue.cancel(rid)

    def step(self, step: int) -> list[tuple[str, str]]:
        self.agreement.step(step)
        return [(departure.rid, departure.reason) for departure in self.queue.pop_departures()]


def open_agreed_rank(groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> AgreedRank:
    """Open the queue of one rank."""
    return AgreedRank(groups, clock, leads)


class GrammarRank:
    """One rank's ``GrammarQueue``. Each request has a grammar of its own."""

    def __init__(self, groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> None:
        waits = AgreedQueue[GrammarUser](name="grammar", max_wait_s=MAX_WAIT_S)
        self.compiler = ManualCompiler()
        self.room = GrammarQueue(compiler=self.compiler, queue=waits)
        self.agreement = StepAgreement(groups=groups, parts=[self.room], clock=clock, leads=leads)
        self.users: dict[str, GrammarUser] = {}
        self.num_added = 0

    def add(self, rid: str, timeout_s: float) -> bool:
        assert timeout_s == MAX_WAIT_S
        self.num_added += 1  # a grammar that was compiled for an aborted request would be in the cache
        self.users[rid] = GrammarUser(rid, GrammarKey("regex", f"{rid}{self.num_added}"))
        return self.room.enter(self.users[rid])

    def report(self, rid: str, is_ready: bool) -> None:
        key = self.users[rid].grammar_key if rid in self.users else None
        if key is not None:
            self.compiler.finish(key, "" if is_ready else "this rank cannot")

    def cancel(self, rid: str) -> None:
        if rid in self.users:
            self.room.end(self.users[rid])

    def step(self, step: int) -> list[tuple[str, str]]:
        self.agreement.step(step)
        departures = self.room.queue.pop_departures()
        for departure in departures:
            if departure.reason != "ready":
                self.room.end(departure.item)
        return [(departure.rid, departure.reason) for departure in departures]


class ManualLoader:
    """An ``AdapterLoader`` whose loads end when the check says so."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.facts: list[AdapterFact] = []

    def load(self, key: str, adapter: Adapter) -> None:
        self.keys[adapter.name] = key

    def finish(self, name: str, problem: str) -> None:
        if name in self.keys:
            self.facts.append(AdapterFact(self.keys.pop(name), problem))

    def unload(self, adapter: Adapter) -> None:
        self.keys.pop(adapter.name, None)

    def poll(self) -> Sequence[AdapterFact]:
        facts, self.facts = self.facts, []
        return facts

    def close(self) -> None: ...


class LoraRank:
    """One rank's ``LoraQueue``. Each request has an adapter of its own."""

    def __init__(self, groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> None:
        self.loader = ManualLoader()
        limits = LoraLimits(max_loaded=64, max_registered=1024, max_wait_s=MAX_WAIT_S)
        self.room = LoraQueue[GrammarUser](loader=self.loader, limits=limits)
        self.agreement = StepAgreement(groups=groups, parts=[self.room], clock=clock, leads=leads)
        self.users: dict[str, GrammarUser] = {}
        self.num_added = 0

    def add(self, rid: str, timeout_s: float) -> bool:
        assert timeout_s == MAX_WAIT_S
        self.num_added += 1
        name = f"{rid}-{self.num_added}"
        self.room.register(name, "folder")
        self.users[rid] = GrammarUser(rid, None, hints=RequestHints(lora=name))
        return self.room.enter(self.users[rid])

    def report(self, rid: str, is_ready: bool) -> None:
        if rid in self.users:
            self.loader.finish(self.users[rid].hints.lora or "", "" if is_ready else "this rank cannot")

    def cancel(self, rid: str) -> None:
        if rid in self.users:
            self.room.end(self.users[rid])

    def step(self, step: int) -> list[tuple[str, str]]:
        self.agreement.step(step)
        departures = self.room.queue.pop_departures()
        for departure in departures:
            self.room.end(departure.item)
        return [(departure.rid, departure.reason) for departure in departures]
