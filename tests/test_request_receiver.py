"""All ranks admit the same sequence between the same steps; without the relay they diverge."""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components.errors import LockstepError
from scheduler_components.input_blocker import InputBlocker, InputLimits
from scheduler_components.receiving.recv_skipper import RecvSkipper
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.testing.fakes import ListInputSource, TextInputReader
from scheduler_components.values import ForwardMode, RelayedInput


class Tape:
    """What a leading rank relayed; its end of the relay. ``playback`` is another rank's, which reads it later."""

    def __init__(self) -> None:
        self.relayed: list[RelayedInput] = []

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        self.relayed.append(own)
        return own

    def close(self) -> None:
        pass


class Playback:
    def __init__(self, tape: Tape) -> None:
        self.to_come = iter(tape.relayed)

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        return next(self.to_come)

    def close(self) -> None:
        pass


class OwnEars:
    """The agreement removed: steps and digests still come from the leading rank, messages are this rank's own."""

    def __init__(self, tape: Tape) -> None:
        self.to_come = iter(tape.relayed)

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        relayed = next(self.to_come)
        return RelayedInput(relayed.step, relayed.state_digest, relayed.input_digest, own.frames)

    def close(self) -> None:
        pass


class ReceivingRank:
    """A scheduler whose whole state is what it has admitted, and in which step."""

    def __init__(self, relay: Tape | Playback | OwnEars, interval: int, most: int) -> None:
        self.source = ListInputSource()
        self.intake = RequestReceiver(
            rank="a rank",
            reader=TextInputReader(),
            source=self.source,
            relay=relay,
            blocker=InputBlocker(bounds=InputLimits(max_recv_per_poll=most)),
            recv_skipper=RecvSkipper(recv_interval=interval),
        )
        self.admitted: list[tuple[int, str]] = []
        self.digest = 0

    def step(self, number: int, arrivals: list[str], mode: ForwardMode) -> None:
        self.source.frames += [text.encode() for text in arrivals]
        for text in self.intake.receive(number, self.digest, mode):
            self.admitted.append((number, text))
            self.digest = crc32(f"{number} {text}".encode(), self.digest)


NOISE = st.sampled_from(["abort:a", "abort:b", "block:", "unblock:", "drain:", "command:dump", "noise", "request:a"])
REQUESTS = st.builds("request:{}:{}".format, st.integers(0, 30), st.integers(0, 1))
STEPS = st.lists(
    st.tuples(st.lists(REQUESTS | NOISE, max_size=5), st.sampled_from(ForwardMode)), min_size=1, max_size=15
)


@given(steps=STEPS, interval=st.integers(1, 4), most=st.integers(1, 4))
def test_all_ranks_admit_one_sequence(steps: list[tuple[list[str], ForwardMode]], interval: int, most: int) -> None:
    tape = Tape()
    leader = ReceivingRank(tape, interval, most)
    for number, (arrivals, mode) in enumerate(steps):
        leader.step(number, arrivals, mode)
    for _ in range(2):
        follower = ReceivingRank(Playback(tape), interval, most)
        for number, (_, mode) in enumerate(steps):
            follower.step(number, [], mode)
        assert follower.admitted == leader.admitted
        assert follower.digest == leader.digest
    assert leader.intake.stats.receives + leader.intake.stats.receives_skipped == len(steps)
    assert max((len(each.frames) for each in tape.relayed), default=0) <= most


@given(steps=STEPS, late=st.integers(0, 14))
def test_ranks_that_read_their_own_socket_diverge_and_are_found_at_the_next_relay(
    steps: list[tuple[list[str], ForwardMode]], late: int
) -> None:
    """The other rank hears the same messages, one of the lots a step later."""
    tape = Tape()
    leader = ReceivingRank(tape, 1, 256)
    steps = [*steps, ([], ForwardMode.DECODE), ([], ForwardMode.DECODE)]
    for number, (arrivals, mode) in enumerate(steps):
        leader.step(number, arrivals, mode)
    other = ReceivingRank(OwnEars(tape), 1, 256)
    heard: list[list[str]] = [arrivals for arrivals, _ in steps]
    late = min(late, len(steps) - 3)
    heard[late], heard[late + 1] = [], heard[late] + heard[late + 1]
    for number, (_, mode) in enumerate(steps):
        other.step(number, heard[number], mode)
        if other.admitted != [each for each in leader.admitted if each[0] <= number]:
            with pytest.raises(LockstepError):
                other.step(number + 1, heard[number + 1], steps[number + 1][1])
            return


def test_a_rank_that_skips_different_steps_is_found() -> None:
    tape = Tape()
    leader = ReceivingRank(tape, 1, 256)
    for number in range(2):
        leader.step(number, [], ForwardMode.DECODE)
    other = ReceivingRank(Playback(tape), 2, 256)
    other.step(0, [], ForwardMode.DECODE)
    with pytest.raises(
        LockstepError, match=r"step 1: a rank has state 00000000 at step 1 .* its leader has 00000000 at"
    ):
        other.step(1, [], ForwardMode.DECODE)


def test_an_idle_leading_rank_wakes_no_rank_for_a_rejected_message() -> None:
    rank = ReceivingRank(Tape(), 1, 256)
    rank.source.frames += [b"noise", b"drain:", b"request:a"]
    assert not rank.intake.poll()
    assert (rank.intake.stats.messages_unreadable, rank.intake.stats.requests_refused) == (1, 1)
    rank.source.frames += [b"unblock:", b"request:b"]
    assert rank.intake.poll()
    assert rank.intake.receive(1, 0, ForwardMode.IDLE) == ["request:b"]


def test_waiting_messages_stay_in_the_source() -> None:
    rank = ReceivingRank(Tape(), 1, 2)
    rank.source.frames += [b"request:%d" % number for number in range(7)]
    for _ in range(3):
        assert rank.intake.poll()
    assert len(rank.source.frames) == 5


@pytest.mark.parametrize(
    "heard", [[], [b"command:other"], [b"command:", b"command:"]], ids=["nothing", "another", "cut elsewhere"]
)
def test_a_caller_without_a_digest_is_found_by_its_input(heard: list[bytes]) -> None:
    tape = Tape()
    leader = ReceivingRank(tape, 1, 256)
    leader.source.frames.append(b"command:command:")
    for step in range(2):
        leader.intake.receive(step, 0, ForwardMode.DECODE)
    other = ReceivingRank(OwnEars(tape), 1, 256)
    other.source.frames += heard
    other.intake.receive(0, 0, ForwardMode.DECODE)
    with pytest.raises(LockstepError, match="after input"):
        other.intake.receive(1, 0, ForwardMode.DECODE)


def test_an_id_can_be_reused_when_the_scheduler_releases_it() -> None:
    rank = ReceivingRank(Tape(), 1, 256)
    rank.source.frames += [b"request:a:1", b"request:a:2"]  # the second while the first is on its way
    assert rank.intake.receive(0, 0, ForwardMode.DECODE) == ["request:a:1"]
    rank.source.frames.append(b"request:a:3")
    assert rank.intake.receive(1, 0, ForwardMode.DECODE) == ["request:a:3"]
