"""What ``/server_info`` says of the KV-event streams, made from the port plan that the publishers bind by.

The keys are those of SGLang's descriptor (0.5.23), which its gateway and Dynamo read. A reader dials
``endpoint_port_base + rank`` for each rank below ``dp_size``.
"""

from __future__ import annotations

from scheduler_components.errors import ConfigError
from scheduler_components.kv_events import Endpoint, EventPublisherFactory, KVEventsConfig, PortPlan
from scheduler_components.validators import check_integer

__all__ = ["LOAD_TOPIC", "describe_kv_events_publisher", "kv_events_server_info"]

LOAD_TOPIC = "load"
"""First frame of the load gauge's messages (SGLang 0.5.23)."""


def describe_kv_events_publisher(
    config: str | KVEventsConfig | None, *, block_size: int | None, dp_size: int
) -> dict[str, object] | None:
    """Describe the streams for readers, or None when there is nothing that a reader could follow.

    Args:
        config: the text after ``--kv-events-config``, or what was read from it. Bad text gives None, never an error.
        block_size: tokens per block in the events: the page size, times the DCP size where pages are split by it.
        dp_size: number of streams (``ParallelState.kv_stream_count``).

    Returns:
        ``publisher, endpoint_host, endpoint_port_base, topic, block_size, dp_size``; ``replay_endpoint_port_base``
        and ``load_endpoint_port_base`` with ``load_topic`` where they are configured; ``replay_endpoint_host`` and
        ``load_endpoint_host`` only where they differ from ``endpoint_host``. A host may be a wildcard (``*``,
        ``0.0.0.0``, ``::``), for which the reader puts the worker's own; a concrete IPv6 address is in brackets.
    """
    try:
        return _describe(config, block_size, dp_size)
    except ConfigError:
        return None


def kv_events_server_info(
    config: str | KVEventsConfig | None, *, block_size: int | None, dp_size: int
) -> dict[str, object]:
    """Give the keys that KV events add to ``/server_info``; see ``describe_kv_events_publisher``.

    Returns:
        ``{"kv_events": {...}}``, with ``kv_events_warning`` where a reader or operator should know more, or
        ``{"kv_events": None, "kv_events_error": "why"}``.
    """
    try:
        descriptor = _describe(config, block_size, dp_size)
        warning = _warning(config)
    except ConfigError as error:
        return {"kv_events": None, "kv_events_error": str(error)}
    return {"kv_events": descriptor} | ({"kv_events_warning": warning} if warning else {})


def _describe(config: str | KVEventsConfig | None, block_size: int | None, dp_size: int) -> dict[str, object]:
    """Describe, or raise the ConfigError that says why there is nothing to describe."""
    settings = _published(config)
    check_integer("page_size", block_size, "is not a number of tokens")
    check_integer("dp_size", dp_size, "is not a number of streams")
    EventPublisherFactory.find(settings.publisher)
    plan = settings.port_plan(dp_size)
    if not plan.events.port:
        raise ConfigError(
            "endpoint", settings.endpoint, "has no port that can be advertised", "give tcp and a fixed port"
        )
    return {
        "publisher": settings.publisher,
        "endpoint_host": plan.events.advertised_host,
        "endpoint_port_base": plan.events.port,
        "topic": settings.topic,
        "block_size": block_size,
        "dp_size": dp_size,
        **_side_channel("replay", plan.replay, plan.events),
        **_side_channel("load", plan.load, plan.events),
        **({"load_topic": LOAD_TOPIC} if plan.load is not None and plan.load.port else {}),
    }


def _published(config: str | KVEventsConfig | None) -> KVEventsConfig:
    hint = 'give --kv-events-config with "publisher": "zmq" to publish them'
    if not config:
        raise ConfigError("kv_events_config", config, "is not set, so KV events are not published", hint)
    settings = KVEventsConfig.read(config)
    if settings.publisher == "null":
        raise ConfigError("publisher", "null", "publishes no KV events", hint)
    return settings


def _side_channel(name: str, base: Endpoint | None, events: Endpoint) -> dict[str, object]:
    """The keys of the replay or load range; none where it is not tcp on a fixed port."""
    if base is None or not base.port:
        return {}
    keys: dict[str, object] = {f"{name}_endpoint_port_base": base.port}
    if base.host != events.host and not (base.is_wildcard and events.is_wildcard):
        keys[f"{name}_endpoint_host"] = base.advertised_host
    return keys


def _warning(config: str | KVEventsConfig | None) -> str:
    """What is not wrong, and still not what a reader would expect; "" when there is nothing to say."""
    settings = _published(config)
    plan = settings.port_plan(1)
    sentences = []
    if not plan.events.decide_bind(settings.bind):
        sentences.append(
            f"the publisher connects to {plan.events}, so nothing of this process listens there; "
            'to listen there, give "bind": true'
        )
    sentences.extend(
        f"{field}={str(base)!r} is not advertised, for it is not tcp with a fixed port"
        for field, base in _side_bases(plan)
        if not base.port
    )
    return "; ".join(sentences)


def _side_bases(plan: PortPlan) -> list[tuple[str, Endpoint]]:
    named = [("replay_endpoint", plan.replay), ("load_endpoint", plan.load)]
    return [(field, base) for field, base in named if base is not None]
