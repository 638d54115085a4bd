"""Simulated ranks of a hierarchical cache: what happens when they agree over TP only, over CP x TP, or over all.

N ranks in one process, each with a small scheduler over a real cache. All get the same commands, and everything in a
rank follows from them and from its I/O; only the I/O differs. Each transfer takes a random time of its own and may
fail, as on a machine of its own. The program runs every seed with the whole agreement, without the hop over pipeline
stages, and without that over attention-CP as well.

What moves is not bytes but the digest that a page's bytes would be made from. So a page that ends up under another name
is found out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import attrs

from scheduler_components import CacheIntegrityError, OutOfPagesError, ParallelState
from scheduler_components.agreement import AgreedValues, Proposal
from scheduler_components.cache import PagePool, RadixNode
from scheduler_components.cache.block_hash import DIGEST_BYTES
from scheduler_components.events import Tier
from scheduler_components.hicache import HiCachePolicy, HiRadixCache
from scheduler_components.page_operations import (
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
from scheduler_components.rank_groups import world_rank_groups
from scheduler_components.testing.in_process_groups import InProcessGroups
from scheduler_components.validators import integer_validator

__all__ = [
    "FaultRates",
    "SimulatedHostPages",
    "SimulatedMover",
    "SimulatedStorage",
    "StepCommands",
    "SimulatedRequest",
    "SimulatedScheduler",
    "SimulatedWorkload",
    "Agreement",
    "AgreementScope",
    "SimulationRun",
    "SimulatedRank",
    "SimulatedReplica",
    "SimulationConfig",
    "SliceStorage",
    "StoredSlice",
    "make_in_process_groups",
    "make_rank",
    "run_simulation",
]

_TORN = b"torn"  # what a copy that failed leaves behind


@attrs.frozen(kw_only=True)
class FaultRates:
    """How much the ranks' machines differ.

    Attributes:
        max_latency_steps: a transfer ends 1 to this many steps after it began.
        failure: chance that a transfer or a query fails on one rank.
        no_host_page: chance that a rank finds no host page though the ledger says that there is one.
        no_load_room: chance per step that a rank can begin no copy to the device.
        storage_outage: chance per step that a rank's storage is away for a while.
    """

    max_latency_steps: int = 8
    failure: float = 0.02
    no_host_page: float = 0.02
    no_load_room: float = 0.1
    storage_outage: float = 0.002


class SimulatedHostPages:
    """``HostPages`` whose reservations fail now and then, on this rank alone."""

    def __init__(self, num_pages: int, *, rng: random.Random, failure: float) -> None:
        self.pool = PagePool(num_pages)
        self._rng = rng
        self._failure = failure

    def reserve(self, num_pages: int) -> list[int]:
        if self._rng.random() < self._failure:
            raise OutOfPagesError(num_pages, 0)
        return self.pool.allocate(num_pages).tolist()

    def commit(self, pages: Sequence[int]) -> None:
        self.pool.move_to_cache(pages)

    def abort(self, pages: Sequence[int]) -> None:
        self.pool.free(pages)

    def release(self, pages: Sequence[int]) -> None:
        self.pool.free_cached(pages)

    def check_integrity(self, committed: Sequence[int]) -> None:
        self.pool.check(committed)


class StoredSlice(Protocol):
    """One slice of what all ranks share: digests of the pages whose slice is stored, with their content."""

    def __contains__(self, digest: bytes, /) -> bool: ...

    def get(self, digest: bytes, /) -> bytes | None: ...

    def update(self, pages: Iterable[tuple[bytes, bytes]], /) -> None: ...


class SliceStorage(Protocol):
    """Storage that all ranks share."""

    def slice_of(self, name: str) -> StoredSlice: ...


@dataclass(slots=True)
class SimulatedStorage:
    """What all ranks of one process share."""

    pages: dict[str, dict[bytes, bytes]] = field(default_factory=dict)

    def slice_of(self, name: str) -> StoredSlice:
        return self.pages.setdefault(name, {})


@dataclass(slots=True, kw_only=True)
class _Reading:
    """One ``ReadFromStorage`` under way."""

    instruction: ReadFromStorage
    num_read: int = 0
    is_stopped: bool = False


@dataclass(slots=True, kw_only=True)
class SimulatedMover:
    """A ``PageMover`` and ``PageHook`` in one thread; ``poll`` lets one step of time pass.

    Attributes:
        rng: this rank's own.
        rates: how bad it is.
        stored: the slice of storage that this rank reads.
        writes: this rank is the one that writes its slice.
    """

    rng: random.Random
    rates: FaultRates
    stored: StoredSlice
    writes: bool
    _device: dict[int, bytes] = field(default_factory=dict, init=False)
    _host: dict[int, bytes] = field(default_factory=dict, init=False)
    _copies: list[tuple[int, Instruction]] = field(default_factory=list, init=False)
    _readings: dict[int, _Reading] = field(default_factory=dict, init=False)
    _step: int = field(default=0, init=False)
    _storage_back_at: int = field(default=0, init=False)
    load_back_budget_pages: int = field(default=2**31, init=False)

    @property
    def has_storage(self) -> bool:
        return self._step >= self._storage_back_at

    def submit(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, ReadFromStorage):
                self._readings[instruction.op] = _Reading(instruction=instruction)
            elif isinstance(instruction, CancelPrefetch):
                if instruction.op in self._readings:
                    self._readings[instruction.op].is_stopped = True
            elif isinstance(instruction, CopyToDevice) and instruction.by_layer:
                self._copies.append((self._step, instruction))  # the forward of this step has waited for it
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
        for reading in list(self._readings.values()):
            events += self._read_on(reading)
        return events

    def close(self) -> None:
        """Nothing to let go of."""

    def on_computed(self, digests: bytes, pages: Sequence[int]) -> None:
        self._device.update(zip(pages, _each(digests), strict=True))

    def on_loaded_back(self, digests: bytes, pages: Sequence[int]) -> None:
        for digest, page in zip(_each(digests), pages, strict=True):
            if self._device.get(page) != digest:
                raise CacheIntegrityError(f"device page {page} was loaded with another page's content")

    def _end(self, instruction: Instruction) -> IoEvent:
        is_ok = self.rng.random() >= self.rates.failure
        if isinstance(instruction, CopyToDevice) and instruction.by_layer:
            is_ok = True  # otherwise the forward would have failed on this rank alone, and ended the simulation
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
        digests = _each(instruction.digests) if is_ok and self.has_storage else []
        hit = next((at for at, digest in enumerate(digests) if digest not in self.stored), len(digests))
        return QueryDone(instruction.op, hit)

    def _back_up(self, instruction: WriteToStorage, is_ok: bool) -> bool:
        if not self.writes:
            return True  # the one that writes this slice answers for it
        if is_ok and self.has_storage:
            pages = (self._host[page] for page in instruction.host_pages)
            self.stored.update(zip(_each(instruction.digests), pages, strict=True))
        return is_ok and self.has_storage

    def _read_on(self, reading: _Reading) -> list[IoEvent]:
        """Land a random number of further pages; end when all are there, one is missing, or a stop was asked for."""
        instruction, events = reading.instruction, list[IoEvent]()
        digests = _each(instruction.digests)
        fails = self.rng.random() < self.rates.failure
        for _ in range(0 if fails or reading.is_stopped else self.rng.randint(0, 4)):
            content = self.stored.get(digests[reading.num_read])
            if content is None:
                fails = True
                break
            self._host[instruction.host_pages[reading.num_read]] = content
            reading.num_read += 1
            events.append(PagesRead(instruction.op, reading.num_read))
            if reading.num_read == len(digests):
                break
        if fails or reading.is_stopped or reading.num_read == len(digests):
            del self._readings[instruction.op]
            events.append(ReadDone(instruction.op))
        return events


def _each(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


@attrs.frozen
class SimulatedRequest:
    """A prompt, and for how many steps it runs."""

    rid: str
    token_ids: tuple[int, ...]
    num_steps: int


@attrs.frozen
class StepCommands:
    """What all ranks get before a step."""

    arrivals: tuple[SimulatedRequest, ...] = ()
    aborts: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class SimulatedWorkload:
    """Chats whose prompts grow with each request over a few shared beginnings; some requests are aborted.

    Attributes:
        seed: of everything in it.
        page_size: tokens per page.
        num_chats: chats that requests come from; more of them reuse less.
        max_pages: length at which a chat starts again.
    """

    seed: int
    page_size: int
    num_chats: int = 12
    max_pages: int = 14
    arrival_rate: float = 0.5
    abort_rate: float = 0.05

    def steps(self, num_steps: int) -> Iterator[StepCommands]:
        """The commands of each step."""
        rng = random.Random(self.seed)  # noqa: S311  a simulation
        num_pages = [2] * self.num_chats
        open_rids: list[str] = []
        for step in range(num_steps):
            arrivals = []
            if rng.random() < self.arrival_rate:
                chat = rng.randrange(self.num_chats)
                num_pages[chat] = num_pages[chat] % self.max_pages + rng.randint(1, 4)
                length = num_pages[chat] * self.page_size + rng.randrange(self.page_size)
                arrivals.append(SimulatedRequest(f"r{step}", self._tokens(chat, length), rng.randint(1, 6)))
                open_rids.append(f"r{step}")
            aborts: tuple[str, ...] = ()
            if open_rids and rng.random() < self.abort_rate:
                aborts = (open_rids.pop(rng.randrange(len(open_rids))),)
            del open_rids[:-8]
            yield StepCommands(tuple(arrivals), aborts)

    def _tokens(self, chat: int, length: int) -> tuple[int, ...]:
        shared = 2 * self.page_size
        return tuple((chat % 3 if at < shared else 1000 + chat * 100 + at) for at in range(length))


@dataclass(slots=True, kw_only=True)
class _Running:
    request: SimulatedRequest
    node: RadixNode
    pages: list[int]
    num_shared: int
    num_steps_left: int


@dataclass(slots=True, kw_only=True)
class SimulatedScheduler:
    """First come, first served; as many as the pool holds.

    Attributes:
        cache: real.
        max_running: slots.
        num_served: requests that ran to their end.
    """

    cache: HiRadixCache
    max_running: int = 4
    num_served: int = field(default=0, init=False)
    _waiting: list[SimulatedRequest] = field(default_factory=list, init=False)
    _running: list[_Running] = field(default_factory=list, init=False)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def step(self, commands: StepCommands) -> None:
        """Take in commands, move on what runs, let in what may."""
        for request in commands.arrivals:
            self._waiting.append(request)
            self.cache.prefetch_queue.start(request.rid, request.token_ids)
        for rid in commands.aborts:
            self._abort(rid)
        for running in list(self._running):
            running.num_steps_left -= 1
            if running.num_steps_left <= 0:
                self._finish(running)
        self._admit()

    def _admit(self) -> None:
        for place, request in enumerate(self._waiting[:3]):
            ready = self.cache.prefetch_queue.is_done(request.rid, request.token_ids, is_next=place == 0)
            if place == 0 and (not ready or len(self._running) >= self.max_running or not self._start(request)):
                return
            if place == 0:
                del self._waiting[0]
                return

    def _start(self, request: SimulatedRequest) -> bool:
        cache = self.cache
        match = cache.match_prefix(request.token_ids)
        cache.lock(match.node)
        num_pages = len(request.token_ids) // cache.page_size
        try:
            fresh = cache.allocate(num_pages - len(match.pages))
        except OutOfPagesError:
            cache.unlock(match.node)
            return False
        cache.prefetch_queue.record_admission(
            request.rid, prompt_tokens=len(request.token_ids), cached_tokens=match.num_tokens
        )
        self._running.append(
            _Running(
                request=request,
                node=match.node,
                pages=[*match.pages, *fresh],
                num_shared=len(match.pages),
                num_steps_left=request.num_steps,
            )
        )
        return True

    def _finish(self, running: _Running) -> None:
        self._running.remove(running)
        self.cache.insert(running.request.token_ids, running.pages)
        self.cache.unlock(running.node)
        self.num_served += 1

    def _abort(self, rid: str) -> None:
        self._waiting = [request for request in self._waiting if request.rid != rid]
        self.cache.prefetch_queue.cancel(rid)
        for running in self._running:
            if running.request.rid == rid:
                self._running.remove(running)
                self.cache.free(running.pages[running.num_shared :])
                self.cache.unlock(running.node)
                return


AgreementScope: TypeAlias = Literal["tp", "cp x tp", "cp x tp x pp"]


@attrs.frozen(kw_only=True)
class SimulationConfig:
    """One simulated replica.

    Attributes:
        attn_cp_size, attn_tp_size, pp_size: its ranks.
        scope: over which of them they agree.
        policy: of every cache.
        rates: of every rank's I/O.
        page_size, device_pages, host_pages: small, so that pages are evicted all the time.

    Raises:
        ConfigError: a size below 1.
    """

    attn_cp_size: int = attrs.field(default=2, validator=integer_validator())
    attn_tp_size: int = attrs.field(default=2, validator=integer_validator())
    pp_size: int = attrs.field(default=1, validator=integer_validator())
    scope: AgreementScope = "cp x tp x pp"
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
        """The scopes that differ for these ranks, the whole agreement last."""
        return ("tp", "cp x tp", "cp x tp x pp") if self.pp_size > 1 else ("tp", "cp x tp")


class Agreement(Protocol):
    """Gives each rank the agreed values of a step. ``InProcessGroups`` is one; a test may have one that lies."""

    def reduce(self, proposals: Mapping[int, Proposal]) -> Mapping[int, AgreedValues]: ...


def make_in_process_groups(config: SimulationConfig) -> InProcessGroups:
    """Return the agreement over the ranks that ``config.scope`` names."""
    parallel = ParallelState.from_tp_rank(
        0, tp_size=config.tp_size, attn_cp_size=config.attn_cp_size, pp_size=config.pp_size
    )
    world = world_rank_groups(parallel)
    if config.scope != "cp x tp x pp":
        world = tuple(attrs.evolve(sets, pp=None) for sets in world)
    if config.scope == "tp":
        world = tuple(attrs.evolve(sets, attn_cp=None) for sets in world)
    return InProcessGroups({sets.rank: sets.reduce_groups for sets in world})


@dataclass(slots=True, kw_only=True)
class SimulatedRank:
    """One rank's parts; ``clock_rate`` is how fast its clock goes."""

    cache: HiRadixCache
    host: SimulatedHostPages
    mover: SimulatedMover
    scheduler: SimulatedScheduler
    clock_rate: float


