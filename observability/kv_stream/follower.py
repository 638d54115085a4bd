"""Following one stream: what a cursor says is carried out on a view, and its deadlines are kept against a clock.

A ``FrameParser`` tells the stream's messages from others. A ``StreamFollower`` has its cursor, its ``BatchApplier``
(payload to view) and its deadlines (``FollowPolicy``). Its owner, who has the sockets and the clock, passes on what
comes, and calls ``tick`` by ``next_deadline_s``. Questions go out through a ``ReplayChannel``.

What others see of a stream is here too: ``StreamListener`` is told of everything that happens; ``StreamPosition`` and
``StreamStats`` are the state and the counters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import attrs
import msgspec

from observability.kv_stream.cursor import MAX_REPLAY_CREDIT, StreamCursor
from observability.kv_stream.instructions import (
    Apply,
    ApplyStaged,
    Clear,
    CommitStaging,
    CursorCounters,
    Instruction,
    RetryLater,
    SendReplayRequest,
    StartStaging,
    StreamState,
)
from observability.kv_stream.view import BlockView
from scheduler_components import AllBlocksCleared, DecodeError
from scheduler_components.kv_events import DecodedBatch
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind
from scheduler_components.validators import number_validator

__all__ = [
    "MAX_STREAMS",
    "ApplierCounters",
    "BatchApplier",
    "BatchEffect",
    "FollowPolicy",
    "FrameParser",
    "NullStreamListener",
    "PayloadDecoder",
    "ReplayChannel",
    "StreamFollower",
    "StreamListener",
    "StreamPosition",
    "StreamStats",
]

MAX_STREAMS = 1_024
"""Of one worker or one subscriber. A stream costs three file descriptors; no engine is near this."""

# --- what others see of a stream ---


class StreamListener(Protocol):
    """Told of everything in the order in which it happens, on the thread that polls; what it raises ends that poll.

    It may ask the subscriber, which answers with what has been applied so far. It must not wait for another thread
    that asks: queries of others are answered between two messages.

    Batches between ``on_snapshot_begin`` and ``on_snapshot_end`` are applied to a staging view, which begins empty and
    replaces the present one when it was used. Chunks of its base carry the number of the last batch in the base.
    """

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        """A batch was applied to the view; ``batch.errors`` names the events that were left out of it."""
        ...

    def on_batch_unreadable(self, rank: int, seq: int, error: DecodeError) -> None:
        """A batch could not be decoded at all; its number counts as seen."""
        ...

    def on_gap(self, rank: int, expected: int, seq: int) -> None:
        """Live batch ``seq`` came where ``expected`` should have; a replay is asked for where there is one."""
        ...

    def on_view_cleared(self, rank: int, reason: str) -> None:
        """The view of this rank begins anew; not called for a publisher's own AllBlocksCleared."""
        ...

    def on_snapshot_begin(self, rank: int) -> None: ...

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        """The snapshot replaced the view of this rank, or came to nothing."""
        ...

    def on_state_changed(self, rank: int, old: StreamState, new: StreamState) -> None: ...


class NullStreamListener:
    """A listener that ignores everything; a base for listeners that want to know one thing."""

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        """Nothing to do."""

    def on_batch_unreadable(self, rank: int, seq: int, error: DecodeError) -> None:
        """Nothing to do."""

    def on_gap(self, rank: int, expected: int, seq: int) -> None:
        """Nothing to do."""

    def on_view_cleared(self, rank: int, reason: str) -> None:
        """Nothing to do."""

    def on_state_changed(self, rank: int, old: StreamState, new: StreamState) -> None:
        """Nothing to do."""

    def on_snapshot_begin(self, rank: int) -> None:
        """Nothing to do."""

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        """Nothing to do."""


class StreamPosition(msgspec.Struct, frozen=True, gc=False):
    """Where the view of one stream stands.

    Attributes:
        rank, state, last_seq: as in ``StreamStats``.
        is_settled: connected, with no recovery under way: the view will not get better by waiting.
    """

    rank: int
    state: StreamState
    last_seq: int
    is_settled: bool


