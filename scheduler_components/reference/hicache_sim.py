"""``scheduler-components hicache-sim``: what comes of a hierarchical cache whose ranks agree over TP only, or CP x TP.

N ranks in one process, each with a scheduler and a real cache, all given the same commands; only their I/O differs. The
program runs every seed twice: with the whole agreement, and with the hop over attention-CP left out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import attrs

from scheduler_components.errors import ConfigError
from scheduler_components.hicache.ballot import Ballot, Outcome
from scheduler_components.hicache.hi_radix_cache import HiRadixCache
from scheduler_components.hicache.in_process_sync import InProcessSync
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.hicache.rank_sets import world_rank_sets
from scheduler_components.hicache.tiers import Tier
from scheduler_components.parallel_state import ParallelState
from scheduler_components.reference.hicache_sim_io import (
    FaultRates,
    SimulatedHostPages,
    SimulatedMover,
    SimulatedStorage,
)
from scheduler_components.reference.hicache_sim_rank import Commands, SimulatedScheduler, SimulatedWorkload

__all__ = [
    "Agreement",
    "Run",
    "Scope",
    "SimulatedRank",
    "SimulatedReplica",
    "SimulationConfig",
    "agreement_of",
    "make_rank",
    "run_simulation",
]

Scope: TypeAlias = Literal["tp", "cp x tp"]


def _check_size(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise ConfigError(attribute.name, value, "is not a size", "give an integer of at least 1")


@attrs.frozen(kw_only=True)
class SimulationConfig:
    """One simulated replica.

    Attributes:
        attn_cp_size, attn_tp_size: its ranks.
        scope: over which of them they agree.
        policy: of every cache.
        rates: of every rank's I/O.
        page_size, device_pages, host_pages: small, so that pages are evicted all the time.

    Raises:
        ConfigError: a size below 1.
    """

    attn_cp_size: int = attrs.field(default=2, validator=_check_size)
    attn_tp_size: int = attrs.field(default=2, validator=_check_size)
    scope: Scope = "cp x tp"
    policy: HiCachePolicy = attrs.field(factory=lambda: HiCachePolicy(prefetch_threshold_pages=2, clean_ahead_pages=16))
    rates: FaultRates = attrs.field(factory=FaultRates)
    page_size: int = attrs.field(default=2, validator=_check_size)
    device_pages: int = attrs.field(default=48, validator=_check_size)
    host_pages: int = attrs.field(default=72, validator=_check_size)


class Agreement(Protocol):
    """Gives each rank the outcome of all ranks' ballots. ``InProcessSync`` is one; a test may have one that lies."""

    def agree(self, ballots: Mapping[int, Ballot]) -> Mapping[int, Outcome]: ...


