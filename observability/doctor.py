"""Check a worker by its URL: connect to what it advertises, report problems and how to correct them.

``check_worker`` checks in order of dependency (description, pages, ports, load gauges, streams, topics) and stops when
the next check is impossible. Each check yields a ``CheckResult``. Given an endpoint, it checks one stream.
"""

from __future__ import annotations

import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING

import attrs
import msgspec

from observability.kv_stream import (
    FollowPolicy,
    NoStreamsError,
    NullStreamListener,
    StreamState,
    StreamStats,
    Subscriber,
    UnreachableError,
    escape_unprintable,
    fetch_json,
    fetch_page,
    open_subscriber,
    parse_addresses,
    parse_worker_url,
    static_address,
)
from observability.zmq_topic_probe import probe_topics
from scheduler_components import BlockStored, ConfigError, DecodeError, StartError
from scheduler_components.kv_events import CurveClientKeys, DecodedBatch, Endpoint, StreamAddress
from scheduler_components.load import open_zmq_load_reader
from scheduler_components.load.load_stat import LoadSample

if TYPE_CHECKING:
    import httpx

__all__ = [
    "CheckResult",
    "DoctorOptions",
    "Severity",
    "diagnose_stream",
    "check_worker",
    "exit_code",
    "render_report_json",
]

_GAUGE = "num_running_reqs"
"""The gauge that gateways read from ``/metrics``, after the prefix ``sglang:`` or ``sglang_``."""

_ACCEPT_OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
"""The ``Accept`` header of Prometheus 2.x."""

_PAGE_HINT = "routers that poll it will not register this worker, or will not see its load"

_MAX_SIZES = 8
"""Block sizes to keep per rank, enough to show that they differ."""

_MAX_LAG_S = 60.0
"""A longer lag does not come from the network: a clock is wrong, or batches are held back."""


