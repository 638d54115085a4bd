"""ReaderJudge: the promises to one reader, judged while the world runs.

A fault excuses a reader for as long as recovery may take. After that it must be ``LIVE`` and on time until the next
fault. Whatever happens, a ``LIVE`` view is never wrong, and no lost batch goes unreported.
"""

from __future__ import annotations

import math

import msgspec

from observability.kv_stream import FollowPolicy, StreamState
from observability.kv_stream.reopen_pauses import LAST_REOPEN_S
from scheduler_components.kv_events import BatchEncoder, EventStream
from worlds.publisher_actor import LiveFrame, PublisherActor
from worlds.publisher_process import MAX_SEND_DELAY_S, PublisherProcess
from worlds.stream_connection import ReaderNetwork
from worlds.subscriber_actor import SubscriberActor
from worlds.timeline import BrokenPromise, Timeline, WorldCounters

_LONGEST_REOPEN_S = 2 * LAST_REOPEN_S
"""Pauses between attempts to connect, one after the other."""

_SLACK_S = 0.1
"""Slices of serving, and rounding."""

_RESYNC_ROUND_TRIPS = 4
"""A status that overtakes live batches costs an incremental replay. One about a position that a short replay buffer has
passed costs a snapshot."""

_SPARE_DEPARTURES = 2
"""Departures from LIVE in a calm, in addition to one per probe: the first probe, and a batch that was lost before."""


def recovery_limit_s(policy: FollowPolicy, network: ReaderNetwork) -> float:
    """Return how long recovery may take after the last fault.

    Two probe intervals plus the replay, after one lost request and the pause that follows. A status, an incremental
    replay and a snapshot may each have to wait for credit. Before all that, the reader may have to connect.
    """
    rules_s = 2 * policy.probe_interval_s + policy.answer_timeout_s + policy.retry_max_s + 3 * policy.request_interval_s
    return rules_s + _LONGEST_REOPEN_S + 10 * (network.live.max_latency_s + network.replay.max_latency_s) + _SLACK_S


