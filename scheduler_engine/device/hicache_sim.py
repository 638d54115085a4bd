"""Simulate a replica whose ranks agree over TP only, over CP x TP, or over CP x TP x PP.

N ranks run in one process, each with a small scheduler over a real cache. All ranks get the same commands and differ
only in their I/O: each transfer takes a random time and may fail. Every seed runs with the full agreement, without the
reduction over pipeline stages, and also without the reduction over attention-CP.

A page's content is its digest and the name of the rank's slice instead of its bytes, so a page that is stored under the
wrong digest or read from another rank's slice is detected.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, Protocol, TypeAlias, get_args

import attrs

from scheduler_components import CacheIntegrityError, ComponentError, OutOfPagesError, ParallelState
from scheduler_components._internal.validators import integer_validator
from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.batcher import Batcher
from scheduler_components.cache import RadixNode
from scheduler_components.cache.block_hash import split_digests
from scheduler_components.events import Tier
from scheduler_components.hicache import HiCachePolicy, HiRadixCache, KeySpace, MemoryPageStore, Placement
from scheduler_components.ports import PageStore
from scheduler_components.scheduling.admission_budget import BatchLimits
from scheduler_components.scheduling.composition import compose_batcher
from scheduler_components.scheduling.request import OutputLength, Request
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.testing.in_process_groups import InProcessGroups, agree_on_decisions
from scheduler_components.values import DivergenceReport, FinishReason
from scheduler_components.values.page_operations import (
    BackupDone,
    CancelPrefetch,
    CopyToDevice,
    CopyToHost,
    DiscardLoadBack,
    Instruction,
    IoEvent,
    LoadBackDone,
    PagesRead,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    ReleaseStorage,
    WriteDone,
    WriteToStorage,
)
from scheduler_engine.simulation.tiers import CountedHostPages

__all__ = [
    "SLOTS_OF_AGREEMENT",
    "FaultRates",
    "SimulatedHostPages",
    "SimulatedMover",
    "StepCommands",
    "HiCacheRequest",
    "SimulatedScheduler",
    "SimulatedWorkload",
    "Agreement",
    "AgreementName",
    "AgreementScope",
    "LocalSlots",
    "SimulationRun",
    "SimulatedRank",
    "HiCacheReplica",
    "HiCacheSimulationConfig",
    "make_in_process_groups",
    "make_rank",
    "run_simulation",
]

_STORE_BYTES = 1 << 30  # more than any simulation stores, so that nothing is evicted
_TORN = b"torn"  # the content of a page after a failed copy
_FAILURES = (ComponentError, AssertionError, IndexError, KeyError, ValueError)
"""How a rank fails that has diverged: by a check of the kit, or by a page or an operation that it does not know."""


@attrs.frozen(kw_only=True)
class FaultRates:
    """How much the I/O of the ranks differs.

    Attributes:
        max_latency_steps: a transfer ends 1 to this many steps after it began.
        failure: probability that a transfer or a query fails on one rank.
        no_host_page: probability that a rank cannot reserve host pages although the common count shows free pages.
        no_load_room: probability per step that a rank cannot begin a copy to the device.
        storage_outage: probability per step that a rank's storage becomes unavailable for some steps.
    """

    max_latency_steps: int = 8
    failure: float = 0.02
    no_host_page: float = 0.02
    no_load_room: float = 0.1
    storage_outage: float = 0.002


class SimulatedHostPages(CountedHostPages):
    """``HostPages`` whose reservations fail at random, on this rank only."""

    __slots__ = ("_failure", "_rng")

    def __init__(self, num_pages: int, *, rng: random.Random, failure: float) -> None:
        super().__init__(num_pages)
        self._rng = rng
        self._failure = failure

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_committed(self) -> int:
        return self.pool.num_cached

    def free_pages(self) -> Sequence[int]:
        return self.pool.free_pages()

    def reserve(self, num_pages: int) -> list[int]:
        if self._rng.random() < self._failure:
            raise OutOfPagesError(num_pages, 0)
        return super().reserve(num_pages)


@dataclass(slots=True, kw_only=True)
class _Read:
    """A ``ReadFromStorage`` under way."""

    instruction: ReadFromStorage
    num_read: int = 0
    is_cancelled: bool = False


@dataclass(slots=True, kw_only=True)
class SimulatedMover:
    """A ``PageMover`` and ``PageHook`` without threads. ``poll`` advances the time by one step.

    Attributes:
        rng: the random numbers of this rank.
        rates: the faults to simulate.
        store: the storage that all ranks share.
        keys: the keys of this rank's slices in it.
        slice_name: the slice of each page that this rank computes, as a prefix of the page's content.
    """

    rng: random.Random
    rates: FaultRates
    store: PageStore
    keys: KeySpace
    slice_name: bytes = b""
    _device: dict[int, bytes] = field(default_factory=dict, init=False)
    _host: dict[int, bytes] = field(default_factory=dict, init=False)
    _copies: list[tuple[int, Instruction]] = field(default_factory=list, init=False)
    _reads: dict[int, _Read] = field(default_factory=dict, init=False)
    _step: int = field(default=0, init=False)
    _storage_back_at: int = field(default=0, init=False)
    load_back_budget_pages: int = field(default=2**31, init=False)

    @property
    def has_storage(self) -> bool:
        return self._step >= self._storage_back_at

    def submit(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, ReadFromStorage):
                self._reads[instruction.op] = _Read(instruction=instruction)
            elif isinstance(instruction, CancelPrefetch):
                if instruction.op in self._reads:
                    self._reads[instruction.op].is_cancelled = True
            elif isinstance(instruction, CopyToDevice) and instruction.by_layer:
                self._copies.append((self._step, instruction))  # because the forward of this step waits for it
            elif not isinstance(instruction, ReleaseStorage | DiscardLoadBack):
                self._copies.append((self._step + self.rng.randint(1, self.rates.max_latency_steps), instruction))

    def poll(self) -> list[IoEvent]:
        self._step += 1
        rng, rates = self.rng, self.rates
        self.load_back_budget_pages = 0 if rng.random() < rates.no_load_room else rng.randint(1, 64)
        if rng.random() < rates.storage_outage:
            self._storage_back_at = self._step + rng.randint(1, 4 * rates.max_latency_steps)
        due = [instruction for at, instruction in self._copies if at <= self._step]
        self._copies = [(at, instruction) for at, instruction in self._copies if at > self._step]
        events = [self._end(instruction) for instruction in due]
        for read in list(self._reads.values()):
            events += self._read_on(read)
        return events

    def close(self) -> None:
        pass

    def on_computed(self, digests: bytes, pages: Sequence[int]) -> None:
        self._device.update(zip(pages, self._contents(digests), strict=True))

    def on_loaded_back(self, digests: bytes, pages: Sequence[int]) -> None:
        for content, page in zip(self._contents(digests), pages, strict=True):
            if self._device.get(page) != content:
                raise CacheIntegrityError(f"device page {page} holds the content of another page after a load")

    def _end(self, instruction: Instruction) -> IoEvent:
        is_ok = self.rng.random() >= self.rates.failure
        if isinstance(instruction, CopyToDevice) and instruction.by_layer:
            is_ok = True  # a failure would fail the forward of this rank and end the simulation
        if isinstance(instruction, CopyToHost):
            for device_page, host_page in zip(instruction.device_pages, instruction.host_pages, strict=True):
                self._host[host_page] = self._device[device_page] if is_ok else _TORN
            return WriteDone(instruction.op, is_ok)
        if isinstance(instruction, CopyToDevice):
            for host_page, device_page in zip(instruction.host_pages, instruction.device_pages, strict=True):
                self._device[device_page] = self._host[host_page] if is_ok else _TORN
            return LoadBackDone(instruction.op, is_ok)
        if isinstance(instruction, WriteToStorage):
            return BackupDone(instruction.op, self._back_up(instruction, is_ok))
        assert isinstance(instruction, QueryStorage)
        keys = self._keys(instruction.digests) if is_ok and self.has_storage else []
        return QueryDone(instruction.op, self.store.batch_exists(keys))

    def _back_up(self, instruction: WriteToStorage, is_ok: bool) -> bool:
        if not self.keys.is_writer:
            return True  # the result of the writer decides
        if is_ok and self.has_storage:
            self.store.batch_set(self._keys(instruction.digests), [self._host[page] for page in instruction.host_pages])
        return is_ok and self.has_storage

    def _read_on(self, read: _Read) -> list[IoEvent]:
        """Read a random number of further pages. End when all are read, one is missing, or the read was cancelled."""
        instruction, events = read.instruction, list[IoEvent]()
        keys = self._keys(instruction.digests)
        fails = self.rng.random() < self.rates.failure
        for _ in range(0 if fails or read.is_cancelled else self.rng.randint(0, 4)):
            [content] = self.store.batch_get([keys[read.num_read]])
            if content is None:
                fails = True
                break
            self._host[instruction.host_pages[read.num_read]] = bytes(content)
            read.num_read += 1
            events.append(PagesRead(instruction.op, read.num_read))
            if read.num_read == len(keys):
                break
        if fails or read.is_cancelled or read.num_read == len(keys):
            del self._reads[instruction.op]
            events.append(ReadDone(instruction.op))
        return events

    def _keys(self, digests: bytes) -> list[str]:
        return [self.keys.key(digest) for digest in split_digests(digests)]

    def _contents(self, digests: bytes) -> list[bytes]:
        return [self.slice_name + digest for digest in split_digests(digests)]


@attrs.frozen
class HiCacheRequest:
    """A prompt and the number of steps for which it runs."""

    rid: str
    token_ids: tuple[int, ...]
    num_steps: int


@attrs.frozen
class StepCommands:
    """The commands that all ranks receive before a step."""

    arrivals: tuple[HiCacheRequest, ...] = ()
    aborts: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class SimulatedWorkload:
    """Chats that share a few first pages and whose prompts grow with each request. Some requests are aborted.

    Attributes:
        seed: seed of the workload.
        page_size: tokens per page.
        num_chats: number of chats; more chats reuse fewer pages.
        max_pages: length at which a chat starts again.
        arrival_rate: probability per step that a request arrives.
        abort_rate: probability per step that a request is aborted.
    """

    seed: int
    page_size: int
    num_chats: int = 12
    max_pages: int = 14
    arrival_rate: float = 0.5
    abort_rate: float = 0.05

    def steps(self, num_steps: int) -> Iterator[StepCommands]:
        """Yield the commands of each step."""
        rng = random.Random(self.seed)
        num_pages = [2] * self.num_chats
        open_rids: list[str] = []
        for step in range(num_steps):
            arrivals = []
            if rng.random() < self.arrival_rate:
                chat = rng.randrange(self.num_chats)
                num_pages[chat] = num_pages[chat] % self.max_pages + rng.randint(1, 4)
                length = num_pages[chat] * self.page_size + rng.randrange(self.page_size)
                arrivals.append(HiCacheRequest(f"r{step}", self._tokens(chat, length), rng.randint(1, 6)))
                open_rids.append(f"r{step}")
            aborts: tuple[str, ...] = ()
            if open_rids and rng.random() < self.abort_rate:
                aborts = (open_rids.pop(rng.randrange(len(open_rids))),)
            del open_rids[:-8]
            yield StepCommands(tuple(arrivals), aborts)

    def _tokens(self, chat: int, length: int) -> tuple[int, ...]:
        shared = 2 * self.page_size
        return tuple((chat % 3 if at < shared else 1000 + chat * 100 + at) for at in range(length))


class SimulatedScheduler:
    """The kit's composition over a real cache with tiers, and a model that computes a batch without taking time.

    Args:
        cache: the pages and the tiers below the device.
        decisions: the log that all parts note in.

    Attributes:
        num_served: requests that have finished.
    """

    __slots__ = ("batcher", "kv_cache", "num_served")

    def __init__(self, cache: HiRadixCache, decisions: DecisionLog) -> None:
        self.kv_cache = RequestKvCache[RadixNode](
            cache=cache, tiers=cache, decisions=decisions, on_cached_prompt=Request.record_cached_prompt
        )
        self.batcher: Batcher[Request[RadixNode]] = compose_batcher(
            self.kv_cache, BatchLimits(max_running_requests=4), decisions=decisions
        )
        self.num_served = 0

    @property
    def is_idle(self) -> bool:
        return not self.batcher.queues

    def step(self, commands: StepCommands) -> None:
        """Apply the commands, then make a batch and append its tokens."""
        batcher, room_tokens = self.batcher, self.kv_cache.cache.capacity_tokens
        for arrived in commands.arrivals:
            num_tokens = min(arrived.num_steps, room_tokens - len(arrived.token_ids))
            request = Request[RadixNode](arrived.rid, array("I", arrived.token_ids), OutputLength(num_tokens))
            self.kv_cache.start(request)
            batcher.add(request)
        for rid in commands.aborts:
            aborted = batcher.queues.find(rid)
            if aborted is not None:
                self.kv_cache.cancel(rid)
                self._end(aborted, FinishReason.ABORT)
        batch = batcher.next_batch()
        for chunk in batch.chunks:
            request = chunk.request
            request.num_computed_tokens = chunk.end
            if chunk.end == len(request.token_ids):
                request.token_ids.append(chunk.end)
            if chunk.is_prefill:
                self.kv_cache.cache_unfinished(request)
            if not request.num_output_tokens_left:
                self._end(request, FinishReason.LENGTH)
                self.num_served += 1
        batcher.on_results(batch)

    def _end(self, request: Request[RadixNode], reason: FinishReason) -> None:
        self.batcher.finish(request, reason)
        self.kv_cache.free(request)


AgreementScope: TypeAlias = Literal["tp", "cp x tp", "cp x tp x pp"]
AgreementName: TypeAlias = Literal[
    "storage",
    "load-room",
    "writes-done",
    "writes-good",
    "loads-done",
    "loads-good",
    "backups-done",
    "backups-good",
    "prefetch-answered",
    "prefetch-hit",
    "prefetch-reserved",
    "prefetch-landed",
    "prefetch-ended",
    "drains-done",
    "clock",
]
SLOTS_OF_AGREEMENT: Mapping[AgreementName, str] = {
    name: "now us" if name == "clock" else name.replace("prefetch-", "prefetch * ").replace("-", " ")
    for name in get_args(AgreementName)
}
"""Agreement -> pattern of the names of its slots. ``LocalSlots`` removes one."""


@attrs.frozen(kw_only=True)
class HiCacheSimulationConfig:
    """The configuration of a simulated replica.

    Attributes:
        attn_cp_size, attn_tp_size, pp_size: parallel sizes.
        placement: how a page is distributed over the ranks; ``Placement.mla()`` for a latent that TP ranks replicate.
        scope: the axes over which the ranks agree.
        without: an agreement in which each rank takes its own value instead of the agreed one.
        policy: policy of every cache.
        rates: faults of every rank's I/O.
        page_size, device_pages, host_pages: small, so that pages are evicted continually.

    Raises:
        ConfigError: a size is below 1.
    """

    attn_cp_size: int = attrs.field(default=2, validator=integer_validator())
    attn_tp_size: int = attrs.field(default=2, validator=integer_validator())
    pp_size: int = attrs.field(default=1, validator=integer_validator())
    placement: Placement = attrs.field(factory=Placement)
    scope: AgreementScope = "cp x tp x pp"
    without: AgreementName | None = None
    policy: HiCachePolicy = attrs.field(factory=lambda: HiCachePolicy(prefetch_threshold_pages=2, clean_ahead_pages=16))
    rates: FaultRates = attrs.field(factory=FaultRates)
    page_size: int = attrs.field(default=2, validator=integer_validator())
    device_pages: int = attrs.field(default=48, validator=integer_validator())
    host_pages: int = attrs.field(default=72, validator=integer_validator())

    @property
    def tp_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.attn_cp_size * self.attn_tp_size

    @property
    def scopes(self) -> tuple[AgreementScope, ...]:
        """The scopes that differ for these sizes; the full agreement is the last."""
        return ("tp", "cp x tp", "cp x tp x pp") if self.pp_size > 1 else ("tp", "cp x tp")


class Agreement(Protocol):
    """Returns each rank's agreed values of a step: ``InProcessGroups``, or a test double that returns wrong values."""

    def reduce(self, proposals: Mapping[int, Proposal]) -> Mapping[int, AgreedValues]: ...


