"""The command line: ``scheduler-components serve | demo | watch | doctor``.

Exit codes: 0 all is well, 1 the verdict is bad or the engine failed, 2 a person's mistake, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import attrs
import typer

from observability.doctor import DoctorOptions, examine, exit_code
from observability.watch import WatchOptions
from observability.watch import watch as watch_streams
from scheduler_components import __version__
from scheduler_components.errors import ComponentError, ConfigError
from scheduler_components.kv_events.config import KVEventsConfig
from scheduler_components.kv_events.registry import EventPublisherFactory
from scheduler_components.reference.engine_config import DEFAULT_HOST, EngineConfig, default_kv_events
from scheduler_components.reference.policy import SchedulerConfig
from scheduler_components.reference.session_config import SessionConfig
from scheduler_components.reference.workload import WorkloadConfig

__all__ = ["app", "main"]

_DEFAULT_WORKLOAD = WorkloadConfig()
_INTERRUPTED = 130  # what the CLI library makes of a KeyboardInterrupt

app = typer.Typer(
    help="A reference engine composed of scheduler components, and tools that look at engines.",
    pretty_exceptions_enable=False,
    add_completion=False,
)

_DpSize = Annotated[int, typer.Option(help="Data-parallel replicas: independent KV caches, one event stream each.")]
_AttnCpSize = Annotated[int, typer.Option(help="Ranks a replica along attention context parallelism.")]
_AttnTpSize = Annotated[int, typer.Option(help="Ranks a replica along attention tensor parallelism.")]
_PageSize = Annotated[int, typer.Option(help="Tokens a KV page, and a block of the events.")]
_KvTokens = Annotated[int, typer.Option(help="Capacity of each replica's KV pool, in tokens.")]
_MaxRunning = Annotated[int, typer.Option(help="Request slots of each replica.")]
_ChunkTokens = Annotated[int, typer.Option(help="The most that one request prefills in a step, in tokens.")]
_Seed = Annotated[int, typer.Option(help="Of the generated workload and of the tokens that come out.")]
_Speed = Annotated[float, typer.Option(help="Divides the workload's or trace's time and the simulated device's.")]
_Affinity = Annotated[
    int,
    typer.Option(help="A conversation stays on its replica up to this many tokens of extra load; 0: by load alone."),
]
_KvEvents = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="Event publisher's configuration. Default: loopback, free ports, with replay."),
]
_Host = Annotated[str, typer.Option(help="Address of the HTTP server.")]
_Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the HTTP server; 0 lets the system choose.")]


@app.command()
def serve(
    host: _Host = DEFAULT_HOST,
    port: _Port = 30_000,
    dp_size: _DpSize = 2,
    attn_cp_size: _AttnCpSize = 2,
    attn_tp_size: _AttnTpSize = 2,
    page_size: _PageSize = 16,
    kv_tokens: _KvTokens = 262_144,
    max_running_requests: _MaxRunning = 64,
    chunk_tokens: _ChunkTokens = 2048,
    kv_events_config: _KvEvents = None,
    affinity_tokens: _Affinity = 8192,
    speed: _Speed = 1.0,
    seed: _Seed = 0,
    trace: Annotated[Path | None, typer.Option(help="Replay this trace (Mooncake's JSON lines), judge, stop.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only the first requests of the trace.")] = None,
    keep_serving: Annotated[bool, typer.Option("--keep-serving", help="Go on serving after the trace.")] = False,
    duration: Annotated[float | None, typer.Option(min=0, help="Stop serving after so many seconds.")] = None,
) -> int:
    """Run the engine and serve HTTP until Ctrl-C, or replay a trace against it."""
    engine = EngineConfig(
        dp_size=dp_size,
        attn_cp_size=attn_cp_size,
        attn_tp_size=attn_tp_size,
        scheduler=_sizes(page_size, kv_tokens, max_running_requests, chunk_tokens),
        speed=speed,
        seed=seed,
    )
    return _run(
        SessionConfig(
            engine=_with_kv_events(engine, kv_events_config),
            host=host,
            port=port,
            affinity_tokens=affinity_tokens,
            trace=trace,
            limit=limit,
            keep_serving=keep_serving,
            duration_s=duration,
        )
    )


@app.command()
def demo(
    host: _Host = DEFAULT_HOST,
    port: _Port = 0,
    dp_size: _DpSize = 2,
    attn_cp_size: _AttnCpSize = 2,
    attn_tp_size: _AttnTpSize = 2,
    page_size: _PageSize = 16,
    kv_tokens: _KvTokens = 6144,
    max_running_requests: _MaxRunning = 32,
    chunk_tokens: _ChunkTokens = 512,
    kv_events_config: _KvEvents = None,
    affinity_tokens: _Affinity = 8192,
    speed: _Speed = 1.0,
    seed: _Seed = 0,
    requests: Annotated[
        int, typer.Option(help="Requests of the generated multi-turn chats.")
    ] = _DEFAULT_WORKLOAD.num_requests,
    chats_per_s: Annotated[float, typer.Option(help="Chats that begin a second.")] = _DEFAULT_WORKLOAD.chats_per_s,
) -> int:
    """Run the engine under a generated workload with an observer on its event streams, and judge what it saw."""
    engine = EngineConfig(
        dp_size=dp_size,
        attn_cp_size=attn_cp_size,
        attn_tp_size=attn_tp_size,
        scheduler=_sizes(page_size, kv_tokens, max_running_requests, chunk_tokens),
        speed=speed,
        seed=seed,
    )
    return _run(
        SessionConfig(
            engine=_with_kv_events(engine, kv_events_config),
            host=host,
            port=port,
            affinity_tokens=affinity_tokens,
            workload=WorkloadConfig(num_requests=requests, seed=seed, chats_per_s=chats_per_s),
        )
    )


@app.command()
def watch(
    target: Annotated[str, typer.Argument(help="A worker's URL (http://host:port) or one endpoint (tcp://host:port).")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Also replay what was published before.")] = False,
    replay_endpoint: Annotated[str | None, typer.Option(help="Replay address of a bare endpoint.")] = None,
    topic: Annotated[str | None, typer.Option(help="Topic to follow. Default: what the worker says, or all.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after so many events.")] = None,
    duration: Annotated[float | None, typer.Option(min=0, help="Stop after so many seconds.")] = None,
) -> int:
    """Show live KV-cache events of any engine that speaks this wire, until Ctrl-C."""
    options = WatchOptions(
        as_json=as_json,
        history=history,
        replay_endpoint=replay_endpoint,
        topic=topic,
        max_events=count,
        duration_s=duration,
    )
    with suppress(KeyboardInterrupt):  # the usual end of it
        watch_streams(target, sys.stdout, options)
    return 0


@app.command()
def doctor(
    url: Annotated[str, typer.Argument(help="A worker's URL (http://host:port).")],
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for one answer.")] = 2.0,
    listen: Annotated[float, typer.Option(min=0, help="Seconds to follow the streams at most.")] = 8.0,
) -> int:
    """Dial what a worker's /server_info advertises and say what is wrong with it; exit code 1 when something is."""
    findings = examine(url, DoctorOptions(timeout_s=timeout, listen_s=listen))
    for finding in findings:
        typer.echo(str(finding))
    return exit_code(findings)


