"""The plugin for SGLang: it replaces SGLang's publisher ``zmq`` by this kit's. See docs/how-to/sglang.md.

SGLang calls ``load_plugin`` in each of its processes before it starts, and then applies the hooks in its
``HookRegistry``. The plugin registers nothing unless ``SGLANG_PLUGINS`` names it. It reads ``--kv-events-config`` as
SGLang does. Written for SGLang 0.5.23.

A wrong setting never stops the engine: the plugin logs one sentence, and SGLang's own publisher is used. If the
settings require keys, no stream is opened, because a fallback must not open a stream without access control.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from scheduler_components.engines.settings import (
    ENGINE_SETTINGS,
    UNLIMITED,
    log_fallback,
    may_require_keys,
    read_plugin_settings,
)
from scheduler_components.engines.sglang_components import COMPONENTS, SglangComponents
from scheduler_components.engines.sglang_decision_log import SglangDecisionLog
from scheduler_components.engines.sglang_publisher import open_sglang_publisher
from scheduler_components.engines.sglang_scheduling import SglangScheduling
from scheduler_components.errors import ConfigError
from scheduler_components.kv_events import CurveServerKeys, Endpoint, KVEventsConfig
from scheduler_components.kv_events.config import parse_json_object

__all__ = ["PLUGIN_NAME", "SglangPlugin", "load_plugin"]

_log = logging.getLogger("sglang.scheduler_components")

PLUGIN_NAME = "scheduler_components"
"""Name of the entry point, for ``SGLANG_PLUGINS``."""

_PLUGINS_VARIABLE = "SGLANG_PLUGINS"

_SGLANG_KV_EVENTS = "sglang.srt.disaggregation.kv_events"
_DESCRIBE = "sglang.srt.runtime_context.describe_kv_events_publisher"


def load_plugin(environ: Mapping[str, str] | None = None) -> None:
    """Register the hooks if ``SGLANG_PLUGINS`` names this plugin. SGLang applies them later.

    Args:
        environ: the environment; None for the environment of this process.
    """
    environ = os.environ if environ is None else environ  # noqa: SCH007 operators enable a plugin by the environment
    if PLUGIN_NAME not in (name.strip() for name in environ.get(_PLUGINS_VARIABLE, "").split(",")):
        return
    plugin = SglangPlugin(environ=dict(environ))
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    around = hooks.HookType.AROUND
    hooks.HookRegistry.register(f"{_SGLANG_KV_EVENTS}.EventPublisherFactory.create", plugin.create_publisher, around)
    hooks.HookRegistry.register(_DESCRIBE, plugin.describe_publisher, around)
    if plugin.wants_components():
        SglangComponents(plugin.publisher_settings).register(hooks)
    SglangScheduling.from_environment(environ).register(hooks)
    SglangDecisionLog.from_environment(environ).register(hooks)


@dataclass(slots=True, kw_only=True)
class SglangPlugin:
    """The hooks around SGLang's functions.

    Attributes:
        environ: the environment. The plugin reads it when it opens a stream, so that an error is logged once.
    """

    environ: Mapping[str, str]

    def wants_components(self) -> bool:
        """Whether the settings replace components of SGLang's scheduler by this kit's."""
        try:
            return COMPONENTS in read_plugin_settings(self.environ, switches={COMPONENTS: False})[1]
        except ConfigError:
            return False  # The publisher logs the error.

    def publisher_settings(self, config: str | None) -> KVEventsConfig | None:
        """Return the publisher's settings for the value of ``--kv-events-config``.

        Return None if the value is empty, invalid for SGLang, or names another publisher than ``zmq``: SGLang handles
        these cases.

        Raises:
            ConfigError: a setting is invalid, or a key file cannot be read.
        """
        if not config:
            return None
        theirs: Any = import_module(_SGLANG_KV_EVENTS)
        try:
            given = theirs.KVEventsConfig.from_cli(config)
        except ValueError:
            return None
        if given.publisher != "zmq":
            return None
        known = theirs.KVEventsConfig.model_fields
        for name, value in parse_json_object(
            config, field="--kv-events-config", example='{"publisher": "zmq"}'
        ).items():
            if name not in known:
                problem = "is not a setting of SGLang's --kv-events-config"
                raise ConfigError(name, value, problem, f"give some of {', '.join(known)}")
        settings = _to_kit_settings(given, read_plugin_settings(self.environ, switches={COMPONENTS: False})[0])
        CurveServerKeys.of(settings)
        return settings

    def create_publisher(
        self, original: Callable[..., Any], factory: Any, config: str | None, attn_dp_rank: int = 0
    ) -> Any:
        """Hook around ``EventPublisherFactory.create``.

        Raises:
            StartError: an address cannot be bound; SGLang's own publisher raises an error in this case too.
        """
        try:
            settings = self.publisher_settings(config)
            if settings is not None:
                return open_sglang_publisher(settings, attn_dp_rank)
        except ConfigError as error:
            is_closed = may_require_keys(self.environ)
            log_fallback(_log, error, engine="SGLang", is_closed=is_closed)
            if is_closed:
                return import_module(_SGLANG_KV_EVENTS).NullEventPublisher()
        return original(factory, config, attn_dp_rank)

    def describe_publisher(self, original: Callable[..., Any], server_args: Any) -> Any:
        """Hook around the description for ``/server_info``: describe no stream if none was opened for lack of keys."""
        description = original(server_args)
        if description is None or not may_require_keys(self.environ):
            return description
        try:
            self.publisher_settings(server_args.kv_events_config)
        except ConfigError:
            return None
        return description


def _to_kit_settings(given: Any, settings: KVEventsConfig) -> KVEventsConfig:
    """Return SGLang's settings as this kit's, with those of the environment."""
    values = {name: getattr(given, name) for name in ENGINE_SETTINGS}
    values["hwm"] = values["hwm"] or UNLIMITED
    values["max_queue_size"] = max(0, values["max_queue_size"]) or UNLIMITED
    binds = settings.bind if given.bind is None else given.bind
    if binds is None:
        endpoint = Endpoint.parse(given.endpoint, field="endpoint")
        # SGLang searches "::" anywhere in the address, so it also binds at a host such as [fd00::1]. The kit must bind
        # wherever SGLang binds, or readers that dial the address find no publisher.
        binds = endpoint.transport != "tcp" or endpoint.is_wildcard or (endpoint.is_ipv6 and "::" in endpoint.host)
    return settings.changed(**values, bind=binds)
