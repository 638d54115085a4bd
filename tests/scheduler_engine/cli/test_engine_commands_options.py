"""``serve`` and ``demo`` pass their shared options to one engine and keep their own defaults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from scheduler_components import ConfigError, StartError
from scheduler_components._internal import extras
from scheduler_components.errors import MissingExtraError
from scheduler_components.hicache import HiCachePolicy
from scheduler_components.kv_events import KVEventsConfig
from scheduler_engine.cli import engine_commands
from scheduler_engine.cli.commands import COMMANDS, make_app
from scheduler_engine.cli.engine_commands import DemoOptions, EngineOptions, HiCacheOptions, ModelOptions, engine_config
from scheduler_engine.device.model_spec import KvShape, ModelSpec, TokenSpec
from scheduler_engine.engine.config import (
    DEFAULT_HOST,
    GrammarConfig,
    HiCacheConfig,
    IntegrityConfig,
    SchedulerConfig,
    TelemetryConfig,
)


def parse(*arguments: str) -> tuple[Any, dict[str, Any]]:
    """The command that a command line asks for, and what it is called with."""
    command, bound, _ = make_app().parse_args(arguments)
    bound.apply_defaults()
    return command, dict(bound.arguments)


@pytest.mark.parametrize(("command", "options"), [("serve", EngineOptions()), ("demo", DemoOptions())])
def test_a_missing_option_has_the_commands_default(command: str, options: EngineOptions) -> None:
    called, bound = parse(command)
    assert called is COMMANDS[command]
    assert (bound["options"], bound["hicache"]) == (options, HiCacheOptions())
    called, bound = parse(command, "--host", "::1")
    assert bound["options"] == type(options)(host="::1")  # one that is given leaves the others as they were


def test_a_demo_uses_system_ports_and_a_small_pool() -> None:
    serve, demo = EngineOptions(), DemoOptions()
    assert (serve.host, serve.port, serve.max_running_requests) == (DEFAULT_HOST, 30_000, 64)
    assert (demo.host, demo.port, demo.max_running_requests) == (DEFAULT_HOST, 0, 32)
    in_parts = {"dp_size": 2, "attn_cp_size": 2, "attn_tp_size": 2}
    assert serve.sizes(of_a_model=False) == {**in_parts, "kv_tokens": 262_144, "chunk_tokens": 2048}
    assert demo.sizes(of_a_model=False) == {**in_parts, "kv_tokens": 6144, "chunk_tokens": 512}


def test_one_rank_serves_a_model_by_default() -> None:
    whole = {"dp_size": 1, "attn_cp_size": 1, "attn_tp_size": 1}
    for options, kv_tokens in ((EngineOptions(), 16_384), (DemoOptions(), 2048)):
        assert options.sizes(of_a_model=True) == {**whole, "kv_tokens": kv_tokens, "chunk_tokens": 512}
    asked = EngineOptions(dp_size=2, kv_tokens=262_144).sizes(of_a_model=True)
    assert (asked["dp_size"], asked["kv_tokens"]) == (2, 262_144)


@pytest.mark.parametrize(("field", "value"), [("dtype", "bfloat16"), ("device", "cuda"), ("grammar_backend", "none")])
def test_the_options_of_a_model_are_refused_without_one(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}=.*add --model"):
        ModelOptions(**{field: value}).spec()


def test_a_limit_of_adapters_without_adapters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^max_loaded_loras=4: has no effect by itself; add --lora-paths or"):
        ModelOptions(max_loaded_loras=4).lora()
    given = ModelOptions(max_loaded_loras=4, enable_lora=True).lora()
    assert given is not None
    assert given.limits.max_loaded == 4


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(StartError, match=r"transformers.*scheduler-components\[model\]"):
        ModelOptions(model=Path("anywhere")).spec()


SPEC = ModelSpec(
    path="/model",
    kv=KvShape(num_layers=1, kv_heads=1, head_dim=1),
    tokens=TokenSpec(vocab_size=8, eos_token_ids=(2,)),
    weight_bytes=1,
    identity="x",
)


def test_a_model_has_grammars_where_the_library_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an end-of-sequence token, without which no output could end."""
    endless = attrs.evolve(SPEC, tokens=TokenSpec(vocab_size=8))
    assert ModelOptions().grammar(SPEC) == GrammarConfig()
    assert ModelOptions(grammar_backend="llguidance").grammar(SPEC) == GrammarConfig()
    assert ModelOptions(grammar_backend="none").grammar(SPEC) is None
    assert ModelOptions().grammar(None) is ModelOptions().grammar(endless) is None
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    monkeypatch.setattr(engine_commands, "find_spec", lambda name: None)
    assert ModelOptions().grammar(SPEC) is None
    with pytest.raises(StartError, match=r"llguidance.*scheduler-components\[grammar\]"):
        ModelOptions(grammar_backend="llguidance").grammar(SPEC)