class ReaderJudge:
    """Judges one reader. It is the ``ConnectionListener`` of its connection.

    Args:
        timeline, counters: of the world.
        process: the reader's publisher.
        reader: the reader.
        network: the reader's network without faults.
        policy: how long its follower waits.

    Attributes:
        due_s: from then on the reader must be LIVE and on time; infinite while faults go on.
    """

    __slots__ = (
        "_counters", "_joining", "_ledger", "_left_s", "_live_since_s", "_max_age_s", "_num_departures",
        "_probe_interval_s", "_process", "_reader", "_repair", "_resync_s", "_since_s", "_state", "_timeline", "due_s",
        "limit_s",
    )  # fmt: skip

    def __init__(
        self,
        timeline: Timeline,
        counters: WorldCounters,
        process: PublisherProcess,
        reader: SubscriberActor,
        *,
        network: ReaderNetwork,
        policy: FollowPolicy,
    ) -> None:
        self._timeline = timeline
        self._counters = counters
        self._process = process
        self._reader = reader
        self.limit_s = recovery_limit_s(policy, network)
        # While a probe is open, live batches wait in the socket.
        self._max_age_s = MAX_SEND_DELAY_S + network.live.max_latency_s + 2 * network.replay.max_latency_s + _SLACK_S
        self._resync_s = (
            3 * policy.request_interval_s + _RESYNC_ROUND_TRIPS * 2 * network.replay.max_latency_s + _SLACK_S
        )
        self._state = reader.state
        self._live_since_s = self._left_s = -math.inf
        self._since_s: float | None = timeline.now_s
        self._probe_interval_s = policy.probe_interval_s
        self._num_departures = 0
        self._joining: JoiningBytes | None = None
        self._ledger = LossLedger(reader)
        self._repair: tuple[int, int, float] | None = None
        self.due_s = math.inf

    # --- the connection's listener ---

    def on_fault(self, kind: str) -> None:
        """Excuse the reader for as long as recovery may take."""
        self._counters.faults[kind] += 1
        self._timeline.record(f"{self._reader.name}: {kind}")
        self.excuse()

    def excuse(self) -> None:
        """Excuse the reader: something happened that may cost it a recovery."""
        self._since_s = self._timeline.now_s
        if self.due_s < math.inf:
            self.begin()

    def begin(self) -> None:
        """Expect the reader to be LIVE and on time when recovery is over. It may have joined just now."""
        if self._joining is None and not self._reader.sent_s:
            self._joining = JoiningBytes(self._process.actor)
        self.due_s = max(self._timeline.now_s, self._process.stalled_until_s) + self.limit_s
        self._num_departures = 0

    def end(self) -> None:
        """Expect nothing while faults go on, except what holds always. They may cost a reader many answers."""
        self.due_s = math.inf
        self._joining = None

    def on_frame_sent(self, frame: LiveFrame) -> None:
        """Count what a joining reader may need."""
        if self._joining is not None:
            self._joining.on_sent(frame)

    def on_frame_lost(self, frame: LiveFrame) -> None:
        """Expect the reader to report the loss before it is LIVE beyond this batch."""
        if frame.epoch is not None:
            self._ledger.on_lost(frame.epoch, frame.sequence)

    def expect_repair(self) -> None:
        """The next batch is lost. A LIVE reader gets it without a snapshot, if the publisher keeps it so long."""
        if self._reader.state is StreamState.LIVE and self._timeline.now_s >= self.due_s:
            num_snapshots = self._reader.follower.cursor.counters.snapshots
            self._repair = self._process.actor.stream.next_sequence, num_snapshots, self.due_s

    def on_change(self) -> None:
        """Check what holds always."""
        reader = self._reader
        reader.check()
        state = reader.state
        if state is not self._state:
            self._timeline.record(f"{reader.name} is {state} at {reader.follower.cursor.last_seq}")
            if self._state is StreamState.LIVE:
                self._left_s = self._timeline.now_s
                self._num_departures += 1
            elif state is StreamState.LIVE:
                self._note_live()
            self._state = state
        self._ledger.check()
        if self._joining is not None:
            self._check_bytes(self._joining)
        if self._repair is not None:
            self._check_repair(*self._repair)

    def _check_repair(self, lost: int, num_snapshots: int, due_s: float) -> None:
        reader = self._reader
        if self._process.actor.stream.first > lost or self.due_s != due_s:
            self._repair = None
        elif reader.follower.cursor.last_seq >= lost and reader.state is StreamState.LIVE:
            self._repair = None
            if reader.follower.cursor.counters.snapshots != num_snapshots:
                raise BrokenPromise("a lost batch costs no snapshot", f"{reader.name} got one for batch {lost}")

    def _note_live(self) -> None:
        self._live_since_s = now_s = self._timeline.now_s
        self._counters.counts["recoveries"] += 1
        if self._since_s is not None:
            self._counters.measure("until_live_s", now_s - self._since_s)
            self._since_s = None

    def _check_bytes(self, joining: JoiningBytes) -> None:
        """Check what a reader has received that joined in a calm, until it has arrived."""
        reader = self._reader
        limit = joining.limit(reader.num_plain_requests)
        if reader.num_answer_bytes > limit:
            detail = f"{reader.name} has received {reader.num_answer_bytes} bytes of {limit}"
            raise BrokenPromise("the cost of a joining reader is bounded", detail)
        if reader.follower.cursor.is_settled:
            self._joining = None

    # --- while the world is calm ---

    def judge(self) -> None:
        """Check that the reader is LIVE, right and on time, once its recovery must be over.

        Raises:
            BrokenPromise: it is not.
        """
        now_s, reader, actor = self._timeline.now_s, self._reader, self._process.actor
        if now_s < self.due_s:
            return
        reader.check(is_proof_due=True)
        cursor = reader.follower.cursor
        if reader.has_extension and not cursor.is_extended and cursor.is_settled:
            raise BrokenPromise("every reader finds the extension", f"{reader.name} follows plainly: {cursor!r}")
        if not self._process.can_prove(reader):
            return
        if reader.state is not StreamState.LIVE:
            if not self._process.keeps_answers(self._resync_s):
                self._left_s = now_s  # its answers are cut
            elif now_s - self._left_s > self._resync_s:
                raise BrokenPromise("every reader is LIVE in time", f"{reader.name} is {reader.state}: {cursor!r}")
            return
        if not self._process.keeps_answers(self._resync_s):
            self._num_departures = 0
        elif self._num_departures > _SPARE_DEPARTURES + (now_s - self.due_s + self.limit_s) / self._probe_interval_s:
            detail = f"{reader.name} has left LIVE {self._num_departures} times since {self.due_s - self.limit_s:.6f}"
            raise BrokenPromise("LIVE lasts", detail)
        if now_s - self._live_since_s < self._max_age_s:
            return
        published_s = actor.stamps.get((actor.epoch, cursor.last_seq + 1), now_s)
        self._counters.measure("age_s", now_s - published_s)
        if now_s - published_s > self._max_age_s:
            detail = f"{reader.name} is at {cursor.last_seq} and lacks a batch of {published_s:.6f}"
            raise BrokenPromise("batches arrive in time", detail)


