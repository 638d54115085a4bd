"""PublisherActor: a publisher of KV events without sockets, and the truth about its blocks.

Stream, sender and replay sessions are the kit's. Next to them the actor keeps what a reader must have: the blocks after
every number of every epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs
import msgspec

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVCacheEvent, KVEventBatch
from scheduler_components.events import Tier
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, EventStream
from scheduler_components.kv_events.live_sender import LARGE_PAYLOAD_BYTES, LiveSender
from scheduler_components.kv_events.replay import ReplaySessions
from scheduler_components.kv_events.replay_messages import ReplayRequest, encode_plain_request
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES
from scheduler_components.values import PublisherStats
from worlds.timeline import BrokenPromise

State: TypeAlias = frozenset[tuple[int, Tier]]
"""Blocks by hash and tier."""

NO_BLOCKS: State = frozenset()

TOPIC = b"kv@pod1"

OTHER_TOPIC = b"kv@pod10"
"""Topic of another publisher behind the same proxy: a subscription to ``TOPIC`` delivers its frames too."""

FORGED_PAYLOAD = BatchEncoder("array").encode(KVEventBatch(0.0, (BlockStored((99,), None, (99,), 1, None),)), 0)
"""A readable batch of no followed publisher."""

_DECODER = BatchDecoder()

_NO_SUCH_NUMBER = 2**63
"""What a publisher without the extension reads from an extended request."""


class LiveFrame(msgspec.Struct, frozen=True):
    """A live message in transit.

    Attributes:
        epoch: the truth about it, the number of the publisher's epoch; None if another sender forged it.
        frames: topic, number and payload.
    """

    epoch: int | None
    frames: tuple[bytes, ...]

    @property
    def sequence(self) -> int:
        """The number of its batch."""
        return int.from_bytes(self.frames[1], "big")


@attrs.frozen(kw_only=True)
class PublisherShape:
    """Settings of a publisher.

    Attributes:
        window, max_bytes: bounds of the replay buffer, in batches and in payload bytes.
        chunk_bytes: size of a chunk of the snapshot.
        max_pending: pending batches above which all are merged into one.
        seq_base: ``"zero"`` or ``"clock"``: an epoch that does not begin at 0 begins with a clear.
        large_bytes: size of a payload above which its batch is sent in several parts.
    """

    window: int = 4
    max_bytes: int = 10**6
    chunk_bytes: int = 256 * 1024
    max_pending: int = 2
    seq_base: str = "zero"
    large_bytes: int = LARGE_PAYLOAD_BYTES


class PublisherActor:
    """A publisher over several epochs. It may serve as the sink of a relay.

    Args:
        shape: its settings.
        broadcast: called with every frame that it sends.
        first_sequence: returns the first number of an epoch, by its number.
        clock: seconds, for time stamps.
        work_clock: seconds, for time limits of sending; by default ``clock``.

    Attributes:
        can_send: False if other code has destroyed the sockets.
        epoch: number of the present epoch, from 0.
        held: the blocks after every published batch, sent or not.
        states: the blocks after each number that was sent, by epoch and number.
        stamps: when the newest batch behind each number was published, likewise.
        is_poisoned: True if this epoch has a batch that readers cannot read.
        num_refused, num_unsent: events that no reader accepts, and batches that could not be sent, of this epoch.
        num_published: batches published in all epochs.
        stream, sessions, sender: of the present epoch.
    """

    __slots__ = (
        "_broadcast",
        "_clock",
        "_encoder",
        "_first_sequence",
        "_held_by_readers",
        "_shape",
        "_work_clock",
        "can_send",
        "epoch",
        "held",
        "is_poisoned",
        "num_published",
        "num_refused",
        "num_unsent",
        "sender",
        "sessions",
        "stamps",
        "states",
        "stream",
    )

    def __init__(
        self,
        shape: PublisherShape,
        *,
        broadcast: Callable[[LiveFrame], None],
        first_sequence: Callable[[int], int],
        clock: Callable[[], float] = lambda: 0.0,
        work_clock: Callable[[], float] | None = None,
    ) -> None:
        self._shape = shape
        self._broadcast = broadcast  # noqa: SCH005  network, sequence floor and clock are three parties
        self._first_sequence = first_sequence
        self._clock = clock
        self._work_clock = work_clock or clock
        self._encoder = BatchEncoder("array")
        self.epoch = -1
        self.num_published = 0
        self.states: dict[tuple[int, int], State] = {}
        self.stamps: dict[tuple[int, int], float] = {}
        self.start_epoch()

    def start_epoch(self) -> None:
        """Start the next epoch with an empty cache. What was pending is lost with the process."""
        self.epoch += 1
        first = self._first_sequence(self.epoch)
        self.stream = EventStream(
            epoch=(self.epoch + 1).to_bytes(EPOCH_BYTES, "big"),
            max_steps=self._shape.window,
            max_bytes=self._shape.max_bytes,
            first_sequence=first,
            chunk_bytes=self._shape.chunk_bytes,
        )
        self.sessions = ReplaySessions(self.stream, encoder=self._encoder, rank=0)
        self.sender = LiveSender(
            self._send, topic=TOPIC, encoder=self._encoder, stream=self.stream, rank=0,
            max_pending=self._shape.max_pending, clock=self._work_clock, large_bytes=self._shape.large_bytes,
        )  # fmt: skip
        self.held = self._held_by_readers = NO_BLOCKS
        self.is_poisoned = False
        self.can_send = True
        self.num_refused = self.num_unsent = 0
        self.states[self.epoch, first - 1] = NO_BLOCKS
        if self._shape.seq_base == "clock":
            self.publish_events((AllBlocksCleared(),))
            self.idle()

    # --- live batches ---

    def publish_events(self, events: Sequence[KVCacheEvent], *, refused: Sequence[KVCacheEvent] = ()) -> None:
        """Publish one batch, and change ``held``. ``refused`` are events of it that no reader accepts."""
        self._change(events)
        self.num_refused += len(refused)
        self.sender.pending.append(KVEventBatch(self._clock(), (*refused, *events), 0))

    def publish(self, events: EventBatch) -> None:
        """Accept one batch. It is pending until ``idle`` sends it."""
        self._change(events.events)
        self.sender.pending.append(KVEventBatch(ts=events.ts, events=events.events, attn_dp_rank=0))

    def _change(self, events: Sequence[KVCacheEvent]) -> None:
        for event in events:
            self.held = _after(self.held, event)
        self.num_published += 1

    def idle(self) -> None:
        """Send all pending batches."""
        self.sender.send_pending()
        self._cancel_stuck()
        self.check_sent()

    def _send(self, frames: tuple[bytes, bytes, bytes]) -> bool:
        sequence = int.from_bytes(frames[1], "big")
        if (self.epoch, sequence - 1) not in self.states:
            raise BrokenPromise("numbers have no gaps", f"batch {sequence} of epoch {self.epoch} follows no other")
        batch = _DECODER.decode(frames[2])
        for event in batch.events:
            self._held_by_readers = _after(self._held_by_readers, event)
        self.states[self.epoch, sequence] = self._held_by_readers
        self.stamps[self.epoch, sequence] = batch.ts
        if not self.can_send:
            self.num_unsent += 1
            return False
        self._broadcast(LiveFrame(self.epoch, frames))
        return True

    def check_sent(self) -> None:
        """Check that all batches together say what was published, and that every event left out is counted.

        Raises:
            BrokenPromise: they do not, or one is not.
        """
        sender = self.sender
        if sender.num_dropped != self.num_unsent:
            detail = f"{sender.num_dropped} of {self.num_unsent} unsent batches are counted"
            raise BrokenPromise("everything is counted", detail)
        if sender.pending:
            return
        if sender.num_refused != self.num_refused:
            detail = f"{sender.num_refused} of {self.num_refused} refused events are counted"
            raise BrokenPromise("everything is counted", detail)
        if self._held_by_readers != self.held:
            raise BrokenPromise("no published event is lost", f"epoch {self.epoch}, at {self.last_sequence}")

    def send_poison(self) -> None:
        """Send the pending batches and one unreadable batch, which changes nothing."""
        self.idle()
        self.is_poisoned = True
        self.num_published += 1
        payload = msgspec.msgpack.encode((self._clock(), [["BlockMoved", [1, 2]]], 0))
        sequence = self.stream.append(payload)
        self.states[self.epoch, sequence] = self.held
        self.stamps[self.epoch, sequence] = self._clock()
        self.fold()
        self._broadcast(LiveFrame(self.epoch, (TOPIC, sequence.to_bytes(8, "big"), payload)))

    # --- replays ---

    def receive(self, client: bytes, request: ReplayRequest, *, has_extension: bool) -> None:
        """Receive a request. ``has_extension`` is False if the publisher acts as one without the extension."""
        is_read = has_extension or request.verb is None
        self.sessions.receive((client, b"", request.encode() if is_read else encode_plain_request(_NO_SUCH_NUMBER)))

    def fold(self) -> None:
        """Fold the oldest batches, as a publisher does each time it sends or answers."""
        self.stream.fold_oldest()
        self._cancel_stuck()

    def _cancel_stuck(self) -> None:
        if self.stream.has_stuck_pins:
            self.sessions.cancel_pinned()

    @property
    def last_sequence(self) -> int:
        """The newest number of the present epoch; one below the first before any."""
        return self.stream.next_sequence - 1

    def can_be_live(self, *, has_extension: bool) -> bool:
        """Return whether a reader that has everything can prove it.

        Unreadable batches prevent that, and a relay's doubt. Without the extension, an empty stream looks like a silent
        one.
        """
        if self.is_poisoned or self.sessions.upstream is not None:
            return False
        return has_extension or len(self.stream) > 0

    # --- the sink of a relay ---

    def set_upstream_state(self, state: str | None) -> None:
        """Publish how far a relay knows the stream."""
        self.sessions.upstream = state

    def stats(self) -> PublisherStats:
        """Return the counters of the present epoch."""
        return PublisherStats(
            batches_sent=self.sender.num_batches,
            batches_collapsed=self.sender.num_collapsed,
            batches_dropped=self.sender.num_dropped,
            replays_truncated=self.sessions.num_truncated,
            last_sequence=self.last_sequence,
        )

    def shutdown(self) -> None:
        """Send what is pending."""
        self.idle()


def _after(held: State, event: object) -> State:
    """Return the blocks after one event."""
    if isinstance(event, BlockStored):
        return held | {(each, _tier_of(event)) for each in event.block_hashes}
    if isinstance(event, BlockRemoved):
        return held - {(each, _tier_of(event)) for each in event.block_hashes}
    return NO_BLOCKS


def _tier_of(event: BlockStored | BlockRemoved) -> Tier:
    return Tier.DEVICE if event.medium is None else Tier.HOST
