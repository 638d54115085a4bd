"""The main program of a rank process: ``python -m scheduler_engine.engine.rank.process``.

The engine starts it and writes its configuration to standard input. It exits with 0 when standard input ends. After an
error it writes one line to standard error and exits with 1.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path

import zmq

from scheduler_components import ComponentError, LoadPublisher, ParallelState, open_load_publisher
from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.agreement.file_divergence_sink import FileDivergenceSink
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.checks.thread_stack_sampler import StackSampler
from scheduler_components.checks.thread_watchdog import open_thread_watchdog
from scheduler_components.input_blocker import InputBlocker
from scheduler_components.internal_state import InternalState
from scheduler_components.kv_events import EventPublisher, ZmqEventPublisher, open_event_publisher
from scheduler_components.metrics import ZmqReportSink, open_shm_metrics_sink, open_zmq_forward_pass_sink
from scheduler_components.ports import DecisionSink, NullDecisionLog, ReportSink
from scheduler_components.profiler_manager import NullProfiler, Profiler, ProfilerManager
from scheduler_components.quiesce import QuiesceState
from scheduler_components.receiving.recv_skipper import RecvSkipper
from scheduler_components.receiving.zmq_input_relay import (
    IdleSleeper,
    StopRequestedError,
    ZmqFollowerRelay,
    ZmqInputSource,
    ZmqLeaderRelay,
)
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.scheduling.composition import SchedulerSinks
from scheduler_components.scheduling.dp_attn import DpBatchSync, dp_rank_groups
from scheduler_components.values import ForwardPassMetrics
from scheduler_components.waiting.grammar_queue import GrammarQueue
from scheduler_components.waiting.lora_queue import LoraQueue
from scheduler_components.waiting.thread_adapter_loader import open_thread_adapter_loader
from scheduler_engine.device.device import RankCompute
from scheduler_engine.engine.config import RankConfig
from scheduler_engine.engine.log_output import configure_logging
from scheduler_engine.engine.messages import MAX_QUEUED_BATCHES, RankHeartbeat, RankReady
from scheduler_engine.engine.rank.compute import open_rank_device
from scheduler_engine.engine.rank.frontend_sinks import (
    FrontendLoadSink,
    FrontendRefusalSink,
    ZmqOutputSink,
    ZmqReportSender,
    report_stalls_to,
)
from scheduler_engine.engine.rank.grammar import open_grammar_queue
from scheduler_engine.engine.rank.heartbeat import HeartbeatSender, StopPipe
from scheduler_engine.engine.rank.loop import CommandDecoder, Follower, Leader, RankWorker
from scheduler_engine.engine.rank.quiescable_scheduler import make_quiesce_stepper
from scheduler_engine.engine.rank.rpc_handler import ProfiledDevice, RpcHandler
from scheduler_engine.engine.rank.zmq_sync import ZmqSyncHub, open_zmq_sync_hub
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler
from scheduler_engine.engine.zmq_sockets import bind_pull, connect_push

_STDIN = 0
_SYNC_TIMEOUT_S = 60.0  # eight interpreters that start together on two busy cores
_MAX_STEPS_AHEAD = 16  # a leader blocks on a follower that is further behind, as in a collective

_Context = zmq.Context[zmq.Socket[bytes]]


def main() -> int:
    """Run one rank and return the exit code."""
    try:
        config = RankConfig.from_json(_read_line(_STDIN))
        configure_logging(config.engine.logs, rank=config.rank)
        run_rank(config, StopPipe(_STDIN))
    except ComponentError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201  the engine reads it
        return 1
    return 0


def run_rank(config: RankConfig, stop: StopPipe) -> None:
    """Open the parts of a rank, report that it is ready, and run its loop until ``stop``.

    Raises:
        ConfigError, StartError: the rank cannot start.
        LockstepError: the input of the rank differs from its leader's, or the ranks have decided differently.
    """
    parallel = config.engine.parallel(config.rank)
    with ExitStack() as opened:
        context: _Context = zmq.Context()
        opened.callback(context.destroy, linger=0)
        reports = ZmqReportSender(socket=connect_push(context, config.paths.reports))
        alive = RankHeartbeat(str(parallel), parallel.kv_stream_index)
        heartbeat = HeartbeatSender(alive=alive, reports=reports, stop=stop)
        # Load the model first: opening the groups below waits for the other ranks, with a short timeout.
        compute = open_rank_device(config.engine, parallel, config.paths, on_wait=heartbeat.keep_alive)
        opened.callback(compute.close)
        events = open_event_publisher(config.engine.kv_events, parallel=parallel)
        opened.callback(events.shutdown)
        opened.enter_context(suppress(StopRequestedError))
        groups = _open_groups(config, parallel, context, heartbeat, opened)
        peers = _open_peers(config, parallel, context, heartbeat)
        opened.callback(peers.close)
        tiers = _open_tiers(config, parallel, groups, compute)
        if tiers is not None:
            opened.callback(tiers.close)
        sinks = _open_sinks(config, parallel, context, events, opened)
        profiles = ProfilerManager(profiler=_profiler(config), rank=f"rank{parallel.world_rank}")
        opened.callback(profiles.stop)
        device = ProfiledDevice(device=compute.device, profiles=profiles)
        state, decisions = QuiesceState(), _decision_log(config, groups)
        scheduler = Scheduler.compose(
            config.engine.scheduler,
            parallel,
            device,
            tiers=tiers,
            sinks=sinks,
            quiesce=state,
            dp=_dp_sync(config, parallel, peers),
            lora=_open_lora(config, compute, decisions, opened),
            groups=groups,
            rooms=_open_grammars(config, decisions, opened),
            decisions=decisions,
        )
        opened.callback(scheduler.close)
        opened.callback(scheduler.kv_events.publish_all_cleared)
        quiesce = make_quiesce_stepper(scheduler, state, groups=groups, weights=compute.weights, memory=compute.memory)
        internal = InternalState(providers=(scheduler.settings, scheduler.batcher.conditions.chunk_sizer, profiles))
        rpc = RpcHandler(state=internal, profiles=profiles, sessions=scheduler.sessions)
        worker = RankWorker(parallel=parallel, scheduler=scheduler, reports=reports, rpc=rpc, quiesce=quiesce)
        _open_watchdog(config, context, alive, scheduler, opened)
        load_publisher = _open_load_publisher(config, parallel, scheduler, reports, opened)
        loop = _open_loop(config, context, worker, heartbeat, load_publisher, peers)
        opened.callback(loop.receiver.close)
        heartbeat.send_if_due()  # before `RankReady`, so that the frontend monitors the rank from the start
        reports.send(_ready(config.rank, events, load_publisher, sinks.forward_passes))
        loop.run()


def _open_load_publisher(
    config: RankConfig,
    parallel: ParallelState,
    scheduler: Scheduler,
    reports: ZmqReportSender,
    opened: ExitStack,
) -> LoadPublisher:
    """Open the gauge of the stream, which also reports to the frontend."""
    publisher = open_load_publisher(
        config.engine.kv_events,
        parallel=parallel,
        load=scheduler.load,
        sinks=(FrontendLoadSink(reports=reports),),
    )
    opened.callback(publisher.close)
    return publisher


def _open_grammars(
    config: RankConfig, decisions: DecisionSink, opened: ExitStack
) -> tuple[GrammarQueue[EngineRequest], ...]:
    """Open the queue of requests with a grammar; none if the configuration refuses them."""
    scheduler = config.engine.scheduler
    if scheduler.grammar is None:
        return ()
    queue = open_grammar_queue(scheduler.grammar, scheduler.tokens, config.paths.tokenizer, decisions)
    opened.callback(queue.close)
    return (queue,)


def _decision_log(config: RankConfig, groups: ParallelGroups) -> DecisionLog | NullDecisionLog:
    """Make the log that compares the decisions of this rank with those of the other ranks of its replica."""
    integrity = config.engine.scheduler.integrity
    if integrity.decision_log == "off":
        return NullDecisionLog()
    log = DecisionLog(groups=groups, policy=integrity.decision_log)
    if integrity.decision_dump_directory:
        log.sink = FileDivergenceSink(directory=Path(integrity.decision_dump_directory)).write
    return log


def _open_lora(
    config: RankConfig, compute: RankCompute, decisions: DecisionSink, opened: ExitStack
) -> LoraQueue[EngineRequest] | None:
    """Open the adapters of the configuration. Return None without any: the scheduler then refuses them."""
    lora = config.engine.scheduler.lora
    if lora is None:
        return None
    loader = open_thread_adapter_loader(compute.adapters)
    opened.callback(loader.close)
    queue = LoraQueue[EngineRequest](loader=loader, limits=lora.limits, decisions=decisions)
    for each in lora.adapters:
        queue.register(each.name, each.path, is_pinned=each.pinned)
    return queue


def _profiler(config: RankConfig) -> Profiler:
    """Return the profiler of this rank. Without a directory the engine refuses requests for profiles."""
    if not config.engine.profile_directory:
        return NullProfiler()
    return StackSampler(Path(config.engine.profile_directory))


def _open_sinks(
    config: RankConfig, parallel: ParallelState, context: _Context, events: EventPublisher, opened: ExitStack
) -> SchedulerSinks:
    """Open the sinks of outputs and metrics, and those for planners and collectors that the configuration names."""
    metrics = open_shm_metrics_sink(Path(config.paths.directory), parallel)
    opened.callback(metrics.close)
    sinks, telemetry = SchedulerSinks(events=events, metrics=metrics), config.engine.telemetry
    if parallel.leads_replica:
        outputs = connect_push(context, config.paths.outputs, high_water_mark=MAX_QUEUED_BATCHES)
        sinks.outputs = ZmqOutputSink(socket=outputs)
    sinks.worker_id, sinks.model_name = telemetry.forward_pass_worker_id, config.engine.model_name
    if telemetry.forward_pass_endpoint:
        sinks.forward_passes = open_zmq_forward_pass_sink(telemetry.forward_pass_endpoint, parallel)
        opened.callback(sinks.forward_passes.close)
    if telemetry.otlp_traces_endpoint:
        # Imported here, because only an engine that exports spans needs OpenTelemetry.
        from scheduler_components.metrics import open_otel_span_sink

        sinks.spans = open_otel_span_sink(telemetry.otlp_traces_endpoint, parallel)
        opened.callback(sinks.spans.close)
    return sinks


def _open_watchdog(
    config: RankConfig, context: _Context, alive: RankHeartbeat, scheduler: Scheduler, opened: ExitStack
) -> None:
    """Watch the steps of this thread. The engine reads standard error, which also gets the stacks written from C."""
    after_s = config.engine.scheduler.integrity.stall_timeout_s(config.engine.relative_speed)
    if not after_s:
        return
    socket = connect_push(context, config.paths.reports)
    opened.callback(socket.close, linger=0)
    sink = report_stalls_to(ZmqReportSender(socket=socket), alive)
    watchdog = open_thread_watchdog(
        scheduler.integrity.progress, rank=alive.rank, after_s=after_s, sink=sink, stack_dump_file=sys.stderr
    )
    opened.callback(watchdog.close)


def _open_groups(
    config: RankConfig, parallel: ParallelState, context: _Context, heartbeat: HeartbeatSender, opened: ExitStack
) -> ParallelGroups:
    """Open the groups in which the ranks of a replica agree once per step, and on control requests."""
    reduce_groups = world_rank_groups(parallel)[parallel.world_rank].reduce_groups
    hub = open_zmq_sync_hub(
        context,
        rank=parallel.world_rank,
        reduce_groups=reduce_groups,
        address_of=config.paths.sync,
        wait_for=heartbeat.wait,
        timeout_s=_SYNC_TIMEOUT_S,
    )
    opened.callback(hub.close)
    return hub.parallel_groups(reduce_groups)


def _peer_hops(config: RankConfig, parallel: ParallelState) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks of other replicas that take every step together with this rank."""
    return () if config.engine.dp_attention is None else dp_rank_groups(parallel).reduce_groups


