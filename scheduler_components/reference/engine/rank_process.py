"""A scheduler process: ``python -m scheduler_components.reference.engine.rank_process``, configured on standard input.

Started by the launcher. Exits 0 when its standard input ends, 1 with one line on standard error when it cannot go on.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack, suppress

import zmq

from scheduler_components import (
    NO_KV_METRICS,
    ComponentError,
    EventPublisher,
    LoadPublisher,
    ParallelState,
    open_load_publisher,
)
from scheduler_components.kv_events import ZmqEventPublisher, open_event_publisher
from scheduler_components.metrics import open_zmq_kv_metrics_sink
from scheduler_components.reference.device import SimulatedDevice, SimulatedModel
from scheduler_components.reference.engine.cache_tiers import NO_TIERS, CacheTiers, PrefixCache
from scheduler_components.reference.engine.config import RankConfig
from scheduler_components.reference.engine.messages import MAX_QUEUED_BATCHES, OutputSocket, RankReady
from scheduler_components.reference.engine.rank_loop import Follower, Leader, ReportSocket, StepExecutor, StopSignal
from scheduler_components.reference.engine.scheduler import Scheduler
from scheduler_components.reference.engine.zmq_sync import StopRequested

__all__ = [
    "main",
    "run_rank",
]

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
        opened.enter_context(suppress(StopRequested))
        cache, tiers = _open_cache(config, parallel, context, stop)
        opened.callback(tiers.close)
        scheduler = _make_scheduler(config, parallel, context, event_sink, reports, cache, tiers)
        opened.callback(scheduler.close)
        reports.outputs = scheduler.output
        load_publisher = open_load_publisher(config.engine.kv_events, parallel=parallel, load=scheduler.load)
        opened.callback(load_publisher.close)
        executor = StepExecutor(parallel=parallel, scheduler=scheduler, reports=reports)
        loop = _open_loop(config, context, executor, stop, load_publisher)
        reports.send(RankReady(config.tp_rank, _stream_endpoint(event_sink)))
        loop.run()


def _open_cache(
    config: RankConfig, parallel: ParallelState, context: _Context, stop: StopSignal
) -> tuple[PrefixCache | None, CacheTiers]:
    """Open what is behind the device; None where the scheduler's own cache will do."""
    if config.engine.hicache is None:
        return None, NO_TIERS
    # Imported here: the memory of a host tier needs numpy, which an engine without one need not have.
    from scheduler_components.reference.engine.hicache_rank import open_host_tiers

    return open_host_tiers(config, config.engine.hicache, parallel, context=context, wait_for=stop.wait)


def _make_scheduler(
    config: RankConfig,
    parallel: ParallelState,
    context: _Context,
    event_sink: EventPublisher,
    reports: ReportSocket,
    cache: PrefixCache | None,
    tiers: CacheTiers,
) -> Scheduler:
    engine, outputs = config.engine, None
    if parallel.leads_replica:
        outputs = OutputSocket(
            socket=_connect_push(context, config.sockets.outputs, high_water_mark=MAX_QUEUED_BATCHES)
        )
    kv_metrics = open_zmq_kv_metrics_sink(config.sockets.kv_metrics) if parallel.reports_metrics else NO_KV_METRICS
    return Scheduler(
        engine.scheduler,
        parallel,
        SimulatedDevice(SimulatedModel(seed=engine.seed), speed=engine.speed),
        cache=cache,
        tiers=tiers,
        event_sink=event_sink,
        output_sink=outputs,
        metrics_sink=reports,
        kv_metrics_sink=kv_metrics,
    )


def _open_loop(
    config: RankConfig, context: _Context, executor: StepExecutor, stop: StopSignal, load_publisher: LoadPublisher
) -> Leader | Follower:
    parallel, sockets = executor.parallel, config.sockets
    if not parallel.leads_replica:
        return Follower(executor=executor, steps=_bind_pull(context, sockets.steps(parallel.tp_rank)), stop=stop)
    first_follower = parallel.tp_rank + 1
    followers = range(first_follower, parallel.tp_rank + config.engine.ranks_per_replica)
    return Leader(
        executor=executor,
        commands=_bind_pull(context, sockets.commands(parallel.kv_stream_index)),
        followers=[
            _connect_push(context, sockets.steps(tp_rank), high_water_mark=_STEPS_AHEAD) for tp_rank in followers
        ],
        stop=stop,
        load_publisher=load_publisher,
    )


def _bind_pull(context: _Context, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.rcvhwm = _STEPS_AHEAD
    socket.bind(address)
    return socket


def _connect_push(context: _Context, address: str, *, high_water_mark: int = 0) -> zmq.Socket[bytes]:
    """Connect to who may bind later; without a high-water mark sending never waits."""
    socket = context.socket(zmq.PUSH)
    socket.sndhwm = high_water_mark
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
