"""A simulation of writer, broker and reader: the real cores, and a broker that loses, drops and repeats messages.

The true state is the writer's after every batch of every epoch. No reader is LIVE with another state, and once the
faults stop every reader has the writer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from kit import broken_log_cores
from kit.searches import num_examples

from observability.jetstream.log_follower import LogFollower
from observability.jetstream.log_ownership import LogOwnership
from observability.jetstream.log_writer import LogLimits, LogTraffic, LogWriter
from observability.kv_stream import (
    BatchApplier,
    BlockView,
    FollowPolicy,
    NullStreamListener,
    StreamState,
    Tier,
)
from observability.kv_stream.log_cursor import LogCursor
from observability.kv_stream.log_records import LogHeartbeat, LogMessage, Snapshot, SnapshotPointer
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder

LIMITS = LogLimits(
    max_msgs=12, max_bytes=4_000, max_age_s=1_000.0, overhead_bytes=100, buffer_steps=3, buffer_bytes=10_000
)
LARGEST_BYTES = 90
"""Upper limit of a message; a batch of four blocks exceeds it."""

SECONDS_POLICY = FollowPolicy(
    answer_timeout_s=1.0,
    retry_min_s=0.1,
    retry_max_s=0.5,
    request_interval_s=0.1,
    probe_interval_s=1.0,
    dead_after_s=5.0,
)
HEARTBEAT_INTERVAL_S = 0.5
RECOVERY_ROUNDS = 40
"""Heartbeats: a stalled reader needs five, another request the longest pause, and a lost answer as much."""


@dataclass
class Broker:
    """A log of one subject with its limits and known ids, two objects, and a pointer with its revision."""

    log: list[LogMessage] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    next_log_seq: int = 1
    objects: dict[int, bytes] = field(default_factory=dict)
    pointer: bytes | None = None
    revision: int = 0

    def store(self, message: LogMessage) -> tuple[int, bool]:
        """Append a message unless its id is known; return its number, and whether the id was known."""
        message_id = message.headers["Nats-Msg-Id"]
        if message_id in self.ids:
            return self.next_log_seq - 1, True
        self.ids.add(message_id)
        log_seq, self.next_log_seq = self.next_log_seq, self.next_log_seq + 1
        self.log.append(LogMessage(log_seq, message.epoch, message.seq, message.digest, message.payload))
        self.drop(len(self.log) - LIMITS.max_msgs)
        while sum(len(each.payload) + LIMITS.overhead_bytes for each in self.log) > LIMITS.max_bytes:
            self.drop(1)
        return log_seq, False

    def drop(self, count: int) -> None:
        del self.log[: max(0, count)]


class ModelWriter:
    """A writer's core, its true state, and its messages in flight."""

    limits = LIMITS

    def __init__(self, world: LogModel, number: int) -> None:
        self.world, self.number = world, number
        self.num_epochs = 0
        self.core = LogWriter(
            epoch=self.new_epoch(),
            rank=0,
            limits=self.limits,
            traffic=world.traffic,
            log_seq=world.broker.next_log_seq - 1,
        )
        self.held: frozenset[int] = frozenset()
        self.unacked: list[tuple[LogMessage, tuple[int, bool] | None]] = []
        self.ownership = LogOwnership()
        self.refresh_pointer()

    def new_epoch(self) -> bytes:
        self.num_epochs += 1
        epoch = bytes([self.number + 1, self.num_epochs]) * 8
        self.world.states[epoch, -1] = frozenset()
        return epoch

    def publish(self, event: Any, held: frozenset[int]) -> None:
        self.held = held
        payload = self.world.encoder.encode(KVEventBatch(1.0, (event,), 0), 0)
        seq = self.core.append(payload)
        self.world.states[self.core.epoch, seq] = held

    def start_epoch(self) -> None:
        self.core.start_epoch(self.new_epoch())
        self.held = frozenset()

    def send(self, count: int, fate: str) -> None:
        """Send messages: the broker stores them, they are lost, or their acknowledgements are lost."""
        for _ in range(count):
            message = None if self.ownership.is_superseded else self.core.pop_message(LARGEST_BYTES)
            if message is None:
                return
            answer = None if fate == "lose" else self.world.broker.store(message)
            self.unacked.append((message, None if fate == "lose answer" else answer))

    def acknowledge(self, count: int) -> None:
        """Receive acknowledgements, or time out."""
        for _ in range(min(count, len(self.unacked))):
            message, answer = self.unacked.pop(0)
            if answer is None:
                self.core.on_failed(message)
            else:
                self.core.on_stored(message, answer[0], is_duplicate=answer[1])

    def store_snapshot(self, fate: str) -> None:
        """Build a snapshot if one is due, and store it or fail on the way."""
        broker, now_s = self.world.broker, self.world.now_s
        if self.ownership.is_superseded or not self.core.snapshot_reason(now_s):
            return
        snapshot, traffic = run_to_end(self.core.build_snapshot())
        self.refresh_pointer()
        if fate == "lose" or self.ownership.is_superseded:
            self.core.on_snapshot_failed()
            return
        pointer = self.ownership.next_pointer(snapshot)
        broker.objects[pointer.slot] = snapshot.encode()
        if fate != "lose object":
            broker.pointer, broker.revision = pointer.encode(), broker.revision + 1
        if fate != "none":
            self.core.on_snapshot_failed()
            return
        self.ownership.on_pointer_stored(pointer, broker.revision)
        self.core.on_snapshot_stored(snapshot, traffic, now_s)

    def refresh_pointer(self) -> None:
        """Detect another writer's pointer, which means that the writer was replaced."""
        broker = self.world.broker
        found = SnapshotPointer.decode(broker.pointer) if broker.pointer else None
        self.ownership.on_pointer_read(found, broker.revision, num_stored=self.ownership.num_stored)


