"""Integrity: what keeps a scheduler's pools honest, and who says that it is stuck.

``PoolInvariantChecker`` looks between two steps whether every page is in one place; ``OwnerLedger`` knows who took and
gave it; ``StepProgress`` is where the step stands, which a watchdog reads from outside the scheduler's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names
from scheduler_components.errors import PoolInvariantError
from scheduler_components.integrity.cache_pool import RadixCachePool, SlotPool
from scheduler_components.integrity.census import PoolProblem, problems_of_pool, problems_of_told_blocks
from scheduler_components.integrity.events_view import EventsView
from scheduler_components.integrity.owners import OwnerLedger
from scheduler_components.integrity.pool_invariants import (
    CheckAction,
    CheckPolicy,
    PoolInvariantChecker,
    PoolReport,
    describe_pools,
)
from scheduler_components.integrity.pool_stats import PoolStatsObserver
from scheduler_components.integrity.stall import StallJudge
from scheduler_components.integrity.step_progress import IDLE, StepProgress
from scheduler_components.values import (
    HeldCount,
    IntegrityStats,
    OwnerAction,
    OwnerRecord,
    PageHolding,
    PoolCount,
    PoolStats,
    StallReport,
)

if TYPE_CHECKING:
    from scheduler_components.integrity.thread_watchdog import LogStallSink, ThreadWatchdog, open_thread_watchdog

__all__ = [
    "IDLE",
    "CheckAction",
    "CheckPolicy",
    "EventsView",
    "HeldCount",
    "IntegrityStats",
    "OwnerLedger",
    "OwnerAction",
    "OwnerRecord",
    "PageHolding",
    "PoolCount",
    "PoolInvariantError",
    "PoolInvariantChecker",
    "PoolProblem",
    "PoolReport",
    "PoolStats",
    "PoolStatsObserver",
    "RadixCachePool",
    "SlotPool",
    "StallJudge",
    "StallReport",
    "StepProgress",
    "LogStallSink",
    "ThreadWatchdog",
    "describe_pools",
    "open_thread_watchdog",
    "problems_of_pool",
    "problems_of_told_blocks",
]

__getattr__ = lazy_names(
    __name__,
    {"scheduler_components.integrity.thread_watchdog": "LogStallSink ThreadWatchdog open_thread_watchdog"},
)
