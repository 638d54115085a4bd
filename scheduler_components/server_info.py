"""Describe the KV-event streams for `/server_info`, from the port plan that the publishers bind by.

The keys are those of SGLang's descriptor (0.5.23), which its gateway and Dynamo read. A reader connects to
``endpoint_port_base + rank`` for each rank below `dp_size`. If that is wrong for some ranks, because they run on
several nodes or the system chose their ports, `publishers` has one entry per rank (sglang #38032).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import ConfigError
from scheduler_components.kv_events import Endpoint, EventPublisherFactory, KVEventsConfig, ListeningStream, PortPlan

__all__ = ["LOAD_TOPIC", "describe_kv_events_publisher", "kv_events_server_info"]

LOAD_TOPIC = "load"
"""First frame of the load gauge's messages (SGLang 0.5.23)."""


def describe_kv_events_publisher(
    config: str | Mapping[str, object] | KVEventsConfig | None,
    *,
    block_size: int | None,
    dp_size: int,
    publishers: Iterable[ListeningStream] = (),
) -> dict[str, object] | None:
    """Return a description of the streams for readers; None if there is no stream that a reader could follow.

    Args:
        config: the value of ``--kv-events-config``, text, by name or parsed. An invalid one gives None, never an error.
        block_size: tokens per block in the events: the page size, multiplied by the DCP size if pages are split by it.
        dp_size: number of streams (`ParallelState.kv_stream_count`).
        publishers: endpoints of all publishers, in any order; empty if the configuration determines them. Needed for
            port 0, and for several nodes: `ListeningStream.on_host` inserts each node's address.

    Returns:
        ``publisher, endpoint_host, endpoint_port_base, topic, block_size, dp_size``; if configured,
        ``replay_endpoint_port_base``, ``load_endpoint_port_base`` and ``load_topic``; ``replay_endpoint_host`` and
        ``load_endpoint_host`` only if they differ from ``endpoint_host``. A host may be a wildcard (``*``, ``0.0.0.0``,
        ``::``), which the reader replaces by the worker's host. A concrete IPv6 address is in brackets. ``publishers``
        is a list of maps with ``dp_rank``, ``endpoint``, and optionally ``replay_endpoint`` and ``load_endpoint``. It
        is omitted if all hosts are wildcards and all ports are base + rank. A port base is omitted if the system's
        ports are not consecutive.
    """
    try:
        return _describe(config, block_size, dp_size, publishers)
    except ConfigError:
        return None


def kv_events_server_info(
    config: str | Mapping[str, object] | KVEventsConfig | None,
    *,
    block_size: int | None,
    dp_size: int,
    publishers: Iterable[ListeningStream] = (),
) -> dict[str, object]:
    """Return the keys that KV events add to `/server_info`; see `describe_kv_events_publisher`.

    Returns:
        ``{"kv_events": {...}}``, with ``kv_events_warning`` if readers or operators should know more, or
        ``{"kv_events": None, "kv_events_error": "why"}``.
    """
    bound = tuple(publishers)
    try:
        descriptor = _describe(config, block_size, dp_size, bound)
        warning = _warning(config, bound)
    except ConfigError as error:
        return {"kv_events": None, "kv_events_error": str(error)}
    return {"kv_events": descriptor} | ({"kv_events_warning": warning} if warning else {})


def _describe(
    config: str | Mapping[str, object] | KVEventsConfig | None,
    block_size: int | None,
    dp_size: int,
    publishers: Iterable[ListeningStream],
) -> dict[str, object]:
    """Return the description; raise a ConfigError if there is nothing to describe."""
    settings = _published(config)
    check_integer("page_size", block_size, "is not a number of tokens")
    check_integer("dp_size", dp_size, "is not a number of streams")
    EventPublisherFactory.find(settings.publisher)
    bound = _each_once(publishers, dp_size)
    plan = _resolved(settings.port_plan(dp_size), bound)
    if not plan.events.port and not bound:
        hint = "give tcp and a fixed port, or the endpoints of the publishers"
        raise ConfigError("endpoint", settings.endpoint, "has no port that can be advertised", hint)
    return {
        "publisher": settings.publisher,
        "endpoint_host": plan.events.advertised_host,
        **({"endpoint_port_base": plan.events.port} if plan.events.port else {}),
        "topic": settings.topic,
        "block_size": block_size,
        "dp_size": dp_size,
        **_side_channel("replay", plan.replay, plan.events),
        **_side_channel("load", plan.load, plan.events),
        **({"load_topic": LOAD_TOPIC} if _has_load(plan, bound) else {}),
        **({"publishers": [_entry(stream) for stream in bound]} if _differs_from_bases(plan, bound) else {}),
    }


