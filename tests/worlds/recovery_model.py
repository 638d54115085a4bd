"""Recovery of streams, step by step: a publisher, several subscribers, and a network with every fault.

Publisher and subscribers are the actors of ``worlds``: the kit's real cores, without sockets, clock
or threads. Here nothing happens by itself. Each step of a list publishes, delivers, answers or breaks something, so
that Hypothesis can shrink the list and a developer can read it. After every step, no subscriber may be ``LIVE`` with a
view that differs from the true state, distrust an honest publisher, or have sent more requests than its credit allows.
Once the faults stop, every view must become the true state within ``RECOVERY_LIMIT_S``.

Use ``RecoverySimulation(...).run(steps)`` to check that a deliberately broken core is caught, or to try another cursor.
``DeliveryWorld`` draws whole histories of the same actors from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from observability.kv_stream import FollowPolicy, StreamState
from observability.kv_stream.instructions import SendReplayRequest
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored
from scheduler_components.kv_events.replay_messages import END_SEQ
from worlds import (
    FORGED_PAYLOAD,
    OTHER_TOPIC,
    TOPIC,
    Answer,
    FaultyLink,
    LinkFault,
    LiveFrame,
    PublisherActor,
    PublisherShape,
    State,
    SubscriberActor,
    begins_chunks,
)

__all__ = ["POLICY", "RECOVERY_LIMIT_S", "RecoverySimulation", "SteppedReader", "Steps"]

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
    """A live connection. ``is_broken`` means that nothing more is sent over it, which its reader does not know yet."""

    live: FaultyLink[LiveFrame] = field(default_factory=FaultyLink)
    is_broken: bool = False


class SteppedReader:
    """A subscriber, its live connection and its open request. Nothing arrives but by a step."""

    def __init__(self, publisher: PublisherActor, name: str, *, has_extension: bool, now_s: float = 0.0) -> None:
        self.publisher = publisher
        self.actor = SubscriberActor(
            name, publisher, channel=self, policy=POLICY, has_extension=has_extension, now_s=now_s
        )
        self.connection: Connection | None = None
        self.request: SendReplayRequest | None = None
        self.client: bytes | None = None
        self.answering_epoch = -1
        self.is_in_chunks = False
        self.late: list[Answer] = []

    @property
    def name(self) -> str:
        return self.actor.name

    @property
    def state(self) -> StreamState:
        return self.actor.state

    @property
    def blocks(self) -> State:
        return self.actor.blocks

    @property
    def has_extension(self) -> bool:
        return self.actor.has_extension

    # --- the replay channel ---

    def send(self, request: SendReplayRequest) -> None:
        """Open a request. The publisher receives it with the first message of its answer."""
        self.cancel()
        self.request = request

    def cancel(self) -> None:
        """Close the request's connection; a message that is still in transit comes late."""
        if self.request is not None and self.client in self.publisher.sessions.clients:
            message = self.publisher.sessions.message(self.client)
            if message is not None:
                self.late.append(self._answer(self.request, message))
            self.publisher.sessions.drop(self.client)
        self.request = self.client = None

    def _answer(self, request: SendReplayRequest, message: tuple[bytes, ...]) -> Answer:
        sequence = int.from_bytes(message[-2], "big", signed=True)
        return Answer(request_id=request.request_id, sequence=sequence, payload=message[-1], epoch=self.answering_epoch)

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
                self.publisher.receive(self.client, request.request, has_extension=self.has_extension)
            self.publisher.fold()
            if self.client not in self.publisher.sessions.clients:
                return  # that epoch of the publisher is over, or a message was lost
            if fault == "cut":
                self.publisher.sessions.end_all()
            self._take(request, self.client, fault, now_s)

    def _take(self, request: SendReplayRequest, client: bytes, fault: str, now_s: float) -> None:
        message = self.publisher.sessions.message(client)
        self.publisher.sessions.on_sent(client)
        if message is None or fault == "lose":
            return
        answer = self._answer(request, message)
        is_marker = message[-2] == END_SEQ
        if is_marker and fault == "garble":
            answer.payload = b"junk"
        if is_marker and message[-1]:
            self.is_in_chunks = begins_chunks(message[-1])
        elif fault == "alter" and not is_marker and request.verb is not None and not self.is_in_chunks:
            answer.payload = FORGED_PAYLOAD  # readable, but not the publisher's batch under this number
            answer.is_altered = True
        for _ in range(2 if fault == "repeat" else 1):
            self.actor.on_answer(answer, now_s)

    def receive_late(self, now_s: float) -> None:
        """Receive the late messages of answers to older requests."""
        while self.late:
            self.actor.on_answer(self.late.pop(), now_s)

    # --- the live channel ---

    def connect(self, now_s: float) -> None:
        """Open the live connection."""
        if self.connection is None:
            self.connection = Connection()
            self.actor.on_connected(self.publisher.epoch, now_s)

    def disconnect(self, now_s: float) -> None:
        """Close the live connection with all that is in transit."""
        if self.connection is not None:
            self.connection = None
            self.actor.on_disconnected(now_s)

    def deliver(self, count: int, fault: str, now_s: float) -> None:
        """Deliver live frames; without a fault they stay in the socket while the cursor would drop them."""
        if self.connection is None:
            return
        live = self.connection.live
        for _ in range(min(count, len(live.in_transit))):
            if fault == "none" and not self.actor.follower.cursor.is_accepting_live:
                return
            frame = live.deliver(LinkFault(fault))
            if frame is not None:
                self.actor.on_live(frame, now_s)