class _Mark(msgspec.Struct, frozen=True, gc=False):
    """A reader's position and counters at a moment when it was LIVE and right.

    Attributes:
        is_extended: it followed by the extension.
        num_live: batches that it has applied from the live channel.
        num_jumps: times that its position did not move by one.
        num_abandoned: answers that it gave up. Batches of their staging views count as recovered, though they are
            discarded.
    """

    is_extended: bool
    epoch: int
    last: int
    num_live: int
    num_jumps: int
    num_abandoned: int
    recovered: int
    snapshots: int
    restarts: int
    losses: int


class LossLedger:
    """The losses of one reader between two moments at which its view was LIVE and right.

    - Its position moved batch by batch: each batch that did not come live is counted as recovered, so at least as many
      as the network lost in that epoch, and exactly as many as did not come live if no answer was given up.
    - With the extension, its position jumped: it counts a snapshot. The reader cannot know how many of its batches were
      lost.
    - With the extension, the epoch changed: it counts a restart, unless it has followed plainly or was dead meanwhile
      and so did not know its epoch. Numbers that were lost at the end of an epoch are part of the restart.
    - Without the extension, its position jumped or the epoch changed: it counts something as recovered, a loss of
      history or a restart. It cannot know which: the base state of a publisher has fewer batches than it replaces.

    Args:
        reader: the reader.
    """

    __slots__ = ("_has_forgotten_epoch", "_lost", "_mark", "_reader")

    def __init__(self, reader: SubscriberActor) -> None:
        self._reader = reader
        self._lost: dict[int, set[int]] = {}
        self._mark: _Mark | None = None
        self._has_forgotten_epoch = False

    def on_lost(self, epoch: int, sequence: int) -> None:
        """The network lost a batch."""
        self._lost.setdefault(epoch, set()).add(sequence)

    def check(self) -> None:
        """Compare, if the reader is LIVE and right.

        Raises:
            BrokenPromise: a loss is missing in its counters.
        """
        reader = self._reader
        is_extended = reader.follower.cursor.is_extended
        if not is_extended or reader.state is StreamState.DEAD:
            self._has_forgotten_epoch = True
        epoch, truth = reader.epoch, reader.truth
        is_wrong = truth.is_spliced if is_extended else truth.was_restarted
        if reader.state is not StreamState.LIVE or epoch is None or is_wrong:
            return
        old, new = self._mark, self._take_mark(epoch)
        if new == old:
            return
        if old is not None and old.is_extended == is_extended:
            problem = self._problem(old, new)
            if problem is not None:
                raise BrokenPromise("every loss is reported", f"{reader.name} {problem}")
        self._mark, self._has_forgotten_epoch = new, not is_extended
        if self._lost:
            self._forget_up_to(epoch, new.last)

    def _forget_up_to(self, epoch: int, last: int) -> None:
        lost = {number for number in self._lost.get(epoch, ()) if number > last}
        later = {each: numbers for each, numbers in self._lost.items() if each > epoch}
        self._lost = {epoch: lost, **later} if lost else later

    def _take_mark(self, epoch: int) -> _Mark:
        reader = self._reader
        cursor = reader.follower.cursor
        counters = cursor.counters
        return _Mark(
            is_extended=cursor.is_extended,
            epoch=epoch,
            last=cursor.last_seq,
            num_live=reader.num_applied_live,
            num_jumps=reader.num_jumps,
            num_abandoned=counters.replays_cut + counters.replays_unanswered + counters.splices,
            recovered=counters.recovered,
            snapshots=counters.snapshots,
            restarts=counters.restarts,
            losses=counters.losses,
        )

    def _problem(self, old: _Mark, new: _Mark) -> str | None:
        """Return what is wrong with the counters; None if nothing is."""
        num_recovered = new.recovered - old.recovered
        if new.epoch == old.epoch and new.num_jumps == old.num_jumps and new.snapshots == old.snapshots:
            num_lost = len([each for each in self._lost.get(new.epoch, ()) if old.last < each <= new.last])
            num_missed = new.last - old.last - (new.num_live - old.num_live)
            is_exact = new.num_abandoned == old.num_abandoned
            if num_recovered < max(num_missed, num_lost) or (is_exact and num_recovered != num_missed):
                return (
                    f"reports {num_recovered} recovered batches up to {new.last}, and {num_missed} did not come live, "
                    f"of which {num_lost} were lost"
                )
            return None
        if not new.is_extended:
            num_reported = num_recovered + new.losses - old.losses + new.restarts - old.restarts
            return None if num_reported else f"has begun again at {new.last} without a report"
        if new.snapshots == old.snapshots:
            return f"has jumped from {old.last} to {new.last} without a snapshot"
        if new.epoch != old.epoch and new.restarts == old.restarts and not self._has_forgotten_epoch:
            return f"is in epoch {new.epoch} after {old.epoch} without a restart"
        return None


