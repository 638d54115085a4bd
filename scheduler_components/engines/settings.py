"""Settings of the plugins, and of the schedulers for vLLM.

A plugin reads one environment variable that extends an engine's own KV-event settings.

The engine's option ``--kv-events-config`` does not change; it has the endpoints. The variable
``SCHEDULER_COMPONENTS_KV_EVENTS`` holds a JSON object with the settings of ``KVEventsConfig`` that the option lacks,
and with switches of the plugin.

The schedulers for vLLM read ``--additional-config``, a JSON object that vLLM passes on, under the key
``scheduler_components``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

from scheduler_components.errors import ConfigError
from scheduler_components.invariant_checker import CheckAction
from scheduler_components.kv_events import KVEventsConfig
from scheduler_components.kv_events.config import JsonSettings, parse_json_object

__all__ = [
    "ENGINE_SETTINGS",
    "KV_EVENTS_VARIABLE",
    "PUBLISHER_SETTINGS",
    "SCHEDULER_KEY",
    "UNLIMITED",
    "SchedulerSettings",
    "log_fallback",
    "may_require_keys",
    "read_plugin_settings",
    "read_scheduler_settings",
]

KV_EVENTS_VARIABLE = "SCHEDULER_COMPONENTS_KV_EVENTS"

ENGINE_SETTINGS = ("publisher", "endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic")
"""Settings that SGLang and vLLM have in their own option."""

_NOT_OFFERED = ("dialect", "load_endpoint", "options")
"""The plugins write the engine's own dialect, and publish no load."""

_DEFAULTS = {"publisher": "zmq", "dialect": "native", "replay_framing": "topic"}
"""The dialect and the framing of SGLang's and vLLM's own publishers."""

UNLIMITED = 2**31 - 1
"""The largest limit of ``KVEventsConfig``. SGLang and vLLM use 0 for an unlimited queue."""

PUBLISHER_SETTINGS = tuple(
    name for name in KVEventsConfig.model_fields if name not in (*ENGINE_SETTINGS, *_NOT_OFFERED)
)

_KEY_WORDS = ("auth", "secret_key_file", "client_keys_dir")


def read_plugin_settings(
    environ: Mapping[str, str], *, switches: Mapping[str, bool] = MappingProxyType({})
) -> tuple[KVEventsConfig, frozenset[str]]:
    """Return the settings of the kit's publisher without the engine's own, and the switches of the plugin that are on.

    Without the variable, or if it is empty, return the defaults.

    Args:
        environ: the environment.
        switches: the plugin's own settings by name, each with its default: true or false.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    text = environ.get(KV_EVENTS_VARIABLE, "")
    given = parse_json_object(text, field=KV_EVENTS_VARIABLE, example='{"seq_base": "clock"}') if text.strip() else {}
    known = (*PUBLISHER_SETTINGS, *switches)
    for name, value in given.items():
        if name not in known:
            own = "give it in the engine's own --kv-events-config"
            hint = own if name in ENGINE_SETTINGS else f"give some of {', '.join(known)}"
            raise ConfigError(name, value, f"is not a setting of {KV_EVENTS_VARIABLE}", hint)
        if name in switches and type(value) is not bool:
            raise ConfigError(name, value, "is not true or false", "give true or false")
    settings = {name: value for name, value in given.items() if name not in switches}
    is_on = frozenset(name for name, default in switches.items() if given.get(name, default))
    return KVEventsConfig(**_DEFAULTS | settings), is_on


def may_require_keys(environ: Mapping[str, str]) -> bool:
    """Whether the variable names a setting that restricts access, even if the variable is malformed.

    A plugin must not fall back to an open stream because a setting that restricts access is invalid.
    """
    text = environ.get(KV_EVENTS_VARIABLE, "")
    return any(word in text for word in _KEY_WORDS)


def log_fallback(log: logging.Logger, error: ConfigError, *, engine: str, is_closed: bool) -> None:
    """Log why the kit does not publish, and the fallback: the engine's own publisher, or none if keys are required."""
    if is_closed:
        log.error("no KV events are published, because the settings require keys: %s", error)
    else:
        log.error("%s publishes its KV events itself, without scheduler-components: %s", engine, error)


SCHEDULER_KEY = "scheduler_components"
"""The key of ``--additional-config`` whose value has the settings of a scheduler."""


class SchedulerSettings(JsonSettings):
    """The value of the key. ``PolicyScheduler`` reads ``policy`` alone.

    Attributes:
        policy: the scheduling policy: one of ``POLICY_NAMES``, or ``module:name`` of your own.
        preemption: name of the preemption policy.
        metrics_directory: directory of the board to which the metrics of each step are written; empty for none.
        checks: how violations of the page pool are reported, as ``CheckPolicy.action``.

    Raises:
        ConfigError: a setting is unknown or no text. Whether a policy is known is for its own factory to say.
    """

    text_name = SCHEDULER_KEY
    example = '{"policy": "priority"}'

    policy: str = "fcfs"
    preemption: str = "latest-arrival"
    metrics_directory: str = ""
    checks: CheckAction = "log"


def read_scheduler_settings(additional_config: object) -> SchedulerSettings:
    """Read the settings of a scheduler from vLLM's ``additional_config``; without the key, return the defaults.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    given = additional_config.get(SCHEDULER_KEY, {}) if isinstance(additional_config, Mapping) else {}
    return SchedulerSettings.model_validate(given)
