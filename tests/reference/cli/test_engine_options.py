"""The options that ``serve`` and ``demo`` share come to one engine, and each command keeps its own beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from scheduler_components.hicache import HiCachePolicy
from scheduler_components.reference.cli.engine_commands import EngineOptions, with_engine_options
from scheduler_components.reference.engine import DEFAULT_HOST, HiCacheConfig, SchedulerConfig

taken: list[tuple[EngineOptions, str, bool]] = []


@with_engine_options(EngineOptions(port=0, kv_tokens=6144))
def command(options: EngineOptions, name: str, loud: bool = False) -> int:
    """What the help says."""
    taken.append((options, name, loud))
    return 0


def run(*arguments: str) -> tuple[EngineOptions, str, bool]:
    taken.clear()
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return taken[0]


def test_what_is_not_given_is_the_commands_default() -> None:
    options, name, loud = run("a")
    assert options == EngineOptions(port=0, kv_tokens=6144)
    assert (name, loud) == ("a", False)
    assert (options.host, options.max_running_requests) == (DEFAULT_HOST, 64)


def test_shared_and_own_options_stand_side_by_side() -> None:
    options, name, loud = run("--dp-size", "1", "a", "--loud", "--kv-tokens", "64", "--host", "::1")
    assert options == EngineOptions(port=0, dp_size=1, kv_tokens=64, host="::1")
    assert (name, loud) == ("a", True)


def test_every_option_reaches_the_engine(tmp_path: Path) -> None:
    options, _, _ = run(
        *("a", "--dp-size", "1", "--attn-cp-size", "3", "--attn-tp-size", "4", "--page-size", "8"),
        *("--kv-tokens", "800", "--max-running-requests", "5", "--chunk-tokens", "32768", "--speed", "2.5"),
        *("--seed", "7", "--kv-events-config", '{"publisher": "null"}', "--hicache", "--hicache-host-tokens", "1600"),
        *("--hicache-storage", "file", "--hicache-storage-path", str(tmp_path)),
        *("--hicache-mooncake-master", "m:1", "--hicache-mooncake-metadata", "http://m:2"),
        *("--hicache-write", "write_back", "--hicache-prefetch", "timeout"),
    )
    engine = options.engine_config()
    assert (engine.dp_size, engine.attn_cp_size, engine.attn_tp_size) == (1, 3, 4)
    assert (engine.speed, engine.seed, engine.kv_events) == (2.5, 7, '{"publisher": "null"}')
    assert engine.scheduler == SchedulerConfig(
        page_size=8, kv_tokens=800, max_running_requests=5, chunk_tokens=32_768, max_prefill_tokens=32_768
    )
    assert engine.hicache == HiCacheConfig(
        host_tokens=1600,
        storage="file",
        storage_path=str(tmp_path),
        mooncake_master="m:1",
        mooncake_metadata="http://m:2",
        policy=HiCachePolicy(write="write_back", prefetch="timeout"),
    )


@pytest.mark.parametrize("chunk_tokens", [16, 100_000])
def test_a_step_takes_a_whole_chunk(chunk_tokens: int) -> None:
    scheduler = EngineOptions(chunk_tokens=chunk_tokens).engine_config().scheduler
    assert scheduler.max_prefill_tokens == max(chunk_tokens, SchedulerConfig().max_prefill_tokens)
