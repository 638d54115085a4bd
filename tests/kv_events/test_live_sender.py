"""The pending batches of a publisher without a socket: what is sent has the effect of what was published."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from observability.kv_stream import BlockView
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, EventStream
from scheduler_components.kv_events.live_sender import LiveSender

BLOCKS = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True).map(tuple)
EVENTS = st.one_of(
    BLOCKS.map(lambda blocks: BlockStored(blocks, None, blocks, 1, None)),
    BLOCKS.map(BlockRemoved),
    st.just(AllBlocksCleared()),
)


class Channel:
    """Takes frames until it is closed."""

    def __init__(self, *, max_pending: int = 100) -> None:
        self.sent: list[tuple[bytes, bytes, bytes]] = []
        self.is_closed = False
        self.stream = EventStream(epoch=bytes(16), max_steps=100, max_bytes=10**6)
        self.sender = LiveSender(
            self.send, topic=b"kv", encoder=BatchEncoder(), stream=self.stream, rank=3, max_pending=max_pending,
            clock=lambda: 5.0,
        )  # fmt: skip

    def send(self, frames: tuple[bytes, bytes, bytes]) -> bool:
        if not self.is_closed:
            self.sent.append(frames)
        return not self.is_closed

    def publish(self, *events: KVCacheEvent) -> None:
        self.sender.pending.append(KVEventBatch(1.0, events))

    def publish_some(self, count: int) -> None:
        for number in range(count):
            self.publish(BlockStored((number,), None, (number,), 1, None))


@given(batches=st.lists(st.lists(EVENTS, min_size=1, max_size=3), max_size=12), max_pending=st.integers(1, 6))
def test_readers_get_the_effect_of_all_batches(batches: list[list[KVCacheEvent]], max_pending: int) -> None:
    it, expected, view = Channel(max_pending=max_pending), BlockView(), BlockView()
    for number, events in enumerate(batches):
        it.publish(*events)
        expected.apply(0, events)
        if number % 5 == 0:
            it.sender.send_pending()
    it.sender.send_pending()
    for number, (topic, sequence, payload) in enumerate(it.sent):
        assert (topic, sequence) == (b"kv", number.to_bytes(8, "big"))
        view.apply(0, BatchDecoder().decode(payload).events)
    assert view.blocks(0) == expected.blocks(0)
    assert it.sender.num_batches == len(it.sent)


def test_too_many_pending_batches_become_one() -> None:
    it = Channel(max_pending=4)
    it.publish_some(5)
    it.sender.send_pending()
    assert (len(it.sent), it.sender.num_collapsed) == (1, 5)
    it.publish_some(4)
    it.sender.send_pending()
    assert (len(it.sent), it.sender.num_collapsed) == (5, 5)


def test_small_batches_are_sent_together_when_the_time_is_over() -> None:
    it = Channel()
    it.publish_some(10)
    it.sender.send_pending(until_s=4.0)
    assert (len(it.sent), len(it.sender.pending)) == (3, 7)


def test_a_closed_channel_drops_and_counts() -> None:
    it = Channel()
    it.is_closed = True
    it.publish_some(2)
    it.sender.send_pending()
    assert (it.sender.num_dropped, it.sender.num_batches, len(it.sender.pending)) == (2, 0, 0)
