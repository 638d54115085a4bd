"""EventPublisherFactory: publishers by name; ``open_event_publisher`` opens the publisher of a rank.

``config`` validates the whole configuration, ``endpoints`` plans its ports, and the publisher's opener gets it
unchanged. This module knows no setting of the ZMQ publisher.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, TypeAlias

from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import ConfigError, PublisherNameTakenError
from scheduler_components.kv_events.config import KVEventsConfig, spelling_hint
from scheduler_components.kv_events.event_publisher import EventPublisher, NullEventPublisher
from scheduler_components.parallel_state import ParallelState

__all__ = ["ENTRY_POINT_GROUP", "EventPublisherFactory", "PublisherConstructor", "open_event_publisher"]

_log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "scheduler_components.event_publishers"
"""Entry-point group in which packages offer publishers: ``mine = "my_package.publisher:MyPublisher"``."""


PublisherConstructor: TypeAlias = Callable[..., EventPublisher]
"""A publisher's class, or a function that returns a publisher. It offsets its endpoints by the rank itself."""

OpenPublisher: TypeAlias = Callable[[KVEventsConfig, int], EventPublisher]
"""Opens the publisher of a configuration and a stream's index."""


def _open_null_publisher(config: KVEventsConfig, attn_dp_rank: int) -> EventPublisher:
    given = sorted(config.model_fields_set)
    if given and "publisher" not in given:
        # SGLang also starts and publishes nothing. That is no error, but probably not the intention.
        text = 'kv_events_config gives %s and no publisher, so no KV events are published: add "publisher": "zmq"'
        _log.warning(text, ", ".join(given))
    return NullEventPublisher(attn_dp_rank)


def _open_zmq_publisher(config: KVEventsConfig, attn_dp_rank: int) -> EventPublisher:
    from scheduler_components.kv_events.zmq_publisher import ZmqEventPublisher

    return ZmqEventPublisher(attn_dp_rank, config=config)


def _opener_of(constructor: PublisherConstructor) -> OpenPublisher:
    """Return an opener that calls a constructor as SGLang's factory does, with the configuration's options added."""

    def open_publisher(config: KVEventsConfig, attn_dp_rank: int) -> EventPublisher:
        if config.auth != "none":
            problem = f"is not known to reach the publisher {config.publisher!r}"
            raise ConfigError("auth", config.auth, problem, "remove it, and protect that publisher by its options")
        arguments = config.sglang_arguments() | config.options
        _check_signature(config, constructor, arguments)
        return constructor(attn_dp_rank=attn_dp_rank, **arguments)

    return open_publisher


class EventPublisherFactory:
    """Publishers by name: the kit's ``null`` and ``zmq``, registered ones, and those that installed packages offer.

    A subclass starts with a copy of its parent's publishers. Names registered on it do not affect the parent.
    """

    _openers: ClassVar[dict[str, OpenPublisher]] = {"null": _open_null_publisher, "zmq": _open_zmq_publisher}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._openers = dict(cls._openers)

    @classmethod
    def register_publisher(cls, name: str, ctor: PublisherConstructor) -> None:
        """Register ``ctor`` as the publisher ``name``.

        It is called as ``ctor(attn_dp_rank=..., endpoint=..., replay_endpoint=..., buffer_steps=..., hwm=...,
        max_queue_size=..., topic=..., **options)``, with the endpoints as configured, not yet offset.

        Raises:
            PublisherNameTakenError: the name is in use. It is also a KeyError, as in SGLang's registry.
        """
        if name in cls._openers:
            raise PublisherNameTakenError(name)
        cls._openers[name] = _opener_of(ctor)

    @classmethod
    def create(
        cls, config: str | Mapping[str, object] | KVEventsConfig | None, attn_dp_rank: int = 0
    ) -> EventPublisher:
        """Open the publisher of stream ``attn_dp_rank``, or the null publisher without a configuration.

        Prefer ``open_event_publisher``, which also decides whether this rank publishes at all.

        Raises:
            ConfigError: the configuration is invalid, or no port is left for this stream.
            StartError: the system refused an address.
        """
        if not config:
            return NullEventPublisher(attn_dp_rank)
        settings = KVEventsConfig.read(config)
        check_integer("attn_dp_rank", attn_dp_rank, "is not a rank", at_least=0)
        settings.port_plan(attn_dp_rank + 1)  # there are at least this many streams
        return cls.find(settings.publisher)(settings, attn_dp_rank)

    @classmethod
    def find(cls, name: str) -> OpenPublisher:
        """Return the opener of the publisher ``name``. Load it first if an installed package offers it.

        Raises:
            ConfigError: no package offers the name, or the offered object cannot be loaded.
        """
        if name in cls._openers:
            return cls._openers[name]
        offers = entry_points(group=ENTRY_POINT_GROUP)
        values = {offer.value: offer for offer in offers if offer.name == name}
        if not values:
            known = (*cls._openers, *sorted(offers.names))
            raise ConfigError("publisher", name, "is not a known publisher", spelling_hint(name, known))
        if len(values) > 1:
            raise ConfigError("publisher", name, f"is offered by {' and '.join(sorted(values))}", "uninstall one")
        return cls._openers.setdefault(name, _opener_of(_load(*values.values())))


def _load(offer: EntryPoint) -> PublisherConstructor:
    hint = f"repair or remove the package that offers {offer.value!r}"
    try:
        constructor: PublisherConstructor = offer.load()
    except Exception as error:
        problem = f"cannot be loaded ({type(error).__name__}: {error})"
        raise ConfigError("publisher", offer.name, problem, hint) from error
    if not callable(constructor):
        raise ConfigError("publisher", offer.name, "is offered as something that cannot be called", hint)
    return constructor


def _check_signature(settings: KVEventsConfig, constructor: PublisherConstructor, arguments: dict[str, Any]) -> None:
    """Reject options that the constructor does not accept. A TypeError of its body stays unchanged."""
    try:
        signature = inspect.signature(constructor)
    except ValueError:  # a constructor written in C without a signature: the call itself raises
        return
    try:
        signature.bind(attn_dp_rank=0, **arguments)
    except TypeError as error:
        hint = "give the options that its constructor takes"
        raise ConfigError("options", settings.options, f"do not fit {settings.publisher!r} ({error})", hint) from None


def open_event_publisher(
    config: str | Mapping[str, object] | KVEventsConfig | None,
    *,
    parallel: ParallelState,
    factory: type[EventPublisherFactory] = EventPublisherFactory,
) -> EventPublisher:
    """Open the publisher of this rank's KV stream, or the null publisher if the rank owns none.

    Every rank validates the whole configuration, for all streams of the engine, before it opens anything. An invalid
    configuration fails on all ranks alike and leaves no socket open.

    Args:
        config: the operator's configuration, as text, by name or parsed; None or "" publishes nothing.
        parallel: decides whether this rank publishes, and as which stream.
        factory: looks up publishers by name.

    Raises:
        ConfigError: the configuration is invalid for this engine.
        StartError: the system refused an address.
    """
    if not config:
        return NullEventPublisher(parallel.kv_stream_index)
    settings = KVEventsConfig.read(config)
    settings.port_plan(parallel.kv_stream_count)
    open_publisher = factory.find(settings.publisher)
    if not parallel.owns_kv_stream:
        return NullEventPublisher(parallel.kv_stream_index)
    return open_publisher(settings, parallel.kv_stream_index)
