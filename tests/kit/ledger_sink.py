"""An event sink that checks the rules of the wire and keeps the blocks of a subscriber."""

from __future__ import annotations

from scheduler_components import BlockRemoved
from scheduler_components.events import EventBatch
from scheduler_components.testing import EventLedger
from scheduler_components.testing.fakes import ListEventSink


class LedgerSink(ListEventSink):
    """The blocks that a subscriber knows; fails when an event breaks a rule of the wire."""

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.ledger = EventLedger(block_size=page_size)
        self.num_removed = 0

    @property
    def blocks(self) -> set[int]:
        return self.ledger.hashes()

    def publish(self, events: EventBatch) -> None:
        assert events.events, "an empty batch was published"
        assert self.ledger.apply_all(events.events) == []
        self.num_removed += sum(len(each.block_hashes) for each in events.events if isinstance(each, BlockRemoved))
