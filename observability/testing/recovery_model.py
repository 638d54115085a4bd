"""The recovery of streams as a model: one publisher, several subscribers, and a network with every fault.

All are the kit's real cores (stream, replay cursors, follower, view), without sockets, clock or threads. The publisher
keeps the truth beside its stream: what it held after every batch of every epoch. After every step, no subscriber may
say
``LIVE`` of a view that differs from the truth, doubt an honest publisher, or have asked more than its pace allows;
once faults stop, every view must become the truth in ``RECOVERY_LIMIT_S``.

``RecoverySimulation(...).run(steps)`` carries out steps by name, so that Hypothesis can shrink them and a person can
read
them. Use it to break a core on purpose and see that it is caught, or to try a cursor of your own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from observability.kv_stream import (
    MAX_REPLAY_CREDIT,
    BatchApplier,
    BlockView,
    FollowPolicy,
    FrameParser,
    NullStreamListener,
    SendReplayRequest,
    StreamCursor,
    StreamFollower,
    StreamState,
    Tier,
)
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, EventStream
from scheduler_components.kv_events.replay import ReplaySessions
from scheduler_components.kv_events.replay_messages import END_SEQ, ReplayMeta, ReplayMetaKind, encode_plain_request
from scheduler_components.kv_events.snapshot import merge_batches

__all__ = ["RECOVERY_LIMIT_S", "RecoverySimulation", "ModelPublisher", "ModelSubscriber", "Steps"]

MAX_PENDING = 2
"""Batches that may wait; more collapse into one."""

Frame = tuple[int, bytes]
"""Number and payload of a live batch."""

TOPIC = b"kv@pod1"
FORGED = BatchEncoder("array").encode(KVEventBatch(0.0, (BlockStored((99,), None, (99,), 1, None),)), 0)
"""Readable, and of nobody that is followed."""

OTHER_TOPIC = b"kv@pod10"
"""Of another publisher behind the same proxy: a subscription to ``TOPIC`` brings its frames too."""

State = frozenset[tuple[int, Tier]]
_NO_BLOCKS: State = frozenset()


class ModelPublisher:
    """Stream and replay cursors as the ZMQ edge uses them; what waits beyond ``MAX_PENDING`` collapses."""

    def __init__(self, *, window: int, seq_base: str) -> None:
        self.window, self.seq_base = window, seq_base
        self.encoder = BatchEncoder("array")
        self.epoch = -1
        self.states: dict[tuple[int, int], State] = {}
        self.num_published = 0
        self.start_epoch()

    def start_epoch(self) -> list[Frame]:
        """Start, or start again with nothing; returns the live frames of the beginning."""
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
        """Accept one batch of one event; ``held`` is the naive fold of all that was accepted."""
        if isinstance(event, BlockStored):
            self.held |= {(each, _tier_of(event)) for each in event.block_hashes}
        elif isinstance(event, BlockRemoved):
            self.held -= {(each, _tier_of(event)) for each in event.block_hashes}
        else:
            self.held = _NO_BLOCKS
        self.num_published += 1
        self.pending.append(KVEventBatch(float(self.num_published), (event,), 0))

    def send_pending(self) -> list[Frame]:
        """Number what is pending, collapsed when it is too much; returns the live frames."""
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
        """Number one payload, after which a reader holds ``state``."""
        sequence = self.stream.append(payload)
        self.fold()
        self.states[self.epoch, sequence] = state
        return sequence, payload

    def fold(self) -> None:
        """What a publisher does each time it sends or answers."""
        self.stream.fold_oldest()
        if self.stream.has_stuck_pins:
            self.cursors.cancel_pinned()

    def send_poison(self) -> list[Frame]:
        """A batch with one event that nobody can read, which therefore changes nothing."""
        frames = self.send_pending()
        self.is_poisoned = True
        self.num_published += 1
        payload = msgspec.msgpack.encode((float(self.num_published), [["BlockMoved", [1, 2]]], 0))
        return [*frames, self.send(payload, self.held)]


def _tier_of(event: BlockStored | BlockRemoved) -> Tier:
    return Tier.DEVICE if event.medium is None else Tier.HOST


# --- a subscriber at the other end ---

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
    """A live connection: the publisher's epoch when it was made, and the frames under way, each with its epoch.

    Frames of another publisher, and forged ones, have no epoch of this one: None.
    """

    epoch: int
    frames: deque[tuple[int | None, tuple[bytes, ...]]] = field(default_factory=deque)
    is_broken: bool = False
    was_restarted: bool = False


class ModelSubscriber:
    """A follower, its view, its live connection and the one question that is open."""

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
        self.question: SendReplayRequest | None = None
        self.client: bytes | None = None
        self.now_s = 0.0
        self.asked_s: list[float] = []
        self.answering_epoch = -1
        self.verified_epoch = -1
        self.is_spliced = self.is_altered = self.is_in_base = False
        self.spliced_after = 0  # the number of the newest question then
        self.late: list[tuple[int, int, bytes]] = []
        self.follower.begin(0.0)

    # --- the replay channel ---

    def send(self, question: SendReplayRequest) -> None:
        self.cancel()
        self.question = question
        self.asked_s.append(self.now_s)
        for number, asked_s in enumerate(reversed(self.asked_s), 1):
            allowed = MAX_REPLAY_CREDIT + (self.now_s - asked_s) / POLICY.request_interval_s
            assert number <= allowed + 1e-6, f"{self.name} asks {number} times since {asked_s}"

    def tick(self, now_s: float) -> None:
        self.now_s = now_s
        self.follower.tick(now_s)

    def cancel(self) -> None:
        """A question's connection ends with it; a message that is still under way comes late."""
        if self.question is not None and self.client in self.publisher.cursors.clients:
            message = self.publisher.cursors.message(self.client)
            if message is not None:
                self.late.append((self.question.ask, int.from_bytes(message[-2], "big", signed=True), message[-1]))
            self.publisher.cursors.drop(self.client)
        self.question = self.client = None

    @property
    def is_cut_off(self) -> bool:
        """A plain subscriber's network takes both its connections or none; an extended one's may take either."""
        return not self.has_extension and (self.connection is None or self.connection.is_broken)

    def serve(self, count: int, fault: str, now_s: float) -> None:
        """Take some messages of the open answer; a question reaches the publisher when its answer is first wanted."""
        for _ in range(count):
            question = self.question
            if question is None or self.is_cut_off:
                return
            if self.client is None:
                if fault == "lose":
                    self.client = b"lost"  # the question itself
                    return
                self.client = f"{self.name}{question.ask}".encode()
                self.answering_epoch = self.publisher.epoch
                is_read = self.has_extension or question.verb is None
                self.publisher.cursors.receive(
                    [self.client, b"", question.request.encode() if is_read else encode_plain_request(2**63)]
                )
            self.publisher.fold()
            if self.client not in self.publisher.cursors.clients:
                return  # the publisher of that answer is gone, or a message was lost
            if fault == "cut":
                self.publisher.cursors.end_all()
            self.take(question, self.client, fault, now_s)

    def take(self, question: SendReplayRequest, client: bytes, fault: str, now_s: float) -> None:
        message = self.publisher.cursors.message(client)
        self.publisher.cursors.on_sent(client)
        if message is None or fault == "lose":
            return
        sequence, payload = int.from_bytes(message[-2], "big", signed=True), message[-1]
        if fault == "garble" and message[-2] == END_SEQ:
            payload = b"junk"
        if message[-2] == END_SEQ and message[-1]:
            meta = ReplayMeta.decode(message[-1])
            self.is_in_base = meta.kind is ReplayMetaKind.BEGIN and meta.snap
        elif fault == "alter" and message[-2] != END_SEQ and question.verb is not None and not self.is_in_base:
            payload = FORGED  # readable, and not what the publisher has under this number
            self.is_altered = True
        for _ in range(2 if fault == "repeat" else 1):
            self.receive(question.ask, sequence, payload, now_s)

    def receive(self, ask: int, sequence: int, payload: bytes, now_s: float) -> None:
        counters = self.follower.cursor.counters
        verified, splices = counters.verified, counters.splices
        may_distrust = self.is_spliced or self.is_altered
        if sequence == int.from_bytes(END_SEQ, "big", signed=True):
            for _ in self.follower.prepare_swap(payload):
                self.check()
            self.follower.on_replay_marker(ask, payload, now_s)
        else:
            self.follower.on_replay_batch(ask, sequence, payload, now_s)
        assert counters.splices == splices or may_distrust, f"{self.name} distrusts an honest publisher"
        if counters.verified > verified:
            self.verified_epoch = self.answering_epoch
            self.is_altered = False
            # A status proves the place that was asked about, and this answer may have opened the next question.
            self.is_spliced = self.is_spliced and self.spliced_after >= ask

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
        """Hand over live frames; without a fault they stay in the socket while nobody listens."""
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

    # --- what it believes ---

    @property
    def state(self) -> StreamState:
        return self.follower.cursor.state

    @property
    def blocks(self) -> State:
        return frozenset((each, tier) for tier in Tier for each in self.view.blocks(0, tier))

    def check(self) -> None:
        """LIVE is not said of a wrong view.

        One exception: a frame of another epoch came on the same connection, behind a proxy. Then LIVE may be wrong
        until the next proof. A publisher without the extension gives no proof, so its proxies must hang up.
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
"""How long recovery may take: two probe intervals plus the sync, after one lost question and the pause that follows. A
status, a synchronisation and a snapshot may each have to wait for their credit."""

Steps: TypeAlias = list[tuple[Any, ...]]
"""Each a method's name and its arguments."""


