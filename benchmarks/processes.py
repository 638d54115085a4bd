"""Start the processes of a benchmark: a scheduler loop, its subscriber and its replay client."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

__all__ = ["Delivery", "LoopResult", "LoopSpec", "Replays", "free_endpoints", "run_loop", "start_child"]

_ROOT = Path(__file__).parent.parent


class LoopSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a loop process.

    Attributes:
        subject: a name of ``publishers.open_benchmarked_publisher``.
        shape: a name of ``workloads.SHAPES``.
        steps: measured steps, one batch per step.
        loop: what a step does besides its work: ``"waits"`` 1 ms for its device, where it calls ``idle()``;
            ``"releases the GIL"`` for 0.2 ms; or ``"holds the GIL"`` throughout.
        works: whether the loop does other work. Without other work it publishes prepared batches as fast as it can.
        subscribes: start a subscriber process.
        kept: batches published before the loop, for replays or to fill the replay buffer.
        buffer_steps: batches that the publisher keeps for replays.
        pool_steps: steps after which stored blocks are removed, as in a full pool; None for never, so that the pool
            and the publisher's snapshot grow.
        replay: the work of a replay client: ``"none"``, ``"prompt"``, ``"slow"``, ``"loop"`` or ``"last"``.
        num_clients: replay clients, one process per client.
    """

    subject: str
    shape: str
    steps: int
    loop: Literal["waits", "releases the GIL", "holds the GIL"] = "waits"
    works: bool = True
    subscribes: bool = True
    kept: int = 0
    buffer_steps: int = 10_000
    pool_steps: int | None = None
    replay: str = "none"
    num_clients: int = 1


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The measured batches as the subscriber process received them.

    Attributes:
        delays_s: seconds from the batch's timestamp to its arrival, in order of arrival.
        times_s: times of arrival on the wall clock.
    """

    delays_s: list[float]
    times_s: list[float]


class Replays(msgspec.Struct, frozen=True, kw_only=True):
    """The answers that the replay clients received, in order.

    Attributes:
        batches: batches per answer.
        ended: whether each answer reached its end marker.
        first_s: seconds from each request to the first frame of its answer.
        whole_s: seconds from each request to the end marker, or until the client's timeout.
    """

    batches: list[int]
    ended: list[bool]
    first_s: list[float]
    whole_s: list[float]


class LoopResult(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of the loop process.

    Attributes:
        publish_us, iteration_us: microseconds per step; an iteration excludes the time of making its batch.
        begun_s, ended_s: start and end of the loop on the wall clock.
        calls_cpu_s: processor time of the loop's thread in ``publish()`` and ``idle()``.
        threads_cpu_s: processor time of all other threads, from the first step to the last.
        cpu_to_delivery_s: processor time of the process until the subscriber had everything.
    """

    publish_us: list[float]
    iteration_us: list[float]
    begun_s: float
    ended_s: float
    calls_cpu_s: float = math.nan
    threads_cpu_s: float = math.nan
    cpu_to_delivery_s: float = math.nan
    deliveries: Delivery | None = None
    replays: Replays | None = None

    @property
    def num_undelivered(self) -> float:
        """Return the number of batches that had not arrived at the end of the loop's last step."""
        if self.deliveries is None:
            return math.nan
        return len(self.publish_us) - sum(time_s <= self.ended_s for time_s in self.deliveries.times_s)


def start_child(module: str, argument: bytes, **pipes: Any) -> subprocess.Popen[bytes]:
    """Start ``python -m benchmarks.<module> argument`` with pipes for input and output."""
    return subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}", argument.decode()],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **pipes,
    )


def run_loop(spec: LoopSpec, *, timeout_s: float = 180.0) -> LoopResult:
    """Run one loop in a separate process, so that its processor time can be measured.

    Raises:
        subprocess.CalledProcessError: the loop failed; its traceback is on standard error.
    """
    with start_child("loop_process", msgspec.json.encode(spec)) as loop:
        try:
            output, _ = loop.communicate(timeout=timeout_s)
        finally:
            loop.kill()
    if loop.returncode:
        raise subprocess.CalledProcessError(loop.returncode, f"loop {spec}")
    return msgspec.msgpack.decode(output, type=LoopResult)


def free_endpoints(count: int) -> list[str]:
    """Return free TCP addresses on loopback. The peers cannot report a port that the system chose."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    endpoints = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in held]
    for each in held:
        each.close()
    return endpoints
