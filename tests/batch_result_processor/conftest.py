"""Fakes around a result processor: they record the calls they receive."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from scheduler_components import BatchResultProcessor
from scheduler_components.output_streamer import OutputStreamer, StreamedRequest
from scheduler_components.testing.fakes import ListOutputSink
from scheduler_components.values import FinishReason, TokenOutput

EOS, STOP = 1, 2  # what ends a request of the bench


@dataclass
class Limits:
    max_new_tokens: int = 8
    stop_token_ids: tuple[int, ...] = (STOP,)
    ignore_eos: bool = False


@dataclass(eq=False)
class Req:
    rid: str
    token_ids: array[int]
    limits: Limits = field(default_factory=Limits)
    num_computed_tokens: int = 0
    finish_reason: str | None = None
    stream_interval: int = 1
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def output(self) -> list[int]:
        return list(self.token_ids[self.num_prompt_tokens :])

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def output_since(self, start: int) -> TokenOutput:
        return TokenOutput(tuple(self.output[start:]))


@dataclass
class Pages:
    """Which positions were put in the cache, and how often pages came back."""

    shared: dict[str, int] = field(default_factory=dict)
    releases: dict[str, int] = field(default_factory=dict)
    broken_rids: set[str] = field(default_factory=set)

    def cache_unfinished(self, request: Req) -> None:
        if request.rid in self.broken_rids:
            raise RuntimeError("the tree is broken there")
        self.shared[request.rid] = request.num_computed_tokens

    def free(self, request: Req) -> None:
        self.releases[request.rid] = self.releases.get(request.rid, 0) + 1
        self.cache_unfinished(request)


@dataclass
class Register:
    running: dict[str, Req] = field(default_factory=dict)

    def finish(self, request: Req, reason: FinishReason) -> None:
        del self.running[request.rid]
        request.finish_reason = reason


@dataclass
class Observer:
    num_tokens: int = 0
    ends: list[FinishReason] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    broken: bool = False

    def on_tokens(self, requests: Sequence[Req], num_tokens: Sequence[int]) -> None:
        if self.broken:
            raise RuntimeError("no counters today")
        self.calls.append(" ".join(f"{request.rid}+{num}" for request, num in zip(requests, num_tokens, strict=True)))
        self.num_tokens += sum(num_tokens)

    def on_finished(self, request: Req, reason: FinishReason) -> None:
        if self.broken:
            raise RuntimeError("no counters today")
        self.calls.append(f"{request.rid} {reason}")
        self.ends.append(reason)


class RecordingStreamer(OutputStreamer):
    """Records the ids of the streamed requests, one list per step, and sends nothing."""

    def __init__(self) -> None:
        super().__init__(sink=ListOutputSink())
        self.steps: list[list[str]] = []

    def stream(self, requests: Iterable[StreamedRequest]) -> None:
        self.steps.append([request.rid for request in requests])


@dataclass
class ResultBench:
    """A processor among fakes."""

    pages: Pages = field(default_factory=Pages)
    register: Register = field(default_factory=Register)
    observer: Observer = field(default_factory=Observer)
    streamer: RecordingStreamer = field(default_factory=RecordingStreamer)

    def processor(self, output: OutputStreamer | None = None) -> BatchResultProcessor[Req]:
        """Create a processor that streams to ``output``, by default to the recording streamer."""
        return BatchResultProcessor(
            kv=self.pages,
            requests=self.register,
            output=output if output is not None else self.streamer,
            observer=self.observer,
            eos_token_ids=frozenset({EOS}),
        )

    def add(
        self, rid: str, prompt: int = 10, *, max_new: int = 8, ignore_eos: bool = False, stream_interval: int = 1
    ) -> Req:
        """Let a request run, with a prompt of so many tokens."""
        limits = Limits(max_new_tokens=max_new, ignore_eos=ignore_eos)
        request = Req(rid, array("I", range(100, 100 + prompt)), limits, stream_interval=stream_interval)
        self.register.running[rid] = request
        return request


@pytest.fixture
def bench() -> ResultBench:
    """A bench of the test's own."""
    return ResultBench()


@pytest.fixture
def make_bench() -> type[ResultBench]:
    """Makes as many as are asked for."""
    return ResultBench
