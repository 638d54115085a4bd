"""Dials what a worker advertises and says what is wrong with it, and what would mend it.

Looks in the order in which things depend on each other, and stops where nothing further can be seen.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator

import attrs
import httpx

from observability.finding import Finding, Severity, exit_code
from observability.kv_stream.discovery import (
    NoStreamsError,
    StreamAddress,
    addresses_in,
    fetch_json,
    fetch_page,
    worker_url,
)
from observability.kv_stream.follower import FollowPolicy
from observability.kv_stream.instructions import StreamState
from observability.kv_stream.zmq_subscriber import Subscriber, open_subscriber
from observability.load_diagnosis import diagnose_load_gauges
from observability.stream_diagnosis import BatchInspector, diagnose_stream
from observability.zmq_topics import listen_for_topics
from scheduler_components.errors import DecodeError, StartError
from scheduler_components.kv_events.endpoint import Endpoint
from scheduler_components.kv_events.zmq_access import ClientKeys

__all__ = ["DoctorOptions", "examine", "exit_code"]

_GAUGE = b"num_running_reqs"
"""What gateways look for in ``/metrics``, after the prefix ``sglang:`` or ``sglang_``."""


@attrs.frozen(kw_only=True)
class DoctorOptions:
    """How long to wait, in seconds.

    ``timeout_s`` is for one answer: a page, a connection, a replay. ``listen_s`` is how long the streams are followed
    at most; it ends earlier when every stream has shown itself. ``keys`` are for publishers that let in none but
    clients with keys.
    """

    timeout_s: float = 2.0
    listen_s: float = 8.0
    keys: ClientKeys | None = None


def examine(
    url: str, options: DoctorOptions | None = None, *, clock: Callable[[], float] = time.monotonic
) -> list[Finding]:
    """Examine a worker by its URL; ``exit_code`` of the findings says whether it works.

    Raises:
        ConfigError: ``url`` is not a worker's URL. What is wrong with the worker is found, never raised.
    """
    worker = worker_url(url)
    wait = options or DoctorOptions()
    try:
        info = fetch_json(worker, "/server_info", timeout_s=wait.timeout_s)
    except StartError as error:
        return [Finding(Severity.ERROR, f"{error.resource} {error.problem}", error.mend)]
    except DecodeError as error:
        return [Finding(Severity.ERROR, error.reason, "check that this is the worker's own URL")]
    findings = [Finding(Severity.OK, f"{worker}/server_info is readable")]
    try:
        addresses = addresses_in(info, worker)
    except NoStreamsError as error:
        findings.append(
            Finding(Severity.ERROR, str(error), 'start the worker with --kv-events-config and "publisher": "zmq"')
        )
        return [*findings, *_look_at_pages(worker, None, wait)]
    except DecodeError as error:
        findings.append(Finding(Severity.ERROR, error.reason, "mend the worker's description of its streams"))
        return [*findings, *_look_at_pages(worker, None, wait)]
    if info.get("kv_events_warning"):
        findings.append(Finding(Severity.WARNING, f"the worker warns: {info['kv_events_warning']}"))
    findings += _look_at_pages(worker, len(addresses), wait)
    findings += _look_at_hosts(worker, addresses)
    dialled = list(_dial(addresses, wait))
    findings += [finding for _, _, finding in dialled]
    open_ports = {(rank, channel) for rank, channel, finding in dialled if finding.severity is Severity.OK}
    reachable = [address for address in addresses if (address.rank, "events") in open_ports]
    gauges = {each.rank: each.load for each in addresses if each.load and (each.rank, "load") in open_ports}
    findings += diagnose_load_gauges(gauges, listen_s=wait.timeout_s, clock=clock)
    return [*findings, *_follow(reachable, wait, clock)]


def _look_at_pages(worker: httpx.URL, num_streams: int | None, wait: DoctorOptions) -> Iterator[Finding]:
    """The pages by which gateways register and weigh a worker. None of them is needed for the streams."""
    mend = "routers that poll it will not register this worker, or will not see its load"
    try:
        fetch_page(worker, "/health", timeout_s=wait.timeout_s)
        yield Finding(Severity.OK, "/health answers 200")
    except (StartError, DecodeError) as error:
        yield Finding(Severity.WARNING, f"/health: {error}", mend)
    try:
        yield _judge_loads(fetch_json(worker, "/v1/loads", timeout_s=wait.timeout_s), num_streams)
    except (StartError, DecodeError) as error:
        yield Finding(Severity.WARNING, f"/v1/loads: {error}", mend)
    try:
        found = _GAUGE in fetch_page(worker, "/metrics", timeout_s=wait.timeout_s)
        yield (
            Finding(Severity.OK, "/metrics is readable")
            if found
            else Finding(Severity.WARNING, f"/metrics has no {_GAUGE.decode()}", "switch the worker's metrics on")
        )
    except (StartError, DecodeError) as error:
        yield Finding(Severity.WARNING, f"/metrics: {error}", mend)


def _judge_loads(report: object, num_streams: int | None) -> Finding:
    loads = report.get("loads") if isinstance(report, dict) else None
    if not isinstance(loads, list):
        return Finding(Severity.WARNING, "/v1/loads has no list of loads", "check the worker's version")
    if num_streams is not None and len(loads) != num_streams:
        return Finding(
            Severity.WARNING,
            f"/v1/loads has {len(loads)} ranks and {num_streams} streams are advertised",
            "check that each data-parallel rank reports its load, and once",
        )
    return Finding(Severity.OK, f"/v1/loads has {len(loads)} ranks")


def _look_at_hosts(worker: httpx.URL, addresses: Iterable[StreamAddress]) -> Iterator[Finding]:
    """A loopback address is the reader's own machine, not the worker's."""
    here = Endpoint(transport="tcp", host=worker.host, port=1).is_loopback
    hosts = {address.events.host for address in addresses if address.events.is_loopback and not here}
    for host in sorted(hosts):
        yield Finding(
            Severity.ERROR,
            f"streams are advertised at {host}, which only the worker's own machine can reach",
            "publish on a wildcard or on an address that readers can reach",
        )


def _dial(addresses: Iterable[StreamAddress], wait: DoctorOptions) -> Iterator[tuple[int, str, Finding]]:
    """Connect to every advertised port: (rank, channel, what came of it)."""
    for address in addresses:
        channels = {"events": address.events, "replay": address.replay, "load": address.load}
        for channel, endpoint in channels.items():
            if endpoint is None:
                continue
            name = f"rank {address.rank}: {channel} port {endpoint}"
            problem = _connect(endpoint, wait.timeout_s)
            if not problem:
                yield address.rank, channel, Finding(Severity.OK, f"{name} is open")
                continue
            severity = Severity.WARNING if channel == "load" else Severity.ERROR
            mend = "check that this rank's publisher runs, that it binds, and that no firewall stands between"
            yield address.rank, channel, Finding(severity, f"{name}: {problem}", mend)


def _connect(endpoint: Endpoint, timeout_s: float) -> str:
    """Connect and hang up; what went wrong, or nothing."""
    try:
        socket.create_connection((endpoint.host, endpoint.port or 0), timeout=timeout_s).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def _follow(addresses: list[StreamAddress], wait: DoctorOptions, clock: Callable[[], float]) -> Iterator[Finding]:
    """Follow the streams until each has shown itself, then judge them."""
    if not addresses:
        return
    inspector = BatchInspector()
    policy = FollowPolicy(answer_timeout_s=wait.timeout_s, probe_interval_s=wait.timeout_s, dead_after_s=wait.listen_s)
    with open_subscriber(addresses, policy=policy, listener=inspector, keys=wait.keys) as subscriber:
        deadline_s = clock() + wait.listen_s
        while not _all_shown(subscriber) and (left_s := deadline_s - clock()) > 0:
            subscriber.poll(left_s)
        stats = subscriber.stats()
    for address in addresses:
        yield from diagnose_stream(address, stats[address.rank], inspector.block_sizes[address.rank])
    unheard = [address for address in addresses if address.topic and stats[address.rank].lag_s is None]
    yield from _look_at_topics(unheard, wait)


def _all_shown(subscriber: Subscriber) -> bool:
    """Each stream sent something live, or its replay brought all of its history."""
    return all(
        stats.lag_s is not None or (stats.recovered and stats.state is StreamState.LIVE)
        for stats in subscriber.stats().values()
    )


def _look_at_topics(addresses: list[StreamAddress], wait: DoctorOptions) -> Iterator[Finding]:
    """A stream that is silent under its topic may be talking under another; replays carry no topic."""
    if not addresses:
        return
    heard = listen_for_topics(addresses, listen_s=wait.timeout_s, keys=wait.keys)
    for address in addresses:
        others = [topic for topic in heard[address.rank] if not topic.startswith(address.topic.encode())]
        if others:
            names = ", ".join(repr(topic.decode(errors="replace")) for topic in sorted(others))
            yield Finding(
                Severity.ERROR,
                f"rank {address.rank}: it publishes under {names}, and the topic {address.topic!r} is advertised",
                "advertise the topic that the publisher was given",
            )
