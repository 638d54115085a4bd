"""A TokenCountedQueue is a list with the exact sums of its requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kit.searches import num_examples

from scheduler_components.load import TokenCountedQueue
from scheduler_components.load.token_counted_queue import count_request_tokens
from scheduler_components.testing.fakes import FakeRequest as Req

tokens = st.integers(min_value=0, max_value=2**20)


requests = st.builds(Req, tokens, tokens)


class QueueMachine(RuleBasedStateMachine):
    """Drives the queue and a plain list of (request, what it counted when it entered)."""

    @initialize(first=st.lists(requests, max_size=4))
    def start(self, first: list[Req]) -> None:
        self.queue = TokenCountedQueue(first)
        self.model = [(request, count_request_tokens(request)) for request in first]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.model) - 1))

    @rule(request=requests)
    def append(self, request: Req) -> None:
        self.queue.append(request)
        self.model.append((request, count_request_tokens(request)))

    @rule(request=requests)
    def appendleft(self, request: Req) -> None:
        self.queue.appendleft(request)
        self.model.insert(0, (request, count_request_tokens(request)))

    @precondition(lambda self: self.model)
    @rule()
    def popleft(self) -> None:
        assert self.queue.popleft() is self.model.pop(0)[0]

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        assert self.queue.pop() is self.model.pop()[0]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request, _ = self.model.pop(self.pick(data))
        self.queue.remove(request)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), input_tokens=tokens, cached_tokens=tokens)
    def change_a_queued_request(self, data: st.DataObject, input_tokens: int, cached_tokens: int) -> None:
        request, _ = self.model[self.pick(data)]
        request.num_input_tokens, request.num_cached_tokens = input_tokens, cached_tokens

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def recount(self, data: st.DataObject) -> None:
        place = self.pick(data)
        request, _ = self.model[place]
        self.queue.recount(request)
        self.model[place] = (request, count_request_tokens(request))

    @rule(reverse=st.booleans())
    def sort(self, reverse: bool) -> None:
        self.queue.sort(key=lambda request: request.num_input_tokens, reverse=reverse)
        self.model.sort(key=lambda entry: entry[0].num_input_tokens, reverse=reverse)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), left=st.booleans())
    def enter_twice(self, data: st.DataObject, left: bool) -> None:
        request, _ = self.model[self.pick(data)]
        with pytest.raises(ValueError, match="already queued"):
            (self.queue.appendleft if left else self.queue.append)(request)

    @rule(request=requests)
    def leave_without_entering(self, request: Req) -> None:
        for refuse in (self.queue.remove, self.queue.recount, self.queue.index):
            with pytest.raises(ValueError, match="not queued"):
                refuse(request)
        assert request not in self.queue
        assert self.queue.count(request) == 0

    @rule()
    def clear(self) -> None:
        self.queue.clear()
        self.model.clear()

    @invariant()
    def same_requests_in_the_same_order(self) -> None:
        expected = [id(request) for request, _ in self.model]
        assert len(self.queue) == len(expected)
        assert [id(request) for request in self.queue] == expected
        assert [id(request) for request in reversed(self.queue)] == expected[::-1]
        assert [id(self.queue[place]) for place in range(len(expected))] == expected
        assert [id(self.queue[place - len(expected)]) for place in range(len(expected))] == expected
        assert [id(request) for request in self.queue[1:-1]] == expected[1:-1]
        for place, (request, _) in enumerate(self.model):
            assert request in self.queue
            assert self.queue.index(request) == place
            assert self.queue.count(request) == 1

    @invariant()
    def counts_are_what_entered(self) -> None:
        assert self.queue.pending_tokens == sum(counts[0] for _, counts in self.model)
        assert self.queue.uncached_tokens == sum(counts[1] for _, counts in self.model)
        assert self.queue.totals() == (len(self.model), self.queue.pending_tokens, self.queue.uncached_tokens)


QueueMachine.TestCase.settings = settings(max_examples=num_examples(2), stateful_step_count=25, deadline=None)
TestQueueMachine = pytest.mark.soak(QueueMachine.TestCase)


def test_an_abort_after_a_change_leaves_no_tokens_counted() -> None:
    request = Req(1000, 0)
    queue = TokenCountedQueue([request])
    request.num_input_tokens, request.num_cached_tokens = 1500, 800
    queue.remove(request)
    assert (queue.pending_tokens, queue.uncached_tokens, len(queue)) == (0, 0, 0)


def test_an_empty_queue_refuses_to_pop() -> None:
    queue = TokenCountedQueue[Req]()
    for leave in (queue.pop, queue.popleft):
        with pytest.raises(IndexError):
            leave()
    with pytest.raises(IndexError):
        queue[0]


def test_a_request_refused_while_entering_leaves_the_queue_as_it_was() -> None:
    class Broken:
        num_input_tokens = 5

        @property
        def num_cached_tokens(self) -> int:
            raise RuntimeError("no match yet")

    queue = TokenCountedQueue([Req(7)])
    with pytest.raises(RuntimeError):
        queue.append(Broken())
    assert (len(queue), queue.pending_tokens) == (1, 7)


def test_repr_is_a_summary() -> None:
    assert repr(TokenCountedQueue([Req(7, 3)])) == "<TokenCountedQueue: 1 requests, 7 pending tokens, 4 uncached>"


@given(st.integers(), st.integers())
@settings(deadline=None)
def test_counts_stay_in_range_for_any_request(input_tokens: int, cached_tokens: int) -> None:
    pending_tokens, uncached_tokens = count_request_tokens(Req(input_tokens, cached_tokens))
    assert 0 <= uncached_tokens <= pending_tokens == max(0, input_tokens)
    if 0 <= cached_tokens <= input_tokens:
        assert uncached_tokens == input_tokens - cached_tokens
    assert TokenCountedQueue([Req(input_tokens, cached_tokens)]).totals() == (1, pending_tokens, uncached_tokens)


@given(st.integers(0, 50), st.integers(-5, 60), st.integers(0, 60), st.integers(0, 60))
def test_tokens_from_storage_are_not_counted_as_uncached_and_none_counts_twice(
    pending: int, cached: int, first: int, end: int
) -> None:
    request, other = Req(pending, cached), Req(7, 2)
    queue = TokenCountedQueue([request, other])
    queue.recount(request, (first, end))
    covered = set(range(max(0, cached))) | set(range(first, end))
    assert queue.totals() == (2, pending + 7, len(set(range(pending)) - covered) + 5)
    queue.recount(request)
    assert queue.totals() == TokenCountedQueue([request, other]).totals()
    queue.recount(request, (first, end))
    queue.remove(request)
    assert queue.totals() == (1, 7, 5)
