"""Ranks of which one takes a decision by a fact of its own: the decision log names each at its first step.

Each variant breaks one rank of three from some step on. It notes the step in which it first decided otherwise than the
original, which is the truth that the report is compared with. The ranks of HiCache, quiesce and AgreedQueue decide by
their own value of one agreement instead; there the truth is what an independent recorder saw.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from kit.agreed_queue_replica import Call, Fact, QueueReplica, Turn
from kit.quiescable_replica import GOOD, RANKS, Given, OwnFacts, QuiescableReplica
from kit.rank_grid import Hops, on_threads
from kit.variants import instead_of, variants

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.batcher import Batcher
from scheduler_components.cache import PrefixMatch, RadixCache
from scheduler_components.errors import DecisionDivergenceError
from scheduler_components.hicache import HiCachePolicy
from scheduler_components.hicache.controller import HiCacheController
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.testing.fakes import ListInputSource, TextInputReader
from scheduler_components.testing.in_process_groups import InProcessGroups, agree_on_decisions
from scheduler_components.values import (
    BeginWeightUpdate,
    CheckWeights,
    DivergenceReport,
    FlushCache,
    ForwardMode,
    LoadWeights,
)
from scheduler_components.values.page_operations import PrefetchOutcome, WriteOutcome
from scheduler_engine.device.device import SimulatedDevice, SimulatedModel
from scheduler_engine.device.hicache_sim import (
    SLOTS_OF_AGREEMENT,
    AgreementName,
    FaultRates,
    HiCacheReplica,
    HiCacheSimulationConfig,
    LocalSlots,
    SimulatedWorkload,
    make_in_process_groups,
)
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

NUM_RANKS, BROKEN_RANK = 3, 1
GROUPS: Hops = dict.fromkeys(range(NUM_RANKS), ((0, 1, 2),))


class LocalFact:
    """The fact that one rank alone knows: from ``since_step`` on it decides otherwise.

    Attributes:
        step: the present one.
        fired: the steps in which it decided otherwise than the original.
    """

    since_step = 10**9
    step = 0
    fired: ClassVar[list[int]] = []

    @classmethod
    def decide(cls, own: Any, local: Any) -> Any:
        """Return ``local`` on the broken rank. Note the step if it differs from the rank's own decision."""
        if not cls.is_due():
            return own
        if local != own:
            cls.fire()
        return local

    @classmethod
    def is_due(cls) -> bool:
        return cls.step >= cls.since_step

    @classmethod
    def fire(cls) -> None:
        cls.fired.append(cls.step)


@pytest.fixture(autouse=True)
def _no_local_fact() -> Iterator[None]:
    LocalFact.since_step, LocalFact.step = 10**9, 0
    LocalFact.fired.clear()
    yield
    LocalFact.since_step = 10**9


# --- batcher and cache, in the reference scheduler ---


@dataclass
class Forgetful:
    """A cache that matches nothing."""

    cache: RadixCache

    def match_prefix(self, token_ids: Any, namespace: Any) -> PrefixMatch:
        return self.cache.match_prefix(token_ids[:0], namespace)

    def lock(self, node: Any) -> None:
        self.cache.lock(node)


class BrokenBatcher(Batcher):
    __slots__ = ()

    @instead_of("_order", {"match", "admit", "batch"})
    def orders_by_hash(self):
        """Admits in the order of a set."""
        order = list(super()._order())
        yield from LocalFact.decide(order, order[::-1])

    @instead_of("_select_victim", {"preempt"})
    def preempts_by_memory(self):
        """Preempts the request that its own memory suggests."""
        victim = super()._select_victim()
        running = self.queues.running
        return LocalFact.decide(victim, running[1] if len(running) > 1 else victim)

    @instead_of("_admit_waiting", {"preempt"})
    def admits_by_its_clock(self, chunks):
        """Finds no time left in this step."""
        if LocalFact.is_due() and self.queues.waiting:
            before = len(chunks)
            admitted = super()._admit_waiting(chunks)
            if admitted:
                LocalFact.fire()
                for chunk in chunks[before:]:
                    self._retract(chunk.request)
                del chunks[before:]
            return 0
        return super()._admit_waiting(chunks)

    @instead_of("_next_chunk_tokens", {"admit", "batch"})
    def chunks_by_latency(self, request, num_tokens_left, budget_tokens):
        """Shortens chunks because its last step was slow."""
        tokens = super()._next_chunk_tokens(request, num_tokens_left, budget_tokens)
        return int(LocalFact.decide(tokens, max(1, tokens - 1) if tokens else 0))

    @instead_of("_continue_running", {"batch", "match", "preempt", "state"})
    def skips_a_decode(self, chunks, requests):
        """Leaves out a request whose output is not sent yet."""
        return super()._continue_running(chunks, LocalFact.decide(list(requests), list(requests)[:-1]))

    @instead_of("next_batch", {"preempt"})
    def times_out_by_its_clock(self):
        """Takes a request out of the batch, because it is late by its own clock."""
        if LocalFact.is_due() and self.queues.running and (not LocalFact.fired):
            LocalFact.fire()
            self._retract(self.queues.running[-1])
        return super().next_batch()


