"""A publisher written for SGLang's module needs two methods. The null publisher accepts every call."""

from __future__ import annotations

import pytest

from scheduler_components import AllBlocksCleared, EventBatch, KVEventBatch
from scheduler_components.kv_events.event_publisher import EventPublisher, NullEventPublisher
from scheduler_components.values import PublisherStats


class ListPublisher(EventPublisher):
    def __init__(self) -> None:
        super().__init__(attn_dp_rank=3)
        self.batches: list[EventBatch] = []

    def publish(self, events: EventBatch) -> None:
        self.batches.append(events)

    def shutdown(self) -> None:
        self.batches.clear()


@pytest.mark.parametrize("publisher", [ListPublisher(), NullEventPublisher()], ids=["two methods", "null"])
def test_a_publisher_without_hooks_and_counters_can_be_driven(publisher: EventPublisher) -> None:
    publisher.publish(KVEventBatch(1.0, (AllBlocksCleared(),)))
    publisher.idle()
    assert publisher.stats() == PublisherStats()
    publisher.shutdown()


def test_a_publisher_that_cannot_publish_is_not_created() -> None:
    with pytest.raises(TypeError, match="abstract"):
        EventPublisher()  # type: ignore[abstract]