def _sizes(page_size: int, kv_tokens: int, max_running_requests: int, chunk_tokens: int) -> SchedulerConfig:
    return SchedulerConfig(
        page_size=page_size,
        kv_tokens=kv_tokens,
        max_running_requests=max_running_requests,
        chunk_tokens=chunk_tokens,
        max_prefill_tokens=max(chunk_tokens, SchedulerConfig().max_prefill_tokens),
    )


def _with_kv_events(engine: EngineConfig, text: str | None) -> EngineConfig:
    """Add the event stream's configuration, checked here so that a mistake costs no process."""
    if text is None:
        return attrs.evolve(engine, kv_events=default_kv_events(engine))
    settings = KVEventsConfig.from_cli(text)
    settings.port_plan(engine.dp_size)
    EventPublisherFactory.find(settings.publisher)
    return attrs.evolve(engine, kv_events=text)


def _run(config: SessionConfig) -> int:
    return 0 if asyncio.run(_until_terminated(config)) else 1


async def _until_terminated(config: SessionConfig) -> bool:
    """Ctrl-C cancels this task by itself (``asyncio.run``); SIGTERM shall do the same."""
    # Imported here: the HTTP stack takes half a second, and a Ctrl-C in it must not end in a traceback either.
    from scheduler_components.reference.screen import Screen
    from scheduler_components.reference.session import run_session

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run_session(config, Screen.standard())


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """A reference engine composed of scheduler components, and tools that look at engines."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Entry point of ``scheduler-components``: a person's mistake is one line on standard error and exit code 2."""
    try:
        status = app(standalone_mode=False)
    except ConfigError as error:
        _fail(2, str(error))
    except typer.TyperException as error:
        _fail(2, error.format_message())
    except ComponentError as error:
        _fail(1, str(error))
    except asyncio.CancelledError:
        _fail(143, "terminated; all processes are stopped")
    if status == _INTERRUPTED:
        _fail(_INTERRUPTED, "interrupted; all processes are stopped")
    sys.exit(status)


def _fail(status: int, text: str) -> NoReturn:
    typer.echo(f"scheduler-components: {text}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
