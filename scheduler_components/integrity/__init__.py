"""Integrity: what keeps a scheduler's pools honest, and who says that it is stuck.

``PoolInvariantChecker`` looks between two steps whether every page is in one place; ``AllocationLog`` knows who took and
gave it; ``StepProgress`` is where the step stands, which a watchdog reads from outside the scheduler's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports
from scheduler_components.errors import PoolInvariantError
from scheduler_components.integrity.cache_pool import RadixCachePool, SlotPool
from scheduler_components.integrity.census import PoolViolation, find_event_violations, find_pool_violations
from scheduler_components.integrity.events_view import PublishedBlocks
from scheduler_components.integrity.owners import AllocationLog
from scheduler_components.integrity.pool_invariants import (
    CheckAction,
    CheckPolicy,
    PoolInvariantChecker,
    PoolReport,
    describe_pools,
)
from scheduler_components.integrity.pool_stats import PoolStatsObserver
from scheduler_components.integrity.stall import StallDetector
from scheduler_components.integrity.step_progress import IDLE, StepProgress
from scheduler_components.values import (
    AllocationAction,
    AllocationRecord,
    HeldCount,
    IntegrityStats,
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
    "PublishedBlocks",
    "HeldCount",
    "IntegrityStats",
    "AllocationLog",
    "AllocationAction",
    "AllocationRecord",
    "PageHolding",
    "PoolCount",
    "PoolInvariantError",
    "PoolInvariantChecker",
    "PoolViolation",
    "PoolReport",
    "PoolStats",
    "PoolStatsObserver",
    "RadixCachePool",
    "SlotPool",
    "StallDetector",
    "StallReport",
    "StepProgress",
    "LogStallSink",
    "ThreadWatchdog",
    "describe_pools",
    "open_thread_watchdog",
    "find_pool_violations",
    "find_event_violations",
]

__getattr__ = lazy_exports(
    __name__,
    {"scheduler_components.integrity.thread_watchdog": "LogStallSink ThreadWatchdog open_thread_watchdog"},
)
