"""The harness of the four cases: submit requests, run steps, and record what is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from hypothesis import strategies as st
from scheduler_refactor import ModuleTree, Recorder
from scheduler_refactor.recording import Decoder

__all__ = ["CASES", "CaseHarness", "CaseWorkload", "case_version", "harness"]

CASES = ("override", "shared_field", "init_order", "overlap")


class CaseWorkload(msgspec.Struct, frozen=True):
    """Tokens of each submitted request, in steps: an empty tuple is a step without one."""

    steps: tuple[tuple[int, ...], ...]


class CaseHarness:
    """One exit: the texts that a scheduler sends."""

    exits: Mapping[str, Decoder] = {"sent": bytes.decode}
    targets: Sequence[str] = ()
    workload_type = CaseWorkload

    def workloads(self) -> st.SearchStrategy[CaseWorkload]:
        """Return some steps with some requests of a few tokens."""
        requests = st.lists(st.integers(1, 4), max_size=3).map(tuple)
        return st.builds(CaseWorkload, st.lists(requests, max_size=6).map(tuple))

    def play(self, workload: CaseWorkload, recorder: Recorder) -> None:
        """Submit and step."""
        scheduler = recorder.load("case").Scheduler(recorder.sink("sent", str.encode))
        for number, requests in enumerate(workload.steps):
            recorder.begin(f"step with requests of {list(requests)} tokens")
            for place, num_tokens in enumerate(requests):
                scheduler.submit(f"r{number}.{place}", num_tokens)
            scheduler.step()


def case_version(file: Path) -> ModuleTree:
    """Return the version in a file."""
    return ModuleTree({"case": file})


harness = CaseHarness()
