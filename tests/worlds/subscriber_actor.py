"""SubscriberActor: a reader of one stream without sockets, and what is true about its view.

Follower, cursor, applier and view are the kit's. Its owner brings the messages. After each of them, ``check`` compares
a ``LIVE`` view with the publisher's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from observability.kv_stream import (
    BatchApplier,
    BlockView,
    FollowPolicy,
    FrameParser,
    NullStreamListener,
    StreamCursor,
    StreamFollower,
    StreamListener,
    StreamState,
    Tier,
)
from observability.kv_stream.follower import ReplayChannel
from observability.kv_stream.frames import END_SEQ_NUMBER
from observability.kv_stream.instructions import SendReplayRequest
from observability.kv_stream.stream_state import MAX_REPLAY_CREDIT
from scheduler_components.kv_events import BatchDecoder
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind
from worlds.publisher_actor import TOPIC, LiveFrame, State
from worlds.timeline import BrokenPromise


class FollowedPublisher(Protocol):
    """What is true about a publisher, for the readers that follow it."""

    @property
    def epoch(self) -> int:
        """Number of the present epoch."""
        ...

    @property
    def held(self) -> State:
        """The blocks after every published batch."""
        ...

    @property
    def states(self) -> Mapping[tuple[int, int], State]:
        """The blocks after each number that was sent, by epoch and number."""
        ...

    @property
    def last_sequence(self) -> int:
        """The newest number of the present epoch; one below the first before any."""
        ...

    def can_be_live(self, *, has_extension: bool) -> bool:
        """Return whether a reader that has everything can prove it."""
        ...


@dataclass(slots=True, kw_only=True)
class Answer:
    """One message of an answer in transit.

    Attributes:
        request_id: of the request.
        sequence: its number, that of an end marker for a META.
        payload: its payload.
        epoch: number of the publisher's epoch that sent it.
        is_altered: a fault has changed the payload, and it is still readable.
    """

    request_id: int
    sequence: int
    payload: bytes
    epoch: int
    is_altered: bool = False


@dataclass(slots=True)
class _Truth:
    """What is true about a view, as far as a reader cannot know it.

    Attributes:
        connected_epoch: the publisher's epoch when the live connection began; None without a connection.
        was_restarted: the connection has brought frames of another epoch since, or of another sender.
        verified_epoch: the epoch of the last proof.
        is_spliced: a frame of another epoch was applied after the last proof.
        spliced_after: newest request at that time.
        is_altered: an altered batch of an answer was received after the last proof.
    """

    connected_epoch: int | None = None
    was_restarted: bool = False
    verified_epoch: int = -1
    is_spliced: bool = False
    spliced_after: int = 0
    is_altered: bool = False


class SubscriberActor:
    """A reader of one publisher.

    Args:
        name: in messages.
        publisher: the publisher that it follows, for the truth.
        channel: sends its requests.
        policy: how long its follower waits.
        has_extension: False if the publisher acts for it as one without the extension.
        listener: receives every change of the view.
        now_s: the present.

    Attributes:
        num_answer_bytes: payload bytes of the chunks and batches of all answers.
        num_plain_requests: requests without the extension.
        num_applied_live: batches applied from the live channel.
        num_jumps: times that the position of its view did not move by one batch.
        sent_s: the times of its requests.
    """

    __slots__ = (
        "_channel", "_last_seq", "_policy", "_publisher", "follower", "frames", "has_extension", "name", "now_s",
        "num_answer_bytes", "num_applied_live", "num_jumps", "num_plain_requests", "sent_s", "truth", "view",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        publisher: FollowedPublisher,
        *,
        channel: ReplayChannel,
        policy: FollowPolicy,
        has_extension: bool = True,
        listener: StreamListener | None = None,
        now_s: float = 0.0,
    ) -> None:
        self.name = name
        self.has_extension = has_extension
        self.view = BlockView()
        self.follower = StreamFollower(
            cursor=StreamCursor(has_replay=True),
            applier=BatchApplier(
                rank=0,
                view=self.view,
                decoder=BatchDecoder(),
                listener=listener or NullStreamListener(),
                wall_clock=lambda: self.now_s,
            ),
            channel=self,
            policy=policy,
            jitter=lambda: 0.0,
        )
        self.frames = FrameParser(TOPIC)
        self.truth = _Truth()
        self.now_s = now_s
        self.num_answer_bytes = self.num_plain_requests = self.num_applied_live = self.num_jumps = 0
        self._last_seq = self.follower.cursor.last_seq
        self.sent_s: list[float] = []
        self._publisher = publisher
        self._channel = channel
        self._policy = policy
        self.follower.begin(now_s)

    def __repr__(self) -> str:
        return f"<SubscriberActor {self.name}: {self.follower.cursor!r}>"

    # --- the channel of its follower ---

    def send(self, request: SendReplayRequest) -> None:
        """Send a request, and check that the credit allows it."""
        self.sent_s.append(self.now_s)
        self.num_plain_requests += request.verb is None
        for number, sent_s in enumerate(reversed(self.sent_s), 1):
            allowed = MAX_REPLAY_CREDIT + (self.now_s - sent_s) / self._policy.request_interval_s
            if number > allowed + 1e-6:
                raise BrokenPromise("bounded requests", f"{self.name} has sent {number} requests since {sent_s:.6f}")
        self._channel.send(request)

    def cancel(self) -> None:
        """Close the connection of the open request."""
        self._channel.cancel()

    # --- what its owner brings ---

    def on_connected(self, epoch: int, now_s: float) -> None:
        """The live connection, made in this epoch of the publisher, is up."""
        self.now_s = now_s
        self.truth.connected_epoch, self.truth.was_restarted = epoch, False
        self.follower.on_connected(now_s)

    def on_disconnected(self, now_s: float) -> None:
        """The live connection is lost."""
        self.now_s = now_s
        self.truth.connected_epoch = None
        self.follower.on_disconnected(now_s)

    def on_live(self, frame: LiveFrame, now_s: float) -> None:
        """A live message came."""
        self.now_s = now_s
        read = self.frames.parse_live(frame.frames)
        if read is None:
            return
        cursor, truth = self.follower.cursor, self.truth
        counters = cursor.counters
        applied, gaps = counters.applied, counters.gaps
        is_gap = self.state is StreamState.LIVE and cursor.is_accepting_live and read[0] > cursor.last_seq + 1
        self.follower.on_live_batch(*read, now_s)
        self._note_position()
        if is_gap and counters.gaps != gaps + 1:
            raise BrokenPromise("every loss is reported", f"{self.name} does not count the gap before {read[0]}")
        if counters.applied == applied:
            return
        self.num_applied_live += 1
        if frame.frames[0] != TOPIC:
            raise BrokenPromise(
                "frames of another topic are dropped", f"{self.name} has applied one of {frame.frames[0]!r}"
            )
        if frame.epoch != truth.verified_epoch:
            truth.is_spliced, truth.spliced_after = True, counters.replays_asked
        if frame.epoch != truth.connected_epoch:
            truth.was_restarted |= self.has_extension  # others get no such frames

    def on_answer(self, answer: Answer, now_s: float) -> None:
        """A message of an answer came, perhaps of one to an older request."""
        self.now_s = now_s
        counters, truth = self.follower.cursor.counters, self.truth
        truth.is_altered |= answer.is_altered
        verified, splices = counters.verified, counters.splices
        may_distrust = truth.is_spliced or truth.is_altered
        if answer.sequence == END_SEQ_NUMBER:
            for _ in self.follower.prepare_swap(answer.payload):
                self.check()
            self.follower.on_replay_marker(answer.request_id, answer.payload, now_s)
        else:
            self.num_answer_bytes += len(answer.payload)
            self.follower.on_replay_batch(answer.request_id, answer.sequence, answer.payload, now_s)
        self._note_position()
        if counters.splices != splices and not may_distrust:
            raise BrokenPromise("an honest publisher is trusted", f"{self.name} distrusts epoch {answer.epoch}")
        if counters.verified > verified:
            truth.verified_epoch = answer.epoch
            truth.is_altered = False
            # A status proves the position of its request, and this answer may have opened the next request.
            truth.is_spliced = truth.is_spliced and truth.spliced_after >= answer.request_id

    def tick(self, now_s: float) -> None:
        """Handle every deadline up to ``now_s``."""
        self.now_s = now_s
        self.follower.tick(now_s)
        self._note_position()

    def _note_position(self) -> None:
        """Count it if the position has not moved by one batch or not at all."""
        last_seq = self.follower.cursor.last_seq
        self.num_jumps += last_seq not in (self._last_seq, self._last_seq + 1)
        self._last_seq = last_seq

    def tick_until(self, until_s: float) -> None:
        """Let the time pass until ``until_s``, and handle each deadline at its time."""
        while (due_s := self.follower.next_deadline_s) <= until_s:
            self.tick(max(due_s, self.now_s))
        self.now_s = until_s

    # --- its view ---

    @property
    def state(self) -> StreamState:
        """How far it trusts its view."""
        return self.follower.cursor.state

    @property
    def is_connected(self) -> bool:
        """True while the live connection is up."""
        return self.truth.connected_epoch is not None

    @property
    def epoch(self) -> int | None:
        """The publisher's epoch that its view belongs to, as far as it is proved."""
        return self.truth.verified_epoch if self.follower.cursor.is_extended else self.truth.connected_epoch

    @property
    def blocks(self) -> State:
        """The blocks in its view."""
        return frozenset((each, tier) for tier in Tier for each in self.view.blocks(0, tier))

    def check(self, *, is_proof_due: bool = False) -> None:
        """Check that a LIVE view is not wrong.

        One exception: a frame of another epoch came on the same connection, behind a proxy. Then LIVE may be wrong
        until the next proof. A reader whose first requests were lost has its next proof when it finds the extension. A
        publisher without the extension gives no such proof, so its proxies must close the connection.

        Args:
            is_proof_due: nothing was lost for so long that the next proof must have come: no exception.

        Raises:
            BrokenPromise: the view is LIVE and wrong.
        """
        cursor, truth = self.follower.cursor, self.truth
        if cursor.state is not StreamState.LIVE or truth.connected_epoch is None:
            return
        if not is_proof_due and (truth.is_spliced if cursor.is_extended else truth.was_restarted):
            return
        epoch = truth.verified_epoch if cursor.is_extended else truth.connected_epoch
        if self.blocks != self._publisher.states.get((epoch, cursor.last_seq)):
            raise BrokenPromise("a LIVE view is never wrong", f"{self.name} is live at {cursor.last_seq} and wrong")

    def check_converged(self) -> None:
        """Check that the view is the publisher's state, and proved where it can be.

        Raises:
            BrokenPromise: it is not.
        """
        publisher, cursor = self._publisher, self.follower.cursor
        if self.blocks != publisher.held:
            raise BrokenPromise("every view converges", f"{self.name} has not converged: {cursor!r}")
        if cursor.last_seq != publisher.last_sequence:
            raise BrokenPromise("every view converges", f"{self.name} is at {cursor.last_seq}: {cursor!r}")
        if cursor.is_extended and self.truth.verified_epoch != publisher.epoch:
            raise BrokenPromise("every view converges", f"{self.name} has not verified epoch {publisher.epoch}")
        if publisher.can_be_live(has_extension=self.has_extension) and self.state is not StreamState.LIVE:
            raise BrokenPromise("every view converges", f"{self.name} is {self.state} and not live: {cursor!r}")


def begins_chunks(payload: bytes) -> bool:
    """Return whether the chunks of a snapshot follow a META."""
    meta = ReplayMeta.decode(payload)
    return meta.kind is ReplayMetaKind.BEGIN and meta.snap
