"""Run the engine from start to report, for ``serve`` and ``demo``."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
from prometheus_client import CollectorRegistry

from observability import MetricsBoardCollector, StreamCollector, discover, open_async_subscriber
from observability.kv_stream import AsyncSubscriber, NoStreamsError, Tier
from scheduler_components.kv_events import StreamAddress
from scheduler_engine.cli.run_report import (
    ObservedStream,
    RunFacts,
    RunReport,
    TextComparison,
    probe_ports,
    verify,
)
from scheduler_engine.cli.run_reporter import NullStreamStatsSource, RunReporter, RunView
from scheduler_engine.cli.sigterm import Termination
from scheduler_engine.cli.workload_driver import ChatDriver, ChatTranscript, TraceDriver, WorkloadCounters
from scheduler_engine.device.model_spec import ModelSpec
from scheduler_engine.device.workload import (
    TraceSummary,
    WorkloadConfig,
    check_trace,
    generate_chats,
    open_trace,
)
from scheduler_engine.engine.config import DEFAULT_HOST, EngineConfig
from scheduler_engine.engine.engine import Engine, open_engine
from scheduler_engine.engine.free_ports import check_ports_free
from scheduler_engine.engine.http_app import make_app
from scheduler_engine.frontend.access import AccessPolicy
from scheduler_engine.frontend.errors import EngineFailedError
from scheduler_engine.frontend.http_server import HttpServer, bind_http, open_http_server
from scheduler_engine.frontend.text_frontend import open_text_codec
from scheduler_engine.text.text_tokenizer import TextTokenizer

DRAIN_TIMEOUT_S = 20.0
"""Less than the 30 s after which Kubernetes kills a pod."""


@attrs.frozen(kw_only=True)
class ServerConfig:
    """Who may use the HTTP server, and how it stops.

    Attributes:
        access: keys and host names.
        weights_root: see ``make_app``.
        drain_timeout_s: longest time, after SIGTERM, for requests that are open.
    """

    access: AccessPolicy = attrs.field(factory=AccessPolicy)
    weights_root: Path | None = None
    drain_timeout_s: float = DRAIN_TIMEOUT_S


@attrs.frozen(kw_only=True)
class SessionConfig:
    """The configuration of a run.

    Attributes:
        engine: the engine.
        host, port: address of its HTTP server; port 0 lets the system choose.
        kv_pool: whether to serve ``/kv_pool`` with the blocks of each pool.
        server: who may use its routes, and how it stops.
        affinity_tokens: see ``LoadDispatcher``.
        workload: the generated chats; None for none.
        trace: the trace to replay, at most ``limit`` of its requests; None for none.
        keep_serving: whether to keep serving after workload or trace.
        duration_s: seconds of serving; None serves until interrupted.
    """

    engine: EngineConfig
    host: str = DEFAULT_HOST
    port: int = 0
    kv_pool: bool = False
    server: ServerConfig = attrs.field(factory=ServerConfig)
    affinity_tokens: int = 0
    workload: WorkloadConfig | None = None
    trace: Path | None = None
    limit: int | None = None
    keep_serving: bool = False
    duration_s: float | None = None

    @property
    def has_work(self) -> bool:
        return self.workload is not None or self.trace is not None


_SETTLE_S = 30.0  # a healthy stream ends in well under a second; this bounds the wait for a stuck one


async def run_session(config: SessionConfig, screen: RunReporter, termination: Termination) -> bool:
    """Start the engine, run the workload or trace, verify the run, and stop. Return whether all checks passed.

    While the engine only serves, a signal lets open requests end first.

    Raises:
        asyncio.CancelledError: a signal ended the engine.
        ConfigError: the trace cannot be read, has no requests, or has a wrong line.
        StartError: a port is in use, or a rank did not start.
        EngineFailedError: a rank exited while the engine ran.
    """
    engine_config = config.engine
    if config.trace is not None:
        trace = check_trace(config.trace, limit=config.limit)  # before eight processes start
        screen.note(_trace_text(trace, engine_config.speed))
        config = attrs.evolve(config, limit=trace.num_requests)  # replay only checked lines
    check_ports_free(engine_config)
    codec = await asyncio.to_thread(open_text_codec, engine_config)  # fails before any process starts
    with bind_http(config.host, config.port) as listener:  # binds before any process starts
        warning = config.server.access.exposure_warning(listener.getsockname()[0])
        if warning is not None:
            screen.warn(warning)
        return await _run_engine(config, codec, listener, screen, termination)


async def _run_engine(
    config: SessionConfig, codec: TextTokenizer, listener: socket.socket, screen: RunReporter, termination: Termination
) -> bool:
    engine_config = config.engine
    screen.note(
        f"starting {engine_config.world_size} scheduler processes: dp {engine_config.dp_size} x"
        f" attention-CP {engine_config.attn_cp_size} x attention-TP {engine_config.attn_tp_size}"
        f" x PP {engine_config.pp_size}"
    )
    registry = CollectorRegistry()
    ranks = open_engine(
        engine_config, tokenizer=codec.to_json(), affinity_tokens=config.affinity_tokens, show=screen.warn
    )
    async with ranks as engine:
        MetricsBoardCollector(registry, board=engine.stats, model_name=engine_config.model_name)
        app = make_app(
            engine,
            registry,
            kv_pool=config.kv_pool,
            codec=codec,
            access=with_host(config.server.access, config.host),
            weights_root=config.server.weights_root,
        )
        async with open_http_server(app, listener) as server:
            screen.note_ready(server.url)
            try:
                passed = await _run_work(config, engine, server.url, registry, screen)
                if config.keep_serving or not config.has_work:
                    screen.note(f"serving at {server.url}; Ctrl-C stops")
                    await _serve(config, engine, server, screen, termination)
                return passed
            finally:
                engine.frontend.fail(EngineFailedError("the engine is stopping"))  # before the server closes


def _trace_text(trace: TraceSummary, speed: float) -> str:
    return f"trace: {trace.num_requests:,} requests, sent in {trace.duration_s / speed:,.0f} s at speed {speed:g}"


def with_host(access: AccessPolicy, host: str) -> AccessPolicy:
    """Allow clients to use the name at which the server listens."""
    return attrs.evolve(access, allowed_hosts=access.allowed_hosts | {host})


async def _run_work(
    config: SessionConfig, engine: Engine, url: str, registry: CollectorRegistry, screen: RunReporter
) -> bool:
    if not config.has_work:
        return True
    report = await engine.run(_run_workload(config, engine, url, registry, screen))
    screen.show_report(report)
    return report.passed


async def _serve(
    config: SessionConfig, engine: Engine, server: HttpServer, screen: RunReporter, termination: Termination
) -> None:
    """Serve for the configured time, or until a signal. Then refuse new requests and wait for open ones."""
    with termination.deferred():
        with suppress(TimeoutError):
            async with asyncio.timeout(config.duration_s):
                await engine.run(termination.requested.wait())
        if not termination.requested.is_set():
            return
        server.stop_accepting()
        screen.note(f"stopping: {engine.frontend.num_open_requests} requests are open")
        num_left = await engine.drain(config.server.drain_timeout_s)
        if num_left:
            screen.warn(f"{num_left} requests were still open after {config.server.drain_timeout_s:g} s")
    raise asyncio.CancelledError


async def _run_workload(
    config: SessionConfig, engine: Engine, url: str, registry: CollectorRegistry, screen: RunReporter
) -> RunReport:
    counters = WorkloadCounters()
    async with _observing(url, registry, config.server.access.api_key) as observed:
        view = RunView(counters=counters, board=engine.stats, streams=observed.subscriber or NullStreamStatsSource())
        async with screen.live_view(view):
            chats = await _drive(config, engine, url, view, screen)
            await engine.wait_until_idle()
        view.stop_clock()
        evidence = await _gather_evidence(engine, observed, counters)
        tiers = [dump.tiers for leader in evidence.leaders if (dump := evidence.dumps[leader]).tiers is not None]
        screen.show_summary(view, tiers)
        if config.engine.model is not None and chats:
            evidence = attrs.evolve(evidence, texts=await _verify_texts(config.engine.model, chats, screen))
        return verify(evidence)


async def _verify_texts(model: ModelSpec, chats: Sequence[ChatTranscript], screen: RunReporter) -> TextComparison:
    """Let transformers compute every answer again while the engine keeps running."""
    # Only a run with a model needs torch.
    from scheduler_engine.cli.torch_text_verifier import verify_texts

    screen.note("asking transformers for the same answers, from the same weights")
    return await asyncio.to_thread(verify_texts, model, chats)


@attrs.frozen(kw_only=True)
class _Observed:
    """The engine's streams as a router finds them by its URL, or the reason for having none."""

    addresses: tuple[StreamAddress, ...] = ()
    subscriber: AsyncSubscriber | None = None
    no_streams_reason: str = ""