class BrokenCache(RadixCache):
    __slots__ = ()

    @instead_of("evict", {"evict"})
    def evicts_the_newest(self, num_pages):
        """Evicts the leaf that its own clock says is the oldest."""
        if LocalFact.is_due() and num_pages > 0 and (len(self.lru._nodes) > 1):
            leaves = [node for node in self.lru._nodes if not node.children]
            if leaves[-1] is not next(iter(self.lru._nodes)):
                self.lru._nodes.move_to_end(leaves[-1], last=False)
                LocalFact.fire()
        return super().evict(num_pages)

    @instead_of("take_events", {"evict"})
    def evicts_in_the_background(self):
        """Evicts a page when it has time."""
        if LocalFact.is_due() and self.evictable_tokens:
            LocalFact.fire()
            self.evict(1)
        return super().take_events()

    @instead_of("insert", {"evict"})
    def drops_a_page(self, token_ids, pages, namespace=None):
        """Does not cache what it has computed, because it is short of memory."""
        if LocalFact.is_due() and self.evictable_tokens:
            LocalFact.fire()
            self.evict(1)
        return super().insert(token_ids, pages, namespace)


class BrokenKvCache(RequestKvCache):
    __slots__ = ()

    @instead_of("match", {"match"})
    def matches_by_age(self, request):
        """Does not use a prefix that is older than its clock allows."""
        if LocalFact.is_due() and self.match_length(request):
            LocalFact.fire()
            cache, self.cache = self.cache, Forgetful(cache=self.cache)
            super().match(request)
            self.cache = cache
        else:
            super().match(request)


SCHEDULER_VARIANTS = variants(BrokenBatcher, BrokenKvCache, BrokenCache)
"""Variant -> its class, and the kinds of the first decision that differs, on any rank."""