class LocalSlots:
    """A broken agreement: in slots that match a pattern, each rank gets its own value.

    Args:
        agreement: reduces the proposals.
        pattern: of the names of slots, as for ``fnmatch``.
    """

    __slots__ = ("_agreement", "_pattern")

    def __init__(self, agreement: Agreement, pattern: str) -> None:
        self._agreement = agreement
        self._pattern = pattern

    def reduce(self, proposals: Mapping[int, Proposal]) -> dict[int, AgreedValues]:
        agreed = self._agreement.reduce(proposals)
        return {
            rank: self._with_own(agreed[rank], proposal.unpack(proposal.pack(0)))
            for rank, proposal in proposals.items()
        }

    def _with_own(self, agreed: AgreedValues, own: AgreedValues) -> AgreedValues:
        numbers = {name: own.numbers[name] for name in agreed.numbers if fnmatchcase(name, self._pattern)}
        flags = {name: own.flags[name] for name in agreed.flags if fnmatchcase(name, self._pattern)}
        return AgreedValues(agreed.numbers | numbers, agreed.flags | flags)


def make_in_process_groups(config: HiCacheSimulationConfig) -> InProcessGroups:
    """Return the agreement over the axes of ``config.scope``."""
    parallel = ParallelState.from_tp_rank(
        0, tp_size=config.tp_size, attn_cp_size=config.attn_cp_size, pp_size=config.pp_size
    )
    world = world_rank_groups(parallel)
    if config.scope != "cp x tp x pp":
        world = tuple(attrs.evolve(each, pp=None) for each in world)
    if config.scope == "tp":
        world = tuple(attrs.evolve(each, attn_cp=None) for each in world)
    return InProcessGroups({each.rank: each.reduce_groups for each in world})


