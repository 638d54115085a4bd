"""The commands that run the reference engine: ``serve`` and ``demo``."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from scheduler_components.reference.engine_options import EngineOptions, with_engine_options
from scheduler_components.reference.screen import Screen
from scheduler_components.reference.session import run_session
from scheduler_components.reference.session_config import SessionConfig
from scheduler_components.reference.workload import WorkloadConfig

__all__ = ["demo", "serve"]

_DEFAULT_WORKLOAD = WorkloadConfig()


@with_engine_options(EngineOptions())
def serve(
    options: EngineOptions,
    trace: Annotated[Path | None, typer.Option(help="Replay this trace (Mooncake's JSON lines), judge, stop.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only the first requests of the trace.")] = None,
    keep_serving: Annotated[bool, typer.Option("--keep-serving", help="Go on serving after the trace.")] = False,
    duration: Annotated[float | None, typer.Option(min=0, help="Stop serving after so many seconds.")] = None,
) -> int:
    """Run the engine and serve HTTP until Ctrl-C, or replay a trace against it."""
    return _run(
        SessionConfig(
            engine=options.engine_config(),
            host=options.host,
            port=options.port,
            affinity_tokens=options.affinity_tokens,
            trace=trace,
            limit=limit,
            keep_serving=keep_serving,
            duration_s=duration,
        )
    )


# So small a pool that the generated chats push each other's pages out.
@with_engine_options(EngineOptions(port=0, kv_tokens=6144, max_running_requests=32, chunk_tokens=512))
def demo(
    options: EngineOptions,
    requests: Annotated[
        int, typer.Option(help="Requests of the generated multi-turn chats.")
    ] = _DEFAULT_WORKLOAD.num_requests,
    chats_per_s: Annotated[float, typer.Option(help="Chats that begin a second.")] = _DEFAULT_WORKLOAD.chats_per_s,
) -> int:
    """Run the engine under a generated workload with an observer on its event streams, and judge what it saw."""
    return _run(
        SessionConfig(
            engine=options.engine_config(),
            host=options.host,
            port=options.port,
            affinity_tokens=options.affinity_tokens,
            workload=WorkloadConfig(num_requests=requests, seed=options.seed, chats_per_s=chats_per_s),
        )
    )


def _run(config: SessionConfig) -> int:
    return 0 if asyncio.run(_until_terminated(config)) else 1


async def _until_terminated(config: SessionConfig) -> bool:
    """Ctrl-C cancels this task by itself (``asyncio.run``); SIGTERM shall do the same."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run_session(config, Screen.standard())