class StreamStats(msgspec.Struct, frozen=True, gc=False):
    """One stream at one moment; counters run from when the subscriber was opened.

    Attributes:
        rank: the stream's number; endpoint: where it is read.
        state: how far the view of it can be trusted.
        is_extended: the publisher has the extension, so that its digest proves the view.
        last_seq: number of the last batch that the view has; one below the publisher's first before there is any.
        batches, events: applied to the view, replayed ones included.
        blocks_stored, blocks_removed: blocks in those events; duplicates count in the first.
        blocks_held: blocks in the view now, over all tiers.
        gaps: times that a live batch did not follow on the one before; recovered: batches that came by replay.
        losses: times that the stream became partial; restarts: times that the publisher was another.
        verified: times that the publisher's digest agreed; splices: times that it did not, and all began anew.
        snapshots: staging views that replaced the present one.
        duplicates: batches at or below the last applied number.
        replays_asked, replays_unanswered: questions, and those that got no end marker in time.
        replays_cut: extended answers that could not be used to their end: cut by the publisher, with a hole, or
            never ended.
        disconnects: times that the live connection was lost.
        decode_errors: batches or single events that could not be read.
        bad_frames: messages that are not frames of this wire.
        other_topics: live messages of another topic that begins like the stream's own, skipped.
        rank_mismatches: batches that name another rank than the stream's.
        unknown_removals, unknown_media: events that changed nothing.
        fenced: messages of another life that stand in the same log, skipped; JetStream alone has such.
        lag_s: receive time minus the batch's own time stamp, of the last live batch; None before it. Two clocks
            of two machines may differ.
        last_error: the latest unreadable thing, for people.
    """

    rank: int
    endpoint: str
    state: StreamState
    is_extended: bool = False
    last_seq: int = -1
    batches: int = 0
    events: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    blocks_held: int = 0
    gaps: int = 0
    recovered: int = 0
    losses: int = 0
    restarts: int = 0
    verified: int = 0
    splices: int = 0
    snapshots: int = 0
    duplicates: int = 0
    replays_asked: int = 0
    replays_unanswered: int = 0
    replays_cut: int = 0
    disconnects: int = 0
    decode_errors: int = 0
    bad_frames: int = 0
    other_topics: int = 0
    rank_mismatches: int = 0
    unknown_removals: int = 0
    unknown_media: int = 0
    fenced: int = 0
    lag_s: float | None = None
    last_error: str = ""


# --- which messages are the stream's own ---

# A ZeroMQ subscription is a prefix: who subscribes to ``kv@pod1`` behind a proxy gets ``kv@pod10`` too, whose batches
# are numbered like this stream's. So the topic frame is compared, and what is not equal never reaches a cursor.

_END_SEQ = -1


@dataclass(slots=True)
class FrameParser:
    """Reads one stream's messages and counts those that are not its own.

    Attributes:
        topic: the stream's; empty takes every topic.
        bad_frames: messages that are not frames of this wire.
        other_topics: live messages of another topic, skipped.
    """

    topic: bytes
    bad_frames: int = 0
    other_topics: int = 0

    def parse_live(self, frames: Sequence[bytes]) -> tuple[int, bytes] | None:
        """Number and payload of a live message; None for one that is not this stream's."""
        if len(frames) != 3:
            self.bad_frames += 1
            return None
        topic, number, payload = frames
        if topic != self.topic and self.topic:
            self.other_topics += 1
            return None
        seq = int.from_bytes(number, "big", signed=True)
        if seq < 0 or len(number) != 8:
            self.bad_frames += 1
            return None
        return seq, payload

    def parse_replay(self, frames: Sequence[bytes]) -> tuple[int, bytes] | None:
        """Number (-1 for an end marker) and payload of a message of an answer, in either framing; None for others."""
        if len(frames) < 2 or len(frames[-2]) != 8:
            self.bad_frames += 1
            return None
        seq = int.from_bytes(frames[-2], "big", signed=True)
        if seq < _END_SEQ:
            self.bad_frames += 1
            return None
        return seq, frames[-1]