@dataclass(slots=True, kw_only=True)
class SimulatedRank:
    """The components of one rank. Its clock advances ``clock_rate`` seconds per step."""

    cache: HiRadixCache
    host: SimulatedHostPages
    mover: SimulatedMover
    scheduler: SimulatedScheduler
    decisions: DecisionLog
    clock_rate: float


class HiCacheReplica:
    """All ranks of one replica, stepped together.

    Args:
        config: sizes and rates.
        seed: seed of the ranks' I/O.
        agreement: reduces the proposals; by default over the axes of ``config.scope``, but for ``config.without``.

    The decisions of all ranks are compared before each step, whatever the scope of the agreement is.
    """

    def __init__(self, config: HiCacheSimulationConfig, *, seed: int, agreement: Agreement | None = None) -> None:
        self.config = config
        if agreement is None:
            agreement = make_in_process_groups(config)
            if config.without is not None:
                agreement = LocalSlots(agreement, SLOTS_OF_AGREEMENT[config.without])
        self._agreement = agreement
        self._comparison = make_in_process_groups(attrs.evolve(config, scope="cp x tp x pp"))
        store = MemoryPageStore(_STORE_BYTES)
        self.ranks = {rank: make_rank(config, rank, store, seed) for rank in range(config.pp_size * config.tp_size)}
        self.num_steps = 0

    @property
    def caches(self) -> list[HiRadixCache]:
        """The cache of each rank, in rank order."""
        return [rank.cache for rank in self.ranks.values()]

    @property
    def is_idle(self) -> bool:
        """True if no rank has a request or an operation under way."""
        return all(rank.scheduler.is_idle and not rank.cache.num_operations for rank in self.ranks.values())

    @property
    def has_diverged(self) -> bool:
        """True if the ranks hold different pages."""
        return len({cache.state_digest for cache in self.caches}) > 1

    @property
    def first_divergence(self) -> DivergenceReport | None:
        """The first decision that differed between the ranks, as every rank reports it; None if they are equal."""
        return self.ranks[0].decisions.first_divergence

    def compare_decisions(self) -> None:
        """Compare what the ranks have decided since the last comparison."""
        agree_on_decisions(
            self._comparison, {number: rank.decisions for number, rank in self.ranks.items()}, step=self.num_steps
        )

    def step(self, commands: StepCommands) -> None:
        """Step every rank once."""
        self.num_steps += 1
        self.compare_decisions()
        proposals = {number: self._proposal(rank) for number, rank in self.ranks.items()}
        agreed = self._agreement.reduce(proposals)
        for number, rank in self.ranks.items():
            rank.cache.apply(self.num_steps, agreed[number])
            rank.mover.submit(rank.cache.pop_instructions())
            rank.scheduler.step(commands)
            rank.decisions.note("tiers", rank.cache.state_digest)
            # Submit what start() and insert() began in this step, not in the next one.
            rank.mover.submit(rank.cache.pop_instructions())

    def drain(self) -> None:
        """Step without new requests until the replica is idle."""
        while not self.is_idle:
            self.step(StepCommands())

    def num_differing_pages(self) -> int:
        """Return how many device pages some ranks hold and others do not."""
        held = [frozenset(cache.block_hashes(Tier.DEVICE)) for cache in self.caches]
        return len(frozenset.union(*held) - frozenset.intersection(*held))

    def _proposal(self, rank: SimulatedRank) -> Proposal:
        for event in rank.mover.poll():
            rank.cache.handle(event)
        return rank.cache.proposal(
            self.num_steps,
            has_storage=rank.mover.has_storage,
            load_back_budget_pages=rank.mover.load_back_budget_pages,
            now_s=self._now_s(rank),
        )

    def _now_s(self, rank: SimulatedRank) -> float:
        return self.num_steps * rank.clock_rate


