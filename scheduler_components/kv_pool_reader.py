"""KvPoolReader: what the KV pool holds, together with the place of the stream that tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
from scheduler_components.ports import HeldBlocksSource, NullHeldBlocksSource
from scheduler_components.values import KvPoolSnapshot

__all__ = ["KvPoolReader"]


@dataclass(slots=True, kw_only=True)
class KvPoolReader:
    """Reads the pool between two steps, so that whoever follows the stream can compare without anybody waiting.

    Everything that the pool did so far is in batches up to the reading's number, and nothing that it does later.

    Attributes:
        publisher: of the events; what is recorded and what is pending goes out first.
        blocks: reads the pool, usually the cache.
    """

    publisher: SchedulerKvEventsPublisher
    blocks: HeldBlocksSource = field(default_factory=NullHeldBlocksSource)

    def read(self) -> KvPoolSnapshot:
        """Read it all, on the scheduler's thread and outside of a step. Costs what the blocks's walk costs.

        The number is None where batches are still on their way to the socket: ask again then.
        """
        self.publisher.publish_kv_events()
        self.publisher.idle()
        stats = self.publisher.stats()
        sequence = None if stats.batches_pending else stats.last_sequence
        return KvPoolSnapshot(self.blocks.held_blocks(), sequence, self.publisher.parallel.kv_stream_index)
