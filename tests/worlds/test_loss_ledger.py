"""A reader that is LIVE beyond lost batches has counted them, one by one where it can know them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from observability.kv_stream import StreamState
from worlds import BrokenPromise, PublisherActor, PublisherShape, SubscriberActor
from worlds.loss_ledger import LossLedger
from worlds.recovery_model import POLICY


class Bench:
    """A reader that is LIVE at batch 9 of epoch 0. The test changes its position and its counters."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.state, self.is_extended, self.last_seq = StreamState.LIVE, True, 9
        publisher = PublisherActor(PublisherShape(), broadcast=lambda _: None, first_sequence=lambda _: 0)
        self.reader = SubscriberActor("reader", publisher, channel=self, policy=POLICY)
        self.reader.truth.connected_epoch = self.reader.truth.verified_epoch = 0
        cursor = type(self.reader.follower.cursor)
        for name in ("state", "is_extended", "last_seq"):
            patch.setattr(cursor, name, property(lambda _, name=name: getattr(self, name)))
        self.counters = self.reader.follower.cursor.counters
        self.ledger = LossLedger(self.reader)
        self.ledger.check()

    def send(self, request: object) -> None:
        """Send nothing."""

    def cancel(self) -> None:
        """Send nothing."""

    def pass_batches(self, *, live: int, recovered: int) -> None:
        """Move the position by batches that came live, and by others."""
        self.last_seq += live + recovered
        self.reader.num_applied_live += live
        self.counters.recovered += recovered

    def begin_epoch(self) -> None:
        self.last_seq = 3
        self.reader.num_jumps += 1
        self.reader.truth.connected_epoch = self.reader.truth.verified_epoch = 1


def jump(it: Bench) -> None:
    it.last_seq += 30
    it.reader.num_jumps += 1


def as_plain(it: Bench) -> None:
    it.is_extended = False
    it.ledger.check()


def counts(**counters: int) -> Callable[[Bench], None]:
    def count(it: Bench) -> None:
        for name, value in counters.items():
            setattr(it.counters, name, getattr(it.counters, name) + value)

    return count


def steps(*each: Callable[[Bench], None]) -> Callable[[Bench], None]:
    def do(it: Bench) -> None:
        for step in each:
            step(it)

    return do


RIGHT: dict[str, Callable[[Bench], None]] = {
    "all live": lambda it: it.pass_batches(live=5, recovered=0),
    "lost and recovered": lambda it: it.pass_batches(live=2, recovered=3),
    "batches of an answer that was given up": steps(
        lambda it: it.pass_batches(live=2, recovered=3), counts(recovered=4, replays_cut=1)
    ),
    "a snapshot": steps(jump, counts(snapshots=1)),
    "a restart": steps(lambda it: it.begin_epoch(), counts(snapshots=1, restarts=1)),
    "dead meanwhile": steps(
        lambda it: setattr(it, "state", StreamState.DEAD),
        lambda it: it.ledger.check(),
        lambda it: setattr(it, "state", StreamState.LIVE),
        lambda it: it.begin_epoch(),
        counts(snapshots=1),
    ),
    "a base state without the extension": steps(as_plain, jump, counts(recovered=2)),
    "history lost without the extension": steps(as_plain, jump, counts(losses=1)),
}

WRONG: dict[str, Callable[[Bench], None]] = {
    "a recovered batch is not counted": steps(lambda it: it.pass_batches(live=2, recovered=3), counts(recovered=-1)),
    "too many are counted": steps(lambda it: it.pass_batches(live=5, recovered=0), counts(recovered=1)),
    "a jump without a snapshot": jump,
    "an epoch without a snapshot": steps(lambda it: it.begin_epoch(), counts(restarts=1)),
    "an epoch without a restart": steps(lambda it: it.begin_epoch(), counts(snapshots=1)),
    "nothing is reported without the extension": steps(as_plain, jump),
}


@pytest.mark.parametrize("what", RIGHT)
def test_a_reader_that_reports_what_it_can_know_is_right(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench(monkeypatch)
    RIGHT[what](it)
    it.ledger.check()


@pytest.mark.parametrize("what", WRONG)
def test_a_reader_whose_counters_lack_a_loss_breaks_a_promise(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench(monkeypatch)
    WRONG[what](it)
    with pytest.raises(BrokenPromise, match="every loss is reported"):
        it.ledger.check()


def test_lost_numbers_that_count_as_live_break_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench(monkeypatch)
    for number in (11, 12, 99):
        it.ledger.on_lost(0, number)
    it.pass_batches(live=5, recovered=0)
    with pytest.raises(BrokenPromise, match="of which 2 were lost"):
        it.ledger.check()


def test_nothing_is_compared_until_the_reader_is_live_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Bench(monkeypatch)
    jump(it)
    it.reader.truth.is_spliced = True
    it.ledger.check()
    it.reader.truth.is_spliced, it.state = False, StreamState.PARTIAL
    it.ledger.check()
    it.state = StreamState.LIVE
    with pytest.raises(BrokenPromise, match="jumped from 9 to 39"):
        it.ledger.check()
