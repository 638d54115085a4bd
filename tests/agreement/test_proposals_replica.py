"""Ranks of one replica with different I/O hold the same pages on every tier, and each agreement is needed for it.

Properties, after every step, for every number of ranks, policy, latency, failure, abort and eviction that comes up:
- all ranks hold the same pages on each tier; their arithmetic adds up: no slot is lost, nothing locked is evicted;
- the step took one packed reduction per hop;
- every page that is loaded back has its content, on every rank;
- the events rebuild each tier's content;
and after a drain nothing is locked, reserved or under way.

Each single agreement is needed: with any one of them replaced by the rank's own value, ranks diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, CacheIntegrityError
from scheduler_components.agreement import AgreedValues, Proposal
from scheduler_components.errors import SyncTimeoutError, TierDivergenceError
from scheduler_components.events import Tier
from scheduler_components.hicache import HiCachePolicy, HiRadixCache, KeySpace, Placement
from scheduler_engine.device.hicache_sim import (
    SLOTS_OF_AGREEMENT,
    FaultRates,
    HiCacheReplica,
    HiCacheSimulationConfig,
    LocalSlots,
    SimulatedWorkload,
    StepCommands,
    make_in_process_groups,
)

POLICIES = st.builds(
    HiCachePolicy,
    write=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
    prefetch=st.sampled_from(["best_effort", "wait_complete", "timeout"]),
    prefetch_threshold_pages=st.integers(1, 3),
    prefetch_timeout_s=st.sampled_from([0.0, 2.0, 5.0]),
    clean_ahead_pages=st.integers(1, 32),
    load=st.sampled_from(["whole", "by_layer"]),
    load_threshold_pages=st.integers(1, 2),
    prefetch_retry_steps=st.integers(0, 4),
    prefetch_max_retries=st.integers(0, 3),
)
RATES = st.builds(
    FaultRates,
    max_latency_steps=st.integers(1, 12),
    failure=st.sampled_from([0.0, 0.05, 0.5]),
    no_host_page=st.sampled_from([0.0, 0.1]),
    no_load_room=st.sampled_from([0.0, 0.3]),
    storage_outage=st.sampled_from([0.0, 0.02]),
)
CONFIGS = st.builds(
    HiCacheSimulationConfig,
    attn_cp_size=st.integers(1, 3),
    attn_tp_size=st.integers(1, 3),
    pp_size=st.integers(1, 2),
    placement=st.sampled_from([Placement(), Placement.mla()]),
    policy=POLICIES,
    rates=RATES,
    page_size=st.integers(1, 3),
    device_pages=st.integers(20, 60),
    host_pages=st.integers(4, 80),
)


class TierView:
    """The content of each tier as a router derives it from the events."""

    def __init__(self) -> None:
        self.held: dict[str | None, set[int]] = {None: set(), "CPU": set(), "STORAGE": set()}

    def apply(self, cache: HiRadixCache) -> None:
        for event in cache.take_events():
            if isinstance(event, BlockStored):
                known = set.union(*self.held.values())
                assert event.parent_block_hash is None or event.parent_block_hash in known, "an orphan"
                assert not self.held[event.medium] & {*event.block_hashes}, "stored twice"
                self.held[event.medium] |= {*event.block_hashes}
            elif isinstance(event, BlockRemoved):
                assert self.held[event.medium] >= {*event.block_hashes}, "removed twice"
                self.held[event.medium] -= {*event.block_hashes}
            else:
                assert isinstance(event, AllBlocksCleared)
                for held in self.held.values():
                    held.clear()

    def check(self, cache: HiRadixCache) -> None:
        for tier, medium in ((Tier.DEVICE, None), (Tier.HOST, "CPU"), (Tier.STORAGE, "STORAGE")):
            assert self.held[medium] == set(cache.block_hashes(tier)), tier


@pytest.mark.soak
@settings(max_examples=num_examples(1) // 2, deadline=None)
@given(config=CONFIGS, seed=st.integers(0, 10_000), num_steps=st.integers(1, 80))
@example(config=HiCacheSimulationConfig(), seed=0, num_steps=60)
@example(config=HiCacheSimulationConfig(attn_cp_size=1, pp_size=2), seed=0, num_steps=60)
@example(config=HiCacheSimulationConfig(placement=Placement.mla()), seed=0, num_steps=60)
@example(
    config=HiCacheSimulationConfig(
        attn_cp_size=1, policy=HiCachePolicy(load="by_layer", prefetch_threshold_pages=1), device_pages=30
    ),
    seed=0,
    num_steps=60,
)
def test_ranks_never_diverge_and_nothing_leaks(config: HiCacheSimulationConfig, seed: int, num_steps: int) -> None:
    agreement = make_in_process_groups(config)
    replica, view = HiCacheReplica(config, seed=seed, agreement=agreement), TierView()
    num_hops = sum(size > 1 for size in (config.attn_cp_size, config.attn_tp_size, config.pp_size))
    for commands in SimulatedWorkload(seed=seed, page_size=config.page_size).steps(num_steps):
        replica.step(commands)
        assert not replica.has_diverged
        for cache in replica.caches:
            cache.check_integrity()
        view.apply(replica.caches[0])
        view.check(replica.caches[0])
        assert agreement.num_collectives == num_hops * replica.num_steps
    replica.drain()
    for rank in replica.ranks.values():
        rank.cache.check_integrity()
        assert not rank.cache.used_tokens
        assert not rank.host.pool.num_held
        assert rank.host.pool.num_cached == rank.cache.num_pages_on(Tier.HOST)
        rank.cache.clear()
        assert rank.host.pool.num_free == config.host_pages
    view.apply(replica.caches[0])
    view.check(replica.caches[0])


AGREEMENTS = sorted(SLOTS_OF_AGREEMENT.values())
NOTHING = "no slot has this name"
HARSH = FaultRates(max_latency_steps=10, failure=0.1, no_host_page=0.1, no_load_room=0.3, storage_outage=0.001)


def num_diverged(config: HiCacheSimulationConfig, pattern: str, seeds: range) -> int:
    """Return how many runs ended because ranks diverged or one of them failed."""
    return sum(
        has_diverged(
            HiCacheReplica(config, seed=seed, agreement=LocalSlots(make_in_process_groups(config), pattern)), seed
        )
        for seed in seeds
    )


def has_diverged(replica: HiCacheReplica, seed: int) -> bool:
    for commands in SimulatedWorkload(seed=seed, page_size=replica.config.page_size).steps(400):
        try:
            replica.step(commands)
        except (TierDivergenceError, CacheIntegrityError, AssertionError, IndexError, KeyError, ValueError):
            return True
        if replica.has_diverged:
            return True
    return False


ALL_NEEDED = HiCacheSimulationConfig(
    policy=HiCachePolicy(prefetch="timeout", prefetch_timeout_s=3.0, prefetch_threshold_pages=2), rates=HARSH
)
"""A simulation that exercises every agreement."""


def test_with_every_agreement_ranks_stay_equal() -> None:
    assert not num_diverged(ALL_NEEDED, NOTHING, range(1))


@pytest.mark.broken_variants
@pytest.mark.parametrize("agreement", AGREEMENTS)
def test_without_this_agreement_ranks_part(agreement: str) -> None:
    assert any(num_diverged(ALL_NEEDED, agreement, range(seed, seed + 1)) for seed in range(8)), (
        "the agreement is not needed, or the simulation does not exercise it"
    )


def diverged_replica(agreement: str) -> HiCacheReplica:
    config = HiCacheSimulationConfig(attn_cp_size=2, attn_tp_size=1, rates=attrs.evolve(HARSH, storage_outage=0.0))
    replica = HiCacheReplica(config, seed=1, agreement=LocalSlots(make_in_process_groups(config), agreement))
    for commands in SimulatedWorkload(seed=1, page_size=config.page_size).steps(60):
        replica.step(commands)
    assert replica.caches[1].evict(1) == 1
    assert replica.has_diverged
    return replica


def test_the_digest_detects_a_diverged_rank_at_its_next_step() -> None:
    replica = diverged_replica(NOTHING)
    with pytest.raises(TierDivergenceError) as raised:
        replica.step(StepCommands())
    assert raised.value.step == 61
    assert f"digest is {replica.caches[0].state_digest:016x}" in str(raised.value)


def test_without_the_agreed_state_a_diverged_rank_is_not_detected() -> None:
    replica = diverged_replica("state")
    replica.step(StepCommands())
    assert replica.has_diverged


MLA = HiCacheSimulationConfig(
    placement=Placement.mla(),
    policy=HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=1),
    rates=FaultRates(failure=0.0, no_host_page=0.0, no_load_room=0.0, storage_outage=0.0),
    device_pages=24,
    host_pages=24,
)
"""Pages of a latent that CP and TP ranks replicate, and that return from storage."""


def run_replica(config: HiCacheSimulationConfig) -> HiCacheReplica:
    replica = HiCacheReplica(config, seed=0)
    for commands in SimulatedWorkload(seed=0, page_size=config.page_size).steps(200):
        replica.step(commands)
    return replica


def test_one_rank_writes_a_replicated_latent_and_every_rank_reads_it() -> None:
    replica = run_replica(MLA)
    writers = [number for number, rank in replica.ranks.items() if rank.mover.keys.is_writer]
    assert writers == [0]
    assert len({rank.mover.keys.key(bytes(32)) for rank in replica.ranks.values()}) == 1
    assert all(cache.stats().pages_prefetched > 0 for cache in replica.caches)
    assert not replica.has_diverged


@pytest.mark.broken_variants
@pytest.mark.parametrize("axis", ["attn_tp", "pp"])
def test_a_key_without_a_sharded_axis_returns_the_slice_of_another_rank(
    axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for grouped-query attention over TP, once for a latent over pipeline stages."""
    placement = Placement() if axis == "attn_tp" else Placement.mla()
    config = attrs.evolve(MLA, placement=placement, pp_size=2)
    run_replica(config)
    suffix = KeySpace._make_suffix

    def shorter(self: KeySpace) -> str:
        return ".".join(part for part in suffix(self).split(".") if not part.startswith(axis))

    monkeypatch.setattr(KeySpace, "_make_suffix", shorter)
    with pytest.raises(CacheIntegrityError, match="holds the content of another page"):
        run_replica(config)


