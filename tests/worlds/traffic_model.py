"""A simulation of traffic that never stops: readers join, pause, lose batches and leave while the publisher publishes.

``recovery_model`` judges a view after the traffic has ended. This model judges each promise of delivery during the
traffic, after every turn. A turn publishes, folds, serves a slice of the open answers and delivers:

- a reader is LIVE within ``limit_turns`` of its join, its last pause or its last lost batch, and stays LIVE, except
  for ``MAX_AGE_TURNS`` in which it reads a short replay, at most once per probe;
- from then on it has every batch that is older than ``MAX_AGE_TURNS``;
- a joining reader receives at most ``max_join_bytes`` by replay;
- the stream keeps at most twice the bounds of its replay buffer, and only the buffer when no answer is open;
- no answer stays open that the stream can no longer complete.

A time in turns does not depend on the machine. The real sockets and threads have their own tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from observability.kv_stream import StreamState
from scheduler_components import BlockRemoved, BlockStored
from worlds import LinkFault, LiveFrame
from worlds.recovery_model import POLICY, RecoverySimulation, SteppedReader, Steps

__all__ = ["MAX_AGE_TURNS", "TrafficReader", "TrafficShape", "TrafficSimulation"]

_TURN_S = 0.01

MAX_AGE_TURNS = 3
"""A batch arrives in its own turn, or when a short probe has ended."""

_BATCH_BYTES = 40
"""At least the size of a batch of one block."""

_BLOCK_BYTES = 26
"""At least the size of a block's event in the snapshot."""

_TRIM_TURNS = 4
"""Turns in which the stream folds and drops what the last answer has left."""

_PROBE_TURNS = round(POLICY.probe_interval_s / _TURN_S)

_MAX_DEPARTURES = 2
"""Times that a reader may leave LIVE after a disturbance, in addition to once per probe: one for the gap itself, and
one for the first probe."""

_SPARE_TURNS = 20
"""Turns for requests, probes and the rounding of the others."""


class TrafficReader(SteppedReader):
    """A subscriber that may stop reading for a while, and what it owes."""

    joined_turn = 0
    due_turn = 0
    paused_until = 0
    live_turn = 0
    disturbed_turn = 0
    num_departures = 0
    was_live = False
    loses_next = False
    has_arrived = False


@dataclass(frozen=True, kw_only=True)
class TrafficShape:
    """How much happens in a turn.

    Attributes:
        window: length of the publisher's replay buffer, in batches.
        rate: batches published per turn, each with one stored or one removed block.
        sends: messages of all answers served per turn; a step of planning counts as all of them.
        standing: blocks that stay cached.
        chunk_bytes: size of a chunk of the snapshot: small, so that it has several, as a large one has.
    """

    window: int = 32
    rate: int = 4
    sends: int = 16
    standing: int = 96
    chunk_bytes: int = 600


