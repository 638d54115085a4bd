"""The plain rules against a model publisher and a faulty network.

Properties, after every step:
- A LIVE view is never wrong: it equals the publisher's state after ``last_seq`` in the current epoch.
- A PARTIAL view has no block that the publisher did not hold.
- The cursor always settles once the faults stop, and is LIVE if the publisher still has its history.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from observability.kv_stream import StreamState
from observability.kv_stream.cursor_events import (
    ClearApplied,
    Connected,
    ConnectionTimedOut,
    Disconnected,
    ProbeDue,
    ReplayBatchReceived,
    ReplayEndReceived,
    ReplayTimedOut,
    RetryDue,
)
from observability.kv_stream.instructions import Apply, Clear, Instruction, RetryLater, SendReplayRequest
from observability.kv_stream.plain_cursor import PlainCursor
from observability.kv_stream.stream_cursor import dispatch

END = None
CLEAR = -1


@dataclass
class Publisher:
    """One publisher over several epochs: its blocks after each batch of the current epoch, and its replay buffer."""

    window: int
    epoch: int = 0
    next_seq: int = 0
    sent: dict[int, bytes] = field(default_factory=dict)
    changes: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    held: frozenset[int] = frozenset()
    held_after: dict[int, frozenset[int]] = field(default_factory=dict)

    def publish(self, op: int) -> tuple[int, bytes]:
        """Publish ``op``: CLEAR, or a block to store if absent and remove if present."""
        change = "clear" if op == CLEAR else "remove" if op in self.held else "store"
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        payload = f"{self.epoch}:{seq}".encode()
        self.sent[seq] = payload
        self.changes[payload] = change, op
        self.held = frozenset() if op == CLEAR else self.held ^ {op}
        self.held_after[seq] = self.held
        return seq, payload

    def restart(self, base: int) -> None:
        self.epoch += 1
        self.next_seq = base
        self.sent, self.held_after, self.held = {}, {}, frozenset()

    def answer(self, start: int) -> list[tuple[int, bytes] | None]:
        kept = list(self.sent.items())[-self.window :] if self.window else []
        return [*((seq, payload) for seq, payload in kept if seq >= start), END]


class PlainNetworkModel:
    """Publisher, network and one cursor with its view."""

    def __init__(self, *, window: int, has_replay: bool, patience: int = 3) -> None:
        self.publisher = Publisher(window)
        self.cursor = PlainCursor(has_replay=has_replay, patience=patience)
        self.view: set[int] = set()
        self.live: list[tuple[int, bytes]] = []
        self.is_connected = False
        self.request: SendReplayRequest | None = None
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
                    dispatch(self.cursor, ClearApplied())
            elif isinstance(instruction, Clear):
                self.view.clear()
            elif isinstance(instruction, SendReplayRequest):
                if self.request is not None and self.answer:
                    self.old_answers.append((self.request.request_id, self.answer))
                self.request, self.answer = instruction, None
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
            self.carry_out(dispatch(self.cursor, Connected()))

    def disconnect(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self.live.clear()
            self.request = self.answer = None
            dispatch(self.cursor, Disconnected())

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
            self.carry_out(self.cursor.on_live_batch(*batch))

    def serve(self, count: int, fault: str) -> None:
        """Deliver a part of the answer. Only messages after the first can be lost, as with TCP."""
        for _ in range(count):
            if self.request is None or self.cursor.open_request_id != self.request.request_id:
                return
            request, is_first = self.request, self.answer is None
            if self.answer is None:
                self.answer = self.publisher.answer(request.start)
            if fault == "silence" and not is_first:
                self.carry_out(dispatch(self.cursor, ReplayTimedOut(request.request_id)))
                return
            message = self.answer.pop(0)
            if message is END:
                self.carry_out(dispatch(self.cursor, ReplayEndReceived(request.request_id)))
            elif fault != "drop" or is_first:
                self.carry_out(dispatch(self.cursor, ReplayBatchReceived(request.request_id, *message)))

    def serve_stale(self) -> None:
        if self.old_answers:
            request_id, answer = self.old_answers.pop()
            for message in answer:
                if message is END:
                    self.carry_out(dispatch(self.cursor, ReplayEndReceived(request_id)))
                else:
                    self.carry_out(dispatch(self.cursor, ReplayBatchReceived(request_id, *message)))

    def fail(self) -> None:
        if self.request is not None:
            self.carry_out(dispatch(self.cursor, ReplayTimedOut(self.request.request_id)))

    def retry(self) -> None:
        if self.retry_is_due:
            self.retry_is_due = False
            self.carry_out(dispatch(self.cursor, RetryDue()))

    def time_out(self) -> None:
        if not self.is_connected:
            self.carry_out(dispatch(self.cursor, ConnectionTimedOut()))

    def probe(self) -> None:
        self.carry_out(dispatch(self.cursor, ProbeDue()))

    def recover(self) -> None:
        """Stop the faults: deliver, answer and retry everything until the cursor settles."""
        self.connect()
        for _ in range(200):
            self.serve(1_000, "none")
            self.retry()
            if self.cursor.is_accepting_live and self.live:
                self.deliver_one("none")
            elif self.cursor.open_request_id is None and not self.retry_is_due:
                return
        raise AssertionError(f"does not settle: {self.cursor!r}")


OPS = st.lists(st.integers(0, 5) | st.just(CLEAR), min_size=1, max_size=4)
STEPS = st.one_of(
    st.tuples(st.just("publish"), OPS),
    st.tuples(st.just("deliver"), st.integers(1, 4), st.sampled_from(["none", "none", "drop", "repeat", "reorder"])),
    st.tuples(st.just("serve"), st.integers(1, 6), st.sampled_from(["none", "none", "drop", "silence"])),
    st.tuples(st.just("restart"), st.sampled_from([0, 0, 1_000_000])),
    st.tuples(st.sampled_from(["connect", "disconnect", "probe", "fail", "retry", "time_out", "serve_stale"])),
)


def run(world: PlainNetworkModel, steps: list[tuple]) -> None:
    world.publish([0, 1, 2])
    world.connect()
    world.serve(3, "none")
    for name, *arguments in steps:
        getattr(world, name)(*arguments)


@pytest.mark.soak
@given(
    window=st.integers(0, 6), has_replay=st.booleans(), patience=st.integers(1, 3), steps=st.lists(STEPS, max_size=60)
)
@settings(max_examples=num_examples(6), deadline=None)
def test_no_wrong_view_is_live_and_the_cursor_settles(
    window: int, has_replay: bool, patience: int, steps: list[tuple]
) -> None:
    world = PlainNetworkModel(window=window, has_replay=has_replay, patience=patience)
    run(world, steps)
    world.recover()
    world.probe()
    world.recover()
    assert world.cursor.is_accepting_live and world.cursor.state is not StreamState.CONNECTING


@pytest.mark.soak
@given(steps=st.lists(STEPS, max_size=60), last=OPS)
@settings(max_examples=num_examples(6), deadline=None)
def test_converges_when_the_publisher_has_its_history(steps: list[tuple], last: list[int]) -> None:
    """With all history in the replay buffer, the view converges after the faults and one probe."""
    world = PlainNetworkModel(window=1_000, has_replay=True)
    run(world, steps)
    world.publish(last)
    world.live.clear()  # the last batches are lost on the live channel
    world.recover()
    world.probe()
    world.recover()
    assert world.cursor.state is StreamState.LIVE
    assert world.cursor.last_seq == world.publisher.next_seq - 1
    assert world.view == world.publisher.held
