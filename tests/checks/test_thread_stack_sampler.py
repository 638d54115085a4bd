"""The sampler writes the stacks of a thread, or reports why it cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_components import ConfigError, StartError
from scheduler_components.checks.thread_stack_sampler import StackSampler


def test_the_sampler_records_the_stack_of_a_thread(tmp_path: Path, eventually: Callable[..., None]) -> None:
    release, ident = threading.Event(), list[int]()

    def waits_here() -> None:
        ident.append(threading.get_ident())
        release.wait(30)

    thread = threading.Thread(target=waits_here)
    thread.start()
    try:
        eventually(lambda: ident)
        sampler = StackSampler(tmp_path / "new", interval_s=0.001, thread_ids=ident)
        sampler.start()
        with pytest.raises(ConfigError, match="stop it first"):
            sampler.start()
        eventually(lambda: sampler.num_samples >= 3)
        path = sampler.stop("p-rank0")
    finally:
        release.set()
        thread.join()
    lines = Path(path).read_text().splitlines()
    assert lines
    for line in lines:
        stack, count = line.rsplit(" ", 1)
        assert int(count) > 0
        assert "waits_here (test_thread_stack_sampler.py:" in stack
    with pytest.raises(ConfigError, match="start it first"):
        sampler.stop("p")


def test_a_trace_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sampler = StackSampler(tmp_path / "file")
    sampler.start()
    with pytest.raises(StartError, match="give a writable directory"):
        sampler.stop("p")


def test_a_trace_of_an_earlier_process_is_not_overwritten(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        sampler = StackSampler(tmp_path)
        sampler.start()
        paths.append(Path(sampler.stop("profile-rank0")).name)
    assert paths == ["profile-rank0.folded", "profile-rank0.1.folded", "profile-rank0.2.folded"]
