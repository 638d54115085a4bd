"""Each request is relayed once or answered once, and no two requests with one id are in flight together."""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components.errors import LockstepError, SyncTimeoutError
from scheduler_components.input_blocker import BlockerState, InputBlocker, InputLimits
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.testing.fakes import ListInputSource, TextInputReader
from scheduler_components.values import ForwardMode, InputMessage, RejectionReason, RelayedInput, RequestRejection


@dataclass
class BreakableRelay:
    """The relay of a replica of one rank. ``breaks_at`` are calls in which other ranks are missing."""

    breaks_at: set[int] = field(default_factory=set)
    differs: bool = False
    num_calls: int = 0
    num_closed: int = 0

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        self.num_calls += 1
        if self.num_calls in self.breaks_at:
            raise SyncTimeoutError("input", own.step, (1,), 1.0)
        return RelayedInput(own.step, own.state_digest + 1, own.input_digest) if self.differs else own

    def close(self) -> None:
        self.num_closed += 1


class AnsweringRank:
    """A leading rank, the requests in flight behind it, and the answers to rejected ones."""

    def __init__(self, *, most: int = 256, breaks_at: set[int] | None = None, max_held: int = 4096) -> None:
        self.source, self.relay = ListInputSource(), BreakableRelay(breaks_at or set())
        self.active: dict[str, str] = {}
        self.relayed: list[str] = []
        self.answered: list[str] = []
        self.reasons: list[str] = []
        self.receiver = RequestReceiver(
            rank="the leader",
            reader=TextInputReader(),
            source=self.source,
            relay=self.relay,
            blocker=InputBlocker(
                bounds=InputLimits(max_recv_per_poll=most, max_held_requests=max_held),
                active_ids=self.active.keys(),
                reject=self.reject,
            ),
        )
        self.num_steps = 0

    def reject(self, rejection: RequestRejection, incoming: InputMessage[object]) -> None:
        self.answered.append(str(incoming.message))
        self.reasons.append(rejection.reason)

    def step(self, *texts: str) -> None:
        self.source.frames += [text.encode() for text in texts]
        self.num_steps += 1
        for text in self.receiver.receive(self.num_steps, 0, ForwardMode.DECODE):
            kind, rid, *_ = text.split(":")
            if kind == "request":
                assert rid not in self.active, f"{text} joins {self.active[rid]}"
                self.active[rid] = text
                self.relayed.append(text)
            elif kind == "abort":
                self.active.pop(rid, None)


RIDS = [f"r{number}" for number in range(6)]
messages = st.one_of(
    st.tuples(st.just("request"), st.sampled_from(RIDS)),
    st.tuples(st.just("request"), st.sampled_from(RIDS)),
    st.tuples(st.just("abort"), st.sampled_from(RIDS)),
    st.tuples(st.sampled_from(["block", "unblock", "drain", "command"]), st.just("")),
)
steps = st.tuples(st.lists(messages, max_size=6), st.sets(st.sampled_from(RIDS), max_size=3))


@settings(deadline=None)
@given(
    trace=st.lists(steps, min_size=1, max_size=12),
    most=st.integers(1, 3),
    breaks_at=st.sets(st.integers(1, 12), max_size=2),
    max_held=st.sampled_from([2, 100]),
)
def test_every_request_is_relayed_once_or_answered_once(
    trace: list[tuple[list[tuple[str, str]], set[str]]], most: int, breaks_at: set[int], max_held: int
) -> None:
    rank, sent = AnsweringRank(most=most, breaks_at=breaks_at, max_held=max_held), list[str]()
    for arrivals, ended in trace:
        texts = []
        for kind, rid in arrivals:
            texts.append(f"{kind}:{rid}:{len(sent) + len(texts)}")  # each request differs from all others
        sent += texts
        try:
            rank.step(*texts)
        except SyncTimeoutError:
            assert rank.relay.num_calls in breaks_at
        for rid in ended:
            rank.active.pop(rid, None)
    while rank.source.frames:
        rank.receiver.poll()
        if rank.receiver._pending:
            rank.relay.breaks_at.clear()
            rank.step()
            rank.active.clear()
    rank.receiver.close()
    rank.receiver.close()
    outcomes = Counter(rank.relayed + rank.answered)
    assert outcomes == Counter(text for text in sent if text.startswith("request"))
    stats = rank.receiver.stats
    assert (stats.requests_admitted, stats.requests_refused) == (len(rank.relayed), len(rank.answered))
    assert stats.requests_held == 0


def test_an_id_stays_in_use_while_its_request_waits_for_a_later_relay() -> None:
    rank = AnsweringRank()
    rank.step("block:", *(f"request:h{number}:1" for number in range(255)))
    rank.step(*(f"request:h{number}:1" for number in range(255, 300)))
    rank.step("unblock:")
    assert len(rank.relayed) == 256, "the others follow in the next step"
    rank.step("request:h299:2")
    assert len(rank.relayed) == 300
    assert (rank.answered, rank.reasons) == (["request:h299:2"], [RejectionReason.IN_USE])


def test_held_and_waiting_requests_are_answered_at_the_end() -> None:
    rank = AnsweringRank(most=1)
    rank.step("request:a:1")
    rank.source.frames += [b"request:b:1", b"block:", b"request:c:1", b"request:d:1"]
    for _ in range(4):
        copy(rank.receiver.blocker.stats)
        rank.receiver._pending += [
            each
            for frame in rank.source.poll(1)
            for each in rank.receiver.blocker.handle(frame, TextInputReader().read(frame))
        ]
    rank.receiver.close()
    assert sorted(rank.answered) == ["request:b:1", "request:c:1", "request:d:1"]
    assert set(rank.reasons) == {RejectionReason.STOPPED}
    assert rank.receiver.blocker.state is BlockerState.CLOSED
    rank.source.frames += [b"unblock:", b"request:e:1"]
    rank.receiver.poll()
    rank.receiver.poll()
    assert rank.answered[-1] == "request:e:1"
    assert rank.relay.num_closed == 1


@pytest.mark.parametrize("error", [SyncTimeoutError, LockstepError])
def test_requests_of_a_failed_relay_are_answered_and_may_be_sent_again(error: type[Exception]) -> None:
    rank = AnsweringRank(breaks_at={1} if error is SyncTimeoutError else set())
    rank.relay.differs = error is LockstepError
    with pytest.raises(error):
        rank.step("request:a:1", "command:x", "request:b:1")
    assert rank.answered == ["request:a:1", "request:b:1"]
    assert rank.receiver.stats.requests_admitted == 0
    rank.relay.differs = False
    rank.step("request:a:1")
    assert rank.relayed == ["request:a:1"], "it was not served, so it is no copy"