def run_to_end(slices: Any) -> tuple[Snapshot, int]:
    while True:
        try:
            next(slices)
        except StopIteration as made:
            value: tuple[Snapshot, int] = made.value
            return value


class ModelReader:
    """A follower, its view and its open requests. Implements ``LogChannel``."""

    def __init__(self, world: LogModel) -> None:
        self.world = world
        self.view = BlockView()
        self.follower = LogFollower(
            applier=BatchApplier(
                rank=0, view=self.view, decoder=BatchDecoder(), listener=NullStreamListener(), wall_clock=lambda: 0.0
            ),
            channel=self,
            policy=SECONDS_POLICY,
            jitter=lambda: 0.0,
        )
        self.requests: list[tuple[int, SnapshotPointer | None]] = []
        self.reading_id = 0
        self.log_seq: int | None = None
        self.follower.begin(world.now_s)

    def read_pointer(self, request_id: int) -> None:
        self.requests.append((request_id, None))

    def read_snapshot(self, request_id: int, pointer: SnapshotPointer) -> None:
        self.requests.append((request_id, pointer))

    def request_snapshot(self) -> None:
        assert not self.world.is_whole, "the snapshot leads to the end of the log, and is not used"
        self.world.writer.core.on_snapshot_requested()

    def read_log(self, reading_id: int, log_seq: int) -> None:
        self.reading_id, self.log_seq = reading_id, log_seq

    def receive_heartbeat(self, heartbeat: LogHeartbeat) -> None:
        self.run(self.follower.on_heartbeat(heartbeat, self.world.now_s))

    def answer(self, fate: str) -> None:
        """Answer the open requests from the broker, or fail."""
        requests, self.requests = self.requests, []
        for request_id, pointer in requests:
            broker = self.world.broker
            if fate == "lose answer":
                continue
            if pointer is None:
                found = SnapshotPointer.decode(broker.pointer) if broker.pointer and fate != "lose" else None
                self.run(self.follower.on_pointer_read(request_id, found, self.world.now_s))
            else:
                data = broker.objects.get(pointer.slot) if fate != "lose" else None
                snapshot = Snapshot.decode(data) if data else None
                self.run(self.follower.on_snapshot_read(request_id, snapshot, self.world.now_s))

    def receive(self, count: int) -> None:
        """Read messages of the log in order, each once."""
        for _ in range(count):
            log_seq = self.log_seq
            message = next((each for each in self.world.broker.log if log_seq and each.log_seq >= log_seq), None)
            if message is None:
                return
            self.log_seq = message.log_seq + 1
            self.run(self.follower.on_message(self.reading_id, message, self.world.now_s))

    def run(self, steps: Iterator[None]) -> None:
        for _ in steps:
            self.check()
        self.check()

    @property
    def cursor(self) -> LogCursor:
        return self.follower.cursor

    @property
    def blocks(self) -> frozenset[int]:
        return frozenset(self.view.blocks(0, Tier.DEVICE))

    def check(self) -> None:
        if self.cursor.state is StreamState.LIVE:
            truth = self.world.states[self.cursor.epoch, self.cursor.last_seq]
            assert self.blocks == truth, f"live at {self.cursor.last_seq} and wrong"


