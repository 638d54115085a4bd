"""The plugin for vLLM: its ``publisher: "zmq"`` becomes this kit's publisher. docs/how-to/vllm.md says what that gives.

vLLM calls ``register`` in each of its processes, and once per process or more often. It changes one entry of vLLM's
table of publishers, and only when it was asked to. vLLM's ``--kv-events-config`` is read as vLLM reads it: the offset
of a data-parallel rank, which addresses bind, port 0, ``get_publisher_config()``.

What is wrong never stops the engine: it is said in one sentence, and the stream is vLLM's own. Where keys were asked
for, there is no stream: nobody gets an open one because its lock could not be made.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from typing import Any, Protocol

from scheduler_components.engines.settings import (
    ENGINE_SETTINGS,
    KV_EVENTS_VARIABLE,
    PluginSettings,
    may_require_keys,
    read_plugin_settings,
)
from scheduler_components.engines.vllm_published_blocks import (
    ONCE_PER_BLOCK,
    PublishedBlocks,
    patch_removed_events_to_last_copy,
)
from scheduler_components.errors import ConfigError
from scheduler_components.kv_events import Endpoint, KVEventsConfig, ZmqEventPublisher

__all__ = ["PLUGIN_NAME", "VllmEventPublisher", "VllmPublisherFactory", "register"]

_log = logging.getLogger("vllm.scheduler_components")
"""Below vLLM's own logger, so that its handlers and level apply."""

PLUGIN_NAME = "scheduler_components"
"""The entry point's name, as an operator writes it into ``VLLM_PLUGINS``."""

_PLUGINS_VARIABLE = "VLLM_PLUGINS"

_DEFAULTS = {"dialect": "native", "replay_framing": "topic"}
"""What vLLM's own publisher sends and answers."""

_UNLIMITED = 2**31 - 1
"""vLLM takes 0 for no limit (of a queue, of libzmq's); the kit's settings end here."""


# What the plugin uses of vLLM's module ``vllm.distributed.kv_events``.


class VllmConfig(Protocol):
    """vLLM's ``KVEventsConfig``."""

    endpoint: str
    replay_endpoint: str | None


class VllmPublisher(Protocol):
    """vLLM's ``EventPublisher``, as its scheduler calls it."""

    def publish(self, events: Any) -> None: ...

    def shutdown(self) -> None: ...

    def get_publisher_config(self) -> VllmConfig | None: ...


class VllmPublisherConstructor(Protocol):
    """What vLLM's factory calls: ``config`` has the fields of its configuration."""

    def __call__(self, *, data_parallel_rank: int = 0, **config: Any) -> VllmPublisher: ...


class VllmKvEventsModule(Protocol):
    """The module."""

    KVEventsConfig: type[Any]
    EventPublisher: type[Any]
    EventPublisherFactory: Any
    NullEventPublisher: type[Any]


def register(environ: Mapping[str, str] | None = None) -> None:
    """Put this kit's publisher in the place of vLLM's, when the environment asks for it.

    Asked it is by its name in ``VLLM_PLUGINS``, or by ``SCHEDULER_COMPONENTS_KV_EVENTS``. Safe to call again.

    Args:
        environ: None for this process's environment.
    """
    environ = os.environ if environ is None else environ  # noqa: SCH007 a plugin is asked for by the environment
    is_named = PLUGIN_NAME in environ.get(_PLUGINS_VARIABLE, "").split(",")
    if not is_named and not environ.get(KV_EVENTS_VARIABLE, "").strip():
        return
    theirs: VllmKvEventsModule = import_module("vllm.distributed.kv_events")
    publishers: dict[str, VllmPublisherConstructor] = theirs.EventPublisherFactory._registry
    own = publishers["zmq"]
    if isinstance(own, VllmPublisherFactory):
        own = own.own
    is_closed = may_require_keys(environ)
    try:
        settings = read_plugin_settings(environ, defaults=_DEFAULTS, switches=(ONCE_PER_BLOCK,))
    except ConfigError as error:
        publishers["zmq"] = _fallback_publisher(error, own, theirs, is_closed=is_closed)
        return
    theirs.EventPublisher.register(VllmEventPublisher)
    publishers["zmq"] = VllmPublisherFactory(settings=settings, own=own, theirs=theirs, is_closed=is_closed)


def _fallback_publisher(
    error: ConfigError, own: VllmPublisherConstructor, theirs: VllmKvEventsModule, *, is_closed: bool
) -> VllmPublisherConstructor:
    """Say what is wrong, and return what publishes instead."""
    _log.error(
        "KV events are not published by scheduler-components but by %s: %s",
        "nobody, for keys were asked for" if is_closed else "vLLM itself",
        error,
    )
    if not is_closed:
        return own

    def open_nothing(*, data_parallel_rank: int = 0, **_: Any) -> VllmPublisher:
        nothing: VllmPublisher = theirs.NullEventPublisher(data_parallel_rank)
        return nothing

    return open_nothing


