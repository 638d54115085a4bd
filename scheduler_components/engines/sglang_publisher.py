"""This kit's publisher with the interface of SGLang's ``EventPublisher``.

SGLang's own structs are encoded unchanged, so the bytes equal those of its own publisher. Written for SGLang 0.5.23,
``sglang/srt/disaggregation/kv_events.py``.
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
    """The methods of SGLang's ``EventPublisher``, over this kit's.

    Attributes:
        dp_rank: index of the stream.
        topic: first frame of its messages.
        binds: whether the publisher binds its address; only then can it describe a local source.
        stream: the publisher.
    """

    dp_rank: int
    topic: str
    binds: bool
    stream: ZmqEventPublisher

    def publish(self, events: EventBatch) -> None:
        """Queue one batch without blocking: SGLang's own, or this kit's with SGLang's events."""
        self.stream.publish(events)

    def idle(self) -> None:
        """Encode and send the pending batches."""
        self.stream.idle()

    def stats(self) -> PublisherStats:
        """Return the counters since the stream was opened."""
        return self.stream.stats()

    def shutdown(self) -> None:
        """Send the pending batches within a deadline and close; safe to call twice."""
        self.stream.shutdown()

    def describe_local_source(self, block_size: int) -> dict[str, Any] | None:
        """Return the endpoints for a process on this machine; None if it cannot follow the stream."""
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
    """Return the bound address as a process on this machine dials it, in SGLang's form."""
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
        ConfigError: a setting is invalid; nothing has been opened.
        StartError: an address cannot be bound.
    """
    stream = ZmqEventPublisher(dp_rank, config=settings)
    _log.info("scheduler-components publishes the KV events of rank %d at %s", dp_rank, stream.endpoint)
    binds = settings.port_plan(dp_rank + 1).events.resolve_bind(settings.bind)
    return SglangEventPublisher(dp_rank=dp_rank, topic=settings.topic, binds=binds, stream=stream)
