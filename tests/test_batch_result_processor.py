"""Each request gets exactly its tokens and one end, its pages come back once, and trouble stays where it arises."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_components.batch_result_processor import BatchResultProcessor, WorkResult
from scheduler_components.finish import FinishReason
from scheduler_components.output.delta import OutputBatch, TokenOutput
from scheduler_components.output_streamer import OutputStreamer

EOS, STOP = 1, 2


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

    def share(self, request: Req) -> None:
        if request.rid in self.broken_rids:
            raise RuntimeError("the tree is broken there")
        self.shared[request.rid] = request.num_computed_tokens

    def release(self, request: Req) -> None:
        self.releases[request.rid] = self.releases.get(request.rid, 0) + 1
        self.share(request)


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
    broken: bool = False

    def generated(self, request: Req, num_tokens: int) -> None:
        if self.broken:
            raise RuntimeError("no counters today")
        self.num_tokens += num_tokens

    def ended(self, request: Req, reason: FinishReason) -> None:
        if self.broken:
            raise RuntimeError("no counters today")
        self.ends.append(reason)


@dataclass
class Told:
    """An ``OutputStream`` that notes what it was told, a step a list."""

    steps: list[list[str]] = field(default_factory=list)

    def stream(self, requests: Iterable[Req]) -> None:
        self.steps.append([request.rid for request in requests])


@dataclass
class Bench:
    """A processor among fakes."""

    pages: Pages = field(default_factory=Pages)
    register: Register = field(default_factory=Register)
    observer: Observer = field(default_factory=Observer)
    told: Told = field(default_factory=Told)

    def processor(self) -> BatchResultProcessor[Req]:
        return BatchResultProcessor(
            kv=self.pages,
            requests=self.register,
            output=self.told,
            observer=self.observer,
            eos_token_ids=frozenset({EOS}),
        )

    def add(self, rid: str, prompt: int = 10, **settings: object) -> Req:
        request = Req(rid, array("I", range(100, 100 + prompt)), **settings)  # type: ignore[arg-type]
        self.register.running[rid] = request
        return request


@pytest.fixture
def bench() -> Bench:
    return Bench()


def result(request: Req, end: int | None = None, *tokens: int, **facts: object) -> WorkResult[Req]:
    end = len(request.token_ids) if end is None else end
    return WorkResult(request, request.num_computed_tokens, end, tokens, **facts)  # type: ignore[arg-type]


def test_a_chunked_prefill_shares_each_chunk_and_gives_its_token_with_the_last(bench: Bench) -> None:
    processor, request = bench.processor(), bench.add("a")
    assert processor.process([result(request, 4, 77, is_prefill=True)]) == []
    assert (request.num_computed_tokens, bench.pages.shared["a"], request.output) == (4, 4, [])
    assert processor.process([result(request, 10, 50, is_prefill=True)]) == [request]
    assert (request.num_computed_tokens, bench.pages.shared["a"], request.output) == (10, 10, [50])


def test_a_decode_computes_the_token_before_and_appends_the_next(bench: Bench) -> None:
    processor, request = bench.processor(), bench.add("a")
    processor.process([result(request, None, 50, is_prefill=True)])
    processor.process([result(request, None, 51)])
    assert (request.num_computed_tokens, request.output, bench.pages.shared["a"]) == (11, [50, 51], 10)


@pytest.mark.parametrize(
    ("tokens", "kept", "reason"),
    [
        ((50, 51, 52), [50, 51, 52], None),
        ((50, STOP, 52), [50, STOP], "stop"),
        ((50, EOS, 52), [50, EOS], "stop"),
        ((50, 51, 52, 53, 54), [50, 51, 52, 53], "length"),
        ((50, 51, 52, STOP), [50, 51, 52, STOP], "stop"),
    ],
)
def test_accepted_drafts_become_tokens_up_to_the_one_that_ends(
    bench: Bench, tokens: tuple[int, ...], kept: list[int], reason: str | None
) -> None:
    processor, request = bench.processor(), bench.add("a", limits=Limits(max_new_tokens=4))
    processor.process([result(request, None, *tokens, is_prefill=True)])
    assert (request.output, request.finish_reason) == (kept, reason)
    assert request.num_computed_tokens == len(request.token_ids) - 1
    assert bench.observer.num_tokens == len(kept)
    assert bench.pages.shared["a"] == len(request.token_ids) - 1


def test_an_abort_gives_the_pages_back_at_once_and_is_told_with_the_next_step(bench: Bench) -> None:
    processor, aborted, other = bench.processor(), bench.add("a"), bench.add("b")
    assert processor.abort(aborted)
    assert not processor.abort(aborted)
    assert bench.pages.releases == {"a": 1}
    assert processor.has_news
    late = result(aborted, None, 50)  # the device had it in hand
    assert processor.process([late, result(other, None, 51)]) == [aborted, other]
    assert (aborted.output, aborted.finish_reason) == ([], "abort")
    assert bench.told.steps == [["a", "b"]]
    assert not processor.has_news


def test_a_failed_batch_fails_its_requests_and_nothing_else(bench: Bench) -> None:
    processor, other = bench.processor(), bench.add("other")
    batch = [bench.add("a"), bench.add("b")]
    processor.abort(batch[1])
    assert processor.fail(batch, RuntimeError("out of memory")) == [batch[1], batch[0]]
    assert [request.finish_reason for request in batch] == ["error", "abort"]
    assert (other.finish_reason, list(bench.register.running)) == (None, ["other"])
    assert bench.pages.releases == {"a": 1, "b": 1}
    assert bench.pages.shared == {"a": 0, "b": 0}, "nothing of the failed step may be cached"
    assert sorted(bench.observer.ends) == ["abort", "error"]


@pytest.mark.parametrize(
    "bad",
    [
        {"error": "NaN in the logits"},
        {"token_ids": ()},
        {"token_ids": (2**32,)},  # no u32
        {"token_ids": (-1,)},
        {"start": 3},
        {"end": 0},
        {"end": 99},
    ],
)
def test_one_bad_result_costs_its_request_and_the_others_go_on(bench: Bench, bad: dict[str, object]) -> None:
    processor, sick, well = bench.processor(), bench.add("sick"), bench.add("well")
    facts: dict[str, object] = {"request": sick, "start": 0, "end": 10, "token_ids": (50,), "is_prefill": True, **bad}
    assert processor.process([WorkResult(**facts), result(well, None, 51)]) == [sick, well]  # type: ignore[arg-type]
    assert (sick.finish_reason, sick.output, bench.pages.shared["sick"]) == ("error", [], 0)
    assert (well.finish_reason, well.output) == (None, [51])
    assert (bench.pages.releases, processor.failures.total) == ({"sick": 1}, 1)


def test_a_cache_that_refuses_one_request_fails_that_one(bench: Bench) -> None:
    processor, sick, well = bench.processor(), bench.add("sick"), bench.add("well")
    bench.pages.broken_rids.add("sick")
    results = [result(request, 4, is_prefill=True) for request in (sick, well)]
    assert processor.process(results) == [sick]
    assert (sick.finish_reason, well.finish_reason, well.num_computed_tokens) == ("error", None, 4)
    assert list(bench.register.running) == ["well"]


def test_a_broken_observer_costs_nobody_a_token(bench: Bench) -> None:
    bench.observer.broken = True
    processor, request = bench.processor(), bench.add("a", limits=Limits(max_new_tokens=1))
    processor.process([result(request, None, 50)])
    assert (request.output, request.finish_reason, processor.failures.total) == ([50], "length", 2)


def test_a_request_that_the_register_does_not_know_still_gives_its_pages_back(bench: Bench) -> None:
    processor, request = bench.processor(), bench.add("a")
    bench.register.running.clear()
    processor.abort(request)
    assert bench.pages.releases == {"a": 1}
    assert processor.failures.total == 1


def test_a_step_is_told_once_even_when_there_is_nothing_to_tell(bench: Bench) -> None:
    bench.processor().process()
    assert bench.told.steps == [[]]


@dataclass
class Receiver:
    """An ``OutputSink`` that is behind when a test says so."""

    is_behind: bool = False
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)

    def is_ready(self) -> bool:
        return not self.is_behind

    def send(self, batch: OutputBatch) -> bool:
        for delta in batch.deltas:
            output = self.outputs.setdefault(delta.rid, [])
            assert delta.start == len(output), "repeated or lost"
            output.extend(delta.output.token_ids)
            if delta.finish_reason is not None:
                assert delta.rid not in self.ends
                self.ends[delta.rid] = delta.finish_reason
        return True

    def close(self) -> None:
        """Nothing is held."""


class SchedulerMachine(RuleBasedStateMachine):
    """Requests are chunked, retracted, aborted and failed at will; a model says what each must have generated."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.receiver = Receiver()
        self.processor: BatchResultProcessor[Req] = BatchResultProcessor(
            kv=self.bench.pages,
            requests=self.bench.register,
            output=OutputStreamer(sink=self.receiver),
            observer=self.bench.observer,
            eos_token_ids=frozenset({EOS}),
        )
        self.all: list[Req] = []
        self.expected: dict[str, list[int]] = {}

    @rule(prompt=st.integers(1, 12), max_new=st.integers(1, 9), interval=st.integers(0, 3), ignore=st.booleans())
    def submit(self, prompt: int, max_new: int, interval: int, ignore: bool) -> None:
        rid = str(len(self.all))
        self.all.append(self.bench.add(rid, prompt, limits=Limits(max_new, (STOP,), ignore), stream_interval=interval))
        self.expected[rid] = []

    def running(self) -> list[Req]:
        return list(self.bench.register.running.values())

    @precondition(lambda self: self.bench.register.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        results = []
        for request in self.running():
            num_missing = len(request.token_ids) - request.num_computed_tokens
            num_computed = data.draw(st.integers(0, num_missing))
            if num_computed == 0:
                continue  # not in this batch
            end = request.num_computed_tokens + num_computed
            tokens = tuple(data.draw(st.lists(st.sampled_from([EOS, STOP, 60, 61, 62]), min_size=1, max_size=3)))
            is_bad = data.draw(st.integers(0, 9)) == 0
            results.append(
                WorkResult(
                    request, request.num_computed_tokens, end, tokens, num_missing > 1, "broken" if is_bad else ""
                )
            )
            if end == len(request.token_ids) and not is_bad:
                self._expect(request, tokens)
        self.processor.process(results)

    def _expect(self, request: Req, tokens: tuple[int, ...]) -> None:
        output = self.expected[request.rid]
        for token in tokens:
            output.append(token)
            is_stop = token == STOP or (token == EOS and not request.limits.ignore_eos)
            if is_stop or len(output) == request.limits.max_new_tokens:
                return

    @precondition(lambda self: self.bench.register.running)
    @rule(data=st.data(), num_cached=st.integers(0, 5))
    def retract(self, data: st.DataObject, num_cached: int) -> None:
        request = data.draw(st.sampled_from(self.running()))
        request.num_computed_tokens = min(num_cached, len(request.token_ids) - 1)

    @precondition(lambda self: self.bench.register.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.processor.abort(data.draw(st.sampled_from(self.running())))

    @precondition(lambda self: self.bench.register.running)
    @rule()
    def fail(self) -> None:
        self.processor.fail(self.running()[::2], RuntimeError("device lost"))

    @rule(is_behind=st.booleans())
    def receive(self, is_behind: bool) -> None:
        self.receiver.is_behind = is_behind

    @invariant()
    def tokens_are_those_of_the_device(self) -> None:
        for request in self.all:
            assert request.output == self.expected[request.rid]
            assert request.num_computed_tokens < len(request.token_ids)
            ended = request.finish_reason is not None
            assert self.bench.pages.releases.get(request.rid, 0) == ended
            assert (request.rid in self.bench.register.running) == (not ended)
        assert self.bench.observer.num_tokens == sum(map(len, self.expected.values()))

    def teardown(self) -> None:
        for request in self.running():
            self.processor.abort(request)
        self.receiver.is_behind = False
        self.processor.process()
        assert self.receiver.outputs == self.expected
        assert self.receiver.ends == {request.rid: request.finish_reason for request in self.all}


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(deadline=None, max_examples=150, stateful_step_count=30)
