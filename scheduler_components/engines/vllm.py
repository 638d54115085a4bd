"""The plugin for vLLM: it replaces vLLM's publisher ``zmq`` by this kit's. See docs/how-to/vllm.md.

vLLM calls ``register`` in each of its processes, at least once. The plugin changes one entry of vLLM's table of
publishers, and only if the environment enables it. It reads ``--kv-events-config`` as vLLM does: the offset of a
data-parallel rank, the addresses that bind, port 0, ``get_publisher_config()``.

A wrong setting never stops the engine: the plugin logs one sentence, and vLLM's own publisher is used. If the settings
require keys, no stream is opened, because a fallback must not open a stream without access control.

``PolicyScheduler`` and ``ComponentScheduler`` are for vLLM's option ``--scheduler-cls``. They import vLLM on first use.

When a stream opens, the plugin patches two methods of vLLM in its process: a removal is published with the last copy of
a block (``once_per_block``), and a reset of the prefix cache is published immediately. If this vLLM does not have them,
the plugin logs it and publishes as vLLM does.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, TypeAlias

from scheduler_components._internal.lazy import lazy_exports
from scheduler_components.engines.settings import (
    ENGINE_SETTINGS,
    KV_EVENTS_VARIABLE,
    UNLIMITED,
    log_fallback,
    may_require_keys,
    read_plugin_settings,
)
from scheduler_components.engines.vllm_published_blocks import (
    ONCE_PER_BLOCK,
    VllmPublishedBlocks,
    patch_removed_events_to_last_copy,
)
from scheduler_components.errors import ConfigError
from scheduler_components.kv_events import (
    Endpoint,
    EventPublisher,
    KVEventsConfig,
    NullEventPublisher,
    ZmqEventPublisher,
)

__all__ = [
    "PLUGIN_NAME",
    "VllmEventPublisher",
    "VllmPublisherFactory",
    "open_event_stream",
    "register",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.engines.vllm_policy": "PolicyScheduler",
        "scheduler_components.engines.vllm_scheduler": "ComponentScheduler",
    },
)
"""Not in ``__all__``, because both import vLLM."""

_log = logging.getLogger("vllm.scheduler_components")
"""A child of vLLM's own logger, so that its handlers and level apply."""

PLUGIN_NAME = "scheduler_components"
"""Name of the entry point, for ``VLLM_PLUGINS``."""

_PLUGINS_VARIABLE = "VLLM_PLUGINS"


# The parts of vLLM's module ``vllm.distributed.kv_events`` that the plugin uses.


class VllmConfig(Protocol):
    """vLLM's ``KVEventsConfig``."""

    endpoint: str
    replay_endpoint: str | None


class VllmPublisher(Protocol):
    """vLLM's ``EventPublisher``."""

    def publish(self, events: Any) -> None: ...

    def shutdown(self) -> None: ...

    def get_publisher_config(self) -> VllmConfig | None: ...


VllmPublisherConstructor: TypeAlias = Callable[..., VllmPublisher]
"""An entry of vLLM's table: called with ``data_parallel_rank`` and the fields of vLLM's configuration."""


def register(environ: Mapping[str, str] | None = None) -> None:
    """Replace vLLM's publisher by this kit's if the environment enables the plugin; safe to call again.

    Its name in ``VLLM_PLUGINS`` or a value of ``SCHEDULER_COMPONENTS_KV_EVENTS`` enables it.

    Args:
        environ: the environment; None for the environment of this process.
    """
    environ = os.environ if environ is None else environ  # noqa: SCH007 operators enable a plugin by the environment
    is_named = PLUGIN_NAME in environ.get(_PLUGINS_VARIABLE, "").split(",")
    if not is_named and not environ.get(KV_EVENTS_VARIABLE, "").strip():
        return
    theirs = import_module("vllm.distributed.kv_events")
    publishers: dict[str, VllmPublisherConstructor] = theirs.EventPublisherFactory._registry
    own = publishers["zmq"]
    if isinstance(own, VllmPublisherFactory):
        own = own.own
    theirs.EventPublisher.register(VllmEventPublisher)
    publishers["zmq"] = VllmPublisherFactory(environ=environ, own=own, theirs=theirs)


