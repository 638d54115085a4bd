"""Writers and readers of a log at a broker that loses, drops and forges messages: actors of the simulated world.

Hypothesis chooses the steps, and the actors judge themselves: no reader is LIVE with another state than the writer's.
Once the faults stop, every reader has the writer's state, and no reader requests a snapshot from a log that is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from kit import broken_log_cores
from kit.searches import num_examples
from worlds.jetstream_actor import POLICY, LogReaderActor, LogWriterActor, Truth
from worlds.publisher_actor import FORGED_PAYLOAD
from worlds.simulated_broker import JOIN_LIMIT_S, BrokerQuality, LogTrouble, SimulatedBroker
from worlds.timeline import Timeline

from observability.jetstream.log_writer import LogLimits
from observability.kv_stream import StreamState
from observability.kv_stream.log_records import LogMessage
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored

LIMITS = LogLimits(
    max_msgs=12, max_bytes=4_000, max_age_s=1_000.0, overhead_bytes=100, buffer_steps=3, buffer_bytes=10_000
)
QUALITIES = {
    "none": BrokerQuality(),
    "lose": BrokerQuality(request_loss=1.0),
    "lose answer": BrokerQuality(answer_loss=1.0),
}
DAMAGING = ("quality", "delete", "expire", "lose_tail", "forge")
"""Steps after which a reader may request a snapshot."""

LARGE = 60
"""Blocks of a batch that is larger than a message."""


class LogModel:
    """One log, its writers (the last is the current one), and two readers. Things happen by steps and by time."""

    def __init__(self) -> None:
        self.timeline = Timeline(seed=0)
        self.broker = SimulatedBroker(self.timeline, LIMITS)
        self.truth: Truth = {}
        self.quality_now = QUALITIES["none"]
        self.is_whole = True
        self.writers: list[LogWriterActor] = []
        self.restart_writer()
        self.readers = [self.new_reader(), self.new_reader()]

    @property
    def writer(self) -> LogWriterActor:
        return self.writers[-1]

    def new_reader(self) -> LogReaderActor:
        reader = LogReaderActor(self.timeline, self.broker, self.truth, f"reader {len(self.broker.clients)}")
        reader.client.quality = self.quality_now
        reader.start()
        return reader

    # --- steps ---

    def store(self, first: int, count: int) -> None:
        hashes = tuple(range(first, first + count))
        # A reader that has just read a snapshot takes a batch that is in the next one for lost.
        self.is_whole &= count < LARGE or all(each.state is StreamState.LIVE for each in self.readers)
        self.writer.publish(BlockStored(hashes, None, hashes, 1, None))

    def remove(self, block: int) -> None:
        self.writer.publish(BlockRemoved((block,)))

    def clear(self) -> None:
        self.writer.publish(AllBlocksCleared())

    def wait(self, seconds: float) -> None:
        self.timeline.run_until(self.timeline.now_s + seconds)

    def quality(self, name: str) -> None:
        """Let every request or every answer be lost from now on, or none."""
        self.quality_now = QUALITIES[name]
        for client in self.broker.clients:
            client.quality = self.quality_now

    def cut(self, index: int) -> None:
        """Cut the connection of a reader, or of the writer."""
        actor = self.actor(index)
        if actor.client.is_up:
            self.is_whole &= not (isinstance(actor, LogWriterActor) and actor.is_waiting)
            actor.on_disconnected()

    def connect(self, index: int) -> None:
        actor = self.actor(index)
        if not actor.client.is_up:
            actor.on_reconnected()

    def actor(self, index: int) -> LogReaderActor | LogWriterActor:
        return self.writer if index == len(self.readers) else self.readers[index]

    def restart_writer(self) -> None:
        """Start another writer; the replaced one does not know it yet."""
        self.is_whole &= not (self.writers and self.writer.is_waiting)
        for writer in self.writers[:-1]:
            if not writer.is_closed:
                writer.close()
        writer = LogWriterActor(self.timeline, self.broker, len(self.writers), self.truth)
        writer.client.quality = self.quality_now
        self.writers.append(writer)
        writer.start()

    def replaced_writer_stores(self, block: int) -> None:
        """Let the replaced writer publish, until it notices."""
        for writer in self.writers[-2:-1]:
            self.is_whole = False
            if not writer.is_closed:
                writer.publish(BlockStored((block,), None, (block,), 1, None))

    def start_epoch(self) -> None:
        self.writer.start_epoch()

    def lose_reader(self, index: int) -> None:
        self.readers[index].close()
        self.readers[index] = self.new_reader()

    def delete(self, what: str) -> None:
        for name in ("log", "pointer_bucket", "snapshot_bucket") if what == "all" else (what,):
            getattr(self.broker, f"delete_{name}")()

    def expire(self, count: int) -> None:
        self.broker.expire(count)

    def lose_tail(self, count: int) -> None:
        """The broker loses its newest messages, and every connection."""
        self.broker.lose_tail(count)
        for index in range(3):
            self.cut(index)
            self.connect(index)

    def forge(self, kind: str, ahead: int) -> None:
        """Forge a message in the log."""
        core = self.writer.core
        epoch = core.epoch if kind == "epoch" else b"f" * 16
        self.broker.forge(LogMessage(0, epoch, max(0, core.stream.next_sequence + ahead), b"notachan", FORGED_PAYLOAD))

    # --- the end ---

    def carry_out(self, steps: list[tuple[Any, ...]]) -> None:
        for name, *args in steps:
            getattr(self, name)(*args)
            self.is_whole &= name not in DAMAGING

    def run(self, steps: list[tuple[Any, ...]]) -> None:
        self.carry_out(steps)
        self.recover()

    def recover(self) -> None:
        """Stop the faults, and check that every reader converges to the writer's state."""
        self.quality("none")
        for actor in (*self.writers, *self.readers):
            if not actor.is_closed and not actor.client.is_up:
                actor.on_reconnected()
        counts = self.broker.counters.counts
        num_requested = counts["snapshots requested"]
        self.wait(LogTrouble.STALLED.value + JOIN_LIMIT_S)
        if self.is_whole:
            assert all(each.state is StreamState.LIVE for each in self.readers), "nothing was lost"
        self.wait(LogTrouble.DAMAGED.value)
        if self.is_whole:
            assert counts["snapshots requested"] == num_requested, "the snapshot leads to the end of the log"
        (owner,) = (each for each in self.writers if not each.is_closed and not each.ownership.is_superseded)
        for reader in self.readers:
            assert reader.state is StreamState.LIVE, reader.follower.cursor
            assert reader.follower.cursor.epoch == owner.core.epoch
            assert reader.blocks == owner.held
        assert not owner.core.num_waiting
        owner.check_counted()

    def stop_writers(self) -> None:
        """Stop the writers: no reader stays LIVE, and in the end every view is empty."""
        for writer in self.writers:
            if not writer.is_closed:
                writer.close()
        self.wait(POLICY.answer_timeout_s + 0.1)
        assert all(each.state in (StreamState.CONNECTING, StreamState.DEAD) for each in self.readers)
        self.wait(POLICY.dead_after_s + 0.1)
        assert all(each.state is StreamState.DEAD and not each.blocks for each in self.readers)