# --- the network between them ---

_EPOCH_LENGTH = 10_000
"""Numbers from the first of one epoch to the first of the next, with ``clock``."""

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
        chunk_bytes: size of a chunk of its snapshot.
        seq_base: of its epochs, ``"zero"`` or ``"clock"``.
        num_extended, num_plain: subscribers of either kind, numbered in this order.
    """

    def __init__(
        self,
        *,
        window: int = 4,
        chunk_bytes: int = 256 * 1024,
        seq_base: str = "zero",
        num_extended: int = 2,
        num_plain: int = 1,
    ) -> None:
        self.now_s = 0.0
        self.subscribers: list[SteppedReader] = []
        self.publisher = PublisherActor(
            PublisherShape(window=window, chunk_bytes=chunk_bytes, seq_base=seq_base),
            broadcast=self.broadcast,
            first_sequence=lambda epoch: 0 if seq_base == "zero" else _EPOCH_LENGTH * epoch,
            clock=lambda: self.now_s,
        )
        self.subscribers += [
            SteppedReader(self.publisher, f"subscriber {number} ", has_extension=number < num_extended)
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
                each.actor.check()

    def subscriber_at(self, index: int) -> SteppedReader:
        return self.subscribers[index % len(self.subscribers)]

    def broadcast(self, frame: LiveFrame) -> None:
        for each in self.subscribers:
            if each.connection is not None and not each.connection.is_broken:
                each.connection.live.send(frame)

    # --- steps ---

    def store(self, block: int, count: int, on_host: bool) -> None:
        """Publish a store of ``count`` blocks, numbered from ``block``, each the child of the one before."""
        hashes = tuple(range(block, block + count))
        parent = block - 1 if block else None
        self.publisher.publish_events((BlockStored(hashes, parent, hashes, 1, None, "CPU" if on_host else None),))

    def remove(self, block: int, count: int, on_host: bool) -> None:
        """Publish a removal of ``count`` blocks, numbered from ``block``."""
        removed = BlockRemoved(tuple(range(block, block + count)), "CPU" if on_host else None)
        self.publisher.publish_events((removed,))

    def clear(self) -> None:
        """Publish a clear of all blocks."""
        self.publisher.publish_events((AllBlocksCleared(),))

    def send(self) -> None:
        """Send the published batches to every connected subscriber."""
        self.publisher.idle()

    def poison(self) -> None:
        """Send an unreadable batch."""
        self.publisher.send_poison()

    def send_other_topic(self, index: int, ahead: int) -> None:
        """Send a batch of another publisher with a longer topic, ``ahead`` of the next number of this one."""
        connection = self.subscriber_at(index).connection
        if connection is not None:
            number = max(0, self.publisher.stream.next_sequence + ahead)
            self.put(connection, OTHER_TOPIC, number, 1)

    def put(self, connection: Connection, topic: bytes, number: int, count: int) -> None:
        for _ in range(count):
            connection.live.send(LiveFrame(None, (topic, number.to_bytes(8, "big"), FORGED_PAYLOAD)))

    def forge(self, index: int, ahead: int, count: int) -> None:
        """Send ``count`` forged frames of this topic, each ``ahead`` of the publisher's next number.

        They go only to subscribers with the extension: others cannot distinguish a forged frame.
        """
        each = self.subscriber_at(index)
        if each.connection is not None and each.has_extension:
            number = self.publisher.stream.next_sequence + ahead
            self.put(each.connection, TOPIC, number, count)

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
            each.actor.tick_until(until_s)
        self.now_s = until_s

    def restart(self, is_hidden: bool) -> None:
        """Start the publisher's next epoch. ``is_hidden``: a proxy keeps the connections with the extension open."""
        for each in self.subscribers:
            if each.connection is not None:
                stays = is_hidden and each.has_extension
                each.actor.truth.was_restarted |= stays
                each.connection.is_broken |= not stays
        self.publisher.start_epoch()

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
                each.actor.check()
            self.wait(1)

    def check_converged(self) -> None:
        """Check that every view equals the published state and is LIVE."""
        for each in self.subscribers:
            each.actor.check_converged()