# --- from payload to view ---


class BatchEffect(Enum):
    """What a batch means for the trust in the view.

    CLEARED: it cleared all blocks. DAMAGED: a part of it could not be read.
    """

    ADDED = "added"
    CLEARED = "cleared"
    DAMAGED = "damaged"


@dataclass(slots=True)
class ApplierCounters:
    """Counters of one stream's batches and chunks; ``lag_s`` and ``last_error`` are those of the latest."""

    batches: int = 0
    events: int = 0
    decode_errors: int = 0
    rank_mismatches: int = 0
    lag_s: float | None = None
    last_error: str = ""


class PayloadDecoder(Protocol):
    """Reads payloads: ``BatchDecoder``."""

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload; bad events are reported in ``errors``, each alone.

        Raises:
            DecodeError: the batch itself is unreadable.
        """
        ...


class FollowedCursor(Protocol):
    """What statistics read of a cursor."""

    counters: CursorCounters

    @property
    def state(self) -> StreamState: ...

    @property
    def last_seq(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class BatchApplier:
    """Applies the batches of one rank to a view that may hold other ranks too.

    Attributes:
        rank: the stream's number in the view. A batch that names another is applied here all the same, and counted.
        wall_clock: seconds since the epoch, for the lag.
        staging: the view that a snapshot is built in, None without one.
    """

    rank: int
    view: BlockView
    decoder: PayloadDecoder
    listener: StreamListener
    wall_clock: Callable[[], float]
    counters: ApplierCounters = field(default_factory=ApplierCounters)
    staging: BlockView | None = None

    def start_staging(self) -> None:
        """Begin a snapshot, from nothing."""
        self._forget_staging()
        self.staging = self.view.create_staging()
        self.listener.on_snapshot_begin(self.rank)

    def apply_staged(self, seq: int, payload: bytes, *, is_snapshot_chunk: bool) -> BatchEffect:
        """Apply one payload to the snapshot; never raises for what is in it."""
        assert self.staging is not None
        return self._apply_to(self.staging, seq, payload, replayed=True, is_snapshot_chunk=is_snapshot_chunk)

    def prepare_swap(self) -> Iterator[None]:
        """Do beforehand, in slices, what makes ``commit_staging`` long; the view stays as it is."""
        if self.staging is not None:
            yield from self.view.prepare_replace(self.rank, self.staging)

    def commit_staging(self) -> None:
        """Replace this rank's blocks by those of the snapshot."""
        assert self.staging is not None
        self.view.replace(self.rank, self.staging)
        self.staging = None
        self.listener.on_snapshot_end(self.rank, was_used=True)

    def abort_staging(self) -> None:
        """Forget the snapshot."""
        self._forget_staging()
        self.listener.on_snapshot_end(self.rank, was_used=False)

    def _forget_staging(self) -> None:
        if self.staging is not None:
            self.view.discard_staging(self.staging)
            self.staging = None

    def apply(self, seq: int, payload: bytes, *, replayed: bool) -> BatchEffect:
        """Apply one payload to the view; never raises for what is in it."""
        return self._apply_to(self.view, seq, payload, replayed=replayed)

    def stats(self, cursor: FollowedCursor, endpoint: str) -> StreamStats:
        """What the pure parts of a subscriber know of the stream; its transport fills in the rest."""
        seen, done, blocks = cursor.counters, self.counters, self.view.counters(self.rank)
        return StreamStats(
            rank=self.rank,
            endpoint=endpoint,
            state=cursor.state,
            last_seq=cursor.last_seq,
            batches=done.batches,
            events=done.events,
            blocks_stored=blocks.stored_blocks,
            blocks_removed=blocks.removed_blocks,
            blocks_held=self.view.block_count(self.rank),
            gaps=seen.gaps,
            recovered=seen.recovered,
            losses=seen.losses,
            restarts=seen.restarts,
            verified=seen.verified,
            splices=seen.splices,
            snapshots=seen.snapshots,
            duplicates=seen.duplicates,
            replays_asked=seen.replays_asked,
            replays_unanswered=seen.replays_unanswered,
            replays_cut=seen.replays_cut,
            decode_errors=done.decode_errors,
            rank_mismatches=done.rank_mismatches,
            unknown_removals=blocks.unknown_removals,
            unknown_media=blocks.unknown_media,
            lag_s=done.lag_s,
            last_error=done.last_error,
        )

    def _apply_to(
        self, view: BlockView, seq: int, payload: bytes, *, replayed: bool, is_snapshot_chunk: bool = False
    ) -> BatchEffect:
        counters = self.counters
        try:
            batch = self.decoder.decode(payload)
        except DecodeError as error:
            counters.decode_errors += 1
            counters.last_error = f"batch {seq}: {error.reason}"
            self.listener.on_batch_unreadable(self.rank, seq, error)
            return BatchEffect.DAMAGED
        counters.batches += 1
        counters.events += len(batch.events)
        if batch.attn_dp_rank is not None and batch.attn_dp_rank != self.rank:
            counters.rank_mismatches += 1
        if not replayed:
            counters.lag_s = self.wall_clock() - batch.ts
        view.apply(self.rank, batch.events)
        if is_snapshot_chunk and batch.events and isinstance(batch.events[0], AllBlocksCleared):
            # The base is written so that it begins from nothing: no clear happened.
            batch = msgspec.structs.replace(batch, events=batch.events[1:])
        if batch.events or batch.errors or not is_snapshot_chunk:
            self.listener.on_batch_applied(self.rank, seq, batch, replayed=replayed)
        return self._effect_of(seq, batch)

    def _effect_of(self, seq: int, batch: DecodedBatch) -> BatchEffect:
        if batch.errors:
            self.counters.decode_errors += len(batch.errors)
            self.counters.last_error = f"batch {seq}: {batch.errors[-1].reason}"
            return BatchEffect.DAMAGED
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                return BatchEffect.CLEARED
        return BatchEffect.ADDED


