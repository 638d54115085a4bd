"""The surroundings of every stage, and a publisher that records payloads instead of sending them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from prometheus_client import CollectorRegistry

from scheduler_components import ParallelState
from scheduler_components.kv_events import BatchEncoder, EventBatch, EventPublisher, EventPublisherFactory
from scheduler_components.values import PublisherStats
from serving_parts.batching import Settings
from serving_parts.request import Outbox

__all__ = ["TAPES", "PublisherFactory", "Surroundings", "TapePublisher", "open_tape_publisher"]

TAPES: dict[str, Callable[[bytes], None]] = {}
"""Receivers of payloads by name, because the configuration of a publisher is text."""


@attrs.frozen(kw_only=True)
class Surroundings:
    """The facts and sinks that a scheduler gets from outside: settings, rank, outputs."""

    settings: Settings
    parallel: ParallelState
    registry: CollectorRegistry
    outbox: Outbox
    clock: Callable[[], float]


class TapePublisher(EventPublisher):
    """Passes every payload to a function."""

    def __init__(self, attn_dp_rank: int, tape: Callable[[bytes], None]) -> None:
        super().__init__(attn_dp_rank)
        self._tape = tape
        self._encoder = BatchEncoder()
        self._num_batches = self._num_events = self._num_bytes = 0

    def publish(self, events: EventBatch) -> None:
        payload = self._encoder.encode(events, self._attn_dp_rank)
        self._tape(payload)
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
        """Do nothing: `publish` keeps nothing back."""


def open_tape_publisher(*, attn_dp_rank: int, **settings: Any) -> EventPublisher:
    """Make the publisher of ``{"publisher": "tape", "options": {"tape": "NAME"}}``."""
    return TapePublisher(attn_dp_rank, TAPES[settings["tape"]])


class PublisherFactory(EventPublisherFactory):
    """Return the kit's publishers and the tape."""


PublisherFactory.register_publisher("tape", open_tape_publisher)
