"""The checks of state holders and profilers: the kit's own parts pass, and broken ones fail with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler_components import ParallelState
from scheduler_components.checks.thread_stack_sampler import StackSampler
from scheduler_components.scheduling.dynamic_chunk_sizer import DynamicChunkSizer
from scheduler_components.testing import PROFILER_CHECKS, STATE_HOLDER_CHECKS, ConformanceError
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.batcher_settings import BatcherSettings
from scheduler_engine.engine.scheduler.scheduler import Scheduler

MODEL = {"chunk_base_us": 1.0, "chunk_token_us": 2.0, "chunk_million_pairs_us": 3.0}


def batcher_state() -> BatcherSettings:
    return Scheduler.compose(SchedulerConfig(), ParallelState.trivial(), SimulatedDevice()).settings


@pytest.mark.parametrize("check", STATE_HOLDER_CHECKS)
@pytest.mark.parametrize(
    ("make", "change"), [(DynamicChunkSizer, MODEL), (batcher_state, {"chunk_tokens": 512, "new_token_ratio": 0.5})]
)
def test_the_kits_holders_pass(check: Callable[..., None], make: Callable[[], Any], change: dict[str, Any]) -> None:
    check(make(), change)


class Holder:
    """Wrong in one way."""

    def __init__(self, fault: str) -> None:
        self.fault, self.values = fault, {"a": 1, "b": 2}
        self.settable = ["a", "hidden"] if fault == "hides" else ["a", "b"]

    def state(self) -> dict[str, Any]:
        return dict(self.values)

    def check_state(self, changes: dict[str, Any]) -> None:
        if self.fault == "sets early":
            self.values.update(changes)
        if self.fault == "raises" and any(isinstance(value, str) for value in changes.values()):
            raise TypeError("not a number")

    def set_state(self, changes: dict[str, Any]) -> None:
        if self.fault != "forgets":
            self.values.update(changes)


@pytest.mark.broken_variants
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hides", "missing in state"),
        ("sets early", "changes nothing"),
        ("forgets", "can be reversed"),
        ("raises", "raises a ConfigError"),
    ],
)
def test_a_broken_holder_fails_with_its_trace(fault: str, words: str) -> None:
    found = []
    for check in STATE_HOLDER_CHECKS:
        try:
            check(Holder(fault), {"a": 5})
        except ConformanceError as error:
            found.append(str(error))
    assert any(words in text for text in found), found


@pytest.mark.parametrize("check", PROFILER_CHECKS)
def test_the_kits_profilers_pass(check: Callable[..., None], tmp_path: Path) -> None:
    check(lambda: StackSampler(tmp_path / "stacks"))
    pytest.importorskip("torch")
    from scheduler_components.checks.torch_profiler import TorchProfiler

    check(lambda: TorchProfiler(tmp_path / "torch"))


class OneFile:
    """Writes every trace to one file, and does not mind being started twice."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self) -> None:
        self.path.write_text("")

    def stop(self, name: str) -> str:
        return str(self.path)


@pytest.mark.parametrize("check", PROFILER_CHECKS)
def test_a_broken_profiler_fails(check: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(ConformanceError):
        check(lambda: OneFile(tmp_path / "trace"))
