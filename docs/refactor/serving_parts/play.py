"""Play a workload on a stage and record its output."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import attrs
import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from scheduler_components import ParallelState
from scheduler_components.values import LoadSnapshot
from serving_parts.batching import Settings
from serving_parts.request import Outbox, Output, Request
from serving_parts.surroundings import Surroundings

__all__ = ["Abort", "Action", "Clock", "OpenScheduler", "Record", "Steps", "Submit", "act", "play"]


class Submit(msgspec.Struct, frozen=True):
    """A new request: the first ``num_shared`` tokens are the same for all requests of a ``topic``."""

    topic: int
    num_shared: int
    num_own: int
    max_new_tokens: int


class Abort(msgspec.Struct, frozen=True):
    """End the request that was submitted as number ``place``, if it is in flight."""

    place: int


class Steps(msgspec.Struct, frozen=True):
    """Run steps at intervals, then read load and metrics."""

    count: int
    seconds: float


Action = Submit | Abort | Steps


class AnyScheduler(Protocol):
    """The interface of every stage."""

    def submit(self, request: Request) -> None: ...
    def abort(self, rid: str) -> bool: ...
    def step(self) -> None: ...
    def get_load(self) -> LoadSnapshot: ...
    def close(self) -> None: ...


OpenScheduler = Callable[[Surroundings], AnyScheduler]


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@attrs.frozen(kw_only=True)
class Record:
    """The output of a stage: event payloads, load reports, metrics pages, outputs."""

    tape: bytes
    loads: tuple[bytes, ...]
    metrics: tuple[bytes, ...]
    outputs: tuple[Output, ...]


def play(
    open_scheduler: OpenScheduler,
    actions: Sequence[Action],
    *,
    parallel: ParallelState,
    settings: Settings,
    serve_rest: bool = True,
) -> Record:
    """Run the actions, finish or abort the requests, and close. ``settings.kv_events`` becomes a tape."""
    rest = [Steps(count=8, seconds=0.5)] * 6 if serve_rest else []
    loads: list[bytes] = []
    metrics: list[bytes] = []
    with TemporaryDirectory() as directory:
        tape = Path(directory) / "tape"
        events = json.dumps({"publisher": "tape", "options": {"path": str(tape)}})
        around = Surroundings(
            settings=attrs.evolve(settings, kv_events=events),
            parallel=parallel,
            registry=CollectorRegistry(),
            outbox=Outbox(),
            clock=Clock(),
        )
        scheduler = open_scheduler(around)
        try:
            for number, action in enumerate([*actions, *rest]):
                act(scheduler, around, number, action)
                if isinstance(action, Steps):
                    loads.append(msgspec.json.encode(scheduler.get_load()))
                    metrics.append(generate_latest(around.registry))
        finally:
            scheduler.close()
        written = tape.read_bytes() if tape.exists() else b""
    return Record(tape=written, loads=tuple(loads), metrics=tuple(metrics), outputs=tuple(around.outbox.outputs))


def act(scheduler: AnyScheduler, around: Surroundings, number: int, action: Action) -> None:
    """Run one action. ``number`` names the request that it submits."""
    if isinstance(action, Submit):
        shared = [action.topic * 10 + place for place in range(action.num_shared)]
        own = [1000 + number * 100 + place for place in range(action.num_own)]
        scheduler.submit(Request(rid=f"r{number}", token_ids=shared + own, max_new_tokens=action.max_new_tokens))
    elif isinstance(action, Abort):
        scheduler.abort(f"r{action.place}")
    else:
        for _ in range(action.count):
            assert isinstance(around.clock, Clock)
            around.clock.now += action.seconds
            scheduler.step()