# --- against a clock ---


@attrs.frozen(kw_only=True)
class FollowPolicy:
    """How long to wait for what, in seconds.

    Attributes:
        answer_timeout_s: silence within a replay answer after which it counts as missing. Dynamo has no such limit
            and stays deaf after one lost end marker.
        retry_min_s, retry_max_s: the pause after an unanswered question doubles between these, with jitter. A publisher
            that comes back is asked within the longest one.
        request_interval_s: a stream asks four questions at once, and then one per so much time, whatever comes: in
            ``t`` seconds at most ``4 + t / request_interval_s``.
        probe_interval_s: time between two probes; it bounds how long a lost last batch stays unnoticed. A publisher
            without the extension is probed after so much silence.
        dead_after_s: time without a connection after which the publisher is taken for dead.

    Raises:
        ConfigError: a time that is not above 0.
    """

    answer_timeout_s: float = attrs.field(default=5.0, validator=number_validator())
    retry_min_s: float = attrs.field(default=0.2, validator=number_validator())
    retry_max_s: float = attrs.field(default=2.0, validator=number_validator())
    request_interval_s: float = attrs.field(default=0.5, validator=number_validator())
    probe_interval_s: float = attrs.field(default=2.0, validator=number_validator())
    dead_after_s: float = attrs.field(default=15.0, validator=number_validator())

    def pause_s(self, failures: int, jitter: float) -> float:
        """Give the pause after ``failures`` in a row; ``jitter`` from 0 to 1 takes off up to half of it."""
        longest = min(self.retry_max_s, self.retry_min_s * 2.0 ** min(failures - 1, 30))
        return longest * (1.0 - jitter / 2)


class ReplayChannel(Protocol):
    """Asks the publisher for past batches; at most one question is open."""

    def send(self, question: SendReplayRequest) -> None:
        """Send the question and forget an older one with its connection."""
        ...

    def cancel(self) -> None:
        """Forget the open question, if any."""
        ...


