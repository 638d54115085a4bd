"""All ranks of a replica with a LoraQueue each, in one thread: loads take another time on each rank, and some fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from scheduler_components import ConfigError, ParallelState
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.errors import QueueFullError
from scheduler_components.testing.in_process_groups import InProcessGroups
from scheduler_components.values import GrammarKey, RequestHints
from scheduler_components.waiting.held_request import RequestGrammar
from scheduler_components.waiting.lora_queue import Adapter, AdapterFact, LoraLimits, LoraQueue

LIMITS = LoraLimits(max_loaded=2, max_registered=4, max_waiting=6, max_wait_s=40.0)
NAMES = "abcd"
MAX_LOAD_STEPS = 6


@dataclass
class AdaptedRequest:
    """A request as a LoraQueue sees it, and how many steps it runs."""

    rid: str
    hints: RequestHints
    steps_left: int
    lora_id: int | None = None
    num_prompt_tokens: int = 0
    grammar_key: GrammarKey | None = None
    grammar: RequestGrammar | None = None


@dataclass
class ScriptedLoader:
    """Loads in order, one after the other. Each load takes some steps and may fail.

    Attributes:
        random: chooses how long, and whether it fails.
        failure_rate: probability that a load fails.
        loaded: the adapters on this rank by number.
        users: returns the numbers in use; an unload of one of them is an error.
    """

    random: Random
    failure_rate: float = 0.1
    loaded: dict[int, Adapter] = field(default_factory=dict)
    jobs: list[tuple[str, Adapter] | Adapter] = field(default_factory=list)
    steps_left: int = 0
    max_loaded: int = 0

    def load(self, key: str, adapter: Adapter) -> None:
        self.jobs.append((key, adapter))

    def unload(self, adapter: Adapter) -> None:
        self.jobs.append(adapter)

    def poll(self) -> Sequence[AdapterFact]:
        facts = []
        while self.jobs:
            job = self.jobs[0]
            if isinstance(job, Adapter):
                self.loaded.pop(job.lora_id, None)
                del self.jobs[0]
                continue
            if not self.steps_left:
                self.steps_left = self.random.randint(1, MAX_LOAD_STEPS)
            self.steps_left -= 1
            if self.steps_left:
                break
            del self.jobs[0]
            key, adapter = job
            if self.random.random() < self.failure_rate:
                facts.append(AdapterFact(key, f"{adapter.path} is broken"))
            else:
                self.loaded[adapter.lora_id] = adapter
                facts.append(AdapterFact(key))
        self.max_loaded = max(self.max_loaded, len(self.loaded))
        return facts

    def close(self) -> None:
        pass


@dataclass
class LoraRank:
    """One rank: its queue and loader, its requests, and what it decided."""

    queue: LoraQueue[AdaptedRequest]
    loader: ScriptedLoader
    agreement: StepAgreement
    running: dict[str, AdaptedRequest] = field(default_factory=dict)
    waiting: dict[str, AdaptedRequest] = field(default_factory=dict)
    log: list[object] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)

    def submit(self, request: AdaptedRequest) -> None:
        try:
            waits = self.queue.enter(request)
        except (ConfigError, QueueFullError) as error:
            self.log.append((request.rid, type(error).__name__))
            self.ends[request.rid] = "refused"
            return
        self.log.append((request.rid, waits, request.lora_id))
        (self.waiting if waits else self.running)[request.rid] = request

    def abort(self, rid: str) -> None:
        request = self.waiting.pop(rid, None) or self.running.pop(rid, None)
        if request is not None:
            self.end(request, "aborted")

    def end(self, request: AdaptedRequest, reason: str) -> None:
        assert request.rid not in self.ends, f"{request.rid} ends twice"
        self.ends[request.rid] = reason
        self.queue.end(request)
        self.queue.end(request)

    def after_agreement(self) -> None:
        for departure in self.queue.queue.pop_departures():
            request = self.waiting.pop(departure.rid)
            self.log.append((departure.rid, departure.reason))
            if departure.reason == "ready":
                self.running[departure.rid] = request
            else:
                self.end(request, departure.reason)
        self.log += ((reply.request_id, bool(reply.problem)) for reply in self.queue.pop_replies())

    def compute(self) -> None:
        """Run a step of every running request. Its adapter must be on this rank."""
        for request in list(self.running.values()):
            if request.lora_id is not None:
                assert request.lora_id in self.loader.loaded, f"{request.rid} runs without its adapter"
            request.steps_left -= 1
            if not request.steps_left:
                del self.running[request.rid]
                self.end(request, "finished")


class LoraReplica:
    """The ranks of a replica with equal calls and different loads.

    Args:
        seed: of the loads of all ranks.
        open_queue: opens the queue of a rank; a test replaces it by a broken one.
    """

    def __init__(
        self,
        seed: int,
        *,
        world: ParallelState | None = None,
        open_queue: Callable[[ScriptedLoader], LoraQueue[AdaptedRequest]] = lambda loader: LoraQueue(
            loader=loader, limits=LIMITS
        ),
    ) -> None:
        world = world or ParallelState.from_tp_rank(0, tp_size=4, attn_cp_size=2)
        hops = {each.rank: each.reduce_groups for each in world_rank_groups(world)}
        self.groups = InProcessGroups(hops)
        self.now_s, self.num_steps, self.num_requests = 0.0, 0, 0
        self.ranks = []
        for rank in hops:
            loader = ScriptedLoader(Random(f"{seed}/{rank}"))
            queue = open_queue(loader)
            agreement = StepAgreement(parts=[queue], leads=rank == 0, clock=lambda: self.now_s)
            self.ranks.append(LoraRank(queue, loader, agreement))

    def do(self, random: Random) -> None:
        """Make some random calls on all ranks, then take a step and check the ranks."""
        for _ in range(random.choice((0, 1, 1, 2))):
            self.call(random)
        self.step(random.choice((0.1, 1.0, 1.0, 3.0)))

    def call(self, random: Random) -> None:
        kind, name = random.choice(("submit",) * 6 + ("abort", "register", "unregister")), random.choice(NAMES)
        if kind == "submit":
            lora, steps = random.choice((name, name, name, None)), random.randint(1, 12)
            self.submit(lora, steps)
        elif kind == "abort" and self.num_requests:
            rid = f"r{random.randrange(self.num_requests)}"
            for rank in self.ranks:
                rank.abort(rid)
        elif kind == "register":
            is_pinned, request_id = random.random() < 0.3, random.choice((None, self.num_steps))
            self.each(lambda queue: queue.register(name, name.upper(), is_pinned=is_pinned, request_id=request_id))
        elif kind == "unregister" and random.random() < 0.5:
            self.each(lambda queue: queue.unregister(name))

    def submit(self, lora: str | None, num_steps: int) -> str:
        rid = f"r{self.num_requests}"
        self.num_requests += 1
        for rank in self.ranks:
            rank.submit(AdaptedRequest(rid, RequestHints(lora=lora), num_steps))
        return rid

    def each(self, call: Callable[[LoraQueue[AdaptedRequest]], object]) -> None:
        for rank in self.ranks:
            try:
                call(rank.queue)
            except ConfigError as error:
                rank.log.append(error.field)

    def step(self, seconds: float = 1.0) -> None:
        self.num_steps += 1
        self.now_s += seconds
        proposals = {number: rank.agreement.propose(self.num_steps) for number, rank in enumerate(self.ranks)}
        agreed = self.groups.reduce(proposals)
        for number, rank in enumerate(self.ranks):
            rank.agreement.apply(self.num_steps, agreed[number])
            rank.after_agreement()
            rank.compute()
        self.check()

    def check(self) -> None:
        """The ranks decided alike, within the bounds, and every user has its adapter."""
        first = self.ranks[0]
        for rank in self.ranks:
            assert rank.log == first.log, "the ranks have parted"
            assert rank.queue.lora_load() == first.queue.lora_load()
            limits = rank.queue.limits
            assert rank.loader.max_loaded <= limits.max_loaded, "more adapters are loaded than may be"
            stats = rank.queue.stats()
            assert stats.registered <= limits.max_registered
            assert stats.waiting <= limits.max_waiting
            load = rank.queue.lora_load()
            assert load.slots_used <= load.slots_total
            assert set(rank.waiting) == {request.rid for request in rank.queue.queue}

    def finish(self) -> None:
        """Every request ends, and idle adapters can be unregistered until nothing is loaded."""
        for _ in range(400):
            if not any(rank.waiting or rank.running for rank in self.ranks):
                break
            self.step()
        first = self.ranks[0]
        assert not first.waiting and not first.running, "requests wait without end"
        assert len(first.ends) == self.num_requests, "a request never ended"
        for adapter in first.queue.adapters:
            self.each(lambda queue, name=adapter.name: queue.unregister(name))  # type: ignore[misc]
        for _ in range(5 * MAX_LOAD_STEPS):
            self.step()
        for rank in self.ranks:
            assert not rank.loader.loaded, "an adapter stays loaded"
            assert rank.queue.lora_load().slots_used == 0
            assert not rank.queue.has_pending_loads