class SimulatedReplica:
    """All ranks of one replica, stepped together.

    Args:
        config: what it is made of.
        seed: of the ranks' I/O.
        agreement: of what the ranks bring; that of ``config.scope`` by default.
    """

    def __init__(self, config: SimulationConfig, *, seed: int, agreement: Agreement | None = None) -> None:
        self.config = config
        self._agreement: Agreement = agreement if agreement is not None else make_in_process_groups(config)
        storage = SimulatedStorage()
        self.ranks = {rank: make_rank(config, rank, storage, seed) for rank in range(config.pp_size * config.tp_size)}
        self.num_steps = 0

    @property
    def caches(self) -> list[HiRadixCache]:
        """One per rank, in order of rank."""
        return [rank.cache for rank in self.ranks.values()]

    @property
    def is_idle(self) -> bool:
        """No request and no operation is anywhere."""
        return all(rank.scheduler.is_idle and not rank.cache.num_operations for rank in self.ranks.values())

    @property
    def has_diverged(self) -> bool:
        """Ranks hold different pages now."""
        return len({cache.state_digest for cache in self.caches}) > 1

    def step(self, commands: StepCommands) -> None:
        """Let every rank take one step."""
        self.num_steps += 1
        proposals = {number: self._proposal(rank) for number, rank in self.ranks.items()}
        agreed = self._agreement.reduce(proposals)
        for number, rank in self.ranks.items():
            rank.cache.apply(self.num_steps, agreed[number])
            rank.mover.submit(rank.cache.pop_instructions())
            rank.scheduler.step(commands)
            # What expect() and insert() began goes out now, not a step later.
            rank.mover.submit(rank.cache.pop_instructions())

    def drain(self) -> None:
        """Step without new requests until nothing is anywhere."""
        while not self.is_idle:
            self.step(StepCommands())

    def num_differing_pages(self) -> int:
        """Device pages that some rank holds and another one does not."""
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