@dataclass(slots=True)
class _Deadlines:
    """Moments on the caller's monotonic clock, in seconds; infinite when not set."""

    answer_s: float = math.inf
    retry_s: float = math.inf
    credit_s: float = math.inf
    probe_s: float = math.inf
    dead_s: float = math.inf

    def next_s(self) -> float:
        return min(self.answer_s, self.retry_s, self.credit_s, self.probe_s, self.dead_s)


@dataclass(slots=True)
class _Told:
    """What the others believe: the channel that a question is open, the listener what the state is.

    ``held`` is a question that waits for credit: the cursor believes that it is open, the channel does not know it.
    """

    asks: bool = False
    held: SendReplayRequest | None = None
    state: StreamState = StreamState.CONNECTING


@dataclass(slots=True, kw_only=True)
class StreamFollower:
    """One stream's cursor, applier and deadlines. ``now_s`` is always the caller's monotonic clock."""

    cursor: StreamCursor
    applier: BatchApplier
    channel: ReplayChannel
    policy: FollowPolicy
    jitter: Callable[[], float] = random.random
    _deadlines: _Deadlines = field(default_factory=_Deadlines, init=False)
    _told: _Told = field(default_factory=_Told, init=False)

    @property
    def next_deadline_s(self) -> float:
        """When ``tick`` must be called at the latest; infinite when there is nothing to wait for."""
        return self._deadlines.next_s()

    def begin(self, now_s: float) -> None:
        """Begin to wait for the first connection."""
        self._deadlines.dead_s = now_s + self.policy.dead_after_s

    def on_connected(self, now_s: float) -> None:
        """The live connection is up."""
        self._deadlines.dead_s = math.inf
        self._await_probe(now_s)
        self._follow(self.cursor.on_connected(), now_s)

    def on_disconnected(self, now_s: float) -> None:
        """The live connection was lost."""
        # A connection that comes and goes asks with each coming: the pace stays.
        self._deadlines = _Deadlines(dead_s=now_s + self.policy.dead_after_s, credit_s=self._deadlines.credit_s)
        self._follow(self.cursor.on_disconnected(), now_s)

    def on_live_batch(self, seq: int, payload: bytes, now_s: float) -> None:
        """A batch came on the live channel; offer them only while ``cursor.is_accepting_live``."""
        last, gaps = self.cursor.last_seq, self.cursor.counters.gaps
        instructions = self.cursor.on_live_batch(seq, payload)
        if self.cursor.counters.gaps != gaps:
            self.applier.listener.on_gap(self.applier.rank, last + 1, seq)
        if instructions and not self.cursor.is_extended:
            self._await_probe(now_s)  # batches that tell nothing new prove nothing
        self._follow(instructions, now_s)

    def on_replay_batch(self, ask: int, seq: int, payload: bytes, now_s: float) -> None:
        """A batch of the answer to question ``ask`` came."""
        if ask == self.cursor.open_request_id:
            self._deadlines.answer_s = now_s + self.policy.answer_timeout_s
        self._follow(self.cursor.on_replay_batch(ask, seq, payload), now_s)

    def prepare_swap(self, payload: bytes) -> Iterator[None]:
        """What an end marker with this payload would cost at once, in slices: ``on_replay_marker`` is short then."""
        if payload and self.applier.staging is not None:
            try:
                is_end = ReplayMeta.decode(payload).kind is ReplayMetaKind.END
            except DecodeError:
                return
            if is_end:
                yield from self.applier.prepare_swap()

    def on_replay_marker(self, ask: int, payload: bytes, now_s: float) -> bool:
        """An end marker of the answer to question ``ask`` came, or a META in its place; False when it is neither."""
        if ask == self.cursor.open_request_id:
            self._deadlines.answer_s = now_s + self.policy.answer_timeout_s
        self._await_probe(now_s)
        if not payload or not self.cursor.expects_meta:
            self._follow(self.cursor.on_replay_end(ask), now_s)
            return True
        try:
            meta = ReplayMeta.decode(payload)
        except DecodeError:
            self._follow(self.cursor.on_replay_timeout(ask), now_s)
            return False
        self._follow(self.cursor.on_replay_meta(ask, meta), now_s)
        return True

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        due = self._deadlines
        if now_s >= due.answer_s:
            due.answer_s = math.inf
            if self.cursor.open_request_id is not None:
                self._follow(self.cursor.on_replay_timeout(self.cursor.open_request_id), now_s)
        if now_s >= due.retry_s:
            due.retry_s = math.inf
            self._follow(self.cursor.on_retry_due(), now_s)
        if now_s >= due.credit_s:
            self._give_credit(now_s)
        if now_s >= due.probe_s:
            self._await_probe(now_s)
            self._follow(self.cursor.on_probe_due(), now_s)
        if now_s >= due.dead_s:
            due.dead_s = math.inf
            self._follow(self.cursor.on_connection_timeout(), now_s)

    def _await_probe(self, now_s: float) -> None:
        self._deadlines.probe_s = now_s + self.policy.probe_interval_s

    def _follow(self, instructions: tuple[Instruction, ...], now_s: float) -> None:
        """Carry out what the cursor said, then close what it no longer waits for and report a change of state."""
        for instruction in instructions:
            self._carry_out(instruction, now_s)
        told, cursor = self._told, self.cursor
        if told.asks and cursor.open_request_id is None:
            told.asks = False
            self._deadlines.answer_s = math.inf
            self.channel.cancel()
        if cursor.state is not told.state:
            old, told.state = told.state, cursor.state
            self.applier.listener.on_state_changed(self.applier.rank, old, cursor.state)

    def _carry_out(self, instruction: Instruction, now_s: float) -> None:
        if isinstance(instruction, Apply):
            self._report(self.applier.apply(instruction.seq, instruction.payload, replayed=instruction.replayed))
        elif isinstance(instruction, ApplyStaged):
            seq, payload, is_snapshot_chunk = instruction.seq, instruction.payload, instruction.is_snapshot_chunk
            self._report(self.applier.apply_staged(seq, payload, is_snapshot_chunk=is_snapshot_chunk))
        elif isinstance(instruction, StartStaging):
            self.applier.start_staging()
        elif isinstance(instruction, CommitStaging):
            self.applier.commit_staging()
        elif isinstance(instruction, Clear):
            self.applier.view.clear(self.applier.rank)
            self.applier.listener.on_view_cleared(self.applier.rank, instruction.reason)
        elif isinstance(instruction, SendReplayRequest):
            self._ask(instruction, now_s)
        elif isinstance(instruction, RetryLater):
            self._deadlines.retry_s = now_s + self.policy.pause_s(instruction.failures, self.jitter())
        else:
            self.applier.abort_staging()

    def _ask(self, question: SendReplayRequest, now_s: float) -> None:
        """Send a question, or hold it back until there is credit."""
        credit, told = self.cursor.credit, self._told
        if not credit.available:
            told.held, told.asks = question, False
            self._deadlines.answer_s = math.inf
            self.channel.cancel()
            return
        if credit.available == MAX_REPLAY_CREDIT:
            self._deadlines.credit_s = now_s + self.policy.request_interval_s
        credit.available -= 1
        told.held, told.asks = None, True
        self._deadlines.answer_s = now_s + self.policy.answer_timeout_s
        self.channel.send(question)

    def _give_credit(self, now_s: float) -> None:
        """Give one question back, and ask what waits for it."""
        credit, held = self.cursor.credit, self._told.held
        credit.available += 1
        is_full = credit.available == MAX_REPLAY_CREDIT
        self._deadlines.credit_s = math.inf if is_full else now_s + self.policy.request_interval_s
        if held is not None and held.ask == self.cursor.open_request_id:
            self._ask(held, now_s)
        else:
            self._told.held = None
            self._follow(self.cursor.on_credit_available(), now_s)

    def _report(self, effect: BatchEffect) -> None:
        if effect is BatchEffect.CLEARED:
            self.cursor.on_cleared()
        elif effect is BatchEffect.DAMAGED:
            self.cursor.on_damaged()
