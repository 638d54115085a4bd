"""KV-event streams in NATS JetStream, for readers on other machines.

``open_jetstream_writer`` writes one worker's streams into a broker. ``open_jetstream_subscriber`` follows them with the
view, states and counters of the ZeroMQ subscriber. The rules of the log are in ``observability.kv_stream.log_cursor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from observability.jetstream.addresses import LogAddress
from observability.jetstream.config import JetStreamConfig
from scheduler_components._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from observability.jetstream.nats_subscriber import JetStreamSubscriber, open_jetstream_subscriber
    from observability.jetstream.nats_writer import JetStreamWriter, open_jetstream_writer

__all__ = [
    "JetStreamConfig",
    "LogAddress",
    "open_jetstream_writer",
    "JetStreamWriter",
    "open_jetstream_subscriber",
    "JetStreamSubscriber",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "observability.jetstream.nats_subscriber": "JetStreamSubscriber open_jetstream_subscriber",
        "observability.jetstream.nats_writer": "JetStreamWriter open_jetstream_writer",
    },
)
