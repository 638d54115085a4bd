"""EventPublisher: the base class of publishers written for SGLang's registry, and its null object."""

from __future__ import annotations

from abc import ABC, abstractmethod

from scheduler_components.events import EventBatch
from scheduler_components.values import PublisherStats

__all__ = ["EventPublisher", "NullEventPublisher"]


class EventPublisher(ABC):
    """Base class of SGLang's module. The kit's own components need only the ``KvEventSink`` port.

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
        """Send the pending batches and release all resources."""

    def idle(self) -> None:  # noqa: B027 - optional: a publisher that sends in publish() needs none
        """Encode and send the pending batches. Called where the scheduler waits for its device."""

    def flush(self, deadline_s: float = 0.0) -> bool:  # this publisher has no thread to wait for
        """Send the pending batches within ``deadline_s`` seconds. Return True if each of them has its number."""
        self.idle()
        return not self.stats().batches_pending

    def stats(self) -> PublisherStats:
        """Return the counters since the publisher was opened; all zero for a publisher without counters."""
        return PublisherStats()


class NullEventPublisher(EventPublisher):
    """Publish nothing: the sink of a rank that owns no stream."""

    def publish(self, events: EventBatch) -> None:
        pass

    def shutdown(self) -> None:
        pass
