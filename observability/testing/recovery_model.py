"""A simulation of stream recovery: one publisher, several subscribers, and a network with every fault.

All parts are the kit's real cores (stream, replay sessions, follower, view), without sockets, clock or threads. The
publisher keeps the true state next to its stream: its blocks after every batch of every epoch. After every step, no
subscriber may be ``LIVE`` with a view that differs from the true state, distrust an honest publisher, or have sent more
requests than its credit allows. Once the faults stop, every view must become the true state within
``RECOVERY_LIMIT_S``.

``RecoverySimulation(...).run(steps)`` carries out steps by name, so that Hypothesis can shrink them and a developer can
read them. Use it to check that a deliberately broken core is caught, or to try another cursor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from observability.kv_stream import (
    BatchApplier,
    BlockView,
    FollowPolicy,
    FrameParser,
    NullStreamListener,
    StreamCursor,
    StreamFollower,
    StreamState,
    Tier,
)
from observability.kv_stream.frames import END_SEQ_NUMBER
from observability.kv_stream.instructions import SendReplayRequest
from observability.kv_stream.stream_state import MAX_REPLAY_CREDIT
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, EventStream
from scheduler_components.kv_events.replay import ReplaySessions
from scheduler_components.kv_events.replay_messages import END_SEQ, ReplayMeta, ReplayMetaKind, encode_plain_request
from scheduler_components.kv_events.snapshot import merge_batches

__all__ = ["RECOVERY_LIMIT_S", "RecoverySimulation", "ModelPublisher", "ModelSubscriber", "Steps"]

MAX_PENDING = 2
"""Pending batches of the publisher; more collapse into one."""

Frame = tuple[int, bytes]
"""Number and payload of a live batch."""

TOPIC = b"kv@pod1"
FORGED = BatchEncoder("array").encode(KVEventBatch(0.0, (BlockStored((99,), None, (99,), 1, None),)), 0)
"""A readable batch of no followed publisher."""

OTHER_TOPIC = b"kv@pod10"
"""Topic of another publisher behind the same proxy: a subscription to ``TOPIC`` delivers its frames too."""

State = frozenset[tuple[int, Tier]]
_NO_BLOCKS: State = frozenset()


class ModelPublisher:
    """Stream and replay sessions as the ZMQ edge uses them. More than ``MAX_PENDING`` pending batches collapse."""

    def __init__(self, *, window: int, seq_base: str) -> None:
        self.window, self.seq_base = window, seq_base
        self.encoder = BatchEncoder("array")
        self.epoch = -1
        self.states: dict[tuple[int, int], State] = {}
        self.num_published = 0
        self.start_epoch()

    def start_epoch(self) -> list[Frame]:
        """Start an epoch with an empty state; return its first live frames."""
        self.epoch += 1
        first = 0 if self.seq_base == "zero" else 10_000 * self.epoch
        self.stream = EventStream(
            epoch=bytes([self.epoch + 1]) * 16, max_steps=self.window, max_bytes=10**6, first_sequence=first
        )
        self.cursors = ReplaySessions(self.stream, encoder=self.encoder, rank=0)
        self.is_poisoned = False
        self.pending: list[KVEventBatch] = []
        self.held = self.sent = _NO_BLOCKS
        self.states[self.epoch, first - 1] = _NO_BLOCKS
        if self.seq_base == "zero":
            return []
        self.publish(AllBlocksCleared())
        return self.send_pending()

    def publish(self, event: KVCacheEvent) -> None:
        """Accept one batch of one event, and fold it into ``held``."""
        if isinstance(event, BlockStored):
            self.held |= {(each, _tier_of(event)) for each in event.block_hashes}
        elif isinstance(event, BlockRemoved):
            self.held -= {(each, _tier_of(event)) for each in event.block_hashes}
        else:
            self.held = _NO_BLOCKS
        self.num_published += 1
        self.pending.append(KVEventBatch(float(self.num_published), (event,), 0))

    def send_pending(self) -> list[Frame]:
        """Number the pending batches, collapsed if there are too many; return the live frames."""
        if len(self.pending) > MAX_PENDING:
            merged = merge_batches(self.pending)
            assert merged is not None
            self.pending, self.sent = [], self.held
            return [self.send(self.encoder.encode(merged, 0), self.held)]
        frames = []
        pending, held = self.pending, self.held
        self.pending, self.held = [], self.sent
        for batch in pending:
            self.publish(batch.events[0])
            frames.append(self.send(self.encoder.encode(batch, 0), self.held))
        self.pending, self.held, self.sent = [], held, held
        return frames

    def send(self, payload: bytes, state: State) -> Frame:
        """Number one payload, after which a reader must hold ``state``."""
        sequence = self.stream.append(payload)
        self.fold()
        self.states[self.epoch, sequence] = state
        return sequence, payload

    def fold(self) -> None:
        """Fold the oldest batches, as a publisher does each time it sends or answers."""
        self.stream.fold_oldest()
        if self.stream.has_stuck_pins:
            self.cursors.cancel_pinned()

    def send_poison(self) -> list[Frame]:
        """Send a batch with one unreadable event, which changes nothing."""
        frames = self.send_pending()
        self.is_poisoned = True
        self.num_published += 1
        payload = msgspec.msgpack.encode((float(self.num_published), [["BlockMoved", [1, 2]]], 0))
        return [*frames, self.send(payload, self.held)]


def _tier_of(event: BlockStored | BlockRemoved) -> Tier:
    return Tier.DEVICE if event.medium is None else Tier.HOST


# --- a subscriber ---

POLICY = FollowPolicy(
    answer_timeout_s=1.0,
    retry_min_s=0.1,
    retry_max_s=0.5,
    request_interval_s=0.2,
    probe_interval_s=2.0,
    dead_after_s=5.0,
)


@dataclass
class Connection:
    """A live connection: the publisher's epoch at its start, and the frames in transit, each with its epoch.

    The epoch of a forged frame, and of another publisher's, is None.
    """

    epoch: int
    frames: deque[tuple[int | None, tuple[bytes, ...]]] = field(default_factory=deque)
    is_broken: bool = False
    was_restarted: bool = False


class ModelSubscriber:
    """A follower, its view, its live connection and its open request."""

    def __init__(self, publisher: ModelPublisher, name: str, *, has_extension: bool, cursor: StreamCursor) -> None:
        self.publisher, self.name, self.has_extension = publisher, name, has_extension
        self.view = BlockView()
        self.follower = StreamFollower(
            cursor=cursor,
            applier=BatchApplier(
                rank=0, view=self.view, decoder=BatchDecoder(), listener=NullStreamListener(), wall_clock=lambda: 0.0
            ),
            channel=self,
            policy=POLICY,
            jitter=lambda: 0.0,
        )
        self.frames = FrameParser(TOPIC)
        self.connection: Connection | None = None
        self.request: SendReplayRequest | None = None
        self.client: bytes | None = None
        self.now_s = 0.0
        self.sent_s: list[float] = []
        self.answering_epoch = -1
        self.verified_epoch = -1
        self.is_spliced = self.is_altered = self.is_in_chunks = False
        self.spliced_after = 0  # the newest request id at that time
        self.late: list[tuple[int, int, bytes]] = []
        self.follower.begin(0.0)

    # --- the replay channel ---

    def send(self, request: SendReplayRequest) -> None:
        self.cancel()
        self.request = request
        self.sent_s.append(self.now_s)
        for number, sent_s in enumerate(reversed(self.sent_s), 1):
            allowed = MAX_REPLAY_CREDIT + (self.now_s - sent_s) / POLICY.request_interval_s
            assert number <= allowed + 1e-6, f"{self.name} sent {number} requests since {sent_s}"

    def tick(self, now_s: float) -> None:
        self.now_s = now_s
        self.follower.tick(now_s)

    def cancel(self) -> None:
        """Close the request's connection; a message that is still in transit comes late."""
        if self.request is not None and self.client in self.publisher.cursors.clients:
            message = self.publisher.cursors.message(self.client)
            if message is not None:
                self.late.append(
                    (self.request.request_id, int.from_bytes(message[-2], "big", signed=True), message[-1])
                )
            self.publisher.cursors.drop(self.client)
        self.request = self.client = None

    @property
    def is_cut_off(self) -> bool:
        """True when a plain subscriber has no connection: its network loses both connections or none.

        The network of an extended subscriber may lose either connection alone.
        """
        return not self.has_extension and (self.connection is None or self.connection.is_broken)

    def serve(self, count: int, fault: str, now_s: float) -> None:
        """Receive some messages of the open answer. The request reaches the publisher with the first of them."""
        for _ in range(count):
            request = self.request
            if request is None or self.is_cut_off:
                return
            if self.client is None:
                if fault == "lose":
                    self.client = b"lost"  # the request itself is lost
                    return
                self.client = f"{self.name}{request.request_id}".encode()
                self.answering_epoch = self.publisher.epoch
                is_read = self.has_extension or request.verb is None
                self.publisher.cursors.receive(
                    [self.client, b"", request.request.encode() if is_read else encode_plain_request(2**63)]
                )
            self.publisher.fold()
            if self.client not in self.publisher.cursors.clients:
                return  # that epoch of the publisher is over, or a message was lost
            if fault == "cut":
                self.publisher.cursors.end_all()
            self.take(request, self.client, fault, now_s)

    def take(self, request: SendReplayRequest, client: bytes, fault: str, now_s: float) -> None:
        message = self.publisher.cursors.message(client)
        self.publisher.cursors.on_sent(client)
        if message is None or fault == "lose":
            return
        sequence, payload = int.from_bytes(message[-2], "big", signed=True), message[-1]
        if fault == "garble" and message[-2] == END_SEQ:
            payload = b"junk"
        if message[-2] == END_SEQ and message[-1]:
            meta = ReplayMeta.decode(message[-1])
            self.is_in_chunks = meta.kind is ReplayMetaKind.BEGIN and meta.snap
        elif fault == "alter" and message[-2] != END_SEQ and request.verb is not None and not self.is_in_chunks:
            payload = FORGED  # readable, but not the publisher's batch under this number
            self.is_altered = True
        for _ in range(2 if fault == "repeat" else 1):
            self.receive(request.request_id, sequence, payload, now_s)

    def receive(self, request_id: int, sequence: int, payload: bytes, now_s: float) -> None:
        counters = self.follower.cursor.counters
        verified, splices = counters.verified, counters.splices
        may_distrust = self.is_spliced or self.is_altered
        if sequence == END_SEQ_NUMBER:
            for _ in self.follower.prepare_swap(payload):
                self.check()
            self.follower.on_replay_marker(request_id, payload, now_s)
        else:
            self.follower.on_replay_batch(request_id, sequence, payload, now_s)
        assert counters.splices == splices or may_distrust, f"{self.name} distrusts an honest publisher"
        if counters.verified > verified:
            self.verified_epoch = self.answering_epoch
            self.is_altered = False
            # A status proves the position of its request, and this answer may have opened the next request.
            self.is_spliced = self.is_spliced and self.spliced_after >= request_id

    def receive_late(self, now_s: float) -> None:
        while self.late:
            self.receive(*self.late.pop(), now_s)

    # --- the live channel ---

    def connect(self, now_s: float) -> None:
        if self.connection is None:
            self.connection = Connection(self.publisher.epoch)
            self.follower.on_connected(now_s)

    def disconnect(self, now_s: float) -> None:
        if self.connection is not None:
            self.connection = None
            self.follower.on_disconnected(now_s)

    def deliver(self, count: int, fault: str, now_s: float) -> None:
        """Deliver live frames; without a fault they stay in the socket while the cursor would drop them."""
        frames = self.connection.frames if self.connection is not None else deque()
        for _ in range(min(count, len(frames))):
            if fault == "none" and not self.follower.cursor.is_accepting_live:
                return
            if fault == "reorder" and len(frames) > 1:
                frames[0], frames[1] = frames[1], frames[0]
            frame = frames.popleft()
            if fault == "repeat":
                frames.appendleft(frame)
            if fault != "lose":
                epoch, message = frame
                read = self.frames.parse_live(message)
                if read is not None:
                    applied = self.follower.cursor.counters.applied
                    self.follower.on_live_batch(*read, now_s)
                    is_applied = self.follower.cursor.counters.applied > applied
                    if is_applied and epoch != self.verified_epoch:
                        self.is_spliced, self.spliced_after = True, self.follower.cursor.counters.replays_asked

    # --- its view ---

    @property
    def state(self) -> StreamState:
        return self.follower.cursor.state

    @property
    def blocks(self) -> State:
        return frozenset((each, tier) for tier in Tier for each in self.view.blocks(0, tier))

    def check(self) -> None:
        """Check that a LIVE view is not wrong.

        One exception: a frame of another epoch came on the same connection, behind a proxy. Then LIVE may be wrong
        until the next proof. A publisher without the extension gives no proof, so its proxies must close the
        connection.
        """
        is_extended = self.follower.cursor.is_extended
        if self.state is not StreamState.LIVE or self.connection is None:
            return
        if self.is_spliced if is_extended else self.connection.was_restarted:
            return
        epoch = self.verified_epoch if is_extended else self.connection.epoch
        last = self.follower.cursor.last_seq
        assert self.blocks == self.publisher.states[epoch, last], f"{self.name} is live at {last} and wrong"