@dataclass(slots=True, kw_only=True)
class VllmPublisherFactory:
    """What vLLM's factory calls to open the publisher ``zmq``.

    Attributes:
        settings: what the environment says.
        own: what opened it before.
        theirs: vLLM's module of KV events.
        is_closed: where nobody may read without a key.
    """

    settings: PluginSettings
    own: VllmPublisherConstructor
    theirs: VllmKvEventsModule
    is_closed: bool

    def __call__(self, *, data_parallel_rank: int = 0, **config: Any) -> VllmPublisher:
        """Open the publisher of one rank; ``config`` is vLLM's ``KVEventsConfig`` but for its two switches.

        Raises:
            StartError: the machine refused an address, as vLLM's own raises for it.
        """
        whole = _with_defaults(self.theirs.KVEventsConfig) | config
        try:
            publisher, told = self._open(data_parallel_rank, whole)
        except ConfigError as error:
            own = _fallback_publisher(error, self.own, self.theirs, is_closed=self.is_closed)
            return own(data_parallel_rank=data_parallel_rank, **config)
        resolved = whole | {
            "endpoint": _resolved(whole["endpoint"], data_parallel_rank, publisher.endpoint),
            "replay_endpoint": _resolved(whole["replay_endpoint"], data_parallel_rank, publisher.replay_endpoint),
        }
        described = self.theirs.KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **resolved)
        _log.info("KV events of rank %d, by scheduler-components: %s", data_parallel_rank, described.endpoint)
        return VllmEventPublisher(publisher=publisher, config=described, told=told)

    def _open(self, rank: int, config: dict[str, Any]) -> tuple[ZmqEventPublisher, PublishedBlocks | None]:
        publisher = ZmqEventPublisher(rank, config=self._checked(config))
        if ONCE_PER_BLOCK not in self.settings.switches:
            return publisher, None
        try:
            patch_removed_events_to_last_copy()
        except ConfigError:
            publisher.shutdown()
            raise
        return publisher, PublishedBlocks()

    def _checked(self, config: dict[str, Any]) -> KVEventsConfig:
        """vLLM's settings as this kit's."""
        standard = _with_defaults(self.theirs.KVEventsConfig)
        for name in config.keys() - set(ENGINE_SETTINGS):
            if config[name] != standard.get(name):
                problem = "is a setting of vLLM's that scheduler-components does not know"
                raise ConfigError(name, config[name], problem, "take it out, or upgrade scheduler-components")
        endpoint, binds = self._events_address(config["endpoint"])
        replay = config["replay_endpoint"]
        return self.settings.publisher.changed(
            endpoint=str(endpoint),
            replay_endpoint=None if not replay else str(_on_this_node(Endpoint.parse(replay, field="replay_endpoint"))),
            buffer_steps=config["buffer_steps"],
            hwm=config["hwm"] or _UNLIMITED,
            max_queue_size=max(0, config["max_queue_size"]) or _UNLIMITED,
            topic=config["topic"],
            bind=binds,
        )

    def _events_address(self, text: str) -> tuple[Endpoint, bool]:
        """The PUB socket's address, and whether it binds there: vLLM does at ``*``, in ``::``, ipc and inproc."""
        endpoint = Endpoint.parse(text)
        binds = self.settings.publisher.bind
        if binds is None:
            binds = endpoint.transport != "tcp" or endpoint.host == "*" or (endpoint.is_ipv6 and "::" in endpoint.host)
            if endpoint.is_wildcard and not binds:
                return endpoint.with_host("127.0.0.1"), False  # where a dialled 0.0.0.0 leads
        return _on_this_node(endpoint), binds


def _with_defaults(config_class: type[Any]) -> dict[str, Any]:
    """vLLM's settings that its factory passes on, with their defaults."""
    defaults = {field.name: field.default for field in fields(config_class) if field.default is not MISSING}
    return {name: value for name, value in defaults.items() if name not in ("enable_kv_cache_events", "publisher")}


def _on_this_node(endpoint: Endpoint) -> Endpoint:
    """Port 0 of all interfaces is a port of this node's own address, for that is what readers are told.

    Raises:
        ConfigError: the node has none.
    """
    if endpoint.host != "*" or endpoint.port != 0:
        return endpoint
    here = endpoint.with_host(import_module("vllm.utils.network_utils").get_ip())
    if here.is_wildcard:
        raise ConfigError("endpoint", str(endpoint), "needs an address of this node", "set VLLM_HOST_IP")
    return here


def _resolved(text: str | None, rank: int, bound: str | None) -> str | None:
    """What readers are told: the address as configured, of this rank; with port 0, what it became."""
    if not text:
        return text
    endpoint = Endpoint.parse(text).offset(rank)
    return bound if endpoint.port == 0 else str(endpoint)


class VllmEventPublisher:
    """This kit's publisher with the members that vLLM's scheduler calls.

    It is an ``EventPublisher`` of vLLM's, though it cannot inherit from it: without vLLM there is none.

    Args:
        publisher: the open stream.
        config: what ``get_publisher_config`` returns: vLLM's configuration, with the addresses of this rank.
        told: what was told of each block, where each is to be told once.
    """

    __slots__ = ("_config", "_told", "publisher")

    def __init__(
        self, *, publisher: ZmqEventPublisher, config: VllmConfig, told: PublishedBlocks | None = None
    ) -> None:
        self.publisher = publisher
        self._config = config
        self._told = told

    def publish(self, events: Any) -> None:
        """Accept a batch of vLLM's events; never blocks."""
        if self._told is not None:
            events = self._told.drop_published(events)
            if events is None:
                return
        self.publisher.publish(events)

    def shutdown(self) -> None:
        """Send what is pending, within a second, and close; safe to call twice."""
        self.publisher.shutdown()

    def get_publisher_config(self) -> VllmConfig:
        """The configuration with the addresses that this rank has: what ``/kv_event_sources`` tells."""
        return self._config