@asynccontextmanager
async def _observing(url: str, registry: CollectorRegistry, api_key: str | None) -> AsyncIterator[_Observed]:
    """Follow the engine's streams as a router does, and export the recovery on ``/metrics``, while the block runs.

    Raises:
        StartError, DecodeError: the engine cannot be reached, or its description is unusable.
    """
    try:
        addresses = await asyncio.to_thread(discover, url, api_key=api_key)
    except NoStreamsError as error:
        yield _Observed(no_streams_reason=error.reason)
        return
    async with open_async_subscriber(addresses) as subscriber:
        collector = StreamCollector(registry, subscriber)
        try:
            yield _Observed(addresses=addresses, subscriber=subscriber)
        finally:
            collector.close()


async def _drive(
    config: SessionConfig, engine: Engine, url: str, view: RunView, screen: RunReporter
) -> Sequence[ChatTranscript]:
    """Send the workload or trace. Return the transcripts of chats."""
    speed, counters = config.engine.speed, view.counters
    if config.trace is not None:
        driver = TraceDriver(frontend=engine.frontend, speed=speed, counters=counters, lag=view.lag)
        counters.total = config.limit
        await driver.run(open_trace(config.trace, limit=config.limit))
        if view.lag.max_s > 1:
            late = f"sending was up to {view.lag.max_s:.1f} s behind the trace"
            screen.note(f"speed {speed:g} could not be held: {late}, which asks for more than the engine has")
    elif config.workload is not None:
        counters.total = config.workload.num_requests
        chats = ChatDriver(url=url, speed=speed, counters=counters, api_key=config.server.access.api_key)
        await chats.run(generate_chats(config.workload))
        return chats.chats
    return ()


