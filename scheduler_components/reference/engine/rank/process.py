"""A scheduler process: ``python -m scheduler_components.reference.engine.rank.process``, configured on standard input.

Started by the engine. Exits 0 when its standard input ends, 1 with one line on standard error when it cannot go on.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import zmq

from scheduler_components import ComponentError, LoadPublisher, ParallelState, open_load_publisher
from scheduler_components.agreement import ParallelGroups
from scheduler_components.dp_attn import DpBatchSync, dp_rank_groups
from scheduler_components.input_blocker import InputBlocker
from scheduler_components.internal_state import InternalState
from scheduler_components.kv_events import EventPublisher, ZmqEventPublisher, open_event_publisher
from scheduler_components.load import ZmqLoadSink
from scheduler_components.metrics import open_shm_metrics_sink
from scheduler_components.profiler_manager import NullProfiler, Profiler, ProfilerManager
from scheduler_components.quiesce import QuiesceState
from scheduler_components.rank_groups import world_rank_groups
from scheduler_components.recv_skipper import RecvSkipper
from scheduler_components.reference.engine.config import RankConfig
from scheduler_components.reference.engine.messages import MAX_QUEUED_BATCHES, RankHeartbeat, RankReady
from scheduler_components.reference.engine.rank.compute import RankCompute, open_rank_device
from scheduler_components.reference.engine.rank.control_port import make_quiesce_stepper
from scheduler_components.reference.engine.rank.frontend_sinks import (
    FrontendLoadSink,
    FrontendRefusalSink,
    FrontendStallSink,
    ZmqOutputSink,
    ZmqReportSender,
)
from scheduler_components.reference.engine.rank.heartbeat import HeartbeatSender, StopPipe
from scheduler_components.reference.engine.rank.loop import CommandDecoder, Follower, Leader, RankWorker
from scheduler_components.reference.engine.rank.rpc_handler import BatcherSettings, ProfiledDevice, RpcHandler
from scheduler_components.reference.engine.rank.zmq_sync import ZmqSyncHub, open_zmq_groups, open_zmq_sync_hub
from scheduler_components.reference.engine.scheduler.cache_tiers import CacheTiers
from scheduler_components.reference.engine.scheduler.scheduler import Scheduler, SchedulerSinks
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.thread_stack_sampler import StackSampler
from scheduler_components.thread_watchdog import open_thread_watchdog
from scheduler_components.zmq_idle_sleeper import IdleSleeper
from scheduler_components.zmq_input_relay import StopRequestedError, ZmqFollowerRelay, ZmqInputSource, ZmqLeaderRelay

__all__ = [
    "main",
    "run_rank",
]

_STDIN = 0
_AGREEMENT_TIMEOUT_S = 60.0  # eight interpreters that start at once on two busy cores
_STEPS_AHEAD = 16  # a leader waits for a follower that is further behind, as a collective would make it wait

_Context = zmq.Context[zmq.Socket[bytes]]


def main() -> int:
    """Run one rank to its end; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        run_rank(RankConfig.from_json(_read_line(_STDIN)), StopPipe(_STDIN))
    except ComponentError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201  the engine reads it
        return 1
    return 0