def _open_peers(
    config: RankConfig, parallel: ParallelState, context: _Context, heartbeat: HeartbeatSender
) -> ZmqSyncHub:
    """Open the sockets to the counterparts of this rank in the other replicas.

    The timeout is longer than within a replica. A counterpart may wait for a rank of its own replica, and the error
    must name that rank.
    """
    return open_zmq_sync_hub(
        context,
        rank=parallel.world_rank,
        reduce_groups=_peer_hops(config, parallel),
        address_of=config.paths.dp_sync,
        wait_for=heartbeat.wait,
        timeout_s=_SYNC_TIMEOUT_S * (1 + len(world_rank_groups(parallel)[parallel.world_rank].reduce_groups)),
    )


def _dp_sync(config: RankConfig, parallel: ParallelState, peers: ZmqSyncHub) -> DpBatchSync:
    """Make the exchange by which replicas take their steps together, or one for a single replica."""
    if config.engine.dp_attention is None:
        return DpBatchSync()
    return DpBatchSync(
        groups=peers.parallel_groups(_peer_hops(config, parallel)),
        replica=parallel.attn_dp_rank,
        num_replicas=parallel.attn_dp_size,
        delayer=config.engine.dp_attention.delayer(),
    )


def _open_tiers(
    config: RankConfig, parallel: ParallelState, groups: ParallelGroups, compute: RankCompute
) -> CacheTiers | None:
    """Open the tiers behind the device. Return None without a hierarchical cache: the scheduler then makes its own."""
    engine = config.engine
    if engine.hicache is None:
        return None
    # Imported here, because only a host tier needs numpy.
    from scheduler_engine.engine.rank.hicache_tiers import (
        make_simulated_kv_memory,
        make_torch_kv_memory,
        open_hicache_tiers,
    )

    if compute.pool is None or engine.model is None:
        kv = make_simulated_kv_memory(engine.scheduler, parallel, model=engine.model_name)
    else:
        kv = make_torch_kv_memory(compute.pool, model=engine.model.identity)
    tiers = open_hicache_tiers(kv, engine.hicache, engine.scheduler, parallel, groups=groups)
    compute.device.layer_counter = tiers.layer_counter
    return tiers