async def _gather_evidence(engine: Engine, observed: _Observed, counters: WorkloadCounters) -> RunFacts:
    config, ready, subscriber = engine.config, engine.frontend.replies.ready, observed.subscriber
    dumps = await engine.dump_caches()
    last_sequences = {replica: dumps[config.leader_rank(replica)].last_sequence for replica in range(config.dp_size)}
    return RunFacts(
        dp_size=config.dp_size,
        pp_size=config.pp_size,
        ranks_per_stage=config.attn_cp_size * config.attn_tp_size,
        owners=frozenset(rank for rank, said in ready.items() if said.stream_endpoint is not None),
        probe=await probe_ports(observed.addresses, config.world_size) if observed.addresses else None,
        streams=await _follow_to_the_end(subscriber, last_sequences) if subscriber is not None else [],
        dumps=dumps,
        counters=counters,
        no_streams_reason=observed.no_streams_reason,
    )


async def _follow_to_the_end(subscriber: AsyncSubscriber, last_sequences: Mapping[int, int]) -> list[ObservedStream]:
    """Follow every stream to its last batch, or until the deadline, and return what was seen.

    Args:
        subscriber: follows the streams.
        last_sequences: number of the last published batch, by rank of the stream.
    """
    deadline_s = time.monotonic() + _SETTLE_S
    for rank, sequence in last_sequences.items():
        await subscriber.wait_until(rank, sequence, max(0.0, deadline_s - time.monotonic()))
    stats = subscriber.stats()
    return [
        ObservedStream(
            stats=stats[rank],
            published_sequence=sequence,
            blocks=frozenset(subscriber.blocks(rank)),
            host_blocks=frozenset(subscriber.blocks(rank, Tier.HOST)),
            stored_blocks=frozenset(subscriber.blocks(rank, Tier.STORAGE)),
        )
        for rank, sequence in last_sequences.items()
    ]