def run_rank(config: RankConfig, stop: StopPipe) -> None:
    """Open this rank's parts, say that it is ready, and run its loop until ``stop``.

    Raises:
        ConfigError, StartError: the rank cannot start.
        LockstepError: its state is not its leader's.
    """
    parallel = config.engine.parallel(config.rank)
    # First: who waits for a rank need not wait for its weights.
    computes = open_rank_device(config.engine, parallel, config.paths)
    with ExitStack() as opened:
        opened.callback(computes.close)
        context: _Context = zmq.Context()
        opened.callback(context.destroy, linger=0)
        reports = ZmqReportSender(socket=_connect_push(context, config.paths.reports))
        alive = RankHeartbeat(str(parallel), parallel.kv_stream_index)
        heartbeat = HeartbeatSender(alive=alive, reports=reports, stop=stop)
        events = open_event_publisher(config.engine.kv_events, parallel=parallel)
        opened.callback(events.shutdown)
        opened.enter_context(suppress(StopRequestedError))
        groups = _open_groups(config, parallel, context, heartbeat)
        opened.callback(groups.close)
        peers = _open_peers(config, parallel, context, heartbeat)
        opened.callback(peers.close)
        tiers = _open_tiers(config, parallel, groups, computes)
        if tiers is not None:
            opened.callback(tiers.close)
        metrics = open_shm_metrics_sink(Path(config.paths.directory), parallel)
        opened.callback(metrics.close)
        sinks = SchedulerSinks(events=events, metrics=metrics)
        if parallel.leads_replica:
            outputs = _connect_push(context, config.paths.outputs, high_water_mark=MAX_QUEUED_BATCHES)
            sinks.outputs = ZmqOutputSink(socket=outputs)
        profiles = ProfilerManager(profiler=_profiler(config), rank=f"rank{parallel.world_rank}")
        opened.callback(profiles.stop)
        device = ProfiledDevice(device=computes.device, profiles=profiles)
        state = QuiesceState()
        scheduler = Scheduler.compose(
            config.engine.scheduler,
            parallel,
            device,
            tiers=tiers,
            sinks=sinks,
            quiesce=state,
            dp=_dp_sync(config, parallel, peers),
        )
        opened.callback(scheduler.close)
        quiesce = make_quiesce_stepper(
            scheduler, state, groups=groups, weights=computes.weights, memory=computes.memory
        )
        internal = InternalState(
            providers=(BatcherSettings(batcher=scheduler.batcher), scheduler.batcher.budget.chunk_sizer, profiles)
        )
        control = RpcHandler(state=internal, profiles=profiles)
        executor = RankWorker(parallel=parallel, scheduler=scheduler, reports=reports, control=control, quiesce=quiesce)
        _watch(config, context, alive, scheduler, opened)
        load_publisher = open_load_publisher(
            config.engine.kv_events,
            parallel=parallel,
            load=scheduler.load,
            sinks=(FrontendLoadSink(reports=reports),),
        )
        opened.callback(load_publisher.close)
        loop = _open_loop(config, context, executor, heartbeat, load_publisher, peers)
        heartbeat.send_if_due()  # before the engine is open, so that no rank can be stopped unheard of
        reports.send(_ready(config.rank, events, load_publisher))
        loop.run()


def _profiler(config: RankConfig) -> Profiler:
    """What records this rank; the front lets nobody ask for profiles without a directory."""
    if not config.engine.profile_directory:
        return NullProfiler()
    return StackSampler(Path(config.engine.profile_directory))


def _watch(
    config: RankConfig, context: _Context, alive: RankHeartbeat, scheduler: Scheduler, opened: ExitStack
) -> None:
    """Watch this thread. Standard error is the engine's to read, so it also gets the stacks that only C can write."""
    after_s = config.engine.scheduler.integrity.stall_timeout_s(config.engine.relative_speed)
    if not after_s:
        return
    sink = FrontendStallSink(reports=ZmqReportSender(socket=_connect_push(context, config.paths.reports)), alive=alive)
    watchdog = open_thread_watchdog(
        scheduler.integrity.progress, rank=alive.rank, after_s=after_s, sink=sink, stack_dump_file=sys.stderr
    )
    opened.callback(watchdog.close)


def _open_groups(
    config: RankConfig, parallel: ParallelState, context: _Context, heartbeat: HeartbeatSender
) -> ParallelGroups:
    """Open this rank's end of the agreement of its replica, for tiers and orders."""
    return open_zmq_groups(
        context,
        rank=parallel.world_rank,
        reduce_groups=world_rank_groups(parallel)[parallel.world_rank].reduce_groups,
        address_of=config.paths.sync,
        wait_for=heartbeat.wait,
        timeout_s=_AGREEMENT_TIMEOUT_S,
    )


def _peer_hops(config: RankConfig, parallel: ParallelState) -> tuple[tuple[int, ...], ...]:
    """The ranks that this one takes every step with, none where each replica steps by itself."""
    return () if config.engine.dp_attention is None else dp_rank_groups(parallel).reduce_groups


def _open_peers(
    config: RankConfig, parallel: ParallelState, context: _Context, heartbeat: HeartbeatSender
) -> ZmqSyncHub:
    """Open this rank's sockets to its counterparts in the other replicas. They may wait for one that waits for a rank
    of its own replica, which is to be named then: so they are more patient than a replica.
    """
    return open_zmq_sync_hub(
        context,
        rank=parallel.world_rank,
        reduce_groups=_peer_hops(config, parallel),
        address_of=config.paths.dp_sync,
        wait_for=heartbeat.wait,
        timeout_s=_AGREEMENT_TIMEOUT_S * (1 + len(world_rank_groups(parallel)[parallel.world_rank].reduce_groups)),
    )


