"""Measure the cost of a published batch part by part, to show where the publisher's time goes.

Each part runs alone, in a process without subscribers, with warm processor caches. In a scheduler's step the caches
are cold, and the parts take two to three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

from benchmarks.measure import Measurement, Scale, measure_interleaved
from benchmarks.workloads import SHAPES
from scheduler_components import BlockRemoved, BlockStored, KVEventBatch
from scheduler_components.kv_events import BatchEncoder, EventStream, KVEventsConfig, ZmqEventPublisher
from scheduler_components.kv_events.dialects import dialect_writer
from scheduler_components.kv_events.snapshot import StreamSnapshot
from scheduler_components.kv_events.stream_digest import digest_after

NAME = "parts"
_CASES = {"1 block": 20_000, "64 events": 1_000, "8,192 tokens": 500}
_WINDOW_BYTES = 1 << 30


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # of the kit's publisher alone
    """Time the parts of each shape, and all of them in a burst while the replay buffer fills."""
    rows = []
    for shape, number in _CASES.items():
        spent = _parts(shape, scale, scale.of(number))
        whole = spent.pop("whole")
        rows += [Measurement(NAME, f"{part}, {shape}", "us", us, {"whole": whole}) for part, us in spent.items()]
        rows.append(Measurement(NAME, f"a batch in a burst, before it folds, {shape}", "us", whole))
    return rows


def _parts(shape: str, scale: Scale, number: int) -> dict[str, list[float]]:
    batch = KVEventBatch(1.5, tuple(BlockStored(**fields) for fields in SHAPES[shape].fields(1, tuple)), 0)
    encoder, writer = BatchEncoder(), dialect_writer("array")
    payload, changes = encoder.encode_with_changes(batch, 0)
    stream = EventStream(epoch=bytes(16), max_steps=number * (scale.turns + 1), max_bytes=_WINDOW_BYTES)
    publisher = ZmqEventPublisher(
        0,
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:0",
        number * (scale.turns + 1),
        config=KVEventsConfig(bind=True, buffer_bytes=_WINDOW_BYTES),
    )
    try:
        found = measure_interleaved(
            {
                "encoding": lambda: encoder.encode_with_changes(batch, 0),
                "of it: events to plain tuples": lambda: writer.rows_with_changes(batch.events, True),
                "number, replay buffer and digest": lambda: stream.append(payload, changes),
                "of it: the digest": lambda: digest_after(bytes(8), 7, payload),
                "folding a batch that leaves the replay buffer, and removing as many blocks": _folding(
                    shape, has_changes=True
                ),
                "the same without the encoder's changes": _folding(shape, has_changes=False),
                "whole": lambda: publisher.publish(batch),
            },
            turns=scale.turns,
            number=number,
        )
    finally:
        publisher.close(1.0)
    return {name: [ns / 1e3 for ns in samples] for name, samples in found.items()}


_CYCLE = 64


def _folding(shape: str, *, has_changes: bool) -> Callable[[], None]:
    """Fold one more batch. Each batch removes the blocks of half a cycle before, so that the snapshot does not grow."""
    encoder, base = BatchEncoder(), StreamSnapshot()
    stored = [tuple(BlockStored(**fields) for fields in SHAPES[shape].fields(step, tuple)) for step in range(_CYCLE)]
    hashes = [tuple(each for event in events for each in event.block_hashes) for events in stored]
    with_changes = [
        encoder.encode_with_changes(KVEventBatch(1.5, (*events, BlockRemoved(hashes[step - _CYCLE // 2], "GPU")), 0), 0)
        for step, events in enumerate(stored)
    ]
    coming = cycle(with_changes if has_changes else [(payload, None) for payload, _ in with_changes])

    def fold() -> None:
        base.fold(*next(coming))

    return fold
