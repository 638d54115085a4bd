"""Judges the streams of a live engine, by its URL or one endpoint: any engine that speaks this wire."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

from observability.kv_stream.discovery import NoStreamsError, StreamAddress, bare_address, discover
from scheduler_components.errors import ConfigError, DecodeError
from scheduler_components.kv_events.endpoint import Endpoint
from scheduler_components.testing.conformance.record import Expectations
from scheduler_components.testing.conformance.report import ConformanceReport, report_stream
from scheduler_components.testing.conformance.stream_judge import judge_stream
from scheduler_components.testing.conformance.zmq_probe import ProbeOptions, probe_streams
from scheduler_components.testing.wire_rules import Violation

__all__ = ["examine_conformance"]

_CONNECT_S = 2.0


def examine_conformance(
    target: str,
    options: ProbeOptions | None = None,
    *,
    replay_endpoint: str | None = None,
    topic: str | None = None,
    block_size: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ConformanceReport:
    """Judge an engine by what its streams really send.

    Args:
        target: a worker's URL, whose ``/server_info`` describes the streams, or one PUB endpoint.
        options: how long to listen.
        replay_endpoint, block_size: of a bare endpoint; a worker advertises its own.
        topic: of a bare endpoint; None judges no topic.
        clock: monotonic seconds.

    Raises:
        ConfigError: the target or an option is not one.
        StartError: the worker cannot be reached.
    """
    judged, broken = {"reachable"}, []
    if "://" in target and target.partition("://")[0] in ("tcp", "ipc"):
        addresses: tuple[StreamAddress, ...] = (bare_address(target, replay=replay_endpoint, topic=topic or ""),)
        wanted = [Expectations(0, None if topic is None else topic.encode(), block_size)]
    else:
        for field, value in (("replay_endpoint", replay_endpoint), ("topic", topic), ("block_size", block_size)):
            if value is not None:
                raise ConfigError(field, value, "belongs to a bare endpoint", "take it out: the worker advertises it")
        judged.add("descriptor")
        try:
            addresses = discover(target)
        except (NoStreamsError, DecodeError) as error:
            return ConformanceReport.of(target, judged, [Violation("descriptor", str(error))], ())
        wanted = [Expectations(each.rank, each.topic.encode(), each.block_size) for each in addresses]
        if any(each.block_size is None for each in addresses):
            broken.append(Violation("descriptor", "no block_size is advertised: routers cannot hash prompts"))
    broken += _unreachable(addresses)
    records = probe_streams(addresses, options or ProbeOptions(), clock=clock)
    streams = [
        report_stream(address, judge_stream(record, expected))
        for address, record, expected in zip(addresses, records, wanted, strict=True)
    ]
    return ConformanceReport.of(target, judged, broken, streams)


def _unreachable(addresses: tuple[StreamAddress, ...]) -> Iterator[Violation]:
    for address in addresses:
        for endpoint in (address.events, address.replay):
            if endpoint is not None and (problem := _dial(endpoint)):
                yield Violation("reachable", f"rank {address.rank}: {endpoint}: {problem}")


def _dial(endpoint: Endpoint) -> str:
    """Connect and hang up; what went wrong, or nothing. An ipc path is left to the probe."""
    if endpoint.transport != "tcp":
        return ""
    try:
        socket.create_connection((endpoint.host, endpoint.port or 0), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""