def test_shared_and_own_options_are_listed_together() -> None:
    _, bound = parse("demo", "--dp-size", "1", "--requests", "5", "--kv-tokens", "64", "--chats-per-s=2.5")
    assert bound["options"] == DemoOptions(dp_size=1, kv_tokens=64)
    assert (bound["requests"], bound["chats_per_s"]) == (5, 2.5)


def test_every_option_reaches_the_engine(tmp_path: Path) -> None:
    _, bound = parse(
        *("serve", "--dp-size", "1", "--attn-cp-size", "3", "--attn-tp-size", "4", "--pp-size", "2"),
        *("--page-size", "8", "--schedule-policy", "lpm", "--preemption-policy", "lowest-priority"),
        *("--batch-mode", "prefill_first", "--queue-timeout", "3", "--request-timeout", "4"),
        *("--decision-log", "count", "--profile-directory", "/profiles"),
        *("--kv-tokens", "800", "--max-running-requests", "5", "--chunk-tokens", "32768", "--speed", "2.5"),
        *("--seed", "7", "--kv-events-config", '{"publisher": "null"}', "--hicache", "--hicache-host-tokens", "1600"),
        *("--hicache-storage", "file", "--hicache-storage-path", str(tmp_path)),
        *("--hicache-mooncake-master", "m:1", "--hicache-mooncake-metadata", "http://m:2"),
        *("--hicache-write", "write_back", "--hicache-prefetch", "timeout"),
        *("--hicache-write-hits", "4", "--hicache-retry-steps", "5"),
        *("--hicache-load-pages", "6", "--recv-interval", "4"),
        *("--hicache-prefetch-pages", "9", "--moe-dp-size", "6"),
    )
    engine = engine_config(bound["options"], bound["hicache"])
    assert (engine.dp_size, engine.attn_cp_size, engine.attn_tp_size, engine.pp_size) == (1, 3, 4, 2)
    assert (engine.moe_dp_size, engine.parallel(11).moe_dp_rank, engine.parallel(11).moe_dp_size) == (6, 5, 6)
    assert (engine.speed, engine.seed, engine.kv_events) == (2.5, 7, KVEventsConfig(publisher="null"))
    assert engine.scheduler == SchedulerConfig(
        page_size=8,
        kv_tokens=800,
        max_running_requests=5,
        chunk_tokens=32_768,
        max_prefill_tokens=32_768,
        recv_interval=4,
        schedule_policy="lpm",
        preemption_policy="lowest-priority",
        batch_mode="prefill_first",
        queue_timeout_s=3,
        timeout_s=4,
        integrity=IntegrityConfig(decision_log="count"),
    )
    assert engine.profile_directory == "/profiles"
    assert engine.hicache == HiCacheConfig(
        host_tokens=1600,
        storage="file",
        storage_path=str(tmp_path),
        mooncake_master="m:1",
        mooncake_metadata="http://m:2",
        policy=HiCachePolicy(
            write="write_back",
            write_threshold_hits=4,
            prefetch="timeout",
            prefetch_threshold_pages=9,
            prefetch_retry_steps=5,
            load_threshold_pages=6,
        ),
    )


@pytest.mark.parametrize("chunk_tokens", [16, 100_000])
def test_a_step_takes_a_whole_chunk(chunk_tokens: int) -> None:
    scheduler = engine_config(EngineOptions(chunk_tokens=chunk_tokens), HiCacheOptions()).scheduler
    assert scheduler.max_prefill_tokens == max(chunk_tokens, SchedulerConfig().max_prefill_tokens)


def test_telemetry_is_off_by_default_and_its_options_reach_the_ranks() -> None:
    options = EngineOptions(forward_pass_endpoint="tcp://127.0.0.1:0", forward_pass_worker_id="w7")
    telemetry = engine_config(options, HiCacheOptions()).telemetry
    assert telemetry == TelemetryConfig(forward_pass_endpoint="tcp://127.0.0.1:0", forward_pass_worker_id="w7")
    assert engine_config(EngineOptions(), HiCacheOptions()).telemetry == TelemetryConfig()


def test_spans_need_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_commands, "require_modules", without_opentelemetry)
    with pytest.raises(MissingExtraError, match=r"\[otel\]', or leave --otlp-traces-endpoint out"):
        engine_config(EngineOptions(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces"), HiCacheOptions())


def without_opentelemetry(*modules: str, otherwise: str = "") -> None:
    if "opentelemetry" in modules:
        raise MissingExtraError("opentelemetry", "otel", otherwise)
