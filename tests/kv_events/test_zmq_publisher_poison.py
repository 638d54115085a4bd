"""Objects that a faulty scheduler may publish. Property: each costs itself and a counter, and no valid event."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
from kit.events import numbered_batch
from kit.sockets import Open, ReadReplay

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchEncoder

pytestmark = pytest.mark.sockets


class Junk:
    """An object that is no batch."""


@pytest.mark.parametrize(
    "junk",
    [
        None,
        Junk(),
        EventBatch(ts=1.0, events=None),  # type: ignore[arg-type]
        EventBatch(ts=1.0, events=(None,)),  # type: ignore[arg-type]
        EventBatch(ts=1.0, events=(BlockStored((1,), None, (1, 2), 3, None),)),
        EventBatch(ts=1.0, events=(BlockStored((1,), None, (1, "x"), "2", None),)),  # type: ignore[arg-type]
        EventBatch(ts=1.0, events=(BlockStored((2**64,), None, (1,), 1, None),)),
        EventBatch(ts=1.0, events=(AllBlocksCleared(),), attn_dp_rank=2**70),
    ],
    ids=["none", "object", "no events", "none event", "part of a block", "texts", "65 bits", "rank"],
)
@pytest.mark.parametrize("dialect", ["array", "map", "vllm"])
def test_junk_is_refused_by_count_and_the_stream_goes_on(
    opened: Open, read_replay: ReadReplay, junk: EventBatch, dialect: str
) -> None:
    publisher = opened(dialect=dialect)
    publisher.publish(junk)
    publisher.idle()
    publisher.publish(junk)
    publisher.publish(numbered_batch(1))
    assert read_replay(publisher.replay_endpoint) == [BlockRemoved((1,))]
    stats = publisher.stats()
    assert (stats.events_refused, stats.batches_sent, stats.last_sequence) == (2, 1, 0)


def test_events_too_large_for_a_reader_go_out_in_parts(opened: Open, read_replay: ReadReplay) -> None:
    publisher = opened()
    blocks, size = 600, 2048
    tokens = tuple(range(2**31, 2**31 + blocks * size))
    keys = tuple((str(number),) for number in range(blocks))
    publisher.publish(KVEventBatch(1.0, (BlockStored(tuple(range(blocks)), -1, tokens, size, None, extra_keys=keys),)))
    publisher.publish(KVEventBatch(1.0, (BlockRemoved(tuple(range(2**60, 2**60 + 500_000)), "CPU"),)))
    events = read_replay(publisher.replay_endpoint)  # which accepts no payload above a reader's limit
    stored = [event for event in events if isinstance(event, BlockStored)]
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert [value for event in stored for value in event.block_hashes] == list(range(blocks))
    assert [event.parent_block_hash for event in stored] == [-1, *(event.block_hashes[-1] for event in stored[:-1])]
    assert tuple(token for event in stored for token in event.token_ids) == tokens
    assert tuple(key for event in stored for key in event.extra_keys or ()) == keys
    assert sum(len(event.block_hashes) for event in removed) == 500_000
    assert {event.medium for event in removed} == {"CPU"}


@pytest.mark.parametrize(
    "harmful",
    [
        BlockStored((1,), None, (-1,), 1, None),
        BlockStored((1,), None, (2**32,), 1, None),
        BlockStored((1,), None, ("x",), 1, None),  # type: ignore[arg-type]
        BlockStored((1,), None, (0.5,), 1, None),
        BlockStored(("1",), None, (7,), 1, None),  # type: ignore[arg-type]
        BlockStored((), None, (), 0, None),
        BlockRemoved((b"\x01" * 8,)),  # type: ignore[arg-type]
        BlockRemoved((1,), msgspec.Raw(b"\xc1")),  # type: ignore[arg-type]
        BlockStored((1,), None, (7,), 1, None, medium=5),  # type: ignore[arg-type]
    ],
    ids=["-1", "33 bits", "text", "float", "text hash", "no size", "bytes hash", "raw", "medium"],
)
@pytest.mark.parametrize("dialect", ["array", "map", "vllm"])
def test_a_harmful_event_takes_no_number(
    opened: Open, read_replay: ReadReplay, caplog: pytest.LogCaptureFixture, harmful: KVCacheEvent, dialect: str
) -> None:
    publisher = opened(dialect=dialect, buffer_steps=1)
    publisher.publish(KVEventBatch(1.0, (BlockStored((5,), None, (7,), 1, None), harmful, BlockRemoved((6,)))))
    publisher.publish(KVEventBatch(1.0, (harmful,)))
    publisher.publish(numbered_batch(7))
    publisher.publish(numbered_batch(8))
    folded = [AllBlocksCleared(), BlockStored((5,), None, (7,), 1, None)]
    assert read_replay(publisher.replay_endpoint) == [*folded, BlockRemoved((8,))]
    stats = publisher.stats()
    assert (stats.events_refused, stats.last_sequence, stats.blocks_in_base) == (2, 2, 1)
    kept = KVEventBatch(1.0, (folded[1], BlockRemoved((6,))))
    assert stats.bytes_in_base == len(BatchEncoder(dialect).encode(kept, 0))
    assert type(harmful).__name__ in caplog.text


@pytest.mark.parametrize(
    "giant",
    [
        BlockStored((1,), None, (2**31,) * 900_000, 900_000, None),
        BlockStored((1, 2, 3), None, (7,) * 15_000_000, 5_000_000, None),
        BlockStored(tuple(range(64)), None, (7,) * 64, 1, None, lora_name="n" * 3_000_000),
        BlockRemoved((1,), "m" * 5_000_000),
        BlockRemoved(tuple(range(8)), "m" * 3_000_000),
    ],
    ids=["a block", "three blocks", "a name for many", "a medium", "a medium for many"],
)
def test_an_event_whose_parts_readers_refuse_is_refused_once(
    opened: Open, read_replay: ReadReplay, caplog: pytest.LogCaptureFixture, giant: KVCacheEvent
) -> None:
    publisher = opened()
    publisher.publish(KVEventBatch(1.0, (BlockRemoved((5,)), giant, BlockRemoved((6,)))))
    publisher.publish(numbered_batch(7))
    assert read_replay(publisher.replay_endpoint) == [BlockRemoved((number,)) for number in (5, 6, 7)]
    assert publisher.stats().events_refused == 1
    assert "readers take" in caplog.text or "share" in caplog.text


class Republishing(tuple):  # type: ignore[type-arg]
    """Events during whose encoding the scheduler publishes again, as from a signal handler."""

    __slots__ = ()
    publish_more: Callable[[], None]

    def __iter__(self) -> Iterator[KVCacheEvent]:
        type(self).publish_more()
        return super().__iter__()


def test_an_overflow_is_collapsed_without_a_loss(
    opened: Open, read_replay: ReadReplay, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = opened(max_queue_size=10)
    stored = [BlockStored((number,), None, (number,), 1, None) for number in range(100)]

    def publish_more() -> None:
        Republishing.publish_more = lambda: None
        for event in stored:
            publisher.publish(KVEventBatch(1.0, (event,)))
        publisher.publish(KVEventBatch(1.0, (BlockRemoved((5,)),)))

    Republishing.publish_more = publish_more
    publisher.publish(EventBatch(1.0, Republishing((BlockRemoved((200,)), BlockRemoved((201,))))))
    events = read_replay(publisher.replay_endpoint)
    held: set[int] = set()
    for event in events:
        if isinstance(event, BlockStored):
            held |= set(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            held -= set(event.block_hashes)
    assert held == set(range(100)) - {5}
    assert (publisher.stats().batches_collapsed, publisher.stats().batches_sent) == (101, 2)
    assert caplog.text.count("collapsed") == 1