@pytest.mark.broken_variants
def test_a_key_with_a_replicated_axis_is_written_by_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank looks for its own copy of the latent. Only the first one is there, so no rank uses it."""
    suffix = KeySpace._make_suffix
    monkeypatch.setattr(KeySpace, "_make_suffix", lambda self: f"{suffix(self)}.rank{self.parallel.tp_rank}")
    assert all(cache.stats().pages_prefetched == 0 for cache in run_replica(MLA).caches)


def test_ranks_diverge_over_tp_only_and_never_over_cp_x_tp() -> None:
    seeds = range(1)
    for scope, expected in (("tp", 1), ("cp x tp", 0)):
        config = HiCacheSimulationConfig(scope=scope)
        assert num_diverged(config, NOTHING, seeds) == expected


class Stage0Relays:
    """Passes the agreed values of stage 0 to the other stages, which are then wrong about their own I/O."""

    def __init__(self, config: HiCacheSimulationConfig) -> None:
        self._num_ranks = config.tp_size
        self._agreement = make_in_process_groups(attrs.evolve(config, pp_size=1))

    def reduce(self, proposals: Mapping[int, Proposal]) -> dict[int, AgreedValues]:
        first = {rank: proposals[rank] for rank in range(self._num_ranks)}
        agreed = self._agreement.reduce(first)
        return {rank: agreed[rank % self._num_ranks] for rank in proposals}


def test_pipeline_stages_diverge_unless_all_take_part() -> None:
    """Agreed within each stage; relayed from stage 0; agreed over all."""
    seeds, config = range(1), HiCacheSimulationConfig(attn_cp_size=1, attn_tp_size=2, pp_size=2)
    assert num_diverged(attrs.evolve(config, scope="cp x tp"), NOTHING, seeds) == 1
    relayed = [HiCacheReplica(config, seed=seed, agreement=Stage0Relays(config)) for seed in seeds]
    assert sum(has_diverged(replica, seed) for seed, replica in enumerate(relayed)) == 1
    assert num_diverged(config, NOTHING, seeds) == 0


def test_a_rank_without_a_proposal_is_named() -> None:
    config = HiCacheSimulationConfig()
    agreement = make_in_process_groups(config)
    caches = HiCacheReplica(config, seed=0).caches
    proposals = {
        rank: cache.proposal(1, has_storage=True, load_back_budget_pages=1, now_s=0.0)
        for rank, cache in enumerate(caches)
    }
    del proposals[2]
    with pytest.raises(SyncTimeoutError, match=r"'hicache step' at step 1.*missing ranks: 2"):
        agreement.reduce(proposals)


def test_the_proposal_has_the_same_slots_under_any_load() -> None:
    """And they fit the first block: one reduction per hop."""
    config = HiCacheSimulationConfig(device_pages=2000, host_pages=4000)
    [cache, *_] = HiCacheReplica(config, seed=0).caches
    make: Callable[[], Proposal] = lambda: cache.proposal(1, has_storage=True, load_back_budget_pages=1, now_s=0.0)  # noqa: E731
    idle = len(make())
    for chat in range(500):
        cache.insert([chat, chat], cache.allocate(1))
    assert cache.num_operations == 500
    assert len(make()) == idle
    assert len(make().pack(0)) == len(Proposal("nothing", step=0).pack(0))
