"""The cursor against a model publisher and a faulty network.

Properties, after every step:
- LIVE is never said of a wrong view: the view is then what the publisher's present life held after ``last_seq``.
- PARTIAL never holds a block that the publisher did not hold then.
- The cursor is never stuck: when faults stop, it settles, and is LIVE when the publisher still has its history.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.kv_stream.cursor import StreamCursor
from observability.kv_stream.instructions import Apply, AskReplay, Clear, Instruction, RetryLater, StreamState

END = None
CLEAR = -1


@dataclass
class Publisher:
    """One publisher over several lives: what it held after each batch of the present life, and its replay window."""

    window: int
    life: int = 0
    next_seq: int = 0
    sent: dict[int, bytes] = field(default_factory=dict)
    changes: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    held: frozenset[int] = frozenset()
    held_after: dict[int, frozenset[int]] = field(default_factory=dict)

    def publish(self, op: int) -> tuple[int, bytes]:
        """``op`` is CLEAR, or a block number that is stored when absent and removed when present."""
        change = "clear" if op == CLEAR else "remove" if op in self.held else "store"
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        payload = f"{self.life}:{seq}".encode()
        self.sent[seq] = payload
        self.changes[payload] = change, op
        self.held = frozenset() if op == CLEAR else self.held ^ {op}
        self.held_after[seq] = self.held
        return seq, payload

    def restart(self, base: int) -> None:
        self.life += 1
        self.next_seq = base
        self.sent, self.held_after, self.held = {}, {}, frozenset()

    def answer(self, start: int) -> list[tuple[int, bytes] | None]:
        kept = list(self.sent.items())[-self.window :] if self.window else []
        return [*((seq, payload) for seq, payload in kept if seq >= start), END]


class World:
    """Publisher, network and one cursor with the view that it steers."""

    def __init__(self, *, window: int, has_replay: bool, patience: int = 3) -> None:
        self.publisher = Publisher(window)
        self.cursor = StreamCursor(has_replay=has_replay, patience=patience)
        self.view: set[int] = set()
        self.live: list[tuple[int, bytes]] = []
        self.is_connected = False
        self.question: AskReplay | None = None
        self.answer: list[tuple[int, bytes] | None] | None = None
        self.old_answers: list[tuple[int, list[tuple[int, bytes] | None]]] = []
        self.retry_is_due = False

    def carry_out(self, instructions: tuple[Instruction, ...]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Apply):
                change, block = self.publisher.changes[instruction.payload]
                if change == "store":
                    self.view.add(block)
                elif change == "remove":
                    self.view.discard(block)
                else:
                    self.view.clear()
                    self.cursor.cleared()
            elif isinstance(instruction, Clear):
                self.view.clear()
            elif isinstance(instruction, AskReplay):
                if self.question is not None and self.answer:
                    self.old_answers.append((self.question.ask, self.answer))
                self.question, self.answer = instruction, None
            elif isinstance(instruction, RetryLater):
                self.retry_is_due = True
        self.check()

    def check(self) -> None:
        truth = self.publisher.held_after.get(self.cursor.last_seq, frozenset())
        if self.cursor.state is StreamState.LIVE:
            assert self.view == truth
        elif self.cursor.state is StreamState.PARTIAL and self.is_connected:
            assert self.view <= truth

    # --- what may happen ---

    def connect(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.carry_out(self.cursor.connected())

    def disconnect(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self.live.clear()
            self.question = self.answer = None
            self.cursor.disconnected()

    def publish(self, ops: list[int]) -> None:
        batches = [self.publisher.publish(op) for op in ops]
        if self.is_connected:
            self.live += batches

    def restart(self, base: int) -> None:
        self.disconnect()
        self.publisher.restart(base)
        if base:
            self.publish([CLEAR])

    def deliver(self, count: int, fault: str) -> None:
        for _ in range(min(count, len(self.live))):
            self.deliver_one(fault)

    def deliver_one(self, fault: str) -> None:
        if fault == "reorder" and len(self.live) > 1:
            self.live[0], self.live[1] = self.live[1], self.live[0]
        batch = self.live.pop(0)
        if fault == "repeat":
            self.live.insert(0, batch)
        if fault != "drop":
            self.carry_out(self.cursor.live(*batch))

    def serve(self, count: int, fault: str) -> None:
        """Hand over some of the answer; only what comes after its first batch can be lost, as with TCP."""
        for _ in range(count):
            if self.question is None or self.cursor.open_ask != self.question.ask:
                return
            question, is_first = self.question, self.answer is None
            if self.answer is None:
                self.answer = self.publisher.answer(question.start)
            if fault == "silence" and not is_first:
                self.carry_out(self.cursor.answer_missing(question.ask))
                return
            message = self.answer.pop(0)
            if message is END:
                self.carry_out(self.cursor.answer_ended(question.ask))
            elif fault != "drop" or is_first:
                self.carry_out(self.cursor.answered(question.ask, *message))

    def serve_stale(self) -> None:
        if self.old_answers:
            ask, answer = self.old_answers.pop()
            for message in answer:
                if message is END:
                    self.carry_out(self.cursor.answer_ended(ask))
                else:
                    self.carry_out(self.cursor.answered(ask, *message))

    def fail(self) -> None:
        if self.question is not None:
            self.carry_out(self.cursor.answer_missing(self.question.ask))

    def retry(self) -> None:
        if self.retry_is_due:
            self.retry_is_due = False
            self.carry_out(self.cursor.retry())

    def give_up(self) -> None:
        if not self.is_connected:
            self.carry_out(self.cursor.gave_up())

    def probe(self) -> None:
        self.carry_out(self.cursor.probe())

    def heal(self) -> None:
        """Faults stop: everything is delivered, served and retried, and silence is probed."""
        self.connect()
        for _ in range(200):
            self.serve(1_000, "none")
            self.retry()
            if self.cursor.listening and self.live:
                self.deliver_one("none")
            elif self.cursor.open_ask is None and not self.retry_is_due:
                return
        raise AssertionError(f"does not settle: {self.cursor!r}")


OPS = st.lists(st.integers(0, 5) | st.just(CLEAR), min_size=1, max_size=4)
STEPS = st.one_of(
    st.tuples(st.just("publish"), OPS),
    st.tuples(st.just("deliver"), st.integers(1, 4), st.sampled_from(["none", "none", "drop", "repeat", "reorder"])),
    st.tuples(st.just("serve"), st.integers(1, 6), st.sampled_from(["none", "none", "drop", "silence"])),
    st.tuples(st.just("restart"), st.sampled_from([0, 0, 1_000_000])),
    st.tuples(st.sampled_from(["connect", "disconnect", "probe", "fail", "retry", "give_up", "serve_stale"])),
)


def run(world: World, steps: list[tuple]) -> None:
    world.publish([0, 1, 2])
    world.connect()
    world.serve(3, "none")
    for name, *arguments in steps:
        getattr(world, name)(*arguments)


@given(
    window=st.integers(0, 6), has_replay=st.booleans(), patience=st.integers(1, 3), steps=st.lists(STEPS, max_size=60)
)
@settings(max_examples=600, deadline=None)
def test_never_live_while_wrong_and_never_stuck(
    window: int, has_replay: bool, patience: int, steps: list[tuple]
) -> None:
    world = World(window=window, has_replay=has_replay, patience=patience)
    run(world, steps)
    world.heal()
    world.probe()
    world.heal()
    assert world.cursor.settled


@given(steps=st.lists(STEPS, max_size=60), last=OPS)
@settings(max_examples=600, deadline=None)
def test_converges_when_the_publisher_has_its_history(steps: list[tuple], last: list[int]) -> None:
    """Window large enough for everything: once faults stop and a probe was answered, the view is the truth."""
    world = World(window=1_000, has_replay=True)
    run(world, steps)
    world.publish(last)
    world.live.clear()  # the tail is lost on the live channel
    world.heal()
    world.probe()
    world.heal()
    assert world.cursor.state is StreamState.LIVE
    assert world.cursor.last_seq == world.publisher.next_seq - 1
    assert world.view == world.publisher.held


# --- single rules, by name ---


def opened(*, has_replay: bool = True, batches: int = 3, patience: int = 3) -> StreamCursor:
    """A cursor that is LIVE at batch ``batches - 1`` of a publisher that sends b'0', b'1', ..."""
    cursor = StreamCursor(has_replay=has_replay, patience=patience)
    cursor.connected()
    if has_replay:
        for seq in range(batches):
            cursor.answered(1, seq, b"%d" % seq)
        cursor.answer_ended(1)
    else:
        for seq in range(batches):
            cursor.live(seq, b"%d" % seq)
    assert cursor.state is StreamState.LIVE
    return cursor


def kinds(instructions: tuple[Instruction, ...]) -> list[type]:
    return [type(instruction) for instruction in instructions]


def test_late_join_asks_from_zero() -> None:
    cursor = StreamCursor(has_replay=True)
    assert cursor.connected() == (AskReplay(1, 0),)
    assert cursor.state is StreamState.SYNCING
    assert not cursor.listening


def test_an_empty_stream_stays_syncing_until_its_first_batch() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.connected()
    assert cursor.answer_ended(1) == ()
    assert cursor.state is StreamState.SYNCING
    assert cursor.settled
    assert kinds(cursor.live(0, b"0")) == [Apply]
    assert cursor.state is StreamState.LIVE


def test_a_gap_is_asked_for_from_the_number_that_is_held() -> None:
    cursor = opened()
    assert cursor.live(5, b"5") == (AskReplay(2, 2),)
    assert cursor.state is StreamState.RECOVERING
    assert cursor.answered(2, 2, b"2") == ()
    for seq in (3, 4, 5):
        assert cursor.answered(2, seq, b"%d" % seq) == (Apply(seq, b"%d" % seq, True),)
    cursor.answer_ended(2)
    assert (cursor.state, cursor.last_seq, cursor.counters.gaps) == (StreamState.LIVE, 5, 1)


def test_another_payload_under_the_held_number_is_another_life() -> None:
    cursor = opened()
    cursor.disconnected()
    assert cursor.connected() == (AskReplay(2, 2),)
    assert kinds(cursor.answered(2, 2, b"new 2")) == [Clear, AskReplay]
    assert cursor.counters.restarts == 1


def test_a_restart_at_zero_without_a_reconnect_is_seen() -> None:
    cursor = opened()
    cursor.live(3, b"3")
    assert kinds(cursor.live(0, b"new 0")) == [AskReplay]
    assert kinds(cursor.answer_ended(2)) == [Clear, AskReplay]
    cursor.answered(3, 0, b"new 0")
    cursor.answer_ended(3)
    assert (cursor.state, cursor.last_seq) == (StreamState.LIVE, 0)


def test_a_truncated_window_is_partial_until_a_clear() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.connected()
    cursor.answered(1, 7, b"7")
    cursor.answer_ended(1)
    assert (cursor.state, cursor.counters.losses) == (StreamState.PARTIAL, 1)
    cursor.live(8, b"clear")
    cursor.cleared()
    assert cursor.state is StreamState.LIVE


def test_a_batch_from_the_future_is_not_kept() -> None:
    cursor = opened()
    cursor.live(4, b"4")
    assert cursor.live(5, b"5") == ()
    cursor.answered(2, 2, b"2")
    cursor.answered(2, 3, b"3")
    assert cursor.answer_ended(2) == (AskReplay(3, 3),)
    assert cursor.last_seq == 3


def test_the_same_hole_twice_is_a_loss() -> None:
    cursor = opened()
    cursor.live(6, b"6")
    for ask in (2, 3):
        cursor.answered(ask, 2, b"2")
        instructions = cursor.answered(ask, 5, b"5")
        if ask == 2:
            assert instructions == ()
            assert cursor.answer_ended(2) == (AskReplay(3, 2),)
    assert kinds(instructions) == [Clear, Apply]
    cursor.answered(3, 6, b"6")
    cursor.answer_ended(3)
    assert (cursor.state, cursor.last_seq) == (StreamState.PARTIAL, 6)


def test_a_silent_replay_channel_ends_in_partial_and_is_retried() -> None:
    cursor = opened(patience=2)
    cursor.live(5, b"5")
    assert cursor.answer_missing(2) == (RetryLater(1),)
    assert cursor.state is StreamState.RECOVERING
    assert cursor.retry() == (AskReplay(3, 2),)
    assert kinds(cursor.answer_missing(3)) == [Clear, RetryLater]
    assert (cursor.state, cursor.listening) == (StreamState.PARTIAL, True)
    assert kinds(cursor.live(6, b"6")) == [Clear, Apply]
    assert cursor.retry() == (AskReplay(4, 0),)


def test_an_unanswered_probe_costs_no_block() -> None:
    cursor = opened(patience=2)
    assert cursor.probe() == (AskReplay(2, 2),)
    assert cursor.answer_missing(2) == (RetryLater(1),)
    assert cursor.retry() == (AskReplay(3, 2),)
    assert cursor.answer_missing(3) == (RetryLater(2),)
    assert cursor.state is StreamState.LIVE
    assert kinds(cursor.live(3, b"3")) == [Apply]


def test_an_empty_stream_whose_replay_falls_silent_is_listened_to_again() -> None:
    cursor = StreamCursor(has_replay=True, patience=1)
    cursor.connected()
    cursor.answer_ended(1)
    cursor.probe()
    cursor.answer_missing(2)
    assert (cursor.state, cursor.listening) == (StreamState.PARTIAL, True)


def test_a_lost_end_marker_is_asked_past() -> None:
    cursor = opened()
    cursor.live(5, b"5")
    cursor.answered(2, 2, b"2")
    cursor.answered(2, 3, b"3")
    assert cursor.answer_missing(2) == (AskReplay(3, 3),)


def test_answers_to_an_older_question_change_nothing() -> None:
    cursor = opened()
    cursor.live(5, b"5")
    assert cursor.answered(1, 3, b"wrong") == ()
    assert cursor.answer_ended(1) == ()
    assert cursor.answer_missing(1) == ()
    assert (cursor.open_ask, cursor.counters.stale_answers) == (2, 1)


@pytest.mark.parametrize(("first", "state"), [(0, StreamState.LIVE), (9, StreamState.PARTIAL)])
def test_without_replay_only_the_first_batch_of_a_life_makes_it_live(first: int, state: StreamState) -> None:
    cursor = StreamCursor(has_replay=False)
    cursor.connected()
    assert cursor.state is StreamState.PARTIAL
    cursor.live(first, b"first")
    assert cursor.state is state


def test_without_replay_a_gap_clears_and_goes_on_partial() -> None:
    cursor = opened(has_replay=False)
    assert kinds(cursor.live(5, b"5")) == [Clear, Apply]
    assert (cursor.state, cursor.counters.gaps) == (StreamState.PARTIAL, 1)


def test_an_unreadable_batch_takes_the_live_state_until_a_clear() -> None:
    cursor = opened()
    cursor.live(3, b"3")
    cursor.damaged()
    assert cursor.state is StreamState.PARTIAL
    cursor.live(4, b"4")
    assert cursor.state is StreamState.PARTIAL
    cursor.live(5, b"5")
    cursor.cleared()
    assert cursor.state is StreamState.LIVE


def test_a_dead_publisher_is_forgotten_and_may_come_back() -> None:
    cursor = opened()
    cursor.disconnected()
    assert kinds(cursor.gave_up()) == [Clear]
    assert cursor.state is StreamState.DEAD
    assert cursor.connected() == (AskReplay(2, 0),)


def test_a_repeated_batch_changes_nothing() -> None:
    cursor = opened()
    assert cursor.live(2, b"2") == ()
    assert (cursor.state, cursor.counters.duplicates) == (StreamState.LIVE, 1)


def test_the_first_batch_of_a_clock_based_life_is_no_gap() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.connected()
    cursor.answer_ended(1)
    assert kinds(cursor.live(1_700_000_000_000, b"clear")) == [AskReplay]
    cursor.answered(2, 1_700_000_000_000, b"clear")
    cursor.cleared()
    cursor.answer_ended(2)
    assert (cursor.state, cursor.counters.gaps) == (StreamState.LIVE, 0)


def test_a_window_that_moved_past_the_held_number_is_a_loss_at_once() -> None:
    cursor = opened()
    cursor.live(9, b"9")
    assert cursor.answered(2, 8, b"8") == (Clear("history before batch 8 is not known"), Apply(8, b"8", True))
    cursor.answer_ended(2)
    assert (cursor.state, cursor.counters.asks) == (StreamState.PARTIAL, 2)


def test_a_publisher_that_keeps_nothing_is_followed_partial() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.connected()
    cursor.answer_ended(1)
    cursor.live(4, b"4")
    cursor.answer_ended(2)
    cursor.probe()
    cursor.answer_ended(3)
    assert kinds(cursor.live(5, b"5")) == [Clear, Apply]
    assert cursor.state is StreamState.PARTIAL


def test_a_repeated_batch_within_an_answer_is_dropped() -> None:
    cursor = opened()
    cursor.live(4, b"4")
    for seq in (2, 3, 2, 3):
        cursor.answered(2, seq, b"%d" % seq)
    cursor.answered(2, 4, b"4")
    cursor.answer_ended(2)
    assert (cursor.state, cursor.last_seq, cursor.counters.duplicates) == (StreamState.LIVE, 4, 2)


def test_a_lost_connection_closes_the_question() -> None:
    cursor = opened()
    cursor.live(5, b"5")
    cursor.disconnected()
    assert cursor.answered(2, 3, b"3") == ()
    assert cursor.open_ask is None
    assert cursor.connected() == (AskReplay(3, 2),)


def test_without_replay_a_reconnect_begins_anew() -> None:
    cursor = opened(has_replay=False)
    cursor.disconnected()
    assert kinds(cursor.connected()) == [Clear]
    assert kinds(cursor.live(3, b"new 3")) == [Clear, Apply]
    assert cursor.state is StreamState.PARTIAL


def test_batches_that_waited_during_their_own_replay_raise_no_question() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.connected()
    for seq in range(100):
        cursor.answered(1, seq, b"%d" % seq)
    cursor.answer_ended(1)
    for seq in range(40, 100):
        assert cursor.live(seq, b"%d" % seq) == ()
    assert kinds(cursor.live(100, b"100")) == [Apply]
    assert (cursor.counters.asks, cursor.counters.duplicates) == (1, 1)


def test_a_live_channel_that_goes_back_raises_one() -> None:
    cursor = opened()
    cursor.live(3, b"3")
    assert kinds(cursor.live(1, b"1")) == [AskReplay]


@pytest.mark.parametrize("first", [2, 3, 9], ids=["tail lost", "held batch gone", "window moved on"])
def test_a_probe_that_brings_news_takes_the_live_state_until_its_end(first: int) -> None:
    cursor = opened()
    cursor.probe()
    assert cursor.state is StreamState.LIVE
    for seq in range(first, 11):
        cursor.answered(2, seq, b"%d" % seq)
    assert cursor.state is StreamState.RECOVERING
    cursor.answer_ended(2)
    assert cursor.state is (StreamState.LIVE if first == 2 else StreamState.PARTIAL)
