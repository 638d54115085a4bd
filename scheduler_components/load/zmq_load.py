"""The load gauge over ZMQ: a PUB socket per rank, and a reader that returns only new samples.

Samples for a slow reader queue in four places: libzmq's queue for it, the kernel buffers of both sides, and its own
queue. The sink keeps the first two as small as the system allows, so that a sample after a stall is not queued behind
seconds of old ones. ``ZmqLoadReader`` handles the other two: samples that arrive while it does not read fill its
buffers, and further ones are dropped, so that after a stall they contain only old samples. It receives all queued
samples and keeps the newest. If it has not polled for longer than a heartbeat, it closes its connections with
everything queued in them, and connects again.

Source of the frames ``(topic, sequence, payload)``: SGLang 0.5.23.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scheduler_components._internal.validators import check_number
from scheduler_components.errors import DecodeError
from scheduler_components.kv_events import CurveClientKeys, CurveServerKeys, Endpoint
from scheduler_components.load.load_stat import (
    LOAD_HEARTBEAT_S,
    LOAD_TOPIC,
    MAX_LOAD_STAT_BYTES,
    LoadStat,
    LoadView,
    decode_load_stat,
    encode_load_stat,
    to_load_stat,
)
from scheduler_components.metrics import ZmqReportReader, ZmqReportSink
from scheduler_components.metrics.zmq_reports import (
    ReportWire,
    open_report_publisher,
    open_report_reader,
    parse_report_endpoints,
)
from scheduler_components.values import LoadSnapshot

__all__ = ["ZmqLoadReader", "open_zmq_load_reader", "open_zmq_load_sink"]

_MAX_MESSAGES_PER_READ = 10_000
"""More than 100 ranks send in 5 s. A read does not wait for publishers that send more."""


def _decode(frames: list[bytes]) -> LoadStat:
    if len(frames) != 3 or frames[0] != LOAD_TOPIC:
        raise DecodeError(f"a load sample in {len(frames)} frames, it is topic, sequence and payload")
    return decode_load_stat(frames[2])


def _wire(epoch: int = 0) -> ReportWire[LoadSnapshot, LoadStat]:
    def encode(load: LoadSnapshot, sequence: int) -> tuple[bytes, ...]:
        payload = encode_load_stat(to_load_stat(load, sequence=sequence, epoch=epoch))
        return LOAD_TOPIC, sequence.to_bytes(8, "big"), payload

    return ReportWire(
        subject="load gauge",
        field="load_endpoint",
        encode=encode,
        decode=_decode,
        max_bytes=MAX_LOAD_STAT_BYTES,
        topic=LOAD_TOPIC,
        max_queued=2,  # one sample in transit and the newest; with 1, a sample directly after another would be lost
        buffer_bytes=4096,  # the minimum of the system, about 30 samples; by default, hours of samples queue
    )


def open_zmq_load_sink(endpoint: Endpoint, *, access: CurveServerKeys | None = None) -> ZmqReportSink[LoadSnapshot]:
    """Bind the PUB socket of one stream's load gauge. Readers connect to it.

    Args:
        endpoint: this stream's address; the system chooses a port for port 0.
        access: keys of the clients that may connect; None for any client.

    Raises:
        ConfigError: it is an inproc address.
        StartError: the address is in use, or not an address of this machine; nothing stays open.
    """
    return open_report_publisher(_wire(secrets.randbits(63)), endpoint, access=access)


@dataclass(slots=True, kw_only=True)
class ZmqLoadReader:
    """Reads the load gauges of one engine. ``open_zmq_load_reader`` creates it; one thread uses and closes it.

    Attributes:
        reports: the connections. ``reports.received`` and ``reports.bad`` count messages.
        opened_s: a time before connecting, because the process may be suspended directly after it.
        stall_s: after a longer pause the queued samples are too old.
        clock: seconds from any origin.
        view: the newest sample of each rank.
        reconnects: reconnections after a stall.
    """

    reports: ZmqReportReader[LoadStat]
    opened_s: float
    stall_s: float
    clock: Callable[[], float]
    view: LoadView = field(default_factory=LoadView, init=False)
    reconnects: int = field(default=0, init=False)
    _polled_s: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._polled_s = self.opened_s

    def read(self, timeout_s: float = 0.0) -> LoadView:
        """Receive the queued samples, wait up to ``timeout_s`` for a first one, and return ``view``.

        Call it at least once per heartbeat. After a longer pause it discards the queued samples.
        """
        deadline_s = self.clock() + timeout_s
        self._reconnect_after_stall(self.stall_s)
        num_new = 0
        while True:
            # Wait in short intervals: one that takes much longer shows that the process was suspended.
            wait_s = min(max(0.0, deadline_s - self.clock()), self.stall_s / 2)
            stats = self.reports.receive(wait_s, _MAX_MESSAGES_PER_READ)
            # The samples are as old as this poll and not as the next line: the process may be suspended between them.
            if not self._reconnect_after_stall(wait_s + self.stall_s):
                num_new = sum(self.view.update(stat, self._polled_s) for stat in stats)
            if num_new or self.clock() >= deadline_s:
                return self.view

    def _reconnect_after_stall(self, allowed_s: float) -> bool:
        """Record this poll; connect again if the last one was longer ago than ``allowed_s``."""
        now = self.clock()
        stalled = now - self._polled_s > allowed_s
        self._polled_s = now
        if stalled:
            self.reconnects += 1
            self.reports.reopen()
        return stalled

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        self.reports.close()


def open_zmq_load_reader(
    endpoints: Iterable[str],
    *,
    keys: CurveClientKeys | None = None,
    stall_s: float = LOAD_HEARTBEAT_S,
    clock: Callable[[], float] = time.monotonic,
) -> ZmqLoadReader:
    """Connect to the load gauges of all ranks of one engine; publishers may start later.

    Args:
        endpoints: one address per rank, as advertised (base port + rank), with a host that can be dialled.
        keys: for streams that authenticate clients.
        stall_s: heartbeat of the publishers; after a longer pause the queued samples are too old.
        clock: seconds from any origin.

    Raises:
        ConfigError: an address cannot be dialled, there is none, or ``stall_s`` is not a time span.
        StartError: the system refused a socket.
    """
    wire = _wire()
    addresses = parse_report_endpoints(endpoints, wire)
    check_number("stall_s", stall_s)
    opened_s = clock()
    reports = open_report_reader(wire, addresses, keys=keys)
    return ZmqLoadReader(reports=reports, opened_s=opened_s, stall_s=stall_s, clock=clock)
