"""Sizes of an engine are checked, and an invalid one is named with a hint."""

from __future__ import annotations

import pytest

from scheduler_components import ConfigError
from scheduler_engine.engine.config import (
    AdapterSpec,
    EngineConfig,
    HiCacheConfig,
    LoraConfig,
    SchedulerConfig,
    TelemetryConfig,
)


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("page_size", 0, "at least 1"),
        ("kv_tokens", -16, "at least 1"),
        ("kv_tokens", 100, "give 96"),
        ("kv_tokens", 15, "give 16"),
        ("max_running_requests", 0, "at least 1"),
        ("max_prefill_tokens", True, "at least 1"),
        ("chunk_tokens", 0, "at least 1"),
        ("new_token_ratio", 1.5, "from 0 to 1"),
        ("new_token_ratio", float("nan"), "from 0 to 1"),
        ("min_new_token_ratio", 0.9, "at most 0.7"),
        ("kv_metrics_every_steps", 0, "at least 1"),
    ],
)
def test_an_invalid_size_is_named_with_its_hint(field: str, value: float, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        SchedulerConfig(**{field: value})
    assert error.value.field == field
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("field", "settings", "hint"),
    [
        ("forward_pass_endpoint", {"forward_pass_endpoint": "tcp://127.0.0.1:65535"}, "at most 65534"),
        ("forward_pass_endpoint", {"forward_pass_endpoint": "inproc://x"}, "tcp or ipc"),
        ("forward_pass_worker_id", {"forward_pass_worker_id": "w7"}, "give forward_pass_endpoint, too"),
        ("otlp_traces_endpoint", {"otlp_traces_endpoint": "localhost:4317"}, "http://127.0.0.1:4318/v1/traces"),
    ],
)
def test_a_wrong_address_of_telemetry_is_refused_before_any_process_starts(
    field: str, settings: dict[str, str], hint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(dp_size=2, telemetry=TelemetryConfig(**settings))
    assert error.value.field == field
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("hicache_storage", {"hicache": HiCacheConfig(host_tokens=64, storage="file", storage_path="/pages")}),
        ("lora_paths", {"model_name": "poems"}),
    ],
)
def test_adapters_share_neither_storage_with_other_engines_nor_the_name_of_the_model(
    field: str, settings: dict[str, HiCacheConfig | str]
) -> None:
    lora = LoraConfig(adapters=(AdapterSpec(name="poems", path="/poems"),))
    with pytest.raises(ConfigError) as error:
        EngineConfig(scheduler=SchedulerConfig(lora=lora), **settings)
    assert error.value.field == field