class RecoverySimulation:
    """One publisher, subscribers that it serves by the extension, and others that it does not.

    Args:
        window: batches that the publisher keeps one by one.
        seq_base: of its lives, ``"zero"`` or ``"clock"``.
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
        """All subscribers join, the steps happen, the faults stop, and every view becomes what was published."""
        self.play([("store", 0, 3, False), ("send",)])
        for who in range(len(self.subscribers)):
            self.play([("connect", who), *[("serve", who, 9, "none")] * 2])
        self.play(steps)
        self.recover()
        self.check_converged()

    def play(self, steps: Steps) -> None:
        """Carry out each step, and check after it."""
        for name, *arguments in steps:
            getattr(self, name)(*arguments)
            for each in self.subscribers:
                each.check()

    def chosen(self, who: int) -> ModelSubscriber:
        return self.subscribers[who % len(self.subscribers)]

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
        """Send what was published to every connected subscriber."""
        self.broadcast(self.publisher.send_pending())

    def poison(self) -> None:
        """Send a batch that nobody can read."""
        self.broadcast(self.publisher.send_poison())

    def send_other_topic(self, who: int, ahead: int) -> None:
        """Another publisher, whose topic begins alike, sends a batch ``ahead`` of the number that is due here."""
        connection = self.chosen(who).connection
        if connection is not None:
            number = max(0, self.publisher.stream.next_sequence + ahead)
            self.put(connection, None, OTHER_TOPIC, number, 1)

    def put(self, connection: Connection, epoch: int | None, topic: bytes, number: int, count: int) -> None:
        connection.frames.extend([(epoch, (topic, number.to_bytes(8, "big"), FORGED))] * count)

    def forge(self, who: int, ahead: int, count: int) -> None:
        """Somebody sends ``count`` frames of this topic, each ``ahead`` of the number that is due.

        Only to who asks by the extension: nothing tells another that a frame is not the publisher's.
        """
        each = self.chosen(who)
        if each.connection is not None and each.has_extension:
            number = self.publisher.stream.next_sequence + ahead
            self.put(each.connection, None, TOPIC, number, count)

    def connect(self, who: int) -> None:
        """Make the live connection of one subscriber."""
        self.chosen(who).connect(self.now_s)

    def disconnect(self, who: int) -> None:
        """Cut the live connection of one subscriber."""
        self.chosen(who).disconnect(self.now_s)

    def deliver(self, who: int, count: int, fault: str) -> None:
        """Hand ``count`` live frames to one subscriber, with a fault: none, lose, repeat or reorder."""
        self.chosen(who).deliver(count, fault, self.now_s)

    def serve(self, who: int, count: int, fault: str) -> None:
        """Hand it ``count`` messages of its open answer, with a fault: none, lose, repeat, cut, garble or alter.

        Only a digest tells that a batch was altered, so that no plain answer is, and no chunk of a base.
        """
        self.chosen(who).serve(count, fault, self.now_s)

    def deliver_late(self, who: int) -> None:
        """Hand it what answers to its older questions still brought."""
        self.chosen(who).receive_late(self.now_s)

    def wait(self, tenths: int) -> None:
        """Let tenths of a second pass, and every subscriber do what is due."""
        until_s = self.now_s + tenths / 10
        for each in self.subscribers:
            while (due_s := each.follower.next_deadline_s) <= until_s:
                each.tick(max(due_s, self.now_s))
            each.now_s = until_s
        self.now_s = until_s

    def restart(self, is_hidden: bool) -> None:
        """The publisher's next epoch; ``is_hidden`` behind a proxy, which keeps up the connections of the extended."""
        for each in self.subscribers:
            if each.connection is not None:
                stays = is_hidden and each.has_extension
                each.connection.was_restarted |= stays
                each.connection.is_broken |= not stays
        self.broadcast(self.publisher.start_epoch())

    # --- the end ---

    def recover(self) -> None:
        """Faults stop; what is asked is answered and what is sent arrives, for as long as recovery may take."""
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
        """Every view is what was published, and its state says so."""
        publisher = self.publisher
        for each in self.subscribers:
            assert each.blocks == publisher.held, f"{each.name} has not converged: {each.follower.cursor!r}"
            assert each.follower.cursor.last_seq == publisher.stream.next_sequence - 1
            if each.follower.cursor.is_extended:
                assert each.verified_epoch == publisher.epoch
            if not publisher.is_poisoned and (each.has_extension or len(publisher.stream)):
                assert each.state is StreamState.LIVE  # a plain one cannot tell an empty stream from a silent one