def agreement_of(config: SimulationConfig) -> InProcessSync:
    """Return the agreement over the ranks that ``config.scope`` names."""
    parallel = ParallelState.from_tp_rank(
        0, tp_size=config.attn_cp_size * config.attn_tp_size, attn_cp_size=config.attn_cp_size
    )
    world = world_rank_sets(parallel)
    if config.scope == "tp":
        world = tuple(attrs.evolve(sets, attn_cp=None) for sets in world)
    return InProcessSync({sets.rank: sets.hops for sets in world})


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
        self._agreement: Agreement = agreement if agreement is not None else agreement_of(config)
        storage = SimulatedStorage()
        self.ranks = {
            rank: make_rank(config, rank, storage, seed) for rank in range(config.attn_cp_size * config.attn_tp_size)
        }
        self.num_steps = 0

    @property
    def caches(self) -> list[HiRadixCache]:
        """One a rank, in order of rank."""
        return [rank.cache for rank in self.ranks.values()]

    @property
    def is_idle(self) -> bool:
        """No request and no operation is anywhere."""
        return all(rank.scheduler.is_idle and not rank.cache.num_operations for rank in self.ranks.values())

    @property
    def has_parted(self) -> bool:
        """Ranks hold different pages now."""
        return len({cache.state_digest for cache in self.caches}) > 1

    def step(self, commands: Commands) -> None:
        """Let every rank take one step."""
        self.num_steps += 1
        ballots = {number: self._ballot(rank) for number, rank in self.ranks.items()}
        outcomes = self._agreement.agree(ballots)
        for number, rank in self.ranks.items():
            rank.cache.settle(self.num_steps, outcomes[number], now_s=self._now_s(rank))
            rank.mover.submit(rank.cache.take_instructions())
            rank.scheduler.step(commands)
            # What expect() and insert() began goes out now, not a step later.
            rank.mover.submit(rank.cache.take_instructions())

    def drain(self) -> None:
        """Step without new requests until nothing is anywhere."""
        while not self.is_idle:
            self.step(Commands())

    def num_differing_pages(self) -> int:
        """Device pages that some rank holds and another one does not."""
        held = [frozenset(cache.block_hashes(Tier.DEVICE)) for cache in self.caches]
        return len(frozenset.union(*held) - frozenset.intersection(*held))

    def _ballot(self, rank: SimulatedRank) -> Ballot:
        for event in rank.mover.poll():
            rank.cache.handle(event)
        return rank.cache.ballot(
            self.num_steps,
            has_storage=rank.mover.has_storage,
            load_room_pages=rank.mover.load_room_pages,
            now_s=self._now_s(rank),
        )

    def _now_s(self, rank: SimulatedRank) -> float:
        return self.num_steps * rank.clock_rate


def make_rank(config: SimulationConfig, rank: int, storage: SimulatedStorage, seed: int) -> SimulatedRank:
    """Make one rank; what its I/O does follows from ``seed`` and ``rank``."""
    rng = random.Random(f"{seed}/{rank}")  # noqa: S311  a simulation
    cp_rank, tp_rank = divmod(rank, config.attn_tp_size)
    host = SimulatedHostPages(config.host_pages, rng=rng, failure=config.rates.no_host_page)
    # Pages are the same on every CP rank, and sliced over TP.
    mover = SimulatedMover(rng=rng, rates=config.rates, stored=storage.slice_of(f"tp{tp_rank}"), writes=cp_rank == 0)
    cache = HiRadixCache(
        page_size=config.page_size,
        capacity_tokens=config.device_pages * config.page_size,
        host=host,
        num_host_pages=config.host_pages,
        policy=config.policy,
        record=True,
        witness=mover,
    )
    return SimulatedRank(
        cache=cache,
        host=host,
        mover=mover,
        scheduler=SimulatedScheduler(cache=cache),
        clock_rate=rng.uniform(0.8, 1.2),
    )


@dataclass(slots=True, kw_only=True)
class Run:
    """What came of one seed.

    Attributes:
        seed: of workload and I/O.
        parted_at: first step after which ranks held different pages; None: never.
        differing_pages: at every ``sample_steps``-th step.
        num_served: requests that ran to their end on rank 0.
    """

    seed: int
    parted_at: int | None = None
    differing_pages: list[int] = field(default_factory=list)
    num_served: int = 0


def run_simulation(config: SimulationConfig, *, seeds: Sequence[int], num_steps: int, sample_steps: int) -> list[Run]:
    """Run each seed for ``num_steps`` steps."""
    return [_run(config, seed, num_steps, sample_steps) for seed in seeds]


def _run(config: SimulationConfig, seed: int, num_steps: int, sample_steps: int) -> Run:
    replica, run = SimulatedReplica(config, seed=seed), Run(seed=seed)
    workload = SimulatedWorkload(seed=seed, page_size=config.page_size)
    for step, commands in enumerate(workload.steps(num_steps), start=1):
        replica.step(commands)
        if run.parted_at is None and replica.has_parted:
            run.parted_at = step
        if step % sample_steps == 0:
            run.differing_pages.append(replica.num_differing_pages())
    run.num_served = replica.ranks[0].scheduler.num_served
    return run