READER, ACTOR = st.integers(0, 1), st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 9), st.sampled_from([1, 1, 4, LARGE])),
        st.tuples(st.just("store"), st.integers(0, 9), st.just(1)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.just(("clear",)),
        st.tuples(st.just("wait"), st.sampled_from([0.003, 0.01, 0.05, 0.6, 3.0, 6.0])),
        st.tuples(st.just("wait"), st.sampled_from([0.003, 0.01, 0.05, 0.6])),
        st.tuples(st.just("quality"), st.sampled_from(["none", "none", "lose", "lose answer"])),
        st.tuples(st.sampled_from(["cut", "connect"]), ACTOR),
        st.sampled_from([("restart_writer",), ("start_epoch",)]),
        st.tuples(st.just("replaced_writer_stores"), st.integers(0, 9)),
        st.tuples(st.just("lose_reader"), READER),
        st.tuples(st.just("delete"), st.sampled_from(["log", "pointer_bucket", "snapshot_bucket", "all"])),
        st.tuples(st.sampled_from(["expire", "lose_tail"]), st.integers(1, 5)),
        st.tuples(st.just("forge"), st.sampled_from(["epoch", "other"]), st.sampled_from([-1, 0, 0, 1, 3])),
    ),
    max_size=40,
)

JOINED = ("wait", 1.5)
SOON = ("wait", 0.05)
ONE, TWO = ("store", 1, 1), ("store", 2, 1)
FIVE = [("store", block, 1) for block in range(5)]
WRITER = 2


