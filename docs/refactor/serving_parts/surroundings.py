"""The surroundings of every stage, and a publisher that writes payloads to a file instead of a socket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import attrs
from prometheus_client import CollectorRegistry

from scheduler_components import ParallelState
from scheduler_components.kv_events import BatchEncoder, EventBatch, EventPublisher, EventPublisherFactory
from scheduler_components.values import PublisherStats
from serving_parts.batching import Settings
from serving_parts.request import Outbox

__all__ = ["PublisherFactory", "Surroundings", "TapePublisher", "open_tape_publisher"]


@attrs.frozen(kw_only=True)
class Surroundings:
    """The facts and sinks that a scheduler gets from outside: settings, rank, outputs."""

    settings: Settings
    parallel: ParallelState
    registry: CollectorRegistry
    outbox: Outbox
    clock: Callable[[], float]


class TapePublisher(EventPublisher):
    """Writes every payload to a file, each after its length in 4 bytes."""

    def __init__(self, attn_dp_rank: int, tape: BinaryIO) -> None:
        super().__init__(attn_dp_rank)
        self._tape = tape
        self._encoder = BatchEncoder()
        self._num_batches = self._num_events = self._num_bytes = 0

    def publish(self, events: EventBatch) -> None:
        payload = self._encoder.encode(events, self._attn_dp_rank)
        self._tape.write(len(payload).to_bytes(4, "big") + payload)
        self._num_batches += 1
        self._num_events += len(events.events)
        self._num_bytes += len(payload)

    def stats(self) -> PublisherStats:
        return PublisherStats(
            batches_sent=self._num_batches,
            events_sent=self._num_events,
            bytes_sent=self._num_bytes,
            last_sequence=self._num_batches - 1,
        )

    def shutdown(self) -> None:
        self._tape.close()


def open_tape_publisher(*, attn_dp_rank: int, **settings: Any) -> EventPublisher:
    """Make the publisher of ``{"publisher": "tape", "options": {"path": "..."}}``; the file must not exist."""
    return TapePublisher(attn_dp_rank, Path(settings["path"]).open("xb"))


class PublisherFactory(EventPublisherFactory):
    """Return the kit's publishers and the tape."""


PublisherFactory.register_publisher("tape", open_tape_publisher)
