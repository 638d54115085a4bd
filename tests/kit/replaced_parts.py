"""Replace the KV cache of a reference scheduler, in every part that has it."""

from __future__ import annotations

from typing import Any

from scheduler_engine.engine.scheduler.scheduler import Scheduler


def replace_kv_cache(scheduler: Scheduler, kv_cache: Any) -> None:
    """Let a scheduler, its batcher and its results use ``kv_cache``."""
    scheduler.batcher.kv_cache = scheduler.results.kv = scheduler.kv_cache = kv_cache