@dataclass(slots=True, kw_only=True)
class VllmPublisherFactory:
    """Open the publisher ``zmq`` of one rank, as an entry of vLLM's table.

    Attributes:
        environ: the environment. It is read when a stream opens, because all processes of vLLM load the plugin and only
            those with a stream log an error.
        own: vLLM's own constructor.
        theirs: vLLM's module of KV events.
    """

    environ: Mapping[str, str]
    own: VllmPublisherConstructor
    theirs: ModuleType

    def __call__(self, *, data_parallel_rank: int = 0, **config: Any) -> VllmPublisher:
        """Open the publisher of one rank; ``config`` is vLLM's ``KVEventsConfig`` without its two switches.

        Raises:
            StartError: an address cannot be bound; vLLM's own publisher raises an error in this case too.
        """
        whole = _with_defaults(self.theirs.KVEventsConfig) | config
        try:
            settings, switches = read_plugin_settings(self.environ, switches={ONCE_PER_BLOCK: True})
            publisher = ZmqEventPublisher(data_parallel_rank, config=_to_kit_settings(self.theirs, whole, settings))
        except ConfigError as error:
            is_closed = may_require_keys(self.environ)
            log_fallback(_log, error, engine="vLLM", is_closed=is_closed)
            if is_closed:
                null: VllmPublisher = self.theirs.NullEventPublisher(data_parallel_rank)
                return null
            return self.own(data_parallel_rank=data_parallel_rank, **config)
        published = _filter_copies(data_parallel_rank) if ONCE_PER_BLOCK in switches else None
        _patch_reset_to_publish(self.theirs)
        described = _described(self.theirs, whole, data_parallel_rank, publisher)
        _log.info(
            "scheduler-components publishes the KV events of rank %d at %s", data_parallel_rank, described.endpoint
        )
        return VllmEventPublisher(publisher=publisher, config=described, published=published)


def _described(theirs: ModuleType, config: dict[str, Any], rank: int, publisher: ZmqEventPublisher) -> Any:
    """Return vLLM's configuration with the addresses of this rank."""
    resolved = config | {
        "endpoint": _resolved(config["endpoint"], rank, publisher.endpoint),
        "replay_endpoint": _resolved(config["replay_endpoint"], rank, publisher.replay_endpoint),
    }
    return theirs.KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **resolved)


def _to_kit_settings(theirs: ModuleType, config: dict[str, Any], settings: KVEventsConfig) -> KVEventsConfig:
    """Return vLLM's settings as this kit's, with those of the environment."""
    standard = _with_defaults(theirs.KVEventsConfig)
    for name in config.keys() - set(ENGINE_SETTINGS):
        if config[name] != standard.get(name):
            problem = "is a setting of vLLM that scheduler-components does not know"
            raise ConfigError(name, config[name], problem, "remove it, or upgrade scheduler-components")
    endpoint, binds = _events_address(config["endpoint"], settings.bind)
    replay = config["replay_endpoint"]
    return settings.changed(
        endpoint=str(endpoint),
        replay_endpoint=None if not replay else str(_on_this_node(Endpoint.parse(replay, field="replay_endpoint"))),
        buffer_steps=config["buffer_steps"],
        hwm=config["hwm"] or UNLIMITED,
        max_queue_size=max(0, config["max_queue_size"]) or UNLIMITED,
        topic=config["topic"],
        bind=binds,
    )


def open_event_stream(config: Any, rank: int, environ: Mapping[str, str] | None = None) -> VllmEventPublisher:
    """Open the stream of a scheduler that records the kit's own events, as ``--kv-events-config`` and the variable say.

    Args:
        config: vLLM's ``KVEventsConfig``; None, or one without events, gives a publisher that drops its batches.
        rank: index of the stream.
        environ: the environment; None for the environment of this process.

    Raises:
        ConfigError: a setting is invalid.
        StartError: an address cannot be bound.
    """
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return VllmEventPublisher(publisher=NullEventPublisher(), config=None)
    environ = os.environ if environ is None else environ  # noqa: SCH007 the plugin's variable holds for this, too
    theirs = import_module("vllm.distributed.kv_events")
    whole = {name: getattr(config, name) for name in _with_defaults(theirs.KVEventsConfig)}
    settings = read_plugin_settings(environ, switches={ONCE_PER_BLOCK: True})[0].changed(dialect="vllm")
    publisher = ZmqEventPublisher(rank, config=_to_kit_settings(theirs, whole, settings))
    return VllmEventPublisher(publisher=publisher, config=_described(theirs, whole, rank, publisher))