class LogModel:
    """One log, its writers (the last is the current one), and two readers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.encoder = BatchEncoder()
        self.states: dict[tuple[bytes, int], frozenset[int]] = {}
        self.traffic = LogTraffic()
        self.broker = Broker()
        self.writers = [ModelWriter(self, 0)]
        self.is_whole = False  # faults are over, and the broker dropped only by its limits
        self.readers = [ModelReader(self), ModelReader(self)]

    @property
    def writer(self) -> ModelWriter:
        return self.writers[-1]

    # --- steps ---

    def store(self, first: int, count: int) -> None:
        hashes = tuple(range(first, first + count))
        tokens = tuple(range(16 * count))
        self.writer.publish(BlockStored(hashes, None, tokens, 16, None), self.writer.held | set(hashes))

    def remove(self, block: int) -> None:
        self.writer.publish(BlockRemoved((block,)), self.writer.held - {block})

    def clear(self) -> None:
        self.writer.publish(AllBlocksCleared(), frozenset())

    def send(self, count: int, fate: str) -> None:
        self.writer.send(count, fate)

    def acknowledge(self, count: int) -> None:
        self.writer.acknowledge(count)

    def snapshot(self, fate: str) -> None:
        self.writer.store_snapshot(fate)

    def heartbeat(self, index: int) -> None:
        """Deliver a heartbeat of the current writer, or of a replaced one, to one reader."""
        self.now_s += HEARTBEAT_INTERVAL_S / 4
        for writer in self.writers[-2:] if index > 1 else self.writers[-1:]:
            heartbeat = None if writer.ownership.is_superseded else writer.core.heartbeat()
            if heartbeat is not None:
                self.readers[index % 2].receive_heartbeat(heartbeat)

    def read(self, index: int, count: int) -> None:
        self.readers[index].receive(count)

    def answer(self, index: int, fate: str) -> None:
        self.readers[index].answer(fate)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        for reader in self.readers:
            reader.follower.tick(self.now_s)
            reader.check()

    def restart_writer(self) -> None:
        """Start another writer; the replaced one does not know it yet."""
        self.writers.append(ModelWriter(self, len(self.writers)))

    def replaced_writer_sends(self, count: int) -> None:
        """Let the replaced writer send, until it stores a snapshot and notices."""
        if len(self.writers) > 1 and self.writers[-2].ownership.has_begun:
            old = self.writers[-2]
            old.send(count, "none")
            old.store_snapshot("none")

    def start_epoch(self) -> None:
        self.writer.start_epoch()

    def lose_reader(self, index: int) -> None:
        self.readers[index] = ModelReader(self)

    def lose_broker(self, index: int) -> None:
        reader = self.readers[index]
        reader.follower.on_disconnected(self.now_s)
        reader.log_seq = None
        reader.check()
        reader.follower.on_reconnected()

    def expire(self, count: int) -> None:
        """Drop the oldest messages because of their age."""
        self.broker.drop(count)

    def wipe_broker(self) -> None:
        """Empty the broker, which the writers notice."""
        self.broker = Broker()
        for writer in self.writers:
            writer.acknowledge(len(writer.unacked))
            writer.ownership.on_pointer_read(None, 0, num_stored=writer.ownership.num_stored)
            writer.ownership.on_broker_checked(writer.core, is_known=False, last_log_seq=0)

    def forge(self, kind: str, ahead: int) -> None:
        """Forge a message on the subject."""
        core = self.writer.core
        seq = max(0, core.stream.next_sequence + ahead)
        payload = self.encoder.encode(KVEventBatch(1.0, (BlockStored((99,), None, (1,), 1, None),), 0), 0)
        epoch = core.epoch if kind == "epoch" else b"f" * 16
        self.broker.store(LogMessage(0, epoch, seq, b"notachan", payload))

    # --- the end ---

    def run(self, steps: list[tuple[Any, ...]]) -> None:
        for name, *args in steps:
            getattr(self, name)(*args)
            for reader in self.readers:
                reader.check()
        self.is_whole = not {"expire", "forge", "wipe_broker", "replaced_writer_sends"} & {name for name, *_ in steps}
        self.is_whole = self.is_whole and not any(
            step[0] in ("answer", "snapshot") and step[-1] != "none" for step in steps
        )
        self.recover()

    def stop_writers(self) -> None:
        """Stop the writers: no reader stays LIVE, and in the end every view is empty."""
        for seconds, states in (
            (SECONDS_POLICY.answer_timeout_s, (StreamState.CONNECTING, StreamState.DEAD)),
            (SECONDS_POLICY.dead_after_s, (StreamState.DEAD,)),
        ):
            for _ in range(6):  # because deadlines lie in between
                self.wait(seconds / 5)
            for reader in self.readers:
                assert reader.cursor.state in states, reader.cursor
        assert not any(reader.blocks for reader in self.readers)

    def recover(self) -> None:
        """Stop the faults, and check that every reader converges to the writer's state."""
        for number in range(RECOVERY_ROUNDS):
            self.now_s += HEARTBEAT_INTERVAL_S
            for _ in range(4):
                self.writer.acknowledge(len(self.writer.unacked))
                self.writer.store_snapshot("none")
                self.writer.send(50, "none")
            for reader in self.readers:
                reader.answer("none")
                reader.receive(50)
                heartbeat = self.writer.core.heartbeat()
                assert heartbeat is not None
                reader.receive_heartbeat(heartbeat)
                for _ in range(2):
                    reader.answer("none")
                    reader.receive(50)
                reader.follower.tick(self.now_s)
                reader.check()
                assert not number or reader.cursor.state is not StreamState.DEAD, "the writer sends heartbeats"
        self.writer.acknowledge(len(self.writer.unacked))
        for reader in self.readers:
            assert reader.cursor.state is StreamState.LIVE, reader.cursor
            assert reader.cursor.epoch == self.writer.core.epoch
            assert reader.blocks == self.writer.held
        assert not self.writer.core.num_waiting


