"""JoiningBytes: how many bytes a reader that joins may receive by replay."""

from __future__ import annotations

from scheduler_components.kv_events import BatchEncoder, EventStream
from worlds.publisher_actor import LiveFrame, PublisherActor

__all__ = ["JoiningBytes", "snapshot_bytes"]


def snapshot_bytes(stream: EventStream) -> int:
    """Return the size of the stream's snapshot as a publisher sends it now."""
    encoder = BatchEncoder("array")
    num_bytes = 0
    for chunks in stream.plan_snapshot():
        for number, chunk in enumerate(chunks or ()):
            num_bytes += sum(len(each or b"") for each in stream.encode_chunk(chunk, encoder, 0, clear=number == 0))
    return num_bytes


class JoiningBytes:
    """The bytes that a reader needs from its join on: the snapshot once, and each batch of an answer once.

    The largest snapshot counts, because the publisher plans one at some time after the join. The batches are those of
    the replay buffer at the join and all later ones. A reader without the extension gets the last batch that it has
    once more with each request. METAs and end markers do not count.

    Args:
        actor: the publisher.
    """

    __slots__ = ("_actor", "_earlier_bytes", "_key", "_largest_batch_bytes", "_num_batch_bytes", "_num_snapshot_bytes")

    def __init__(self, actor: PublisherActor) -> None:
        self._actor = actor
        self._earlier_bytes = self._largest_batch_bytes = 0
        self._key = (-1, -1)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        stream = self._actor.stream
        self._num_batch_bytes, self._num_snapshot_bytes = stream.buffered_bytes, 0
        held = range(stream.first, stream.next_sequence)
        self._largest_batch_bytes = max([self._largest_batch_bytes, *(len(stream.payload(each)) for each in held)])
        self._measure()

    def _measure(self) -> None:
        """Measure the snapshot, if it has changed."""
        stream = self._actor.stream
        key = self._actor.epoch, stream.first
        if key != self._key:
            self._key = key
            self._num_snapshot_bytes = max(self._num_snapshot_bytes, snapshot_bytes(stream))

    def on_sent(self, frame: LiveFrame) -> None:
        """The publisher sent a batch, which it has not folded yet."""
        if self._actor.epoch != self._key[0]:
            self._earlier_bytes += self._num_snapshot_bytes + self._num_batch_bytes
            self._begin_epoch()
            return
        self._num_batch_bytes += len(frame.frames[2])
        self._largest_batch_bytes = max(self._largest_batch_bytes, len(frame.frames[2]))
        self._measure()

    def limit(self, num_plain_requests: int) -> int:
        """Return the bytes that a reader may have received after this many requests without the extension."""
        self._measure()
        repeated = num_plain_requests * self._largest_batch_bytes
        return self._earlier_bytes + self._num_snapshot_bytes + self._num_batch_bytes + repeated
