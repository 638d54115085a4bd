"""PolicyQueue has the methods of vLLM's queue, and survives every policy."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_request_double import RequestDouble, make_double

from scheduler_components.engines.vllm_policy_queue import PolicyQueue
from scheduler_components.engines.vllm_request import VllmRequest, VllmRequests
from scheduler_components.scheduling.scheduling_policy import FirstComeFirstServed, PriorityPolicy
from scheduler_components.values import ScheduledChunk


def open_queue(policy: Any = None) -> PolicyQueue:
    return PolicyQueue(policy or FirstComeFirstServed(), VllmRequests(max_model_len=100), lambda: 1)


def ids(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["add", "pop", "peek", "remove", "put back", "skip"]), st.integers(0, 7)), max_size=40
    )
)
def test_with_fcfs_it_is_a_queue_in_order_of_arrival(calls: list[tuple[str, int]]) -> None:
    """vLLM's deque gives the same order, because it puts back what arrived before all that wait."""
    queue, model = open_queue(), []
    taken: list[RequestDouble] = []
    count = 0
    for call, number in calls:
        if call == "add":
            request = make_double(f"{count:03}")
            count += 1
            queue.add_request(request)
            model.append(request)
        elif call == "peek" and model:
            assert queue.peek_request() is model[0]
        elif call == "pop" and model:
            taken.append(queue.pop_request())
            assert taken[-1] is model.pop(0)
        elif call == "remove" and model:
            request = model.pop(number % len(model))
            queue.remove_requests([request, make_double("unknown")])
        elif call == "put back" and taken:
            request = taken.pop()
            queue.prepend_request(request)
            model = sorted([*model, request], key=lambda each: each.request_id)
        elif call == "skip" and len(model) > 1:  # as vLLM skips requests that are not ready
            skipped = [queue.pop_request() for _ in range(2)]
            queue.prepend_requests(reversed(skipped))
        assert (len(queue), bool(queue), ids(queue)) == (len(model), bool(model), ids(model))


def test_an_empty_queue_has_no_next_request() -> None:
    for call in (open_queue().peek_request, open_queue().pop_request):
        with pytest.raises(IndexError, match="the queue is empty"):
            call()


def test_the_order_is_the_policys() -> None:
    queue = open_queue(PriorityPolicy())
    for rid, priority in (("a", 0), ("b", 5), ("c", -5)):
        queue.add_request(make_double(rid, priority=priority))
    assert ids(queue) == ["c", "a", "b"]
    assert queue.pop_request().request_id == "c"
    queue.add_request(make_double("d", priority=-9))
    assert queue.peek_request().request_id == "d"


def test_the_order_is_read_again_in_each_step() -> None:
    class Turning(FirstComeFirstServed[VllmRequest]):
        def order(self, step: int) -> Iterator[VllmRequest]:
            waiting = list(super().order(step))
            return iter(waiting if step % 2 else waiting[::-1])

    step = 1
    queue = PolicyQueue(Turning(), VllmRequests(max_model_len=100), lambda: step)
    for rid in "abc":
        queue.add_request(make_double(rid))
    assert queue.peek_request().request_id == "a"
    step = 2
    assert queue.peek_request().request_id == "c"


