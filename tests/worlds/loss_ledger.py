"""LossLedger: compares what a reader reports about losses with the numbers that its network lost."""

from __future__ import annotations

import msgspec

from observability.kv_stream import StreamState
from worlds.subscriber_actor import SubscriberActor
from worlds.timeline import BrokenPromise

__all__ = ["LossLedger"]


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
