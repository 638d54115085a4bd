"""Whatever a scheduler goes through, each client has read exactly the device's tokens and one end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from kit.searches import num_examples

from scheduler_components import OutputStreamer, RequestResult
from scheduler_components.values import OutputBatch

EOS, STOP = 1, 2  # what ends a request of the bench


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

    def __init__(self, bench: Any) -> None:
        super().__init__()
        self.bench = bench
        self.receiver = Receiver()
        self.processor = bench.processor(OutputStreamer(sink=self.receiver))
        self.all: list[Any] = []
        self.expected: dict[str, list[int]] = {}

    @rule(prompt=st.integers(1, 12), max_new=st.integers(1, 9), interval=st.integers(0, 3), ignore=st.booleans())
    def submit(self, prompt: int, max_new: int, interval: int, ignore: bool) -> None:
        rid = str(len(self.all))
        self.all.append(self.bench.add(rid, prompt, max_new=max_new, ignore_eos=ignore, stream_interval=interval))
        self.expected[rid] = []

    def running(self) -> list[Any]:
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
                RequestResult(
                    request, request.num_computed_tokens, end, tokens, num_missing > 1, "broken" if is_bad else ""
                )
            )
            if end == len(request.token_ids) and not is_bad:
                self._expect(request, tokens)
        self.processor.process(results)

    def _expect(self, request: Any, tokens: tuple[int, ...]) -> None:
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


@pytest.mark.soak
def test_each_client_reads_what_the_device_gave(make_bench: Callable[[], Any]) -> None:
    run_state_machine_as_test(
        lambda: SchedulerMachine(make_bench()),  # type: ignore[arg-type]  # hypothesis takes what makes one
        settings=settings(deadline=None, max_examples=num_examples(2), stateful_step_count=30),
    )
