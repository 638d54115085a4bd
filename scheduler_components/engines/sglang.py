"""The plugin for SGLang: its ``publisher: "zmq"`` becomes this kit's publisher. docs/how-to/sglang.md says more.

SGLang calls ``load_plugin`` in each of its processes, before anything of it starts, and then applies what was
registered with its ``HookRegistry``. Nothing is registered unless ``SGLANG_PLUGINS`` names this plugin. SGLang's
``--kv-events-config`` is read as SGLang reads it. Written against SGLang 0.5.23.

What is wrong never stops the engine: it is said in one sentence, and the stream is SGLang's own. Where keys were asked
for, there is no stream: nobody gets an open one because its lock could not be made.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from scheduler_components.engines.settings import ENGINE_SETTINGS, may_require_keys, read_plugin_settings
from scheduler_components.engines.sglang_components import COMPONENTS, SglangComponents
from scheduler_components.engines.sglang_publisher import open_sglang_publisher
from scheduler_components.errors import ConfigError
from scheduler_components.kv_events import CurveServerKeys, Endpoint, KVEventsConfig
from scheduler_components.kv_events.config import parse_json_object

__all__ = ["PLUGIN_NAME", "SglangPlugin", "load_plugin"]

_log = logging.getLogger("sglang.scheduler_components")

PLUGIN_NAME = "scheduler_components"
"""The entry point's name, as an operator writes it into ``SGLANG_PLUGINS``."""

_PLUGINS_VARIABLE = "SGLANG_PLUGINS"

_DEFAULTS = {"dialect": "native", "replay_framing": "topic"}
"""What SGLang's own publisher sends and answers."""

_UNLIMITED = 2**31 - 1
"""SGLang takes 0 for no limit (of a queue, of libzmq's); the kit's settings end here."""

_THEIRS = "sglang.srt.disaggregation.kv_events"
_DESCRIBE = "sglang.srt.runtime_context.describe_kv_events_publisher"


def load_plugin(environ: Mapping[str, str] | None = None) -> None:
    """Register the hooks, when ``SGLANG_PLUGINS`` names this plugin. SGLang applies them afterwards.

    Args:
        environ: None for this process's environment.
    """
    environ = os.environ if environ is None else environ  # noqa: SCH007 a plugin is asked for by the environment
    if PLUGIN_NAME not in (name.strip() for name in environ.get(_PLUGINS_VARIABLE, "").split(",")):
        return
    plugin = SglangPlugin(environ=dict(environ))
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    around = hooks.HookType.AROUND
    hooks.HookRegistry.register(f"{_THEIRS}.EventPublisherFactory.create", plugin.create_publisher, around)
    hooks.HookRegistry.register(_DESCRIBE, plugin.describe_publisher, around)
    if plugin.wants_components():
        SglangComponents(plugin.publisher_settings).register(hooks)


@dataclass(slots=True, kw_only=True)
class SglangPlugin:
    """What stands in SGLang's places.

    Attributes:
        environ: the environment; it is read when something is opened, so that what is wrong is said once.
    """

    environ: Mapping[str, str]

    def wants_components(self) -> bool:
        """Whether SGLang's scheduler is to run with this kit's components."""
        try:
            settings = read_plugin_settings(self.environ, defaults=_DEFAULTS, switches=(COMPONENTS,))
        except ConfigError:
            return False  # the publisher says it
        return COMPONENTS in settings.switches

    def publisher_settings(self, config: str | None) -> KVEventsConfig | None:
        """Return the publisher's settings for the text of ``--kv-events-config``.

        None where SGLang's text is empty, wrong, or does not say ``zmq``: then it is SGLang's to speak.

        Raises:
            ConfigError: a setting cannot work, or a key file cannot be used.
        """
        if not config:
            return None
        theirs: Any = import_module(_THEIRS)
        try:
            asked = theirs.KVEventsConfig.from_cli(config)
        except ValueError:
            return None
        if asked.publisher != "zmq":
            return None
        known = theirs.KVEventsConfig.model_fields
        for name, value in parse_json_object(
            config, field="--kv-events-config", example='{"publisher": "zmq"}'
        ).items():
            if name not in known:
                problem = "is not a setting of SGLang's --kv-events-config"
                raise ConfigError(name, value, problem, f"give some of {', '.join(known)}")
        settings = _in_our_words(asked, read_plugin_settings(self.environ, defaults=_DEFAULTS, switches=(COMPONENTS,)))
        CurveServerKeys.of(settings)
        return settings

    def create_publisher(
        self, original: Callable[..., Any], factory: Any, config: str | None, attn_dp_rank: int = 0
    ) -> Any:
        """Stand around ``EventPublisherFactory.create``.

        Raises:
            StartError: the machine refused an address, as SGLang's own publisher raises for it.
        """
        try:
            settings = self.publisher_settings(config)
            if settings is not None:
                return open_sglang_publisher(settings, attn_dp_rank)
        except ConfigError as error:
            is_closed = may_require_keys(self.environ)
            whose = "nobody, for keys were asked for" if is_closed else "SGLang itself"
            _log.error("KV events are not published by scheduler-components but by %s: %s", whose, error)
            if is_closed:
                return import_module(_THEIRS).NullEventPublisher()
        return original(factory, config, attn_dp_rank)

    def describe_publisher(self, original: Callable[..., Any], server_args: Any) -> Any:
        """Stand around the description for ``/server_info``: a stream that could not be closed to strangers is none."""
        description = original(server_args)
        if description is None or not may_require_keys(self.environ):
            return description
        try:
            self.publisher_settings(server_args.kv_events_config)
        except ConfigError:
            return None
        return description


def _in_our_words(asked: Any, settings: Any) -> KVEventsConfig:
    """SGLang's settings as this kit's, the environment's added."""
    values = {name: getattr(asked, name) for name in ENGINE_SETTINGS}
    values["hwm"] = values["hwm"] or _UNLIMITED
    values["max_queue_size"] = max(0, values["max_queue_size"]) or _UNLIMITED
    binds = settings.publisher.bind if asked.bind is None else asked.bind
    if binds is None:
        endpoint = Endpoint.parse(asked.endpoint, field="endpoint")
        # SGLang looks for "::" anywhere in the address, so it binds at a host such as [fd00::1], too. Where it would
        # have bound this must bind, or readers that dial it would find nobody.
        binds = endpoint.transport != "tcp" or endpoint.is_wildcard or (endpoint.is_ipv6 and "::" in endpoint.host)
    whole: KVEventsConfig = settings.publisher.changed(**values, bind=binds)
    return whole
