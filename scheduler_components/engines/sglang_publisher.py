"""SGLang's KV events through this kit's publisher: what its factory makes where the configuration says ``zmq``.

SGLang's own structs pass through as they are, so the bytes are those of its own publisher. Written against SGLang
0.5.23, ``sglang/srt/disaggregation/kv_events.py``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_components.events import EventBatch
from scheduler_components.kv_events import Endpoint, KVEventsConfig, ZmqEventPublisher
from scheduler_components.values import PublisherStats

__all__ = ["SglangEventPublisher", "open_sglang_publisher"]

_log = logging.getLogger("sglang.scheduler_components")


@dataclass(slots=True, kw_only=True)
class SglangEventPublisher:
    """Has the members that SGLang asks of an ``EventPublisher``.

    Attributes:
        dp_rank: the stream's index.
        topic: first frame of its messages.
        binds: whether it listens; one that connects has nothing to describe.
        stream: the publisher.
    """

    dp_rank: int
    topic: str
    binds: bool
    stream: ZmqEventPublisher

    def publish(self, events: EventBatch) -> None:
        """Accept one batch, SGLang's own or this kit's around SGLang's events, in order; never blocks."""
        self.stream.publish(events)

    def idle(self) -> None:
        """Encode and send what is pending."""
        self.stream.idle()

    def stats(self) -> PublisherStats:
        """Counters since the stream was opened."""
        return self.stream.stats()

    def shutdown(self) -> None:
        """Send what is pending within a deadline and let go of everything; safe to call twice."""
        self.stream.shutdown()

    def describe_local_source(self, block_size: int) -> dict[str, Any] | None:
        """Say where a process of this machine can follow the stream; None where it cannot."""
        endpoint = _local(self.stream.endpoint) if self.binds else None
        if endpoint is None:
            return None
        source: dict[str, Any] = {
            "dp_rank": self.dp_rank,
            "endpoint": endpoint,
            "topic": self.topic,
            "block_size": block_size,
        }
        replay_endpoint = _local(self.stream.replay_endpoint)
        if replay_endpoint is not None:
            source["replay_endpoint"] = replay_endpoint
        return source


def _local(bound: str | None) -> str | None:
    """The bound address as a process of this machine dials it, as SGLang writes it."""
    if bound is None:
        return None
    endpoint = Endpoint.parse(bound)
    if endpoint.transport == "ipc":
        path = bound.removeprefix("ipc://")
        return bound if path.startswith("@") else f"ipc://{Path(path).absolute()}"
    if endpoint.transport != "tcp":
        return None
    if endpoint.is_wildcard:
        host = "[::1]" if endpoint.is_ipv6 else "127.0.0.1"
        return f"tcp://{host}:{endpoint.port}"
    return str(endpoint)


def open_sglang_publisher(settings: KVEventsConfig, dp_rank: int) -> SglangEventPublisher:
    """Open the stream of one data-parallel rank.

    Raises:
        ConfigError: a setting cannot work; nothing has been opened.
        StartError: the machine refused an address.
    """
    stream = ZmqEventPublisher(dp_rank, config=settings)
    _log.info("KV events of rank %d, by scheduler-components: %s", dp_rank, stream.endpoint)
    binds = settings.port_plan(dp_rank + 1).events.resolve_bind(settings.bind)
    return SglangEventPublisher(dp_rank=dp_rank, topic=settings.topic, binds=binds, stream=stream)