class Broken(FirstComeFirstServed[VllmRequest]):
    """Fails in one way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def add(self, request: VllmRequest, step: int) -> None:
        if self.way == "add" and request.rid == "b":
            raise ValueError("no key")
        super().add(request, step)

    def discard(self, request: VllmRequest) -> None:
        super().discard(request)
        if self.way == "discard":
            raise ValueError("unknown")

    def order(self, step: int) -> Iterator[VllmRequest]:
        waiting = list(super().order(step))[::-1]
        if self.way == "none":
            return
        yield waiting[0]
        if self.way == "twice":
            yield waiting[0]
        if self.way == "stranger":
            yield VllmRequests(max_model_len=100).of(make_double("zz"))
        if self.way == "nonsense":
            yield 7  # type: ignore[misc]
        if self.way == "raises":
            raise ZeroDivisionError("aging")
        if self.way != "one":
            yield from waiting[1:]

    def on_scheduled(self, chunks: Sequence[ScheduledChunk[VllmRequest]]) -> None:
        if self.way == "on_scheduled":
            raise KeyError("tenant")


@pytest.mark.parametrize(
    ("way", "problem"),
    [
        ("add", "add() raised ValueError('no key')"),
        ("discard", "discard() raised"),
        ("none", "order() left out 3 waiting requests"),
        ("one", "order() left out 2 waiting requests"),
        ("twice", "was yielded before or does not wait"),
        ("stranger", "was yielded before or does not wait"),
        ("nonsense", "order() raised AttributeError"),
        ("raises", "order() raised ZeroDivisionError('aging')"),
        ("on_scheduled", "on_scheduled() raised KeyError('tenant')"),
    ],
)
def test_a_broken_policy_is_replaced_once_and_loses_no_request(
    way: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = open_queue(Broken(way))
    with caplog.at_level(logging.ERROR):
        for rid in "abc":
            queue.add_request(make_double(rid))
        if way == "on_scheduled":
            queue.on_scheduled([])
        served = [queue.pop_request().request_id for _ in range(3)]
    assert sorted(served) == ["a", "b", "c"]
    assert queue.num_replaced_policies == 1
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"scheduling policy Broken: {problem}" if "()" in problem else "scheduling policy Broken: ")
    assert problem in line
    assert line.endswith("requests are served first come, first served from now on")
    queue.add_request(make_double("d"))
    queue.add_request(make_double("e"))
    assert ids(queue) == ["d", "e"]


def test_an_iteration_names_each_request_once_whatever_the_policy_yields() -> None:
    queue = open_queue(Broken("twice"))
    for rid in "abc":
        queue.add_request(make_double(rid))
    assert sorted(ids(queue)) == ["a", "b", "c"]
    assert queue.num_replaced_policies == 1


def test_a_request_that_is_taken_is_in_prefill_up_to_its_last_token() -> None:
    requests = VllmRequests(max_model_len=100)
    queue = PolicyQueue(FirstComeFirstServed(), requests, lambda: 1)
    theirs = make_double("a", [1, 2, 3])
    queue.add_request(theirs)
    view = requests.of(queue.pop_request())
    assert (view.prefill_end, list(view.token_ids)) == (3, [1, 2, 3])
    theirs._all_token_ids[1:] = [8, 9, 7]  # the next input of a streaming session
    queue.add_request(theirs)
    assert list(view.token_ids) == [1, 8, 9, 7]


def test_the_order_is_not_read_on_after_a_removal() -> None:
    """A policy may rely on it: while its order is read, only the request just yielded is discarded."""

    class Strict(FirstComeFirstServed[VllmRequest]):
        num_others = 0

        def discard(self, request: VllmRequest) -> None:
            super().discard(request)
            self.num_others += 1

        def order(self, step: int) -> Iterator[VllmRequest]:
            for view in list(super().order(step)):
                before = self.num_others
                yield view
                assert self.num_others <= before + 1

    queue = open_queue(Strict())
    theirs = [make_double(rid) for rid in "abcd"]
    for each in theirs:
        queue.add_request(each)
    assert queue.peek_request() is theirs[0]
    queue.remove_requests(theirs[1:3])
    assert [queue.pop_request() for _ in range(2)] == [theirs[0], theirs[3]]
    assert queue.num_replaced_policies == 0


@pytest.mark.skipif(find_spec("vllm") is None, reason="`make engines` makes an environment with vllm")
def test_it_has_every_method_of_vllms_queue() -> None:
    from vllm.v1.core.sched.request_queue import RequestQueue

    assert RequestQueue.__abstractmethods__ <= set(dir(PolicyQueue))