# --- the network between them ---

RECOVERY_LIMIT_S = (
    2 * POLICY.probe_interval_s + POLICY.answer_timeout_s + POLICY.retry_max_s + 3 * POLICY.request_interval_s
)
"""How long recovery may take: two probe intervals plus the replay, after one lost request and the pause that follows. A
status, an incremental replay and a snapshot may each have to wait for credit."""

Steps: TypeAlias = list[tuple[Any, ...]]
"""Steps of a run, each a method name and its arguments."""


class RecoverySimulation:
    """One publisher, subscribers that it serves by the extension, and others that it serves without.

    Args:
        window: length of the publisher's replay buffer, in batches.
        seq_base: of its epochs, ``"zero"`` or ``"clock"``.
        num_extended, num_plain: subscribers of either kind, numbered in this order.
    """

    def __init__(self, *, window: int = 4, seq_base: str = "zero", num_extended: int = 2, num_plain: int = 1) -> None:
        self.now_s = 0.0
        self.publisher = ModelPublisher(window=window, seq_base=seq_base)
        self.subscribers = [
            ModelSubscriber(
                self.publisher,
                f"subscriber {number} ",
                has_extension=number < num_extended,
                cursor=StreamCursor(has_replay=True),
            )
            for number in range(num_extended + num_plain)
        ]

    def run(self, steps: Steps) -> None:
        """Connect all subscribers, carry out the steps, stop the faults, and check that every view converges."""
        self.play([("store", 0, 3, False), ("send",)])
        for index in range(len(self.subscribers)):
            self.play([("connect", index), *[("serve", index, 9, "none")] * 2])
        self.play(steps)
        self.recover()
        self.check_converged()

    def play(self, steps: Steps) -> None:
        """Carry out the steps, and check after each."""
        for name, *arguments in steps:
            getattr(self, name)(*arguments)
            for each in self.subscribers:
                each.check()

    def subscriber_at(self, index: int) -> ModelSubscriber:
        return self.subscribers[index % len(self.subscribers)]

    def broadcast(self, frames: list[Frame]) -> None:
        for each in self.subscribers:
            if each.connection is not None and not each.connection.is_broken:
                each.connection.frames.extend(
                    (self.publisher.epoch, (TOPIC, sequence.to_bytes(8, "big"), payload))
                    for sequence, payload in frames
                )

    # --- steps ---

    def store(self, block: int, count: int, on_host: bool) -> None:
        """Publish a store of ``count`` blocks, numbered from ``block``, each the child of the one before."""
        hashes = tuple(range(block, block + count))
        parent = block - 1 if block else None
        self.publisher.publish(BlockStored(hashes, parent, hashes, 1, None, "CPU" if on_host else None))

    def remove(self, block: int, count: int, on_host: bool) -> None:
        """Publish a removal of ``count`` blocks, numbered from ``block``."""
        self.publisher.publish(BlockRemoved(tuple(range(block, block + count)), "CPU" if on_host else None))

    def clear(self) -> None:
        """Publish a clear of all blocks."""
        self.publisher.publish(AllBlocksCleared())

    def send(self) -> None:
        """Send the published batches to every connected subscriber."""
        self.broadcast(self.publisher.send_pending())

    def poison(self) -> None:
        """Send an unreadable batch."""
        self.broadcast(self.publisher.send_poison())

    def send_other_topic(self, index: int, ahead: int) -> None:
        """Send a batch of another publisher with a longer topic, ``ahead`` of the next number of this one."""
        connection = self.subscriber_at(index).connection
        if connection is not None:
            number = max(0, self.publisher.stream.next_sequence + ahead)
            self.put(connection, None, OTHER_TOPIC, number, 1)

    def put(self, connection: Connection, epoch: int | None, topic: bytes, number: int, count: int) -> None:
        connection.frames.extend([(epoch, (topic, number.to_bytes(8, "big"), FORGED))] * count)

    def forge(self, index: int, ahead: int, count: int) -> None:
        """Send ``count`` forged frames of this topic, each ``ahead`` of the publisher's next number.

        They go only to subscribers with the extension: others cannot distinguish a forged frame.
        """
        each = self.subscriber_at(index)
        if each.connection is not None and each.has_extension:
            number = self.publisher.stream.next_sequence + ahead
            self.put(each.connection, None, TOPIC, number, count)

    def connect(self, index: int) -> None:
        """Open the live connection of one subscriber."""
        self.subscriber_at(index).connect(self.now_s)

    def disconnect(self, index: int) -> None:
        """Close the live connection of one subscriber."""
        self.subscriber_at(index).disconnect(self.now_s)

    def deliver(self, index: int, count: int, fault: str) -> None:
        """Deliver ``count`` live frames to one subscriber, with a fault: none, lose, repeat or reorder."""
        self.subscriber_at(index).deliver(count, fault, self.now_s)

    def serve(self, index: int, count: int, fault: str) -> None:
        """Deliver ``count`` messages of the open answer, with a fault: none, lose, repeat, cut, garble or alter.

        Only a digest exposes an altered batch, so plain answers and chunks of a snapshot are never altered.
        """
        self.subscriber_at(index).serve(count, fault, self.now_s)

    def deliver_late(self, index: int) -> None:
        """Deliver the late messages of answers to older requests."""
        self.subscriber_at(index).receive_late(self.now_s)

    def wait(self, tenths: int) -> None:
        """Let tenths of a second pass, and handle every subscriber's deadlines."""
        until_s = self.now_s + tenths / 10
        for each in self.subscribers:
            while (due_s := each.follower.next_deadline_s) <= until_s:
                each.tick(max(due_s, self.now_s))
            each.now_s = until_s
        self.now_s = until_s

    def restart(self, is_hidden: bool) -> None:
        """Start the publisher's next epoch. ``is_hidden``: a proxy keeps the connections with the extension open."""
        for each in self.subscribers:
            if each.connection is not None:
                stays = is_hidden and each.has_extension
                each.connection.was_restarted |= stays
                each.connection.is_broken |= not stays
        self.broadcast(self.publisher.start_epoch())

    # --- the end ---

    def recover(self) -> None:
        """Stop the faults: answer every request and deliver every frame, for ``RECOVERY_LIMIT_S``."""
        self.send()
        for each in self.subscribers:
            if each.connection is not None and each.connection.is_broken:
                each.disconnect(self.now_s)
            each.connect(self.now_s)
        for _ in range(round(RECOVERY_LIMIT_S * 10)):
            for each in self.subscribers:
                for _ in range(3):
                    each.serve(1_000, "none", self.now_s)
                    each.deliver(1_000, "none", self.now_s)
                each.check()
            self.wait(1)

    def check_converged(self) -> None:
        """Check that every view equals the published state and is LIVE."""
        publisher = self.publisher
        for each in self.subscribers:
            assert each.blocks == publisher.held, f"{each.name} has not converged: {each.follower.cursor!r}"
            assert each.follower.cursor.last_seq == publisher.stream.next_sequence - 1
            if each.follower.cursor.is_extended:
                assert each.verified_epoch == publisher.epoch
            if not publisher.is_poisoned and (each.has_extension or len(publisher.stream)):
                assert each.state is StreamState.LIVE  # without the extension, an empty stream looks like a silent one
