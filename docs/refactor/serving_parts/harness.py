"""The test that compares every output: which exits a stage has, and how to play a workload on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import msgspec
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from scheduler_refactor import ModuleTree, Recorder
from scheduler_refactor.recording import Decoder

from scheduler_components import ParallelState
from scheduler_components.values import LoadSnapshot
from serving_parts.batching import Settings
from serving_parts.request import Outbox, Output, Request
from serving_parts.surroundings import TAPES, Surroundings

__all__ = [
    "Abort",
    "Action",
    "AnyScheduler",
    "GuideHarness",
    "Steps",
    "Submit",
    "Workload",
    "act",
    "harness",
    "stage_tree",
]

PACKAGE = "scheduler_stage"
"""The import name of every stage, so that nothing which leaves a stage depends on its folder."""
REST_STEPS, REST_SECONDS = 48, 0.5
"""Steps after the actions: enough for every request to finish."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A new request: the first ``num_shared`` tokens are the same for all requests of a ``topic``."""

    topic: int
    num_shared: int
    num_own: int
    max_new_tokens: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End the request that was submitted as number ``place``, if it is in flight."""

    place: int


class Steps(msgspec.Struct, frozen=True, tag=True):
    """Run steps at intervals, and read load and metrics after the last one."""

    count: int
    seconds: float


Action = Submit | Abort | Steps


class Workload(msgspec.Struct, frozen=True):
    """Actions on one rank of a small topology."""

    actions: tuple[Action, ...]
    settings: Settings = Settings()
    rank: int = 0
    tp_size: int = 1
    attn_dp_size: int = 1
    serve_rest: bool = True

    @property
    def parallel(self) -> ParallelState:
        cp_size = 1 if self.tp_size == 1 else 2 // self.attn_dp_size
        sizes = {"tp_size": self.tp_size, "attn_dp_size": self.attn_dp_size, "attn_cp_size": cp_size}
        return ParallelState.from_tp_rank(self.rank, **sizes)


class AnyScheduler(Protocol):
    """The interface of every stage."""

    def submit(self, request: Request) -> None: ...
    def abort(self, rid: str) -> bool: ...
    def step(self) -> None: ...
    def get_load(self) -> LoadSnapshot: ...
    def close(self) -> None: ...


class GuideHarness:
    """The exits of a stage: event payloads, outputs to clients, load reports, metrics pages."""

    exits: Mapping[str, Decoder] = {
        "events": msgspec.msgpack.decode,
        "outputs": json.loads,
        "loads": json.loads,
        "metrics": lambda page: page.decode().splitlines(),
    }
    targets: Sequence[str] = ("retraction", "eviction", "abort", "cache hit")
    workload_type = Workload

    def workloads(self) -> st.SearchStrategy[Workload]:
        """Return prompts that share prefixes, aborts, more requests than fit, long pauses, and every rank."""
        own = st.integers(0, 16)
        submits = st.builds(Submit, st.integers(0, 2), st.integers(1, 24), own, st.integers(1, 24))
        steps = st.builds(Steps, st.integers(0, 6), st.sampled_from([0.0, 0.05, 0.7, 11.0]))
        actions = st.one_of(submits, submits, steps, st.builds(Abort, st.integers(0, 12)))
        return st.builds(
            Workload,
            actions=st.lists(actions, max_size=16).map(tuple),
            settings=st.builds(
                Settings,
                page_size=st.sampled_from([1, 4, 8]),
                max_running_requests=st.integers(1, 4),
                chunk_tokens=st.sampled_from([3, 8, 64]),
            ),
            rank=st.integers(0, 3),
            tp_size=st.just(4),
            attn_dp_size=st.sampled_from([1, 2]),
            serve_rest=st.booleans(),
        )

    def play(self, workload: Workload, recorder: Recorder) -> None:
        """Run the actions, finish or abort the requests, and close."""
        requests: list[Request] = []

        def receive(payload: bytes) -> None:
            recorder.emit("events", payload)
            if b"BlockRemoved" in payload:
                recorder.reach("eviction")

        def send(output: Output) -> None:
            recorder.emit("outputs", msgspec.json.encode(output))
            if output.finish_reason == "abort":
                recorder.reach("abort")

        TAPES["guide"] = receive
        around = Surroundings(
            settings=attrs.evolve(workload.settings, kv_events='{"publisher": "tape", "options": {"tape": "guide"}}'),
            parallel=workload.parallel,
            registry=CollectorRegistry(),
            outbox=Outbox(send),
            clock=recorder.clock,
        )
        opened: AnyScheduler = recorder.load(f"{PACKAGE}.scheduler").open_scheduler(around)
        rest = [Steps(8, REST_SECONDS)] * (REST_STEPS // 8 if workload.serve_rest else 0)
        try:
            for number, action in enumerate([*workload.actions, *rest]):
                recorder.begin(str(action))
                act(opened, number, action, recorder.clock.advance, requests)
                if isinstance(action, Steps):
                    recorder.emit("loads", msgspec.json.encode(opened.get_load()))
                    recorder.emit("metrics", generate_latest(around.registry))
        finally:
            recorder.begin("close")
            opened.close()
        if any(request.num_retractions for request in requests):
            recorder.reach("retraction")
        if any(request.num_cached_tokens for request in requests):
            recorder.reach("cache hit")


def act(
    scheduler: AnyScheduler,
    number: int,
    action: Action,
    advance: Callable[[float], None],
    requests: list[Request],
) -> None:
    """Run one action. ``number`` names the request that it submits, which is appended to ``requests``."""
    if isinstance(action, Submit):
        shared = [action.topic * 10 + place for place in range(action.num_shared)]
        own = [1000 + number * 100 + place for place in range(action.num_own)]
        requests.append(Request(rid=f"r{number}", token_ids=shared + own, max_new_tokens=action.max_new_tokens))
        scheduler.submit(requests[-1])
    elif isinstance(action, Abort):
        scheduler.abort(f"r{action.place}")
    else:
        for _ in range(action.count):
            advance(action.seconds)
            scheduler.step()


def stage_tree(folder: Path) -> ModuleTree:
    """Return the version in the folder of a stage."""
    return ModuleTree({PACKAGE: folder})


harness = GuideHarness()
"""What ``scheduler-components refactor record`` and ``replay`` read."""
