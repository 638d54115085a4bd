"""An id stays in use until its abort is streamed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_components import ConfigError
from scheduler_components.reference.device.sampling import SamplingLimits
from scheduler_components.reference.engine.scheduler.queues import RequestQueues
from scheduler_components.reference.engine.scheduler.request import Request
from scheduler_components.values import FinishReason


def test_an_id_is_in_use_until_its_abort_is_streamed(make_bench: Callable) -> None:
    bench = make_bench()
    bench.submit("r", range(5))
    bench.scheduler.abort("r")
    with pytest.raises(ConfigError, match="in flight"):
        bench.submit("r", range(5))
    bench.drain()
    bench.submit("r", range(5))


def test_requests_keep_their_order_and_prefill_tokens_are_counted_while_they_run() -> None:
    queues = RequestQueues(max_running_requests=4)
    first, second = (Request(rid, tuple(range(5)), SamplingLimits(max_new_tokens=2)) for rid in "ab")
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