def make_rank(config: SimulationConfig, rank: int, storage: SliceStorage, seed: int) -> SimulatedRank:
    """Make one rank; what its I/O does follows from ``seed`` and ``rank``."""
    rng = random.Random(f"{seed}/{rank}")  # noqa: S311  a simulation
    stage, tp_rank = divmod(rank, config.tp_size)
    cp_rank, attn_tp_rank = divmod(tp_rank, config.attn_tp_size)
    host = SimulatedHostPages(config.host_pages, rng=rng, failure=config.rates.no_host_page)
    # Pages are the same on every CP rank, and sliced over TP and, by layers, over PP.
    stored = storage.slice_of(f"pp{stage}-tp{attn_tp_rank}")
    mover = SimulatedMover(rng=rng, rates=config.rates, stored=stored, writes=cp_rank == 0)
    cache = HiRadixCache(
        page_size=config.page_size,
        capacity_tokens=config.device_pages * config.page_size,
        host=host,
        num_host_pages=config.host_pages,
        policy=config.policy,
        record=True,
        page_hook=mover,
    )
    return SimulatedRank(
        cache=cache,
        host=host,
        mover=mover,
        scheduler=SimulatedScheduler(cache=cache),
        clock_rate=rng.uniform(0.8, 1.2),
    )


