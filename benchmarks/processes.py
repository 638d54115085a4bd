"""Starting a benchmark's processes: a scheduler loop, its subscriber and its replay client, each a real process."""

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
    """What a loop process does.

    Attributes:
        subject: ``subjects.open_benchmarked_publisher``'s name.
        shape: a name of ``workloads.SHAPES``.
        steps: measured steps, one batch each.
        loop: what a step does besides its work: ``"waits"`` 1 ms for its device, where it calls ``idle()``; ``"lets
            go"`` of the GIL for 0.2 ms; ``"never lets go"`` of it.
        works: the loop does something besides publishing; without it, it publishes as fast as it can, and all its
            batches were made before.
        subscribes: start a subscriber process.
        kept: batches published before the loop, for replays, or to fill the window.
        buffer_steps: batches that the publisher keeps for replays.
        pool_steps: what a step stores is removed so many steps later, as in a pool that is full; None for never, so
            that the pool and the publisher's base grow.
        replay: what a replay client does: ``"none"``, ``"prompt"``, ``"slow"``, ``"loop"`` or ``"last"``.
        num_clients: replay clients, each a process.
    """

    subject: str
    shape: str
    steps: int
    loop: Literal["waits", "lets go", "never lets go"] = "waits"
    works: bool = True
    subscribes: bool = True
    kept: int = 0
    buffer_steps: int = 10_000
    pool_steps: int | None = None
    replay: str = "none"
    num_clients: int = 1


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """What the subscriber process saw of the measured batches.

    Attributes:
        delays_s: from the batch's time stamp to its arrival, in order of arrival.
        times_s: of arrival, on the wall clock.
    """

    delays_s: list[float]
    times_s: list[float]


class Replays(msgspec.Struct, frozen=True, kw_only=True):
    """What the replay clients got, one after the other.

    Attributes:
        batches: in each answer.
        ended: whether each answer came to its end marker.
        first_s: from each question to the first frame of its answer.
        whole_s: from each question to the end marker, or until the client gave up.
    """

    batches: list[int]
    ended: list[bool]
    first_s: list[float]
    whole_s: list[float]


class LoopResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the loop process measured.

    Attributes:
        publish_us, iteration_us: of each step; an iteration leaves out what making its batch took.
        begun_s, ended_s: of the loop, on the wall clock.
        calls_cpu_s: the processor's time that the loop's own thread spent in ``publish()`` and ``idle()``.
        threads_cpu_s: that of all other threads of its process, from the first step to the last.
        cpu_to_delivery_s: of the whole process, until the subscriber had everything.
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
        """Batches that had not arrived when the loop's last step was done."""
        if self.deliveries is None:
            return math.nan
        return len(self.publish_us) - sum(time_s <= self.ended_s for time_s in self.deliveries.times_s)


def start_child(module: str, argument: bytes, **pipes: Any) -> subprocess.Popen[bytes]:
    """Start ``python -m benchmarks.<module> argument`` with its input and output on pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}", argument.decode()],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **pipes,
    )


def run_loop(spec: LoopSpec, *, timeout_s: float = 180.0) -> LoopResult:
    """Run one loop in a process of its own, so that its CPU is its own too.

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
    """TCP addresses on loopback that are free now: the peers cannot say which port the system chose for them."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    endpoints = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in held]
    for each in held:
        each.close()
    return endpoints