def _each_once(publishers: Iterable[ListeningStream], dp_size: int) -> tuple[ListeningStream, ...]:
    """Return the publishers by rank; raise unless they are all of the engine's, or none."""
    bound = tuple(sorted(publishers, key=lambda stream: stream.rank))
    ranks = [stream.rank for stream in bound]
    if bound and ranks != list(range(dp_size)):
        raise ConfigError("publishers", ranks, f"are not ranks 0 to {dp_size - 1}, each once", "name every stream")
    return bound


def _resolved(plan: PortPlan, bound: tuple[ListeningStream, ...]) -> PortPlan:
    """Return the plan with the system's ports in place of 0, if they are consecutive."""
    return attrs.evolve(
        plan,
        events=_with_consecutive_ports(plan.events, [stream.events for stream in bound]),
        replay=plan.replay and _with_consecutive_ports(plan.replay, [stream.replay for stream in bound]),
        load=plan.load and _with_consecutive_ports(plan.load, [stream.load for stream in bound]),
    )


def _with_consecutive_ports(base: Endpoint, bound: list[Endpoint | None]) -> Endpoint:
    ports = [0 if endpoint is None else endpoint.port or 0 for endpoint in bound]
    if base.port != 0 or not ports or ports != list(range(ports[0], ports[0] + len(ports))):
        return base
    return attrs.evolve(base, port=ports[0])


def _differs_from_bases(plan: PortPlan, bound: tuple[ListeningStream, ...]) -> bool:
    """Return whether the endpoints differ from the bases, or have hosts that readers can connect to."""
    return bool(bound) and not (plan.events.is_wildcard and all(_follows(plan, stream) for stream in bound))


def _follows(plan: PortPlan, stream: ListeningStream) -> bool:
    planned = [plan.event_endpoint(stream.rank), plan.replay_endpoint(stream.rank), plan.load_endpoint(stream.rank)]
    return all(
        actual is None or (base is not None and actual.port == base.port and _is_same_host(actual, base))
        for actual, base in zip((stream.events, stream.replay, stream.load), planned, strict=True)
    )


def _is_same_host(one: Endpoint, other: Endpoint) -> bool:
    return one.host == other.host or (one.is_wildcard and other.is_wildcard)


def _entry(stream: ListeningStream) -> dict[str, object]:
    sides = {"replay_endpoint": stream.replay, "load_endpoint": stream.load}
    return {"dp_rank": stream.rank, "endpoint": str(stream.events)} | {
        field: str(endpoint) for field, endpoint in sides.items() if endpoint is not None
    }


def _has_load(plan: PortPlan, bound: tuple[ListeningStream, ...]) -> bool:
    return bool(plan.load and plan.load.port) or any(stream.load for stream in bound)


def _published(config: str | Mapping[str, object] | KVEventsConfig | None) -> KVEventsConfig:
    hint = 'give --kv-events-config with "publisher": "zmq" to publish them'
    if not config:
        raise ConfigError("kv_events_config", config, "is not set, so KV events are not published", hint)
    settings = KVEventsConfig.read(config)
    if settings.publisher == "null":
        raise ConfigError("publisher", "null", "publishes no KV events", hint)
    return settings


def _side_channel(name: str, base: Endpoint | None, events: Endpoint) -> dict[str, object]:
    """Return the keys of the replay or load endpoints; none unless they are tcp with a fixed port."""
    if base is None or not base.port:
        return {}
    keys: dict[str, object] = {f"{name}_endpoint_port_base": base.port}
    if not _is_same_host(base, events):
        keys[f"{name}_endpoint_host"] = base.advertised_host
    return keys


def _warning(config: str | Mapping[str, object] | KVEventsConfig | None, bound: tuple[ListeningStream, ...]) -> str:
    """Return facts that are valid but may surprise a reader; empty without any."""
    settings = _published(config)
    plan = settings.port_plan(1)
    sentences = []
    if not plan.events.resolve_bind(settings.bind):
        sentences.append(
            f"the publisher connects to {plan.events}, so this process does not listen there; "
            'to listen there, give "bind": true'
        )
    sentences.extend(
        f"{field}={str(base)!r} is not advertised because it is not tcp with a fixed port"
        for field, base in _side_bases(plan)
        if not base.port and not bound
    )
    return "; ".join(sentences)


def _side_bases(plan: PortPlan) -> list[tuple[str, Endpoint]]:
    named = [("replay_endpoint", plan.replay), ("load_endpoint", plan.load)]
    return [(field, base) for field, base in named if base is not None]
