"""Test the environment variable of the plugins: valid settings, and one sentence for each invalid one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler_components import ConfigError
from scheduler_components.engines.settings import (
    ENGINE_SETTINGS,
    KV_EVENTS_VARIABLE,
    PUBLISHER_SETTINGS,
    SCHEDULER_KEY,
    SchedulerSettings,
    may_require_keys,
    read_plugin_settings,
    read_scheduler_settings,
)
from scheduler_components.kv_events import KVEventsConfig


def read(given: Any, **switches: Any) -> Any:
    text = given if isinstance(given, str) else json.dumps(given)
    return read_plugin_settings({KV_EVENTS_VARIABLE: text}, switches={"once_per_block": False, "other": True})


@pytest.mark.parametrize("environ", [{}, {KV_EVENTS_VARIABLE: ""}, {KV_EVENTS_VARIABLE: " \n"}])
def test_without_the_variable_the_defaults_apply(environ: dict[str, str]) -> None:
    settings = KVEventsConfig(publisher="zmq", dialect="native", replay_framing="topic")
    assert read_plugin_settings(environ) == (settings, frozenset())


def test_settings_go_to_the_publisher_and_switches_to_the_plugin() -> None:
    settings, switches = read({"seq_base": "clock", "replay_framing": "seed", "once_per_block": True, "other": False})
    assert settings == KVEventsConfig(publisher="zmq", dialect="native", seq_base="clock", replay_framing="seed")
    assert switches == {"once_per_block"}


@pytest.mark.parametrize(
    ("given", "switches"),
    [
        ({}, {"other"}),
        ({"other": False}, set()),
        ({"other": True, "once_per_block": True}, {"other", "once_per_block"}),
    ],
)
def test_a_switch_that_is_not_given_has_its_default(given: dict[str, bool], switches: set[str]) -> None:
    assert read(given or "")[1] == switches


def test_each_publisher_setting_belongs_to_the_engine_or_to_the_variable() -> None:
    """The variable accepts a new setting of ``KVEventsConfig`` without a change here."""
    assert {*KVEventsConfig.model_fields} - {*ENGINE_SETTINGS, *PUBLISHER_SETTINGS} == {
        "dialect",
        "load_endpoint",
        "options",
    }
    assert {"auth", "secret_key_file", "client_keys_dir", "seq_base", "buffer_bytes"} <= {*PUBLISHER_SETTINGS}


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ("{", KV_EVENTS_VARIABLE, "is not JSON"),
        ("[1]", KV_EVENTS_VARIABLE, "is JSON, but not an object"),
        ('{"seq_base": "zero", "seq_base": "clock"}', "seq_base", "is given twice"),
        ({"endpoint": "tcp://*:5557"}, "endpoint", "give it in the engine's own --kv-events-config"),
        ({"buffer_byts": 1}, "buffer_byts", "give some of bind, replay_framing"),
        ({"dialect": "map"}, "dialect", "is not a setting of SCHEDULER_COMPONENTS_KV_EVENTS"),
        ({"buffer_bytes": "1"}, "buffer_bytes", "is not an integer"),
        ({"buffer_bytes": 0}, "buffer_bytes", "give at least 1"),
        ({"seq_base": "clok"}, "seq_base", "did you mean 'clock'?"),
        ({"auth": "required"}, "secret_key_file", "is missing"),
        ({"once_per_block": 1}, "once_per_block", "give true or false"),
    ],
)
def test_an_invalid_setting_raises_a_config_error_of_one_sentence(given: Any, field: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(given)
    assert raised.value.field == field
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "required"),
    [('{"auth": "required"', True), ('{"client_keys_dir": 1}', True), ('{"seq_base": "clok"}', False), ("{", False)],
)
def test_required_keys_are_detected_in_a_malformed_variable(text: str, required: bool) -> None:
    assert may_require_keys({KV_EVENTS_VARIABLE: text}) is required


# The settings of a scheduler for vLLM.


@pytest.mark.parametrize("given", [None, {}, {"another": 7}, {SCHEDULER_KEY: {}}])
def test_a_scheduler_without_settings_has_the_defaults(given: object) -> None:
    assert read_scheduler_settings(given) == SchedulerSettings()


def test_the_settings_of_a_scheduler_are_below_its_key() -> None:
    given = {SCHEDULER_KEY: {"policy": "lpm", "checks": "raise"}, "policy": "another's"}
    assert read_scheduler_settings(given) == SchedulerSettings(policy="lpm", checks="raise")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lpm", "scheduler_components='lpm': is not an object"),
        ({"polciy": "lpm"}, "polciy='lpm': is not a setting of scheduler_components; did you mean 'policy'"),
        ({"policy": ["lpm"]}, "policy=.*: is not a string"),
    ],
)
def test_a_wrong_setting_of_a_scheduler_is_one_sentence(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scheduler_settings({SCHEDULER_KEY: given})
