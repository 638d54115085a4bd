"""What is right and wrong with a worker's load gauges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

from observability.finding import Finding, Severity
from scheduler_components.kv_events.endpoint import Endpoint
from scheduler_components.load.load_view import LoadSample
from scheduler_components.load.zmq_load_reader import open_zmq_load_reader

__all__ = ["diagnose_load_gauges"]


def diagnose_load_gauges(
    gauges: Mapping[int, Endpoint], *, listen_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[Finding]:
    """Listen until every rank's gauge has said something, or time is up: a sound one does so once a second.

    Args:
        gauges: rank to address; those that cannot be connected to left out.
        listen_s: seconds to wait for all of them.
        clock: monotonic seconds.
    """
    if not gauges:
        return
    with closing(open_zmq_load_reader(map(str, gauges.values()))) as reader:
        deadline_s = clock() + listen_s
        while not gauges.keys() <= reader.view.samples.keys() and (left_s := deadline_s - clock()) > 0:
            reader.read(left_s)
        samples, num_bad = reader.view.samples, reader.bad
    for rank, endpoint in gauges.items():
        yield _judge(f"rank {rank}: load gauge {endpoint}", samples.get(rank), listen_s)
    if num_bad:
        mend = "check that the load port is not that of another stream"
        yield Finding(Severity.WARNING, f"{num_bad} messages of the load gauges are no LoadStat", mend)


def _judge(name: str, sample: LoadSample | None, listen_s: float) -> Finding:
    if sample is None:
        mend = "check that this rank's scheduler reports its load each second, and that no keys are asked for"
        return Finding(Severity.WARNING, f"{name} says nothing in {listen_s:g} s", mend)
    stat = sample.stat
    return Finding(
        Severity.OK,
        f"{name}: {stat.num_running_reqs} running, {stat.num_waiting_reqs} waiting,"
        f" {stat.num_tokens} of {stat.max_total_num_tokens} tokens",
    )