FATES = st.sampled_from(["none", "none", "none", "lose", "lose answer"])
INDEX = st.integers(0, 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 9), st.integers(1, 4)),
        st.tuples(st.just("store"), st.integers(0, 9), st.just(1)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.just(("clear",)),
        st.tuples(st.just("send"), st.integers(1, 6), FATES),
        st.tuples(st.just("acknowledge"), st.integers(1, 6)),
        st.tuples(st.just("snapshot"), st.one_of(FATES, st.just("lose object"))),
        st.tuples(st.just("heartbeat"), st.integers(0, 3)),
        st.tuples(st.just("heartbeat"), INDEX),
        st.tuples(st.just("read"), INDEX, st.integers(1, 9)),
        st.tuples(st.just("answer"), INDEX, FATES),
        st.tuples(st.just("wait"), st.sampled_from([0.1, 1.1, 6.0])),
        st.sampled_from([("restart_writer",), ("start_epoch",), ("wipe_broker",)]),
        st.tuples(st.just("replaced_writer_sends"), st.integers(1, 4)),
        st.tuples(st.sampled_from(["lose_reader", "lose_broker"]), INDEX),
        st.tuples(st.just("expire"), st.integers(1, 5)),
        st.tuples(st.just("forge"), st.sampled_from(["epoch", "other"]), st.integers(-3, 3)),
    ),
    max_size=40,
)


SNAPSHOT = ("snapshot", "none")
ONE, TWO = ("store", 1, 1), ("store", 2, 1)
FIVE = [("store", block, 1) for block in range(5)]
JOINED = (SNAPSHOT, ("heartbeat", 0), ("answer", 0, "none"), ("answer", 0, "none"))


