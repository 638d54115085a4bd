"""What an operator adds to an engine's own KV-event settings: one environment variable, read by every plugin here.

The engine's option (``--kv-events-config``) stays as it is and says where the stream is. The variable
``SCHEDULER_COMPONENTS_KV_EVENTS`` holds a JSON object with what that option lacks: settings of ``KVEventsConfig``, and
switches of the plugin itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs

from scheduler_components.errors import ConfigError
from scheduler_components.kv_events import KVEventsConfig
from scheduler_components.kv_events.config import parse_json_object

__all__ = ["KV_EVENTS_VARIABLE", "PluginSettings", "may_require_keys", "read_plugin_settings"]

KV_EVENTS_VARIABLE = "SCHEDULER_COMPONENTS_KV_EVENTS"

ENGINE_SETTINGS = ("publisher", "endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic")
"""SGLang and vLLM have these in their own option."""

_NOT_OFFERED = ("dialect", "load_endpoint", "options")
"""The stream is written as the engine writes it, and load is none of its publisher's."""

PUBLISHER_SETTINGS = tuple(
    name for name in KVEventsConfig.model_fields if name not in (*ENGINE_SETTINGS, *_NOT_OFFERED)
)

_KEY_WORDS = ("auth", "secret_key_file", "client_keys_dir")


@attrs.frozen(kw_only=True)
class PluginSettings:
    """What the variable says.

    Attributes:
        publisher: settings of the kit's publisher, to be completed by the engine's own.
        switches: the plugin's own switches that are on.
    """

    publisher: KVEventsConfig
    switches: frozenset[str] = frozenset()


def read_plugin_settings(
    environ: Mapping[str, str], *, defaults: Mapping[str, Any], switches: Collection[str] = ()
) -> PluginSettings:
    """Read and check the variable; without it, or where it is empty, there is nothing but ``defaults``.

    Args:
        environ: the environment.
        defaults: settings of ``KVEventsConfig`` that this engine's stream has where the variable has none.
        switches: names of the plugin's own settings, each true or false.

    Raises:
        ConfigError: naming what is wrong in one sentence.
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
        publisher=KVEventsConfig(**{"publisher": "zmq", **defaults, **settings}),
        switches=frozenset(name for name in switches if given.get(name)),
    )


def may_require_keys(environ: Mapping[str, str]) -> bool:
    """Whether the variable, which may be unreadable, names a setting that keeps strangers out.

    Nobody may be given an open stream because the setting that should have closed it was wrong.
    """
    text = environ.get(KV_EVENTS_VARIABLE, "")
    return any(word in text for word in _KEY_WORDS)
