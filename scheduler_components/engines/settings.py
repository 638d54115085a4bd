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

import attrs

from scheduler_components.errors import ConfigError
from scheduler_components.invariant_checker import CheckAction
from scheduler_components.kv_events import KVEventsConfig
from scheduler_components.kv_events.config import parse_json_object

__all__ = [
    "ENGINE_SETTINGS",
    "KV_EVENTS_VARIABLE",
    "PUBLISHER_SETTINGS",
    "SCHEDULER_KEY",
    "UNLIMITED",
    "PluginSettings",
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


@attrs.frozen(kw_only=True)
class PluginSettings:
    """The value of the variable.

    Attributes:
        publisher: settings of the kit's publisher, without the engine's own.
        switches: the plugin's own switches that are on.
    """

    publisher: KVEventsConfig
    switches: frozenset[str] = frozenset()


def read_plugin_settings(
    environ: Mapping[str, str], *, switches: Mapping[str, bool] = MappingProxyType({})
) -> PluginSettings:
    """Read and validate the variable; without it, or if it is empty, return the defaults.

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
        if name in ENGINE_SETTINGS:
            problem = f"is not a setting of {KV_EVENTS_VARIABLE}"
            raise ConfigError(name, value, problem, "give it in the engine's own --kv-events-config")
        if name not in known:
            problem = f"is not a setting of {KV_EVENTS_VARIABLE}"
            raise ConfigError(name, value, problem, f"give some of {', '.join(known)}")
        if name in switches and type(value) is not bool:
            raise ConfigError(name, value, "is not true or false", "give true or false")
    settings = {name: value for name, value in given.items() if name not in switches}
    return PluginSettings(
        publisher=KVEventsConfig(**_DEFAULTS | settings),
        switches=frozenset(name for name, is_on in switches.items() if given.get(name, is_on)),
    )


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


@attrs.frozen(kw_only=True)
class SchedulerSettings:
    """The value of the key. ``PolicyScheduler`` reads ``policy`` alone.

    Attributes:
        policy: the scheduling policy: one of ``POLICY_NAMES``, or ``module:name`` of your own.
        preemption: name of the preemption policy.
        metrics_directory: directory of the board to which the metrics of each step are written; empty for none.
        checks: how violations of the page pool are reported, as ``CheckPolicy.action``.
    """

    policy: str = "fcfs"
    preemption: str = "latest-arrival"
    metrics_directory: str = ""
    checks: CheckAction = "log"


def read_scheduler_settings(additional_config: object) -> SchedulerSettings:
    """Read the settings of a scheduler from vLLM's ``additional_config``; without the key, return the defaults.

    Raises:
        ConfigError: a setting is unknown or no text. Whether a name is known is for the policy's own factory to say.
    """
    given = additional_config.get(SCHEDULER_KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigError(SCHEDULER_KEY, given, "is no JSON object", 'give for example {"policy": "priority"}')
    names = [field.name for field in attrs.fields(SchedulerSettings)]
    for name, value in given.items():
        if name not in names:
            raise ConfigError(
                str(name), value, f"is not a setting of {SCHEDULER_KEY}", f"give some of {', '.join(names)}"
            )
        if not isinstance(value, str):
            raise ConfigError(name, value, "is no text", "give a name")
    return SchedulerSettings(**given)