class TrafficSimulation(RecoverySimulation):
    """One publisher that publishes in every turn, and readers with and without the extension."""

    def __init__(self, shape: TrafficShape | None = None, *, num_extended: int = 2, num_plain: int = 1) -> None:
        self.shape = shape or TrafficShape()
        super().__init__(
            window=self.shape.window,
            chunk_bytes=self.shape.chunk_bytes,
            num_extended=num_extended,
            num_plain=num_plain,
        )
        self.turn_number = self.num_blocks = 0
        self.published_turn: dict[int, int] = {}
        self.last_open_turn = 0
        self.readers: list[TrafficReader | None] = [None] * len(self.subscribers)
        self.has_extension = [each.has_extension for each in self.subscribers]
        self.subscribers = []
        self.turns(2 * math.ceil((self.shape.window + 2 * self.shape.standing) / self.shape.rate))

    @property
    def limit_turns(self) -> int:
        """Turns until a reader is LIVE: every reader gets the snapshot and twice the buffer, one after the other."""
        shape = self.shape
        messages = 2 * (shape.standing + 2 * shape.window) * len(self.readers)
        retry_turns = round((POLICY.retry_max_s + POLICY.request_interval_s) / _TURN_S)
        return math.ceil(messages / shape.sends) + retry_turns + _SPARE_TURNS

    @property
    def max_join_bytes(self) -> int:
        """The snapshot once, twice the buffer, and the META messages of some requests."""
        return self.shape.standing * _BLOCK_BYTES + 2 * self.shape.window * _BATCH_BYTES + 500

    def run(self, steps: Steps) -> None:
        """Carry out the steps, then go on until every reader must have arrived."""
        for name, *arguments in steps:
            getattr(self, name)(*arguments)
        self.turns(self.limit_turns + _SPARE_TURNS)
        for index in range(len(self.readers)):
            self.leave(index)
        self.turns(_SPARE_TURNS + 1)

    # --- steps ---

    def join(self, index: int) -> None:
        """A new reader connects in place of an earlier one."""
        self.leave(index)
        reader = TrafficReader(
            self.publisher,
            f"reader {index} of turn {self.turn_number} ",
            has_extension=self.has_extension[index],
            now_s=self.now_s,
        )
        reader.joined_turn = reader.disturbed_turn = self.turn_number
        reader.due_turn = self.turn_number + self.limit_turns
        self.readers[index] = reader
        self.subscribers.append(reader)
        reader.connect(self.now_s)

    def leave(self, index: int) -> None:
        """The reader closes its connections."""
        reader, self.readers[index] = self.readers[index], None
        if reader is not None:
            self.subscribers.remove(reader)
            reader.disconnect(self.now_s)
            reader.cancel()

    def pause(self, index: int, turns: int) -> None:
        """The reader reads nothing for some turns."""
        reader = self.readers[index]
        if reader is not None:
            reader.paused_until = self.turn_number + turns
            self._excuse(reader, reader.paused_until)

    def lose(self, index: int) -> None:
        """The network loses the reader's next live batch."""
        reader = self.readers[index]
        if reader is not None:
            reader.loses_next = True
            self._excuse(reader, self.turn_number)

    def burst(self, count: int) -> None:
        """Publish ``count`` batches between two turns. They may cut the answers that are open."""
        self._publish(count)
        for reader in self.readers:
            if reader is not None:
                self._excuse(reader, self.turn_number)

    def turns(self, count: int) -> None:
        """Let some turns pass, and judge every promise after each."""
        for _ in range(count):
            self._turn()
            self._judge()

    # --- a turn ---

    def _excuse(self, reader: TrafficReader, since_turn: int) -> None:
        reader.due_turn = max(reader.due_turn, since_turn + self.limit_turns)
        reader.disturbed_turn, reader.num_departures = max(reader.disturbed_turn, since_turn), 0
        reader.has_arrived = True  # a pause and a loss may cost another answer

    def _turn(self) -> None:
        self.turn_number += 1
        self.now_s += _TURN_S
        self._publish(self.shape.rate)
        self.publisher.fold()
        readers = [each for each in self.subscribers if isinstance(each, TrafficReader)]
        awake = [each for each in readers if each.paused_until < self.turn_number]
        self._serve(awake)
        for reader in awake:
            if reader.loses_next and reader.connection is not None and reader.connection.live.in_transit:
                reader.connection.live.deliver(LinkFault.LOSE)
                reader.loses_next = False
            reader.deliver(10**6, "none", self.now_s)
        for reader in readers:
            reader.actor.tick_until(self.now_s)

    def _publish(self, count: int) -> None:
        for _ in range(count):
            block, is_removal = divmod(self.num_blocks, 2)
            self.num_blocks += 1
            if is_removal:
                self.publisher.publish_events((BlockRemoved((max(0, block - self.shape.standing),)),))
            else:
                parent = block - 1 if block else None
                self.publisher.publish_events((BlockStored((block,), parent, (block,), 1, None),))
            self.publisher.idle()

    def broadcast(self, frame: LiveFrame) -> None:
        self.published_turn[frame.sequence] = self.turn_number
        super().broadcast(frame)

    def _serve(self, readers: list[TrafficReader]) -> None:
        """Serve one slice of the open answers, in turns."""
        sends_left = self.shape.sends
        while sends_left > 0:
            asking = [each for each in readers if each.request is not None]
            if not asking:
                return
            for reader in asking:
                is_planning = reader.client in self.publisher.sessions.clients and (
                    self.publisher.sessions.message(reader.client or b"") is None
                )
                reader.serve(1, "none", self.now_s)
                sends_left -= self.shape.sends if is_planning else 1

    # --- the promises ---

    def _judge(self) -> None:
        stream, window = self.publisher.stream, self.shape.window
        kept = stream.next_sequence - stream.oldest
        assert kept <= 2 * window, f"the stream keeps {kept} batches"
        assert not stream.has_stuck_pins, "an answer that cannot be completed stays open"
        if len(self.publisher.sessions):
            self.last_open_turn = self.turn_number
        elif self.turn_number - self.last_open_turn >= _TRIM_TURNS:
            assert kept <= window, f"the stream keeps {kept} batches although no answer is open"
        for reader in self.subscribers:
            reader.actor.check()
            if isinstance(reader, TrafficReader):
                self._judge_reader(reader)

    def _judge_reader(self, reader: TrafficReader) -> None:
        is_live = reader.state is StreamState.LIVE
        if not reader.has_arrived:
            num_bytes = reader.actor.num_answer_bytes
            assert num_bytes <= self.max_join_bytes, f"{reader.name} has received {num_bytes} bytes"
            reader.has_arrived = is_live
        if is_live:
            reader.live_turn = self.turn_number
        reader.num_departures += reader.was_live and not is_live
        reader.was_live = is_live
        most = _MAX_DEPARTURES + max(0, self.turn_number - reader.disturbed_turn) // _PROBE_TURNS
        assert reader.num_departures <= most, f"{reader.name} has left LIVE {reader.num_departures} times"
        if self.turn_number < reader.due_turn:
            return
        # A status that overtakes live batches costs a short replay.
        is_known = self.turn_number - reader.live_turn <= MAX_AGE_TURNS
        assert is_known, f"{reader.name} is {reader.state} after {self.turn_number - reader.joined_turn} turns"
        last = reader.actor.follower.cursor.last_seq
        next_turn = self.published_turn.get(last + 1, self.turn_number)
        assert self.turn_number - next_turn <= MAX_AGE_TURNS, f"{reader.name} is late: it is at {last}"
