"""One run of the engine from start to verdict: what ``serve`` and ``demo`` have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import attrs
from prometheus_client import CollectorRegistry

from observability import OutputCollector, PrometheusSink, StreamCollector
from observability.kv_stream import NoStreamsError
from scheduler_components.reference.cli.driver import ChatDriver, Tally, TraceDriver
from scheduler_components.reference.cli.observer import Observer, open_observer
from scheduler_components.reference.cli.run_report import Evidence, Verdict, judge, probe_ports
from scheduler_components.reference.cli.screen import RunView, Screen
from scheduler_components.reference.device import WorkloadConfig, generate_chats, open_trace
from scheduler_components.reference.engine import (
    DEFAULT_HOST,
    Engine,
    EngineConfig,
    EngineFailedError,
    make_app,
    open_engine,
    open_http_server,
)

__all__ = [
    "SessionConfig",
    "run_session",
]

# What one run of the engine is to do.


@attrs.frozen(kw_only=True)
class SessionConfig:
    """What to run.

    Attributes:
        engine: the engine.
        host, port: of its HTTP server; port 0 lets the system choose.
        affinity_tokens: see ``LoadDispatcher``.
        workload: generated chats to play; None plays none.
        trace: a trace to replay, at most ``limit`` of its requests; None replays none.
        keep_serving: go on after workload or trace.
        duration_s: stop serving after this; None serves until interrupted.
    """

    engine: EngineConfig
    host: str = DEFAULT_HOST
    port: int = 0
    affinity_tokens: int = 0
    workload: WorkloadConfig | None = None
    trace: Path | None = None
    limit: int | None = None
    keep_serving: bool = False
    duration_s: float | None = None

    @property
    def has_work(self) -> bool:
        return self.workload is not None or self.trace is not None


_SETTLE_S = 30.0  # a healthy stream is read to its end in well under a second; a stuck one must end too


async def run_session(config: SessionConfig, screen: Screen) -> bool:
    """Start the engine, play or replay what is asked for, judge, stop. False when the verdict is bad.

    Raises:
        ConfigError: the trace cannot be read.
        StartError: a rank or the HTTP server did not start.
        EngineFailedError: a rank ended while the engine ran.
    """
    if config.trace is not None:
        open_trace(config.trace)  # a wrong path is told before eight processes start
    engine_config = config.engine
    screen.say(
        f"starting {engine_config.world_size} scheduler processes: dp {engine_config.dp_size} x"
        f" attention-CP {engine_config.attn_cp_size} x attention-TP {engine_config.attn_tp_size}"
    )
    registry = CollectorRegistry()
    metrics = PrometheusSink(registry, model_name=engine_config.model_name)
    async with open_engine(
        engine_config, metrics=metrics, affinity_tokens=config.affinity_tokens, show=screen.complain
    ) as engine:
        OutputCollector(registry, engine.front.board, model_name=engine_config.model_name)
        async with open_http_server(make_app(engine, registry), host=config.host, port=config.port) as url:
            screen.say(f"ready at {url}; see /server_info, /v1/loads and /metrics")
            try:
                return await _use(config, engine, url, registry, screen)
            finally:
                engine.front.fail(EngineFailedError("the engine is stopping"))  # ends open answers before the server


async def _use(config: SessionConfig, engine: Engine, url: str, registry: CollectorRegistry, screen: Screen) -> bool:
    passed = True
    if config.has_work:
        verdict = await engine.run(_run_workload(config, engine, url, registry, screen))
        screen.show_verdict(verdict)
        passed = verdict.passed
    if config.keep_serving or not config.has_work:
        screen.say(f"serving at {url}; Ctrl-C stops")
        await engine.run(_serve(config.duration_s))
    return passed


async def _serve(duration_s: float | None) -> None:
    if duration_s is None:
        await asyncio.Event().wait()
    else:
        await asyncio.sleep(duration_s)


async def _run_workload(
    config: SessionConfig, engine: Engine, url: str, registry: CollectorRegistry, screen: Screen
) -> Verdict:
    tally = Tally()
    async with _observing(url, registry) as (observer, no_streams_reason):
        view = RunView(
            tally=tally,
            reports=engine.front.board.stats,
            streams=observer.stats if observer is not None else dict,
        )
        async with screen.showing(view):
            await _drive(config, engine, url, tally, screen)
            await engine.wait_until_idle()
        screen.show_summary(view)
        evidence = await _gather_evidence(engine, observer, no_streams_reason, tally)
        tiers = [dump.tiers for leader in evidence.leaders if (dump := evidence.dumps[leader]).tiers is not None]
        screen.show_tiers(tiers)
        return judge(evidence)


@asynccontextmanager
async def _observing(url: str, registry: CollectorRegistry) -> AsyncIterator[tuple[Observer | None, str]]:
    """An observer of the engine, its recovery on ``/metrics``; or None and why there is nothing to observe."""
    async with AsyncExitStack() as opened:
        try:
            observer = await opened.enter_async_context(open_observer(url))
        except NoStreamsError as error:
            yield None, error.reason
        else:
            opened.callback(StreamCollector(registry, observer).close)
            yield observer, ""


async def _drive(config: SessionConfig, engine: Engine, url: str, tally: Tally, screen: Screen) -> None:
    speed = config.engine.speed
    if config.trace is not None:
        driver = TraceDriver(front=engine.front, speed=speed, tally=tally)
        tally.total = config.limit
        await driver.run(open_trace(config.trace, limit=config.limit))
        if driver.max_late_s > 1:
            late = f"{driver.max_late_s:.1f} s"
            screen.say(f"sending fell behind the trace by up to {late}: the trace asks for more than the engine has")
    elif config.workload is not None:
        tally.total = config.workload.num_requests
        await ChatDriver(url=url, speed=speed, tally=tally).run(generate_chats(config.workload))


async def _gather_evidence(engine: Engine, observer: Observer | None, no_streams_reason: str, tally: Tally) -> Evidence:
    config, ready = engine.config, engine.front.board.ready
    dumps = await engine.dump_caches()
    leaders = {replica: config.leader_of(replica) for replica in range(config.dp_size)}
    last_sequences = {replica: dumps[leader].last_sequence for replica, leader in leaders.items()}
    return Evidence(
        dp_size=config.dp_size,
        ranks_per_replica=config.ranks_per_replica,
        owners=frozenset(rank for rank, endpoint in ready.items() if endpoint is not None),
        probe=await probe_ports(observer.addresses, config.world_size) if observer is not None else None,
        streams=await observer.settle(last_sequences, timeout_s=_SETTLE_S) if observer is not None else [],
        dumps=dumps,
        tally=tally,
        no_streams_reason=no_streams_reason,
    )