@pytest.mark.soak
@pytest.mark.timeout(600)
@given(steps=STEPS)
@settings(max_examples=num_examples(5), deadline=None, suppress_health_check=list(HealthCheck))
def test_no_wrong_view_is_live_and_every_view_converges(steps: list[tuple[Any, ...]]) -> None:
    LogModel().run(steps)


@pytest.mark.soak
@pytest.mark.timeout(600)
@given(steps=STEPS, joins=st.booleans())
@settings(deadline=None, suppress_health_check=list(HealthCheck))
@example(
    steps=[("wait", 1.1), ("restart_writer",), *JOINED],
    joins=True,
)
def test_a_silent_writer_ends_live_and_is_cleared(steps: list[tuple[Any, ...]], joins: bool) -> None:
    world = LogModel()
    if joins:
        for name, *args in JOINED:
            getattr(world, name)(*args)
    for name, *args in steps:
        getattr(world, name)(*args)
    world.stop_writers()


# --- mutants ---

Mutate = Callable[[pytest.MonkeyPatch], None]
MUTANTS: list[Any] = []


def caught_by(mutate: Mutate, *steps: tuple[Any, ...], is_searched: bool = False) -> None:
    """Register a mutant with steps that expose it.

    Args:
        mutate: breaks one rule.
        steps: pass with the unchanged cores.
        is_searched: ``make soak`` checks that random steps expose the mutant too. They rarely expose the others.
    """
    MUTANTS.append(pytest.param(mutate, list(steps), is_searched, id=mutate.__name__))


caught_by(broken_log_cores.digest_of_a_message_not_compared, ("forge", "epoch", 0), is_searched=True)
caught_by(broken_log_cores.epoch_of_a_message_not_compared, ("forge", "other", 0), is_searched=True)
caught_by(broken_log_cores.future_messages_applied, ("forge", "epoch", 1), is_searched=True)
caught_by(
    broken_log_cores.reordered_messages_are_dropped_without_recovery,
    SNAPSHOT,
    ONE,
    TWO,
    ("send", 1, "lose"),
    ("send", 1, "none"),
    ("acknowledge", 2),
)
caught_by(broken_log_cores.stalled_readers_wait, SNAPSHOT, ONE, ("send", 1, "none"), ("expire", 1))
caught_by(
    broken_log_cores.every_heartbeat_is_a_proof,
    SNAPSHOT,
    ("store", 5, 1),
    ("send", 1, "lose"),
    ("forge", "epoch", -1),
    is_searched=True,
)
caught_by(broken_log_cores.another_epoch_is_never_read, *JOINED, ("restart_writer",))
caught_by(broken_log_cores.failed_requests_are_not_retried, SNAPSHOT, ("heartbeat", 0), ("answer", 0, "lose"))
caught_by(broken_log_cores.batches_of_the_snapshot_are_left_out, ONE, is_searched=True)
caught_by(broken_log_cores.the_log_is_read_from_a_later_number, SNAPSHOT, ONE, is_searched=True)
caught_by(broken_log_cores.no_message_is_retried, *JOINED, ONE, ("send", 1, "lose"), ("acknowledge", 1))
caught_by(
    broken_log_cores.messages_sent_beyond_the_limit,
    SNAPSHOT,
    *[step for block in range(20) for step in (("store", block, 1), ("send", 1, "none"), ("acknowledge", 1))],
)
caught_by(broken_log_cores.batches_before_the_buffer_are_skipped, SNAPSHOT, *FIVE)
caught_by(broken_log_cores.large_batches_wait, SNAPSHOT, ("store", 0, 4))
caught_by(broken_log_cores.the_snapshot_is_older_than_its_number, *FIVE, SNAPSHOT)


@pytest.mark.broken_variants
@pytest.mark.soak
@pytest.mark.parametrize(("mutate", "steps", "is_searched"), MUTANTS)
def test_a_broken_core_is_caught(
    mutate: Mutate,
    steps: list[tuple[Any, ...]],
    is_searched: bool,
    soaking: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    LogModel().run(steps)
    mutate(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        LogModel().run(steps)

    @given(steps=STEPS)
    @settings(
        max_examples=1_500, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    def holds(steps: list[tuple[Any, ...]]) -> None:
        LogModel().run(steps)

    if soaking and is_searched:
        with pytest.raises((AssertionError, LookupError)):
            holds()