class Severity(StrEnum):
    """OK: correct. WARNING: works, but will cause problems. ERROR: does not work."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@attrs.frozen
class CheckResult:
    """The result of one check.

    Attributes:
        hint: how to correct the problem; empty if there is none.
        is_unreachable: nothing answered.
    """

    severity: Severity
    what: str
    hint: str = ""
    is_unreachable: bool = False

    def __str__(self) -> str:
        line = escape_unprintable(f"{self.severity.upper():<7} {self.what}")
        return f"{line}\n        -> {escape_unprintable(self.hint)}" if self.hint else line


def _ok(what: str, hint: str = "") -> CheckResult:
    return CheckResult(Severity.OK, what, hint)


def _warning(what: str, hint: str = "") -> CheckResult:
    return CheckResult(Severity.WARNING, what, hint)


def _error(what: str, hint: str) -> CheckResult:
    return CheckResult(Severity.ERROR, what, hint)


def exit_code(report: Collection[CheckResult]) -> int:
    """Return 0 if no check failed, possibly with warnings; 1 if one failed; 3 if nothing answers at the URL.

    2 is reserved for an invalid command line.
    """
    if any(result.is_unreachable for result in report):
        return 3
    return int(any(result.severity is Severity.ERROR for result in report))


def render_report_json(url: str, report: Collection[CheckResult]) -> str:
    """Return one indented JSON object: ``url``, ``works`` (no error), ``exit_code`` and ``checks``."""
    found = exit_code(report)
    facts = {"url": url, "works": found == 0, "exit_code": found, "checks": [attrs.asdict(each) for each in report]}
    return msgspec.json.format(msgspec.json.encode(facts)).decode()


@attrs.frozen(kw_only=True)
class DoctorOptions:
    """Timeouts in seconds, keys, and what a bare endpoint does not advertise.

    Attributes:
        timeout_s: limit for one answer: a page, a connection, a replay.
        listen_s: longest time to follow the streams; ends earlier when every stream has sent a message.
        keys: for publishers that authenticate clients.
        api_key: for workers whose HTTP server requires a key.
        replay_endpoint, topic: for a bare endpoint; a worker advertises its own.
    """

    timeout_s: float = 2.0
    listen_s: float = 8.0
    keys: CurveClientKeys | None = None
    api_key: str | None = attrs.field(default=None, repr=False)
    replay_endpoint: str | None = None
    topic: str | None = None


def check_worker(
    url: str, options: DoctorOptions | None = None, *, clock: Callable[[], float] = time.monotonic
) -> list[CheckResult]:
    """Check a worker by its URL, or one stream by its endpoint. ``exit_code`` of the report says whether it works.

    Args:
        url: a worker's URL, whose ``/server_info`` describes the streams, or one PUB endpoint.

    Raises:
        ConfigError: ``url`` is neither, or an option of a bare endpoint is given for a URL. Problems of the worker are
            reported, never raised.
    """
    wait = options or DoctorOptions()
    if url.partition("://")[0] in ("tcp", "ipc"):
        return _check_endpoint(static_address(url, replay=wait.replay_endpoint, topic=wait.topic or ""), wait, clock)
    worker = parse_worker_url(url)
    for field, value in (("replay_endpoint", wait.replay_endpoint), ("topic", wait.topic)):
        if value is not None:
            raise ConfigError(field, value, "belongs to a bare endpoint", "take it out: the worker advertises it")
    try:
        info = fetch_json(worker, "/server_info", timeout_s=wait.timeout_s, api_key=wait.api_key)
    except StartError as error:
        text, is_silent = f"{error.resource} {error.problem}", isinstance(error, UnreachableError)
        return [CheckResult(Severity.ERROR, text, error.hint, is_unreachable=is_silent)]
    except DecodeError as error:
        return [_error(error.reason, "check that this is the worker's own URL")]
    report = [_ok(f"{worker}/server_info is readable")]
    try:
        addresses = parse_addresses(info, worker)
    except NoStreamsError as error:
        report.append(_error(str(error), 'start the worker with --kv-events-config and "publisher": "zmq"'))
        return [*report, *_check_pages(worker, None, wait)]
    except DecodeError as error:
        report.append(_error(error.reason, "correct the worker's description of its streams"))
        return [*report, *_check_pages(worker, None, wait)]
    if info.get("kv_events_warning"):
        report.append(_warning(f"the worker warns: {info['kv_events_warning']}"))
    is_relay = info.get("relay") is not None
    report += _check_relay_pages(worker, wait) if is_relay else _check_pages(worker, len(addresses), wait)
    report += _check_hosts(worker, addresses)
    ports = list(_check_ports(addresses, wait))
    report += [result for _, _, result in ports]
    open_ports = {(rank, channel) for rank, channel, result in ports if result.severity is Severity.OK}
    reachable = [address for address in addresses if (address.rank, "events") in open_ports]
    gauges = {each.rank: each.load for each in addresses if each.load and (each.rank, "load") in open_ports}
    report += _check_load_gauges(gauges, wait, clock)
    return [*report, *_check_streams(reachable, wait, clock)]


def _check_endpoint(address: StreamAddress, wait: DoctorOptions, clock: Callable[[], float]) -> list[CheckResult]:
    """Check the ports and the stream of one publisher. It is unreachable if its PUB port refuses the connection."""
    ports = list(_check_ports([address], wait))
    report = [
        attrs.evolve(result, is_unreachable=channel == "events" and result.severity is Severity.ERROR)
        for _, channel, result in ports
    ]
    is_open = ports[0][2].severity is Severity.OK
    return [*report, *_check_streams([address] if is_open else [], wait, clock)]


# --- pages, hosts, ports ---


def _check_pages(worker: httpx.URL, num_streams: int | None, wait: DoctorOptions) -> Iterator[CheckResult]:
    """Check the pages that gateways use to register and weigh a worker. The streams need none of them."""
    yield _check_health(worker, wait)
    try:
        yield _check_loads(fetch_json(worker, "/v1/loads", timeout_s=wait.timeout_s, api_key=wait.api_key), num_streams)
    except (StartError, DecodeError) as error:
        yield _warning(f"/v1/loads: {error}", _PAGE_HINT)
    try:
        page = fetch_page(worker, "/metrics", timeout_s=wait.timeout_s)
        scraped = fetch_page(worker, "/metrics", timeout_s=wait.timeout_s, accept=_ACCEPT_OPENMETRICS)
        yield _check_metrics(page, scraped)
    except (StartError, DecodeError) as error:
        yield _warning(f"/metrics: {error}", _PAGE_HINT)


def _check_relay_pages(worker: httpx.URL, wait: DoctorOptions) -> Iterator[CheckResult]:
    """Check the pages of a relay, which has neither load nor requests."""
    yield _check_health(worker, wait)
    try:
        fetch_page(worker, "/metrics", timeout_s=wait.timeout_s)
        yield _ok("/metrics is readable; this is a relay, and routers get the load from the engine")
    except (StartError, DecodeError) as error:
        yield _warning(f"/metrics: {error}", "check the relay's version")


def _check_health(worker: httpx.URL, wait: DoctorOptions) -> CheckResult:
    try:
        fetch_page(worker, "/health", timeout_s=wait.timeout_s)
    except (StartError, DecodeError) as error:
        return _warning(f"/health: {error}", _PAGE_HINT)
    return _ok("/health answers 200")


def _check_metrics(page: bytes, scraped: bytes) -> CheckResult:
    """Check the page in the formats that gateways and Prometheus request."""
    names, stored = _gauge_names(page), _gauge_names(scraped)
    if not re.search(rb"^[^#\s]", page, re.MULTILINE):
        hint = "switch the worker's metrics on, and look in its log for ranks that do not report"
        return _warning("/metrics is empty", hint)
    if not names:
        return _warning(f"/metrics has no {_GAUGE}", "switch the worker's metrics on")
    if names != stored:
        return _warning(
            f"/metrics has {names} as text, and {stored or f'no {_GAUGE}'} in the form that Prometheus asks for",
            "dashboards and alerts find nothing: prometheus-client 0.23 and later escapes the colon; serve the page by "
            "observability.render_metrics, or draw the dashboard with the prefix that is stored",
        )
    return _ok(f"/metrics is readable, and a Prometheus stores {names}")


def _gauge_names(page: bytes) -> str:
    """Return the sample names of the gauge on a page. TYPE lines do not count, because they cannot be queried."""
    found = re.findall(rb"^([\w:]*%s)[{ ]" % _GAUGE.encode(), page, re.MULTILINE)
    return ", ".join(sorted({name.decode() for name in found}))


def _check_loads(page: object, num_streams: int | None) -> CheckResult:
    loads = page.get("loads") if isinstance(page, dict) else None
    if not isinstance(loads, list):
        return _warning("/v1/loads has no list of loads", "check the worker's version")
    if num_streams is not None and len(loads) != num_streams:
        return _warning(
            f"/v1/loads has {len(loads)} ranks and {num_streams} streams are advertised",
            "check that each data-parallel rank reports its load, and only once",
        )
    return _ok(f"/v1/loads has {len(loads)} ranks")


def _check_hosts(worker: httpx.URL, addresses: Iterable[StreamAddress]) -> Iterator[CheckResult]:
    """Report loopback addresses, which readers on other machines resolve to themselves."""
    here = Endpoint(transport="tcp", host=worker.host, port=1).is_loopback
    hosts = {address.events.host for address in addresses if address.events.is_loopback and not here}
    for host in sorted(hosts):
        yield _error(
            f"streams are advertised at {host}, which only the worker's own machine can reach",
            "publish on a wildcard or on an address that readers can reach",
        )


def _check_ports(addresses: Iterable[StreamAddress], wait: DoctorOptions) -> Iterator[tuple[int, str, CheckResult]]:
    """Connect to every advertised port; yield (rank, channel, result)."""
    for address in addresses:
        channels = {"events": address.events, "replay": address.replay, "load": address.load}
        for channel, endpoint in channels.items():
            if endpoint is None:
                continue
            name = f"rank {address.rank}: {channel} port {endpoint}"
            problem = _connect(endpoint, wait.timeout_s)
            if not problem:
                yield address.rank, channel, _ok(f"{name} is open")
                continue
            severity = Severity.WARNING if channel == "load" else Severity.ERROR
            hint = "check that this rank's publisher runs, that it binds, and that no firewall is between"
            yield address.rank, channel, CheckResult(severity, f"{name}: {problem}", hint)


def _connect(endpoint: Endpoint, timeout_s: float) -> str:
    """Connect and disconnect; return the problem, or an empty string."""
    try:
        if endpoint.transport == "tcp":
            socket.create_connection((endpoint.host, endpoint.port or 0), timeout=timeout_s).close()
        else:
            with closing(socket.socket(socket.AF_UNIX)) as unix:
                unix.settimeout(timeout_s)
                unix.connect(endpoint.path.replace("@", "\0", 1) if endpoint.path[0] == "@" else endpoint.path)
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


# --- load gauges ---


def _check_load_gauges(
    gauges: Mapping[int, Endpoint], wait: DoctorOptions, clock: Callable[[], float]
) -> Iterator[CheckResult]:
    """Listen until every gauge has sent a sample, or until the timeout. A working gauge sends once per second."""
    if not gauges:
        return
    with closing(open_zmq_load_reader(map(str, gauges.values()))) as reader:
        deadline_s = clock() + wait.timeout_s
        while not gauges.keys() <= reader.view.samples.keys() and (left_s := deadline_s - clock()) > 0:
            reader.read(left_s)
        samples, num_bad = reader.view.samples, reader.reports.bad
    for rank, endpoint in gauges.items():
        yield _check_sample(f"rank {rank}: load gauge {endpoint}", samples.get(rank), wait.timeout_s)
    if num_bad:
        yield _warning(
            f"{num_bad} messages of the load gauges are no LoadStat",
            "check that the load port is not that of another stream",
        )


def _check_sample(name: str, sample: LoadSample | None, listen_s: float) -> CheckResult:
    if sample is None:
        return _warning(
            f"{name} sends nothing in {listen_s:g} s",
            "check that this rank's scheduler reports its load each second, and that the gauge needs no keys",
        )
    stat = sample.stat
    return _ok(
        f"{name}: {stat.num_running_reqs} running, {stat.num_waiting_reqs} waiting,"
        f" {stat.num_tokens} of {stat.max_total_num_tokens} tokens"
    )


# --- streams ---


class _BlockSizes(NullStreamListener):
    """Records the block sizes that each rank sends."""

    def __init__(self) -> None:
        self.of_rank: dict[int, set[int]] = defaultdict(set)

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        sizes = self.of_rank[rank]
        if len(sizes) < _MAX_SIZES:
            sizes.update(event.block_size for event in batch.events if isinstance(event, BlockStored))


def _check_streams(
    addresses: list[StreamAddress], wait: DoctorOptions, clock: Callable[[], float]
) -> Iterator[CheckResult]:
    """Follow the streams until each has sent a message, then diagnose them."""
    if not addresses:
        return
    block_sizes = _BlockSizes()
    policy = FollowPolicy(answer_timeout_s=wait.timeout_s, probe_interval_s=wait.timeout_s, dead_after_s=wait.listen_s)
    with open_subscriber(addresses, policy=policy, listener=block_sizes, keys=wait.keys) as subscriber:
        deadline_s = clock() + wait.listen_s
        while not _all_seen(subscriber) and (left_s := deadline_s - clock()) > 0:
            subscriber.poll(left_s)
        stats = subscriber.stats()
    for address in addresses:
        yield from diagnose_stream(address, stats[address.rank], block_sizes.of_rank[address.rank])
    silent = [address for address in addresses if address.topic and stats[address.rank].lag_s is None]
    yield from _check_topics(silent, wait)


def _all_seen(subscriber: Subscriber) -> bool:
    """Return whether each stream has sent a live batch or replayed its whole history."""
    return all(
        stats.lag_s is not None or (stats.recovered and stats.state is StreamState.LIVE)
        for stats in subscriber.stats().values()
    )


def diagnose_stream(address: StreamAddress, stats: StreamStats, block_sizes: set[int]) -> list[CheckResult]:
    """Check one stream whose ports are open.

    Args:
        address: the advertised address.
        stats: statistics after some seconds of following it.
        block_sizes: block sizes of its events.
    """
    report = [*_check_extension(address, stats), _check_state(address, stats)]
    name = f"rank {address.rank}"
    if stats.replays_unanswered:
        report.append(
            _error(
                f"{name}: the replay channel {address.replay} gave no end marker in time",
                "check that the port is the publisher's replay ROUTER, and that it is not overloaded; consumers such "
                "as Dynamo stay deaf without the marker",
            )
        )
    if address.block_size is not None and block_sizes - {address.block_size}:
        sizes = ", ".join(map(str, sorted(block_sizes)))
        report.append(
            _error(
                f"{name}: events have blocks of {sizes} tokens, {address.block_size} are advertised",
                "advertise the size that the cache uses: routers hash prompts by it and will match nothing",
            )
        )
    return [*report, *_check_content(name, stats)]


def _check_extension(address: StreamAddress, stats: StreamStats) -> list[CheckResult]:
    name = f"rank {address.rank}"
    if stats.is_extended:
        return [_ok(f"{name}: the publisher's digest proves the view ({stats.verified} times so far)")]
    if address.replay is None:
        return [
            _warning(
                f"{name}: no replay channel is advertised: a late joiner can never get the whole state,"
                " and a reader that misses a batch stays partial",
                "give the publisher a replay_endpoint",
            )
        ]
    if not stats.replays_asked or stats.replays_unanswered:
        return []
    return [
        _ok(f"{name}: the publisher has no digest (SGLang's and vLLM's have none): followed by numbers and payloads")
    ]


def _check_state(address: StreamAddress, stats: StreamStats) -> CheckResult:
    name = f"rank {address.rank}"
    if stats.state is StreamState.LIVE and (stats.last_seq >= 0 or not stats.is_extended):
        return _ok(f"{name}: live at batch {stats.last_seq}, {stats.blocks_held} blocks held")
    if stats.state in (StreamState.LIVE, StreamState.SYNCING) and not stats.replays_unanswered:
        return _ok(
            f"{name}: connected, and nothing was published yet",
            "send the worker a request and check again to see events",
        )
    if stats.state is StreamState.PARTIAL and address.replay is None:
        return _ok(f"{name}: followed up to batch {stats.last_seq}, {stats.blocks_held} blocks held")
    if stats.state is StreamState.PARTIAL and not stats.replays_unanswered and not stats.decode_errors:
        return _warning(
            f"{name}: history before the replay window is gone, so a reader that joins late stays partial",
            "raise buffer_steps, or flush the cache once the readers are there",
        )
    if stats.state in (StreamState.CONNECTING, StreamState.DEAD):
        return _error(
            f"{name}: {address.events} accepts connections, but is no ZeroMQ publisher that can be read",
            "check that the port is the event publisher's, and give key files if the stream asks for keys",
        )
    return _warning(f"{name}: still {stats.state} at batch {stats.last_seq}", "check again")


def _check_content(name: str, stats: StreamStats) -> Iterator[CheckResult]:
    if stats.decode_errors or stats.bad_frames:
        yield _error(
            f"{name}: {stats.decode_errors} batches or events and {stats.bad_frames} messages are unreadable"
            f" ({stats.last_error or 'not the frames of this wire'})",
            "check that publisher and readers use the same version of the event schema",
        )
    if stats.rank_mismatches:
        yield _error(
            f"{name}: {stats.rank_mismatches} batches name another rank",
            "check the publishers' endpoint offsets: two ranks share or swap their ports",
        )
    if stats.gaps and stats.losses:
        yield _warning(
            f"{name}: {stats.gaps} gaps, and not all of what was missed could be had",
            "raise the publisher's hwm and buffer_steps",
        )
    if stats.unknown_media:
        yield _warning(
            f"{name}: {stats.unknown_media} events name a medium that routers do not know",
            "publish GPU, CPU, CPU_PINNED, DISK, EXTERNAL or STORAGE",
        )
    if stats.lag_s is not None and abs(stats.lag_s) > _MAX_LAG_S:
        yield _warning(
            f"{name}: the last batch is stamped {stats.lag_s:.0f} s ago",
            "check the two machines' clocks, or what holds the publisher's batches back",
        )


def _check_topics(addresses: list[StreamAddress], wait: DoctorOptions) -> Iterator[CheckResult]:
    """Check whether a stream without messages publishes under another topic; replays have no topic."""
    if not addresses:
        return
    topics_seen = probe_topics(addresses, listen_s=wait.timeout_s, keys=wait.keys)
    for address in addresses:
        others = topics_seen[address.rank] - {address.topic.encode()}  # readers compare for equality
        if address.topic and len(others) == len(topics_seen[address.rank]) > 0:
            names = ", ".join(repr(topic.decode(errors="replace")) for topic in sorted(others))
            yield _error(
                f"rank {address.rank}: it publishes under {names}, and the topic {address.topic!r} is advertised",
                "advertise the topic that the publisher was given",
            )