def _dp_sync(config: RankConfig, parallel: ParallelState, peers: ZmqSyncHub) -> DpBatchSync:
    """Make what lets replicas take their steps together, or one step alone."""
    if config.engine.dp_attention is None:
        return DpBatchSync()
    return DpBatchSync(
        groups=peers.parallel_groups(_peer_hops(config, parallel)),
        replica=parallel.attn_dp_rank,
        num_replicas=parallel.attn_dp_size,
        delayer=config.engine.dp_attention.delayer(),
    )


def _open_tiers(
    config: RankConfig, parallel: ParallelState, groups: ParallelGroups, computes: RankCompute
) -> CacheTiers | None:
    """Open what is behind the device; None where the scheduler's own cache is enough."""
    engine = config.engine
    if engine.hicache is None:
        return None
    # Imported here: the memory of a host tier needs numpy, which an engine without one need not have.
    from scheduler_components.reference.engine.rank.hicache_tiers import (
        make_simulated_kv_memory,
        make_torch_kv_memory,
        open_hicache_tiers,
    )

    if computes.pool is None or engine.model is None:
        kv = make_simulated_kv_memory(engine.scheduler, parallel, model=engine.model_name)
    else:
        kv = make_torch_kv_memory(computes.pool, model=engine.model.identity)
    tiers = open_hicache_tiers(kv, engine.hicache, engine.scheduler, parallel, groups=groups)
    computes.device.layer_counter = tiers.layer_counter
    return tiers


def _open_loop(
    config: RankConfig,
    context: _Context,
    executor: RankWorker,
    heartbeat: HeartbeatSender,
    load_publisher: LoadPublisher,
    peers: ZmqSyncHub,
) -> Leader | Follower:
    parallel, scheduler, paths = executor.parallel, executor.scheduler, config.paths
    skipper = RecvSkipper(recv_interval=config.engine.scheduler.recv_interval)
    if not parallel.leads_replica:
        steps = _bind_pull(context, paths.steps(parallel.world_rank))
        relay = ZmqFollowerRelay(steps=steps, wait_for=heartbeat.wait)
        intake = RequestReceiver(rank=str(parallel), reader=CommandDecoder(), relay=relay, recv_skipper=skipper)
        return Follower(executor=executor, intake=intake, heartbeat=heartbeat)
    others = config.engine.follower_ranks(parallel.kv_stream_index)
    followers = [_connect_push(context, paths.steps(rank), high_water_mark=_STEPS_AHEAD) for rank in others]
    commands = _bind_pull(context, paths.commands(parallel.kv_stream_index))
    refusals = FrontendRefusalSink(reports=executor.reports, work=scheduler.request_metrics.work)
    return Leader(
        executor=executor,
        intake=RequestReceiver(
            rank=str(parallel),
            reader=CommandDecoder(),
            source=ZmqInputSource(socket=commands),
            relay=ZmqLeaderRelay(followers=followers, wait_for=heartbeat.wait),
            blocker=InputBlocker(
                bounds=config.engine.scheduler.input_bounds,
                active_ids=scheduler.queues,
                rejections=refusals,
                stats=scheduler.request_metrics.receiver,
            ),
            recv_skipper=skipper,
        ),
        sleeper=IdleSleeper([commands, peers.inbox], [heartbeat.stop.descriptor]),
        heartbeat=heartbeat,
        load_publisher=load_publisher,
        peers=peers,
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


def _ready(rank: int, events: EventPublisher, load_publisher: LoadPublisher) -> RankReady:
    """Where this rank's event stream and load gauge really listen, where it has them."""
    load_endpoint = next((sink.endpoint for sink in load_publisher.sinks if isinstance(sink, ZmqLoadSink)), None)
    if isinstance(events, ZmqEventPublisher):
        return RankReady(rank, events.endpoint, events.replay_endpoint, load_endpoint)
    return RankReady(rank, None, load_endpoint=load_endpoint)


def _read_line(descriptor: int) -> bytes:
    """Read up to the first newline and not beyond it: no buffer may swallow what the poller waits for."""
    line = bytearray()
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
