"""A scheduler process: ``python -m scheduler_components.reference.rank_process``, its configuration on standard input.

Started by the launcher. Exits 0 when its standard input ends, 1 with one line on standard error when it cannot go on.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack

import zmq

from scheduler_components.errors import ComponentError
from scheduler_components.kv_events.publisher import EventPublisher
from scheduler_components.kv_events.registry import open_event_publisher
from scheduler_components.kv_events.zmq_publisher import ZmqEventPublisher
from scheduler_components.kv_events_publisher import NO_KV_METRICS
from scheduler_components.metrics.zmq_kv_metrics_sink import open_zmq_kv_metrics_sink
from scheduler_components.parallel_state import ParallelState
from scheduler_components.reference.device import SimulatedDevice, SimulatedModel
from scheduler_components.reference.engine_config import RankConfig
from scheduler_components.reference.messages import RankReady
from scheduler_components.reference.rank_loop import Follower, Leader, ReportSocket, StepExecutor, StopSignal
from scheduler_components.reference.scheduler import Scheduler

__all__ = ["main", "run_rank"]

_STDIN = 0
_STEPS_AHEAD = 16  # a leader waits for a follower that is further behind, as a collective would make it wait

_Context = zmq.Context[zmq.Socket[bytes]]


def main() -> int:
    """Run one rank to its end; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        run_rank(RankConfig.from_json(_read_line(_STDIN)), StopSignal(_STDIN))
    except ComponentError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201  the launcher reads it
        return 1
    return 0


def run_rank(config: RankConfig, stop: StopSignal) -> None:
    """Open this rank's sockets, say that it is ready, and run its loop until ``stop``.

    Raises:
        ConfigError, StartError: the rank cannot start.
        LockstepError: its state is not its leader's.
    """
    parallel = config.engine.parallel(config.tp_rank)
    with ExitStack() as opened:
        context: _Context = zmq.Context()
        opened.callback(context.destroy, linger=0)
        reports = ReportSocket(socket=_connect_push(context, config.sockets.reports), replica=parallel.kv_stream_index)
        event_sink = open_event_publisher(config.engine.kv_events, parallel=parallel)
        opened.callback(event_sink.shutdown)
        scheduler = _make_scheduler(config, parallel, event_sink, reports)
        opened.callback(scheduler.close)
        executor = StepExecutor(parallel=parallel, scheduler=scheduler, reports=reports)
        loop = _open_loop(config, context, executor, stop)
        reports.send(RankReady(config.tp_rank, _stream_endpoint(event_sink)))
        loop.run()


def _make_scheduler(
    config: RankConfig, parallel: ParallelState, event_sink: EventPublisher, reports: ReportSocket
) -> Scheduler:
    engine = config.engine
    kv_metrics = open_zmq_kv_metrics_sink(config.sockets.kv_metrics) if parallel.reports_metrics else NO_KV_METRICS
    return Scheduler(
        engine.scheduler,
        parallel,
        SimulatedDevice(SimulatedModel(seed=engine.seed), speed=engine.speed),
        event_sink=event_sink,
        metrics_sink=reports,
        kv_metrics_sink=kv_metrics,
    )


def _open_loop(config: RankConfig, context: _Context, executor: StepExecutor, stop: StopSignal) -> Leader | Follower:
    parallel, sockets = executor.parallel, config.sockets
    if not parallel.leads_replica:
        return Follower(executor=executor, steps=_bind_pull(context, sockets.steps(parallel.tp_rank)), stop=stop)
    first_follower = parallel.tp_rank + 1
    followers = range(first_follower, parallel.tp_rank + config.engine.ranks_per_replica)
    return Leader(
        executor=executor,
        commands=_bind_pull(context, sockets.commands(parallel.kv_stream_index)),
        followers=[_connect_push(context, sockets.steps(tp_rank), steps_ahead=_STEPS_AHEAD) for tp_rank in followers],
        stop=stop,
    )


def _bind_pull(context: _Context, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.rcvhwm = _STEPS_AHEAD
    socket.bind(address)
    return socket


def _connect_push(context: _Context, address: str, *, steps_ahead: int = 0) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.sndhwm = steps_ahead
    socket.connect(address)
    return socket


def _stream_endpoint(event_sink: EventPublisher) -> str | None:
    """Where this rank's event stream really listens; None when it has none."""
    return event_sink.endpoint if isinstance(event_sink, ZmqEventPublisher) else None


def _read_line(descriptor: int) -> bytes:
    """Read up to the first newline and not beyond it: no buffer may swallow what the poller waits for."""
    line = bytearray()
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
