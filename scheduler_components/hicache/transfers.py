"""TierTransfers: pages on their way between tiers, from the tree's side. Carries out what all ranks agreed."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_components.errors import CacheIntegrityError
from scheduler_components.hicache.controller import HiCacheController
from scheduler_components.hicache.device_loads import DeviceLoads
from scheduler_components.hicache.host_writes import HostWrites
from scheduler_components.hicache.operations import (
    BackupSettled,
    Decision,
    LoadSettled,
    PrefetchHit,
    PrefetchSettled,
    WriteSettled,
)
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.hicache.storage_reads import StorageReads
from scheduler_components.hicache.tier_stats import TierStats
from scheduler_components.hicache.tier_tree import TierTree
from scheduler_components.hicache.tiers import Tier
from scheduler_components.tier_ports import PageWitness

__all__ = ["TierTransfers"]


@dataclass(slots=True, kw_only=True)
class TierTransfers:
    """All ways between the tiers of one rank's tree.

    Attributes:
        tiers: the tree.
        controller: settles the operations.
        writes, loads, reads: the ways.
        stats: what came of it all.
    """

    tiers: TierTree
    controller: HiCacheController
    writes: HostWrites
    loads: DeviceLoads
    reads: StorageReads
    stats: TierStats = field(default_factory=TierStats)

    @classmethod
    def over(
        cls, tiers: TierTree, controller: HiCacheController, policy: HiCachePolicy, witness: PageWitness
    ) -> TierTransfers:
        """Put the ways together."""
        stats = TierStats()
        return cls(
            tiers=tiers,
            controller=controller,
            writes=HostWrites(tiers=tiers, controller=controller, policy=policy, stats=stats),
            loads=DeviceLoads(tiers=tiers, controller=controller, policy=policy, stats=stats, witness=witness),
            reads=StorageReads(tiers=tiers, controller=controller, policy=policy, stats=stats),
            stats=stats,
        )

    def carry_out(self, decisions: list[Decision], now_s: float) -> None:
        """Do to the tree what all ranks have decided, in order; then what follows from it by policy."""
        for decision in decisions:
            if isinstance(decision, WriteSettled):
                self.writes.settle_write(decision)
            elif isinstance(decision, BackupSettled):
                self.writes.settle_backup(decision)
            elif isinstance(decision, LoadSettled):
                self.loads.settle(decision)
            elif isinstance(decision, PrefetchHit):
                self.reads.reserve(decision, now_s)
            elif isinstance(decision, PrefetchSettled):
                self.reads.settle(decision)
            else:
                self._forget_storage()
        self.loads.room_pages = self.controller.agreed.load_room_pages
        self.writes.clean_ahead()

    def check(self) -> None:
        """Check the ledger of host pages: tree + in flight = used.

        Raises:
            CacheIntegrityError: with the numbers.
        """
        in_tree = self.tiers.membership.num_pages[Tier.HOST]
        in_flight = self.writes.num_pages_reserved + self.reads.num_pages_reserved
        used = self.tiers.num_host_pages_used
        if in_tree + in_flight != used or used > self.tiers.num_host_pages:
            raise CacheIntegrityError(
                f"{in_tree} host pages in the tree + {in_flight} in flight, {used} of {self.tiers.num_host_pages} used"
            )

    def _forget_storage(self) -> None:
        for node in reversed(list(self.tiers.nodes())):  # children first, so that stored stays closed upwards
            self.tiers.membership.forget_storage(node)