@pytest.mark.soak
@pytest.mark.timeout(600)
@given(steps=STEPS, joins=st.booleans())
@settings(max_examples=num_examples(5), deadline=None, suppress_health_check=list(HealthCheck))
def test_no_wrong_view_is_live_and_every_view_converges(steps: list[tuple[Any, ...]], joins: bool) -> None:
    LogModel().run([JOINED, *steps] if joins else steps)


@pytest.mark.soak
@pytest.mark.timeout(600)
@given(steps=STEPS)
@settings(max_examples=num_examples(5), deadline=None, suppress_health_check=list(HealthCheck))
@example(steps=[JOINED, ("restart_writer",), JOINED])
def test_a_silent_writer_ends_live_and_is_cleared(steps: list[tuple[Any, ...]]) -> None:
    world = LogModel()
    world.carry_out(steps)
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


caught_by(broken_log_cores.digest_of_a_message_not_compared, JOINED, ("forge", "epoch", 0), is_searched=True)
caught_by(broken_log_cores.epoch_of_a_message_not_compared, JOINED, ("forge", "other", 0), is_searched=True)
caught_by(broken_log_cores.future_messages_applied, JOINED, ("forge", "epoch", 1), is_searched=True)
caught_by(
    broken_log_cores.reordered_messages_are_dropped_without_recovery,
    JOINED,
    ("quality", "lose"),
    ONE,
    SOON,
    ("quality", "none"),
    TWO,
    is_searched=True,
)
caught_by(broken_log_cores.stalled_readers_wait, JOINED, ("cut", 0), ONE, SOON, ("expire", 1), is_searched=True)
caught_by(broken_log_cores.every_heartbeat_is_a_proof, JOINED, ("forge", "epoch", 0), is_searched=True)
caught_by(broken_log_cores.another_epoch_is_never_read, JOINED, ("restart_writer",), is_searched=True)
caught_by(
    broken_log_cores.failed_requests_are_not_retried, JOINED, ("quality", "lose"), ("lose_reader", 0), ("wait", 0.6)
)
caught_by(broken_log_cores.batches_of_the_snapshot_are_left_out, ONE, is_searched=True)
caught_by(broken_log_cores.the_log_is_read_from_a_later_number, JOINED, ONE, is_searched=True)
caught_by(broken_log_cores.no_message_is_retried, JOINED, ("quality", "lose"), ONE, SOON, is_searched=True)
caught_by(
    broken_log_cores.messages_sent_beyond_the_limit,
    JOINED,
    *[step for block in range(20) for step in (("store", block, 1), SOON)],
)
caught_by(broken_log_cores.batches_before_the_buffer_are_skipped, JOINED, ("cut", WRITER), *FIVE)
caught_by(broken_log_cores.large_batches_wait, JOINED, ("store", 0, LARGE), is_searched=True)
caught_by(broken_log_cores.the_snapshot_is_older_than_its_number, *FIVE)


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
        max_examples=200, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    def holds(steps: list[tuple[Any, ...]]) -> None:
        LogModel().run([JOINED, *steps])

    if soaking and is_searched:
        with pytest.raises((AssertionError, LookupError)):
            holds()
