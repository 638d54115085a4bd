"""PoolStatsObserver: how full the pools of a scheduler are, under SGLang's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_components.ports import AuditedPool
from scheduler_components.values import PoolCount, PoolStats

__all__ = ["PoolStatsObserver"]


@dataclass(slots=True, kw_only=True)
class PoolStatsObserver:
    """Reads the counts of pools and says them as metrics do. Pools are told apart by their names.

    Attributes:
        pools: of pages: ``full``, ``swa`` and ``mamba`` have metrics of their own, any other counts for the fullest.
        page_size: tokens per page of the KV pools; a page of ``mamba`` is one state.
    """

    pools: Sequence[AuditedPool]
    page_size: int

    def stats(self) -> PoolStats:
        """Return how full each pool is now."""
        counts = {pool.name: pool.count() for pool in self.pools}
        return PoolStats(
            max((count.usage for count in counts.values()), default=0.0),
            *_split(counts.get("full"), self.page_size),
            *_split(counts.get("swa"), self.page_size),
            *_split(counts.get("mamba"), 1),
            sum(count.session_held for count in counts.values()),
        )

    def get_kv_token_stats(self) -> tuple[int, float]:
        """Return tokens in use and the share of the pool that they are, of the fuller one of ``full`` and ``swa``."""
        counts = [count for pool in self.pools if (count := pool.count()).name in ("full", "swa")]
        num_used = max((count.num_used for count in counts), default=0)
        return num_used * self.page_size, max((count.usage for count in counts), default=0.0)


def _split(count: PoolCount | None, tokens: int) -> tuple[float | None, int | None, int | None, int | None]:
    """Usage, available, evictable and used of a pool, in ``tokens`` per page; None for one that is not there."""
    if count is None:
        return None, None, None, None
    return count.usage, count.available * tokens, count.evictable * tokens, count.num_used * tokens
