"""Requests in flight are in one queue each, running ones in order of arrival."""

from __future__ import annotations

from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.values import FinishReason
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.scheduler.request import EngineRequest


def test_requests_keep_their_order_and_prefill_tokens_are_counted_while_they_run() -> None:
    queues = RequestQueues(max_running_requests=4)
    first, second = (EngineRequest(rid, tuple(range(5)), SamplingLimits(max_new_tokens=2)) for rid in "ab")
    for request in (first, second):
        queues.add(request)
    for request in (first, second):
        request.prefill_end = 5
        queues.admit(request)
    assert ([*queues], queues.num_chunked_tokens_left) == ([first, second], 10)
    first.num_computed_tokens = 3
    queues.update_prefill_tokens(first)
    assert queues.num_chunked_tokens_left == 7
    queues.requeue(second)
    assert ([*queues.running], [*queues.waiting], queues.num_chunked_tokens_left) == ([first], [second], 2)
    queues.finish(first, FinishReason.LENGTH)
    queues.finish(second, FinishReason.ABORT)
    assert (len(queues), queues.num_chunked_tokens_left) == (0, 0)
    assert ["a" in queues, "b" in queues] == [False, True]
    queues.on_aborts_streamed()
    assert "b" not in queues


def test_running_requests_are_in_order_of_arrival_whatever_the_order_of_admission() -> None:
    queues = RequestQueues[EngineRequest](max_running_requests=4)
    requests = [EngineRequest(rid, (1,)) for rid in "abcd"]
    for request in requests:
        queues.add(request)
    for index in (2, 0, 3, 1):
        queues.admit(requests[index])
    assert queues.running == requests
