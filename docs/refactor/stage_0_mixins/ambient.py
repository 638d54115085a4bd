"""The globals that every mixin reads."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from scheduler_components import ParallelState
from serving_parts.batching import Settings
from serving_parts.surroundings import Surroundings

_around: Surroundings | None = None


def set_surroundings(around: Surroundings) -> None:
    global _around  # noqa: PLW0603 - stage 1 removes it
    _around = around


def get_parallel() -> ParallelState:
    assert _around is not None
    return _around.parallel


def get_settings() -> Settings:
    assert _around is not None
    return _around.settings


def get_clock() -> Callable[[], float]:
    assert _around is not None
    return _around.clock


def get_registry() -> CollectorRegistry:
    assert _around is not None
    return _around.registry
