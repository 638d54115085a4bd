"""KvPoolReader: read the blocks of the KV pool together with the matching position of the event stream."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
from scheduler_components.ports import HeldBlocksSource
from scheduler_components.values import KvPoolSnapshot

__all__ = ["KvPoolReader"]


@dataclass(slots=True, kw_only=True)
class KvPoolReader:
    """Read the pool between two steps, so that a reader of the stream can verify its view.

    The batches up to the snapshot's sequence number describe every change of the pool before the read, and no change
    after it.

    Attributes:
        publisher: publishes the events that are recorded or pending before the read.
        blocks: reads the pool; usually the cache. None reads nothing.
    """

    publisher: SchedulerKvEventsPublisher
    blocks: HeldBlocksSource | None = None

    def read(self) -> KvPoolSnapshot:
        """Return the blocks of the pool. Call it on the scheduler's thread, between steps.

        The cost is that of ``held_blocks``. The sequence number is None while batches wait to be sent: read again then.
        """
        self.publisher.flush()
        stats = self.publisher.stats()
        sequence = None if stats.batches_pending else stats.last_sequence
        blocks = {} if self.blocks is None else self.blocks.held_blocks()
        return KvPoolSnapshot(blocks, sequence, self.publisher.parallel.kv_stream_index)