def _open_loop(
    config: RankConfig,
    context: _Context,
    worker: RankWorker,
    heartbeat: HeartbeatSender,
    load_publisher: LoadPublisher,
    peers: ZmqSyncHub,
) -> Leader | Follower:
    parallel, scheduler, paths = worker.parallel, worker.scheduler, config.paths
    progress = scheduler.integrity.progress
    skipper = RecvSkipper(recv_interval=config.engine.scheduler.recv_interval)
    if not parallel.leads_replica:
        steps = bind_pull(context, paths.steps(parallel.world_rank), high_water_mark=_MAX_STEPS_AHEAD)
        relay = ZmqFollowerRelay(steps=steps, wait_for=heartbeat.wait)
        receiver = RequestReceiver(
            rank=str(parallel),
            reader=CommandDecoder(),
            relay=relay,
            recv_skipper=skipper,
            progress=progress,
            decisions=scheduler.decisions,
        )
        return Follower(worker=worker, receiver=receiver, heartbeat=heartbeat)
    others = config.engine.follower_ranks(parallel.kv_stream_index)
    followers = [connect_push(context, paths.steps(rank), high_water_mark=_MAX_STEPS_AHEAD) for rank in others]
    commands = bind_pull(context, paths.commands(parallel.kv_stream_index), high_water_mark=_MAX_STEPS_AHEAD)
    refusals = FrontendRefusalSink(reports=worker.reports, work=scheduler.request_metrics.work)
    return Leader(
        worker=worker,
        receiver=RequestReceiver(
            rank=str(parallel),
            reader=CommandDecoder(),
            source=ZmqInputSource(socket=commands),
            relay=ZmqLeaderRelay(followers=followers, wait_for=heartbeat.wait),
            blocker=InputBlocker(
                bounds=config.engine.scheduler.input_bounds,
                active_ids=scheduler.queues,
                reject=refusals.reject,
                stats=scheduler.request_metrics.receiver,
            ),
            recv_skipper=skipper,
            progress=progress,
            decisions=scheduler.decisions,
        ),
        sleeper=IdleSleeper([commands, peers.inbox], [heartbeat.stop.descriptor]),
        heartbeat=heartbeat,
        load_publisher=load_publisher,
        is_peer_waiting=peers.is_peer_waiting,
    )


def _ready(
    rank: int, events: EventPublisher, load_publisher: LoadPublisher, forward_passes: ReportSink[ForwardPassMetrics]
) -> RankReady:
    """Return the bound endpoints of this rank's event stream, load gauge and forward-pass metrics."""
    load_endpoint = next((sink.endpoint for sink in load_publisher.sinks if isinstance(sink, ZmqReportSink)), None)
    passes = forward_passes.endpoint if isinstance(forward_passes, ZmqReportSink) else None
    if isinstance(events, ZmqEventPublisher):
        return RankReady(rank, events.endpoint, events.replay_endpoint, load_endpoint, passes)
    return RankReady(rank, None, None, load_endpoint, passes)


def _read_line(descriptor: int) -> bytes:
    """Read up to the first newline, and no byte beyond it, because `StopPipe` polls the descriptor."""
    line = bytearray()
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


if __name__ == "__main__":
    exit_code = 1
    try:
        exit_code = main()
    except Exception:  # noqa: BLE001 - printed as the interpreter would
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(exit_code)  # a thread of gloo that waits for a dead rank would hold up the interpreter's own exit
