"""RequestReceiver: one rank receives messages, and every rank of the replica gets them in the same order.

**What must be agreed.** All ranks of a replica run the same scheduler on their own slices, layers or copies of one
model. Its decisions depend on its steps and on the messages between them. So every message must reach every rank before
the same step, and any two messages in the same order. If each rank read its own socket, the ranks would diverge at the
first message that arrives at one of them a moment later than at another.

**The leading rank decides.** It is the first rank of its pipeline, attention-TP and attention-CP groups. It receives
messages, passes them through the `InputBlocker` and relays the admitted ones. The other ranks have no source. Their
input is the leading rank's decision, so limits, blocking and duplicates need no agreement, and the leading rank may use
its clock.

**When the ranks meet.** A relay is a collective call of all ranks. Whether one happens before a step depends only on
facts that are equal on all of them: the mode of the last step and the weights of the `RecvSkipper`. A fact that one
rank alone knows, such as a waiting message, must not decide it.

**How divergence is found.** Each relay carries the step, a digest of the caller's state, and a digest of all frames
relayed before. A rank that differs in any of them raises before it takes the step.

The invariant: after relay n every rank has returned the same messages in the same order, between the same steps.
``tests/test_request_receiver.py`` has a variant in which each rank reads its own socket; the test sees the ranks
diverge and the divergence reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, cast
from zlib import crc32

from scheduler_components.errors import DecodeError, LockstepError
from scheduler_components.input_blocker import InputBlocker, RelayedMessage
from scheduler_components.ports import DecisionSink, NullDecisionLog
from scheduler_components.receiving.recv_skipper import RecvSkipper
from scheduler_components.values import ForwardMode, InputMessage, ReceiverStats, RelayedInput
from scheduler_components.watchdog import IDLE_PHASE, RECEIVE_PHASE, StepProgress

__all__ = ["InputRelay", "InputSource", "MessageDecoder", "NullInputRelay", "NullInputSource", "RequestReceiver"]

T = TypeVar("T")
Message_co = TypeVar("Message_co", covariant=True)


class InputSource(Protocol):
    """Where messages arrive on the leading rank: `ZmqInputSource`, or the queue of an embedded server."""

    def poll(self, most: int) -> Sequence[bytes]:
        """Return at most `most` received messages, oldest first. Never wait."""
        ...


class NullInputSource:
    """The source of a rank that does not lead: all of its input comes through the relay."""

    def poll(self, most: int) -> Sequence[bytes]:
        return ()


class MessageDecoder(Protocol[Message_co]):
    """Decode the engine's messages; the same on every rank."""

    def read(self, frame: bytes) -> InputMessage[Message_co]:
        """Return the decoded message. Raise DecodeError if the frame is no message of this engine."""
        ...


class InputRelay(Protocol):
    """Broadcast the leading rank's input to all ranks of the replica: `SyncGroupRelay`, `ZmqLeaderRelay`."""

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        """Return the leading rank's input; the leading rank itself gets `own` back. Every rank calls it equally often.

        Raises:
            SyncTimeoutError, SyncDivergenceError, StopRequestedError: not all ranks made the call.
        """
        ...

    def close(self) -> None:
        """Release sockets and groups. Safe to call twice."""
        ...