def make_rank(config: HiCacheSimulationConfig, rank: int, store: PageStore, seed: int) -> SimulatedRank:
    """Make one rank. ``seed`` and ``rank`` determine its I/O."""
    rng = random.Random(f"{seed}/{rank}")
    stage, tp_rank = divmod(rank, config.tp_size)
    host = SimulatedHostPages(config.host_pages, rng=rng, failure=config.rates.no_host_page)
    parallel = ParallelState.from_tp_rank(
        tp_rank, tp_size=config.tp_size, attn_cp_size=config.attn_cp_size, pp_rank=stage, pp_size=config.pp_size
    )
    keys = KeySpace(
        model="simulated",
        dtype="digest",
        page_size=config.page_size,
        layout="digest",
        placement=config.placement,
        parallel=parallel,
    )
    slice_name = f"pp{stage}"
    if config.placement.attn_tp == "sharded":
        slice_name += f"-tp{parallel.attn_tp_rank}"
    mover = SimulatedMover(rng=rng, rates=config.rates, store=store, keys=keys, slice_name=slice_name.encode())
    cache = HiRadixCache(
        page_size=config.page_size,
        capacity_tokens=config.device_pages * config.page_size,
        host=host,
        num_host_pages=config.host_pages,
        policy=config.policy,
        record=True,
        page_hook=mover,
    )
    decisions = DecisionLog(groups=ParallelGroups(rank=rank), policy="count")
    cache.record_decisions(decisions)
    return SimulatedRank(
        cache=cache,
        host=host,
        mover=mover,
        scheduler=SimulatedScheduler(cache, decisions),
        decisions=decisions,
        clock_rate=rng.uniform(0.8, 1.2),
    )


