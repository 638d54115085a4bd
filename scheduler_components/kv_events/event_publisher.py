"""The base class of publishers that are written for SGLang's registry."""

from __future__ import annotations

from abc import ABC, abstractmethod

from scheduler_components.events import EventBatch
from scheduler_components.values import PublisherStats

__all__ = ["EventPublisher", "NullEventPublisher"]


class EventPublisher(ABC):
    """Base class kept for publishers written for SGLang's module; the kit itself asks for the ``KvEventSink`` port.

    Args:
        attn_dp_rank: the stream's index, stamped on batches that carry no rank.
    """

    def __init__(self, attn_dp_rank: int = 0) -> None:
        self._attn_dp_rank = attn_dp_rank

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Accept one batch, in order."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send what is pending and let go of every resource."""

    def idle(self) -> None:  # noqa: B027 - an optional hook: a publisher that never defers has nothing to do
        """Encode and send what is pending; called where the scheduler waits for its device."""

    def stats(self) -> PublisherStats:
        """Counters since the publisher was opened; all zero for a publisher that keeps none."""
        return PublisherStats()


class NullEventPublisher(EventPublisher):
    """Publishes nothing: the sink of a rank that owns no stream, so that no caller ever asks ``if enabled``."""

    def publish(self, events: EventBatch) -> None:
        """Forget the batch."""

    def shutdown(self) -> None:
        """Nothing is held."""