@dataclass(slots=True, kw_only=True)
class SimulationRun:
    """The result of one seed.

    Attributes:
        seed: of workload and I/O.
        diverged_at_step: first step after which ranks held different pages; None: never.
        differing_pages: at every ``sample_steps``-th step.
        num_served: requests that ran to their end on rank 0.
    """

    seed: int
    diverged_at_step: int | None = None
    differing_pages: list[int] = field(default_factory=list)
    num_served: int = 0


def run_simulation(
    config: SimulationConfig, *, seeds: Sequence[int], num_steps: int, sample_steps: int
) -> list[SimulationRun]:
    """Run each seed for ``num_steps`` steps."""
    return [_run(config, seed, num_steps, sample_steps) for seed in seeds]


def _run(config: SimulationConfig, seed: int, num_steps: int, sample_steps: int) -> SimulationRun:
    replica, run = SimulatedReplica(config, seed=seed), SimulationRun(seed=seed)
    workload = SimulatedWorkload(seed=seed, page_size=config.page_size)
    for step, commands in enumerate(workload.steps(num_steps), start=1):
        replica.step(commands)
        if run.diverged_at_step is None and replica.has_diverged:
            run.diverged_at_step = step
        if step % sample_steps == 0:
            run.differing_pages.append(replica.num_differing_pages())
    run.num_served = replica.ranks[0].scheduler.num_served
    return run