@dataclass(slots=True, kw_only=True)
class SimulationRun:
    """The result of one seed.

    Attributes:
        seed: seed of workload and I/O.
        diverged_at_step: the first step after which the ranks held different pages; None if they never did.
        differing_pages: number of differing device pages at every ``sample_steps``-th step.
        num_served: requests that finished on rank 0.
        first_divergence: the first decision that differed; None if the ranks decided alike.
        failure: the error that ended the run; empty for none. Ranks without an agreement may fail in any way.
    """

    seed: int
    diverged_at_step: int | None = None
    differing_pages: list[int] = field(default_factory=list)
    num_served: int = 0
    first_divergence: DivergenceReport | None = None
    failure: str = ""


def run_simulation(
    config: HiCacheSimulationConfig, *, seeds: Sequence[int], num_steps: int, sample_steps: int
) -> list[SimulationRun]:
    """Run each seed for ``num_steps`` steps."""
    return [_run(config, seed, num_steps, sample_steps) for seed in seeds]


def _run(config: HiCacheSimulationConfig, seed: int, num_steps: int, sample_steps: int) -> SimulationRun:
    replica, run = HiCacheReplica(config, seed=seed), SimulationRun(seed=seed)
    workload = SimulatedWorkload(seed=seed, page_size=config.page_size)
    for step, commands in enumerate(workload.steps(num_steps), start=1):
        try:
            replica.step(commands)
        except _FAILURES as error:
            if config.without is None:
                raise
            run.failure = f"{type(error).__name__}: {error}"
            break
        if run.diverged_at_step is None and replica.has_diverged:
            run.diverged_at_step = step
        if step % sample_steps == 0:
            run.differing_pages.append(replica.num_differing_pages())
    replica.compare_decisions()
    run.num_served = replica.ranks[0].scheduler.num_served
    run.first_divergence = replica.first_divergence
    if run.failure and run.diverged_at_step is None:
        run.diverged_at_step = replica.num_steps
    return run