@dataclass
class Replica:
    """Three schedulers that get the same requests, and compare their decisions before each step."""

    seed: int
    broken: type | None = None
    schedulers: list[Scheduler] = field(default_factory=list)
    logs: dict[int, DecisionLog] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.page_size = self.random.choice((1, 2, 4))
        config = SchedulerConfig(
            page_size=self.page_size,
            kv_tokens=self.page_size * self.random.randint(14, 30),
            max_running_requests=self.random.choice((4, 64)),
            max_prefill_tokens=self.random.choice((8, 24, 4096)),
            chunk_tokens=self.random.choice((5, 16, 2048)),
            new_token_ratio=self.random.choice((0.0, 0.2)),
            min_new_token_ratio=0.0,
        )
        self.max_tokens = config.kv_tokens
        model = SimulatedModel(vocab_size=3, eos_token_id=2, mean_output_tokens=30)
        for rank in range(NUM_RANKS):
            self.logs[rank] = DecisionLog(groups=ParallelGroups(rank=rank), policy="count")
            scheduler = Scheduler.compose(
                config,
                ParallelState.from_tp_rank(rank, tp_size=NUM_RANKS),
                SimulatedDevice(model=model, clock=lambda: 0.0, sleep=lambda _: None),
                decisions=self.logs[rank],
            )
            # `compare` agrees for all ranks in this thread.
            scheduler.agreement.parts = [part for part in scheduler.agreement.parts if part is not self.logs[rank]]
            if rank == BROKEN_RANK and self.broken is not None:
                for part in (scheduler.batcher, scheduler.batcher.kv_cache, scheduler.cache):
                    if issubclass(self.broken, type(part)):
                        part.__class__ = self.broken  # type: ignore[assignment]
            self.schedulers.append(scheduler)
        self.groups = InProcessGroups(GROUPS)
        self.num_steps = self.num_submitted = 0

    def compare(self) -> bool:
        return agree_on_decisions(self.groups, self.logs, step=self.num_steps + 1)

    def step(self) -> bool:
        """Take a step on all ranks. Return whether the decisions before it were equal."""
        agrees = self.compare()
        self.num_steps += 1
        LocalFact.step = self.num_steps
        for _ in range(self.random.choice((0, 0, 1, 2))):
            length = self.random.randint(1, self.max_tokens // 2)
            prompt = [self.random.choice((0, 0, 0, 1)) for _ in range(length)]
            limits = SamplingLimits(max_new_tokens=self.random.randint(1, self.max_tokens - length))
            self.num_submitted += 1
            for scheduler in self.schedulers:
                scheduler.submit(EngineRequest(f"r{self.num_submitted}", prompt, limits))
        if self.random.random() < 0.1:
            rid = f"r{self.random.randint(1, self.num_submitted + 1)}"
            for scheduler in self.schedulers:
                scheduler.abort(rid)
        for scheduler in self.schedulers:
            scheduler.step()
        return agrees

    def report(self) -> DivergenceReport | None:
        reports = [log.first_divergence for log in self.logs.values()]
        assert reports[0] == reports[1] == reports[2]
        return reports[0]


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", SCHEDULER_VARIANTS)
def test_a_local_decision_of_batcher_or_cache_is_named_at_its_first_step(name: str) -> None:
    (variant, expected_kinds), num_found = SCHEDULER_VARIANTS[name], 0
    for seed in range(12):
        LocalFact.since_step, LocalFact.step = 6 + seed, 0
        LocalFact.fired.clear()
        replica = Replica(seed, variant)
        while replica.step() and replica.num_steps < 60:
            pass
        replica.compare()
        report = replica.report()
        if not LocalFact.fired:
            assert report is None, f"{report} without a local decision"
            continue
        num_found += 1
        assert report is not None
        assert (report.step, report.found_at_step) == (LocalFact.fired[0], LocalFact.fired[0] + 1)
        assert report.culprits == (BROKEN_RANK,)
        kinds = {decision.kind for decision in report.decisions.values() if decision is not None}
        assert kinds & expected_kinds, kinds
    assert num_found >= 3, "the workload does not exercise this decision"


def test_ranks_that_decide_alike_raise_no_alarm() -> None:
    for seed in range(3):
        replica = Replica(seed)
        while replica.num_steps < 80:
            assert replica.step()
        assert replica.report() is None
        assert replica.logs[0].stats().num_unregistered == 0
    tiers = HiCacheReplica(BUSY, seed=0)
    for commands in SimulatedWorkload(seed=0, page_size=BUSY.page_size).steps(150):
        tiers.step(commands)
    assert tiers.first_divergence is None


# --- the agreements of HiCache, quiesce and AgreedQueue ---

BUSY = HiCacheSimulationConfig(
    policy=HiCachePolicy(prefetch="timeout", prefetch_timeout_s=3.0, prefetch_threshold_pages=2),
    rates=FaultRates(max_latency_steps=10, failure=0.1, no_host_page=0.1, no_load_room=0.3, storage_outage=0.001),
)


@pytest.mark.broken_variants
@pytest.mark.parametrize("agreement", SLOTS_OF_AGREEMENT)
def test_a_local_value_in_hicache_is_named_at_its_first_step(
    agreement: AgreementName, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[HiCacheController, list[object]] = {}
    apply = HiCacheController.apply

    def recorded(self: HiCacheController, agreed: Any) -> list[Any]:
        decisions = apply(self, agreed)
        seen.setdefault(self.host, []).append(  # type: ignore[call-overload]
            [
                (self.has_storage, self.load_back_budget_pages),
                *(
                    (type(each), each.op, len(each.host_pages))
                    if isinstance(each, WriteOutcome | PrefetchOutcome)
                    else each
                    for each in decisions
                ),
            ]
        )
        return decisions

    monkeypatch.setattr(HiCacheController, "apply", recorded)
    for seed in range(8):
        seen.clear()
        local = LocalSlots(make_in_process_groups(BUSY), SLOTS_OF_AGREEMENT[agreement])
        replica = HiCacheReplica(BUSY, seed=seed, agreement=local)
        for commands in SimulatedWorkload(seed=seed, page_size=BUSY.page_size).steps(300):
            try:
                replica.step(commands)
            except Exception:  # noqa: BLE001 - ranks that have diverged fail in any way
                break
        replica.compare_decisions()
        first, *others = seen.values()
        differing = [
            at for at, what in enumerate(zip(first, *others, strict=False), start=1) if what.count(what[0]) < len(what)
        ]
        report = replica.first_divergence
        assert (report is None) == (not differing)
        if report is None:
            continue
        assert report.step == differing[0]
        assert {each.kind for each in report.decisions.values() if each is not None} & {"apply", "tiers"}
        return
    raise AssertionError("the simulation does not exercise this agreement")


def quiesce_slot_history(slot: str) -> list[Given]:
    late = (OwnFacts(), OwnFacts(clock_s=90.0), OwnFacts(), OwnFacts())
    facts = {
        "quiesced": [Given(FlushCache(), (OwnFacts(3), OwnFacts(), OwnFacts(), OwnFacts()))],
        "late": [Given(FlushCache(10.0), tuple(OwnFacts(9, each.clock_s) for each in late))],
        "failed_rank": [
            Given(BeginWeightUpdate("v1")),
            Given(LoadWeights("a", b"a"), (OwnFacts(), OwnFacts(), OwnFacts(fails=True), OwnFacts())),
        ],
        "checksum": [
            Given(BeginWeightUpdate("v1")),
            Given(CheckWeights(), (OwnFacts(), OwnFacts(), OwnFacts(), OwnFacts(reads=GOOD + 1))),
        ],
    }
    return facts[slot]


@pytest.mark.broken_variants
@pytest.mark.parametrize("slot", ["quiesced", "late", "failed_rank", "checksum"])
def test_a_local_value_in_quiesce_is_named_at_its_first_step(slot: str) -> None:
    for local_slot in ("", slot):
        replica = QuiescableReplica(local_slot)
        logs = {rank: DecisionLog(groups=ParallelGroups(rank=rank), policy="count") for rank in RANKS}
        for rank, quiesce in replica.ranks.items():
            quiesce.decisions = logs[rank]
        truth = None
        for given in quiesce_slot_history(slot):
            replica.give(given)
            for _ in range(40):
                agree_on_decisions(replica.sync, logs, step=replica.num_steps + 1)
                try:
                    answers = replica.step()
                except AssertionError:  # one rank cleared what another still used
                    break
                if truth is None and replica.have_parted(answers):
                    truth = replica.num_steps
                if truth is not None or answers[0] is not None:
                    break
        agree_on_decisions(replica.sync, logs, step=replica.num_steps + 1)
        report = logs[0].first_divergence
        if not local_slot:
            assert (truth, report) == (None, None)
            continue
        assert truth is not None
        assert report is not None
        assert report.step == truth
        assert report.decisions[0] is not None
        assert report.decisions[0].values[0] == "quiesce"


QUEUE_SCHEDULE = [
    Turn((Call("add", "a"), Call("add", "b"))),
    Turn(facts=tuple(Fact(rank, "a", is_ok=True) for rank in (1, 2))),
    Turn(),
    Turn(facts=(Fact(0, "a", is_ok=True), Fact(2, "b", is_ok=False))),
    Turn((Call("add", "c"),)),
    Turn((Call("cancel", "c"),)),
    Turn((Call("add", "d", 2.0),)),
    *[Turn()] * 4,
]


@pytest.mark.broken_variants
@pytest.mark.parametrize("pattern", ["", "grammar 0", "grammar 1", "now us"])
def test_a_local_value_in_an_agreed_queue_is_named_at_its_first_step(pattern: str) -> None:
    world = ParallelState.from_tp_rank(0, tp_size=NUM_RANKS)
    hops = {each.rank: each.reduce_groups for each in world_rank_groups(world)}
    leading = tuple(hops) if pattern == "now us" else (0,)
    replica = QueueReplica(world, reduction=LocalSlots(InProcessGroups(hops), pattern), leading_ranks=leading)
    logs = {rank: DecisionLog(groups=ParallelGroups(rank=rank), policy="count") for rank in hops}
    for rank, run in replica.ranks.items():
        run.queue.decisions = logs[rank]
    comparison, truth = InProcessGroups(hops), None
    for turn in QUEUE_SCHEDULE:
        agree_on_decisions(comparison, logs, step=replica.num_steps + 1)
        for rank, run in replica.ranks.items():
            run.clock_s += 1.2 * rank  # no two clocks run equally fast
        replica.step(turn)
        if len({tuple(run.departed) for run in replica.ranks.values()}) > 1:
            truth = replica.num_steps
            break
    agree_on_decisions(comparison, logs, step=replica.num_steps + 1)
    report = logs[0].first_divergence
    assert (report is None) == (truth is None) == (pattern == "")
    if report is not None:
        assert report.step == truth
        kinds = {each.kind for each in report.decisions.values() if each is not None}
        assert kinds <= {"apply", "expire"}


# --- the receiver ---


class ReceivesByItsClock(RequestReceiver[str]):
    """Leaves a message for the next step, because the time of this one is over."""

    __slots__ = ()

    def poll(self) -> bool:
        source = self.source
        if LocalFact.step == LocalFact.since_step and isinstance(source, ListInputSource) and source.frames:
            LocalFact.fired.append(LocalFact.step)
            return False
        return super().poll()


@pytest.mark.broken_variants
@pytest.mark.parametrize("since_step", [2, 5])
def test_a_rank_that_reads_its_own_socket_is_named_at_its_first_step(since_step: int) -> None:
    """A message that it takes a step later than the others."""
    logs = {rank: DecisionLog(groups=ParallelGroups(rank=rank), policy="count") for rank in range(NUM_RANKS)}
    sources = {rank: ListInputSource() for rank in logs}
    receivers = {
        rank: (ReceivesByItsClock if rank == BROKEN_RANK else RequestReceiver[str])(
            rank=f"rank {rank}", reader=TextInputReader(), source=sources[rank], decisions=log
        )
        for rank, log in logs.items()
    }
    groups = InProcessGroups(GROUPS)
    LocalFact.since_step = since_step
    for step in range(1, 8):
        agree_on_decisions(groups, logs, step=step)
        LocalFact.step = step
        for source in sources.values():
            source.frames.append(f"request:r{step}:x".encode())
        for receiver in receivers.values():
            receiver.receive(step, 0, ForwardMode.DECODE)
    report = logs[0].first_divergence
    assert report is not None
    assert (report.step, report.culprits) == (since_step, (BROKEN_RANK,))
    assert report.decisions[0] is not None
    assert report.decisions[0].kind == "input"


@pytest.mark.soak_only  # in make test, the histories of test_ranks_that_decide_alike_raise_no_alarm
def test_schedulers_and_tiers_raise_no_alarm_for_long() -> None:
    """With random sizes, requests and aborts, and with faulty I/O of the tiers."""
    for seed in range(20):
        replica = Replica(seed)
        while replica.num_steps < 1_000:
            assert replica.step(), replica.report()
        tiers = HiCacheReplica(BUSY, seed=seed)
        for commands in SimulatedWorkload(seed=seed, page_size=BUSY.page_size).steps(1_000):
            tiers.step(commands)
        assert tiers.first_divergence is None


@pytest.mark.soak
def test_many_agreements_raise_no_alarm(soaking: bool) -> None:
    """Whatever the ranks note, when their tips are read, and how many notes come between two agreements."""
    numbers, reads = random.Random(1), random.Random(2)
    logs = {rank: DecisionLog(groups=ParallelGroups(rank=rank), policy="count", ring_bytes=500) for rank in (0, 1)}
    groups = InProcessGroups({0: ((0, 1),), 1: ((0, 1),)})
    for step in range(1_000_000 if soaking else 2_001):
        for _ in range(numbers.choice((0, 0, 1, 2, 5)) if step % 1000 else 1500):
            values = numbers.choice(((), (step,), (-step, "r1"), (2**64 - 1, numbers.random() < 0.5)))
            for log in logs.values():
                log.note("apply", *values)
            if reads.random() < 0.1:
                assert logs[0].tip  # one rank alone
        assert agree_on_decisions(groups, logs, step=step)
    assert not logs[0].num_divergences


def test_schedulers_stop_together_and_name_the_decision() -> None:
    """Over real collectives between threads: the default of the reference engine."""
    LocalFact.since_step = 4

    def work(groups: ParallelGroups) -> str:
        config = SchedulerConfig(page_size=2, kv_tokens=200, max_prefill_tokens=8, chunk_tokens=5)
        parallel = ParallelState.from_tp_rank(groups.rank, tp_size=NUM_RANKS)
        device = SimulatedDevice(model=SimulatedModel(vocab_size=3), clock=lambda: 0.0, sleep=lambda _: None)
        scheduler = Scheduler.compose(config, parallel, device, groups=groups)
        if groups.rank == BROKEN_RANK:
            scheduler.batcher.__class__ = SCHEDULER_VARIANTS["times_out_by_its_clock"][0]
        for number in range(3):
            scheduler.submit(EngineRequest(f"r{number}", [0] * 9, SamplingLimits(max_new_tokens=20)))
        with pytest.raises(DecisionDivergenceError) as raised:
            for step in range(1, 9):
                if groups.rank == BROKEN_RANK:
                    LocalFact.step = step
                scheduler.step()
        assert raised.value.rank == f"rank {groups.rank}"
        return str(raised.value)

    texts = set(on_threads(GROUPS, work))
    assert len(texts) == 1
    [text] = texts
    assert "step 4: the ranks decided differently at decision 0: ranks 0, 2: " in str(text)
    assert "; rank 1: preempt(arrival=" in str(text)
    assert "rank 1 against the majority (found at step 5)" in str(text)