def snapshot_bytes(stream: EventStream) -> int:
    """Return the size of the stream's snapshot as a publisher sends it now."""
    encoder = BatchEncoder("array")
    num_bytes = 0
    for chunks in stream.plan_snapshot():
        for number, chunk in enumerate(chunks or ()):
            num_bytes += sum(len(each or b"") for each in stream.encode_chunk(chunk, encoder, 0, clear=number == 0))
    return num_bytes


class JoiningBytes:
    """The bytes that a reader needs from its join on: the snapshot once, and each batch of an answer once.

    The largest snapshot counts, because the publisher plans one at some time after the join. The batches are those of
    the replay buffer at the join and all later ones. A reader without the extension gets the last batch that it has
    once more with each request. METAs and end markers do not count.

    Args:
        actor: the publisher.
    """

    __slots__ = ("_actor", "_earlier_bytes", "_key", "_largest_batch_bytes", "_num_batch_bytes", "_num_snapshot_bytes")

    def __init__(self, actor: PublisherActor) -> None:
        self._actor = actor
        self._earlier_bytes = self._largest_batch_bytes = 0
        self._key = (-1, -1)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        stream = self._actor.stream
        self._num_batch_bytes, self._num_snapshot_bytes = stream.buffered_bytes, 0
        held = range(stream.first, stream.next_sequence)
        self._largest_batch_bytes = max([self._largest_batch_bytes, *(len(stream.payload(each)) for each in held)])
        self._measure()

    def _measure(self) -> None:
        """Measure the snapshot, if it has changed."""
        stream = self._actor.stream
        key = self._actor.epoch, stream.first
        if key != self._key:
            self._key = key
            self._num_snapshot_bytes = max(self._num_snapshot_bytes, snapshot_bytes(stream))

    def on_sent(self, frame: LiveFrame) -> None:
        """The publisher sent a batch, which it has not folded yet."""
        if self._actor.epoch != self._key[0]:
            self._earlier_bytes += self._num_snapshot_bytes + self._num_batch_bytes
            self._begin_epoch()
            return
        self._num_batch_bytes += len(frame.frames[2])
        self._largest_batch_bytes = max(self._largest_batch_bytes, len(frame.frames[2]))
        self._measure()

    def limit(self, num_plain_requests: int) -> int:
        """Return the bytes that a reader may have received after this many requests without the extension."""
        self._measure()
        repeated = num_plain_requests * self._largest_batch_bytes
        return self._earlier_bytes + self._num_snapshot_bytes + self._num_batch_bytes + repeated
