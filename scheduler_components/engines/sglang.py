"""The plugin for SGLang: entry point ``scheduler_components`` of the group ``sglang.srt.plugins``.

SGLang loads its plugins in every process before anything of it starts. This one acts when ``SGLANG_PLUGINS`` names it,
and through SGLang's own ``HookRegistry`` alone. Written against SGLang 0.5.23.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from scheduler_components.errors import ConfigError
from scheduler_components.kv_events import KVEventsConfig
from scheduler_components.ports import NullEventPublisher

__all__ = ["load_plugin"]

_log = logging.getLogger(__name__)

PLUGIN_NAME = "scheduler_components"

_FACTORY = "sglang.srt.disaggregation.kv_events.EventPublisherFactory.create"


def load_plugin() -> None:
    """Register the hooks. SGLang calls it once per process and applies them afterwards."""
    named = os.environ.get("SGLANG_PLUGINS", "").split(",")  # noqa: SCH007 a plugin is asked for by the environment
    if PLUGIN_NAME not in map(str.strip, named):
        return
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_FACTORY, _create_publisher, hooks.HookType.AROUND)


def _create_publisher(original: Callable[..., Any], factory: Any, config: str | None, attn_dp_rank: int = 0) -> Any:
    """Stand before ``EventPublisherFactory.create``: what is not ``zmq`` stays SGLang's."""
    asked = json.loads(config) if config else {}
    if asked.get("publisher") != "zmq":
        return original(factory, config, attn_dp_rank)
    from scheduler_components.engines.sglang_publisher import open_sglang_publisher

    asked.pop("format", None)  # the recorder's, not the publisher's
    try:
        settings = KVEventsConfig(**(asked | {"dialect": "map", "replay_framing": "topic"}))
        return open_sglang_publisher(settings, attn_dp_rank)
    except ConfigError as error:
        _log.error("no KV events are published: %s", error)
        return NullEventPublisher(attn_dp_rank)
