"""RequestReceiver: one rank receives, and all ranks of the replica get the same messages in one order.

**What must be agreed.** All ranks of a replica run one scheduler on their own slices, layers or copies of one model.
Its decisions follow from its steps and from what comes in between them. So every message must reach every rank before
the same step, and two messages in the same order. Ranks that listened for themselves would part with the first message
that one of them hears a moment later than another.

**One rank decides, all others are told.** The leading rank (first of its pipeline, attention-TP and attention-CP
groups) takes messages, screens them, and relays what goes on; the others have no source. What the leading rank decides
may depend on its clock and on chance: the others do not decide, they get its answer. So bounds, blocking and duplicates
need no agreement of their own.

**Who meets when.** A relay is a meeting of all ranks. Whether there is one before a step follows from what is equal on
all of them: the mode of the last step, and the weights of the skipper. Nothing that one rank alone knows (a message
that waits, say) may decide it.

**What finds out.** With each meeting go the step, a digest of the caller's state, and one of all frames relayed before.
A rank that differs in any of them raises before it takes the step.

The invariant: after meeting n each rank has returned the same messages in the same order, between the same steps.
``tests/test_request_receiver.py`` lets ranks listen for themselves instead, and sees them part and be found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast
from zlib import crc32

from scheduler_components.errors import DecodeError, LockstepError
from scheduler_components.input_blocker import InputBlocker, RelayedMessage
from scheduler_components.ports import InputRelay, InputSource, MessageDecoder, NullInputRelay, NullInputSource
from scheduler_components.recv_skipper import RecvSkipper
from scheduler_components.values import ForwardMode, ReceiverStats, RelayedInput

__all__ = ["RequestReceiver"]

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _Order:
    """What waits to be brought, and what has been."""

    to_bring: deque[RelayedMessage] = field(default_factory=deque)
    digest: int = 0

    def take(self, most: int) -> list[RelayedMessage]:
        return [self.to_bring.popleft() for _ in range(min(most, len(self.to_bring)))]

    def relayed(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            self.digest = crc32(frame, crc32(len(frame).to_bytes(8, "little"), self.digest))


@dataclass(slots=True, kw_only=True)
class RequestReceiver(Generic[T]):
    """Brings the same messages, in one order, to all ranks of a replica. Call it from the scheduler's thread.

    Attributes:
        rank: this one, as ``ParallelState`` puts it: shown in errors.
        reader: reads messages; the same on every rank.
        source: where messages come in; ``NullInputSource`` on all ranks but the leading one.
        relay: the way to the other ranks.
        screen: which messages go on; used where there is a source.
        skipper: in which steps there is a meeting; equal on all ranks.
    """

    rank: str
    reader: MessageDecoder[T]
    source: InputSource = field(default_factory=NullInputSource)
    relay: InputRelay = field(default_factory=NullInputRelay)
    blocker: InputBlocker = field(default_factory=InputBlocker)
    recv_skipper: RecvSkipper = field(default_factory=RecvSkipper)
    _order: _Order = field(default_factory=_Order, init=False, repr=False)

    @property
    def stats(self) -> ReceiverStats:
        """What was counted on this rank."""
        return self.blocker.stats

    def poll(self) -> bool:
        """Take in what has come, without a meeting; True when something waits to be brought to all ranks.

        For a leading rank that is idle: it need not wake the others for what is refused here. Others have no source.
        """
        most, to_bring = self.blocker.bounds.max_recv_per_poll, self._order.to_bring
        for frame in self.source.poll(most) if len(to_bring) < most else ():
            try:
                incoming = self.reader.read(frame)
            except DecodeError:
                self.stats.messages_unreadable += 1
                continue
            to_bring += self.blocker.handle(frame, incoming)
        return bool(to_bring)

    def receive(self, step: int, state_digest: int, mode: ForwardMode) -> Sequence[T]:
        """Return the messages to obey before step ``step``: the same on every rank.

        Every rank calls it before each of its steps, with the same ``step`` and ``mode``. The others wait here for the
        leading rank.

        Args:
            step: number of the step to come.
            state_digest: 32 bits over the caller's state; 0 where it has none.
            mode: what the last step computed; ``ForwardMode.IDLE`` where the caller has no work.

        Raises:
            LockstepError: this rank's step, state or input is not the leading rank's.
            SyncTimeoutError, SyncDivergenceError, StopRequestedError: of the relay.
        """
        if not self.recv_skipper.should_receive(mode):
            self.stats.receives_skipped += 1
            return ()
        self.poll()
        letters = self._order.take(self.blocker.bounds.max_recv_per_poll)
        own = RelayedInput(step, state_digest, self._order.digest, tuple(letter.frame for letter in letters))
        brought = self.relay.broadcast(own)
        self.stats.receives += 1
        self._check(own, brought)
        self._order.relayed(brought.frames)
        self.blocker.on_broadcast()
        if brought is own:
            return [cast(T, letter.incoming.message) for letter in letters]
        return [self.reader.read(frame).message for frame in brought.frames]

    def close(self) -> None:
        """Let go of the relay; safe to call twice."""
        self.relay.close()

    def _check(self, own: RelayedInput, brought: RelayedInput) -> None:
        if (own.step, own.state_digest, own.input_digest) != (
            brought.step,
            brought.state_digest,
            brought.input_digest,
        ):
            raise LockstepError(own.step, self.rank, _shown(brought), _shown(own))


def _shown(relayed: RelayedInput) -> str:
    return f"{relayed.state_digest:08x} at step {relayed.step} after input {relayed.input_digest:08x}"
