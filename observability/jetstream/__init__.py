"""KV-event streams in NATS JetStream: what a fleet reads beyond one machine.

``open_jetstream_writer`` puts one worker's streams into a broker; ``open_jetstream_subscriber`` follows them with the
view, states and counters of the ZeroMQ subscriber. The rules of the log are in ``cursor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from observability.jetstream.config import JetStreamConfig
from observability.jetstream.cursor import (
    LogCursor,
    LogInstruction,
    ReadLog,
    ReadPointer,
    ReadSnapshot,
    RequestSnapshot,
)
from observability.jetstream.log_follower import LogChannel, LogFollower
from observability.jetstream.log_writer import LogLimits, LogStats, LogTraffic, LogWriter, LogWriterCounters
from observability.jetstream.records import (
    LogAddress,
    LogHeartbeat,
    LogMessage,
    Snapshot,
    SnapshotPointer,
    read_message,
)
from scheduler_components._lazy import lazy_exports

if TYPE_CHECKING:
    from observability.jetstream.nats_subscriber import JetStreamSubscriber, open_jetstream_subscriber
    from observability.jetstream.nats_writer import JetStreamSink, JetStreamWriter, open_jetstream_writer

__all__ = [
    # both ends
    "JetStreamConfig",
    "LogAddress",
    "open_jetstream_writer",
    "JetStreamWriter",
    "JetStreamSink",
    "LogStats",
    "open_jetstream_subscriber",
    "JetStreamSubscriber",
    # the cores, for a broker of your own
    "LogWriter",
    "LogLimits",
    "LogTraffic",
    "LogWriterCounters",
    "LogCursor",
    "LogFollower",
    "LogChannel",
    "LogInstruction",
    "ReadPointer",
    "ReadSnapshot",
    "ReadLog",
    "RequestSnapshot",
    # what they say
    "LogMessage",
    "read_message",
    "LogHeartbeat",
    "SnapshotPointer",
    "Snapshot",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "observability.jetstream.nats_subscriber": "JetStreamSubscriber open_jetstream_subscriber",
        "observability.jetstream.nats_writer": "JetStreamSink JetStreamWriter open_jetstream_writer",
    },
)
