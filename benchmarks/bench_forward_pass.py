"""Measure what a message of forward-pass metrics costs a step: counting, encoding, and sending to a planner.

The figures are the processor time of this thread. The step calls ``publish_forward_pass`` without ``idle()``, so it
pays for the whole message. Counting goes over the batch and over the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from benchmarks.measure import Measurement, Scale, measure_interleaved
from scheduler_components import ParallelState
from scheduler_components.forward_pass_publisher import ForwardPassPublisher, count_queued, count_scheduled
from scheduler_components.metrics import open_zmq_forward_pass_reader, open_zmq_forward_pass_sink
from scheduler_components.metrics.forward_pass_metrics import encode_forward_pass
from scheduler_components.values import FORWARD_PASS_VERSION, ForwardPassMetrics

NAME = "forward_pass"
_CASES = ((16, 0), (64, 0), (256, 0), (64, 1_000))
_PROMPT_TOKENS = 1_000


@dataclass(slots=True)
class RunningRequest:
    """A request in the batch."""

    num_prompt_tokens: int = _PROMPT_TOKENS


@dataclass(slots=True)
class Decode:
    """The one position of a request that a pass computes."""

    request: RunningRequest
    end: int
    start: int = 0
    is_prefill: bool = False


@dataclass(slots=True)
class WaitingRequest:
    """A request in the queue."""

    num_input_tokens: int = _PROMPT_TOKENS
    num_output_tokens: int = 0


@dataclass(slots=True)
class Queue:
    """The queue of a scheduler."""

    waiting: Sequence[WaitingRequest] = field(default_factory=list)


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # no peers: theirs want their engines
    """Time a message of each size of the batch and of the queue."""
    return [_row(num_running, num_waiting, scale) for num_running, num_waiting in _CASES]


def _row(num_running: int, num_waiting: int, scale: Scale) -> Measurement:
    parts = [Decode(RunningRequest(), _PROMPT_TOKENS + number) for number in range(num_running)]
    queue = Queue([WaitingRequest() for _ in range(num_waiting)])
    scheduled, queued = count_scheduled(parts), count_queued(queue.waiting)
    metrics = ForwardPassMetrics(FORWARD_PASS_VERSION, "worker", 0, 1, 0.02, scheduled, queued)
    with ExitStack() as stack:
        sink = open_zmq_forward_pass_sink("tcp://127.0.0.1:0", ParallelState())
        publisher = ForwardPassPublisher(parallel=ParallelState(), queues=queue, sink=sink, worker_id="worker")
        stack.callback(publisher.close)
        reader = stack.enter_context(closing(open_zmq_forward_pass_reader([sink.endpoint])))  # type: ignore[attr-defined]
        while not reader.receive(0.01):
            sink.send(metrics)
        calls: dict[str, Callable[[], object]] = {
            "ours": lambda: publisher.publish_forward_pass(parts, 0.02),
            "limit": lambda: sink.send(metrics),
            "counting": lambda: (count_scheduled(parts), count_queued(queue.waiting)),
            "encoding": lambda: encode_forward_pass(metrics),
        }
        found = measure_interleaved(calls, turns=scale.turns, number=scale.of(2_000), clock_ns=time.thread_time_ns)
    us = {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}
    what = f"a message of a pass, {num_running} decodes, {num_waiting:,} waiting"
    return Measurement(NAME, what, "us", us.pop("ours"), us)