def _events_address(text: str, binds: bool | None) -> tuple[Endpoint, bool]:
    """Return the address of the PUB socket, and whether it binds: vLLM binds at ``*``, ``::``, ipc and inproc."""
    endpoint = Endpoint.parse(text)
    if binds is None:
        binds = endpoint.transport != "tcp" or endpoint.host == "*" or (endpoint.is_ipv6 and "::" in endpoint.host)
        if endpoint.is_wildcard and not binds:
            return endpoint.with_host("127.0.0.1"), False  # A client that dials 0.0.0.0 reaches this address.
    return _on_this_node(endpoint), binds


def _filter_copies(rank: int) -> VllmPublishedBlocks | None:
    """Patch vLLM's pool, and return the filter of a stream; None if this vLLM does not have what is patched."""
    try:
        patch_removed_events_to_last_copy()
    except ConfigError as error:
        _log.warning("rank %d publishes an event for each copy of a block, as vLLM does: %s", rank, error)
        return None
    return VllmPublishedBlocks()


def _patch_reset_to_publish(theirs: ModuleType) -> None:
    """Patch vLLM's scheduler in this process to publish what a reset of its prefix cache changed; safe to call again.

    vLLM publishes at the end of a step, and makes no step while it is idle.
    """
    try:
        scheduler: Any = import_module("vllm.v1.core.sched.scheduler").Scheduler
        reset = scheduler.reset_prefix_cache
    except (ImportError, AttributeError) as error:
        _log.warning("readers see a reset of the prefix cache with vLLM's next step (%s)", error)
        return
    if reset.__module__ == __name__:
        return

    @functools.wraps(reset, assigned=())
    def reset_and_publish(self: Any, *args: Any, **options: Any) -> bool:
        is_reset: bool = reset(self, *args, **options)
        if isinstance(self.kv_event_publisher, VllmEventPublisher):
            events = self.kv_cache_manager.take_events()
            if events:
                self.kv_event_publisher.publish(theirs.KVEventBatch(ts=time.time(), events=events))
        return is_reset

    scheduler.reset_prefix_cache = reset_and_publish


def _with_defaults(config_class: type[Any]) -> dict[str, Any]:
    """Return the settings that vLLM's factory passes on, with their defaults."""
    defaults = {field.name: field.default for field in fields(config_class) if field.default is not MISSING}
    return {name: value for name, value in defaults.items() if name not in ("enable_kv_cache_events", "publisher")}


def _on_this_node(endpoint: Endpoint) -> Endpoint:
    """Replace all interfaces with port 0 by this node's own address, because readers need an address to dial.

    Raises:
        ConfigError: the node has no address.
    """
    if endpoint.host != "*" or endpoint.port != 0:
        return endpoint
    here = endpoint.with_host(import_module("vllm.utils.network_utils").get_ip())
    if here.is_wildcard:
        raise ConfigError("endpoint", str(endpoint), "needs an address of this node", "set VLLM_HOST_IP")
    return here


def _resolved(text: str | None, rank: int, bound: str | None) -> str | None:
    """Return the advertised address: the configured one with the offset of this rank, or the bound one for port 0."""
    if not text:
        return text
    endpoint = Endpoint.parse(text).offset(rank)
    return bound if endpoint.port == 0 else str(endpoint)


class VllmEventPublisher:
    """This kit's publisher with the interface of vLLM's ``EventPublisher``.

    It is a virtual subclass, because vLLM may not be installed when this module is imported.

    Args:
        publisher: the open stream.
        config: vLLM's configuration with the addresses of this rank, for ``get_publisher_config``; None without them.
        published: the published blocks, if each is to be published once.
    """

    __slots__ = ("_config", "_published", "publisher")

    def __init__(
        self, *, publisher: EventPublisher, config: VllmConfig | None, published: VllmPublishedBlocks | None = None
    ) -> None:
        self.publisher = publisher
        self._config = config
        self._published = published

    def publish(self, events: Any) -> None:
        """Queue a batch of vLLM's events without blocking."""
        if self._published is not None:
            events = self._published.drop_published(events)
            if events is None:
                return
        self.publisher.publish(events)

    def shutdown(self) -> None:
        """Send the pending batches within a second and close; safe to call twice."""
        self.publisher.shutdown()

    def get_publisher_config(self) -> VllmConfig | None:
        """Return the configuration with the addresses of this rank, for ``/kv_event_sources``."""
        return self._config