class NullInputRelay:
    """The relay of a replica with one rank."""

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        return own

    def close(self) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class RequestReceiver(Generic[T]):  # noqa: SCH003 - seven parts, and where its input is noted
    """Receives input and broadcasts it to all ranks of a replica. Used on the scheduler's thread.

    Every rank calls `receive` before each step. An idle leading rank calls `poll` first, to find out whether it has to
    wake the others.

    Attributes:
        rank: description of this rank, shown in errors.
        reader: decodes messages; the same on every rank.
        source: where messages arrive; `NullInputSource` on all ranks but the leading one.
        relay: the path to the other ranks.
        blocker: admits or rejects messages; used on the leading rank only.
        recv_skipper: chooses the steps with a relay; equal on all ranks.
        progress: where a watchdog reads that a rank with work waits for its input.
        decisions: where it notes the messages that it returns.
    """

    rank: str
    reader: MessageDecoder[T]
    source: InputSource = field(default_factory=NullInputSource)
    relay: InputRelay = field(default_factory=NullInputRelay)
    blocker: InputBlocker = field(default_factory=InputBlocker)
    recv_skipper: RecvSkipper = field(default_factory=RecvSkipper)
    progress: StepProgress = field(default_factory=StepProgress)
    decisions: DecisionSink = field(default_factory=NullDecisionLog)
    _pending: deque[RelayedMessage] = field(default_factory=deque, init=False, repr=False)  # admitted, not relayed yet
    _digest: int = field(default=0, init=False, repr=False)  # of all relayed frames

    @property
    def stats(self) -> ReceiverStats:
        return self.blocker.stats

    def poll(self) -> bool:
        """Receive messages without a relay; return whether some wait to be relayed.

        An idle leading rank calls it, so that a rejected message does not wake the other ranks.
        """
        most, pending = self.blocker.bounds.max_recv_per_poll, self._pending
        for frame in self.source.poll(most) if len(pending) < most else ():
            try:
                incoming = self.reader.read(frame)
            except DecodeError:
                self.stats.messages_unreadable += 1
                continue
            pending += self.blocker.handle(frame, incoming)
        return bool(pending)

    def receive(self, step: int, state_digest: int, mode: ForwardMode) -> Sequence[T]:
        """Return the messages to process before step `step`: the same on every rank.

        Every rank calls it before each of its steps, with the same `step` and `mode`. The other ranks wait in this call
        for the leading rank.

        Args:
            step: number of the next step.
            state_digest: 32 bits over the caller's state; 0 if it has none.
            mode: what the last step computed; `ForwardMode.IDLE` if the caller has no work.

        Raises:
            LockstepError: the step, state or input of this rank differs from the leading rank's.
            SyncTimeoutError, SyncDivergenceError, StopRequestedError: raised by the relay.

        After an error, the requests that this call would have relayed are answered.
        """
        if not self.recv_skipper.should_receive(mode):
            self.stats.receives_skipped += 1
            return ()
        if mode is not ForwardMode.IDLE:  # a rank without work may wait for any time
            self.progress.enter_phase(RECEIVE_PHASE)
        self.poll()
        messages = self._pop(self.blocker.bounds.max_recv_per_poll)
        own = RelayedInput(step, state_digest, self._digest, tuple(message.frame for message in messages))
        try:
            relayed = self.relay.broadcast(own)
            self.stats.receives += 1
            self._check(own, relayed)
        except BaseException:
            self.blocker.reject_lost(messages)
            raise
        self.progress.enter_phase(IDLE_PHASE)
        for frame in relayed.frames:
            self._digest = crc32(frame, crc32(len(frame).to_bytes(8, "little"), self._digest))
        if relayed.frames:
            self.decisions.note("input", step, len(relayed.frames), self._digest)
        self.blocker.on_broadcast(messages)
        if relayed is own:
            return [cast(T, message.incoming.message) for message in messages]
        return [self.reader.read(frame).message for frame in relayed.frames]

    def close(self) -> None:
        """Answer the requests that are held or not yet relayed, and close the relay. Safe to call twice."""
        self.blocker.close()
        self.blocker.reject_lost(self._pop(len(self._pending)))
        self.relay.close()

    def _pop(self, most: int) -> list[RelayedMessage]:
        return [self._pending.popleft() for _ in range(min(most, len(self._pending)))]

    def _check(self, own: RelayedInput, leading: RelayedInput) -> None:
        if (own.step, own.state_digest, own.input_digest) != (
            leading.step,
            leading.state_digest,
            leading.input_digest,
        ):
            raise LockstepError(own.step, self.rank, _description(leading), _description(own))


def _description(relayed: RelayedInput) -> str:
    return f"{relayed.state_digest:08x} at step {relayed.step} after input {relayed.input_digest:08x}"
