"""Every intake check passes on the kit's relays, and fails, with its trace, on one that breaks its promise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition

import pytest

from scheduler_components import ParallelState
from scheduler_components.hicache import world_rank_sets
from scheduler_components.intake import NO_INPUT, InputRelay, InputSource, Intake, RecvSkipper, RelayedInput, SyncRelay
from scheduler_components.testing import INTAKE_CHECKS, ConformanceError, ListInput, TextReader, ThreadSyncHub
from scheduler_components.testing import thread_intake_checks as checks

WAIT_S = 10.0


class Wire:
    """From the leading rank to one other."""

    def __init__(self) -> None:
        self._sent: deque[RelayedInput] = deque()
        self._changed = Condition()

    def send(self, relayed: RelayedInput) -> None:
        with self._changed:
            self._sent.append(relayed)
            self._changed.notify_all()

    def recv(self) -> RelayedInput:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self._sent), WAIT_S)
            return self._sent.popleft()


class Leader:
    def __init__(self, wires: Sequence[Wire]) -> None:
        self.wires = wires

    def bring(self, own: RelayedInput) -> RelayedInput:
        for wire in self.wires:
            wire.send(own)
        return own

    def close(self) -> None:
        pass


class Follower:
    """One way, as over the engine's sockets. ``spoil`` makes something else of what comes."""

    def __init__(self, wire: Wire, spoil: Callable[[RelayedInput, RelayedInput], RelayedInput]) -> None:
        self.wire, self.spoil = wire, spoil

    def bring(self, own: RelayedInput) -> RelayedInput:
        return self.spoil(self.wire.recv(), own)

    def close(self) -> None:
        pass


def told(came: RelayedInput, own: RelayedInput) -> RelayedInput:
    return came


def opener(
    spoil: Callable[[RelayedInput, RelayedInput], RelayedInput] = told, *, source_for_all: bool = False
) -> checks.OpenIntakes:
    """Three ranks over wires, which take input in after every second decode step."""

    def open_intakes(source: InputSource) -> list[Intake[str]]:
        wires = [Wire(), Wire()]
        relays: list[InputRelay] = [Leader(wires), *(Follower(wire, spoil) for wire in wires)]
        others = source if source_for_all else NO_INPUT
        return [
            Intake(
                rank=str(number),
                reader=TextReader(),
                source=others if number else source,
                relay=relay,
                skipper=RecvSkipper(recv_interval=2),
            )
            for number, relay in enumerate(relays)
        ]

    return open_intakes


def over_groups(source: InputSource) -> list[Intake[str]]:
    """CP 2 x PP 2 over groups by which ranks agree."""
    world = world_rank_sets(ParallelState.from_tp_rank(0, tp_size=2, attn_cp_size=2, pp_size=2))
    hub = ThreadSyncHub({sets.rank: sets.hops for sets in world}, timeout_s=WAIT_S)
    relays = [SyncRelay(rank=sets.rank, leads=not sets.rank, groups=hub.domain(sets.rank).groups) for sets in world]
    return [
        Intake(rank=str(relay.rank), reader=TextReader(), source=NO_INPUT if relay.rank else source, relay=relay)
        for relay in relays
    ]


@pytest.mark.parametrize("check", INTAKE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("open_intakes", [opener(), over_groups], ids=["wires", "groups"])
def test_the_kits_own_pass(check: Callable[[checks.OpenIntakes], None], open_intakes: checks.OpenIntakes) -> None:
    check(open_intakes)


def test_a_replica_of_one_rank_passes() -> None:
    for check in INTAKE_CHECKS:
        check(lambda source: [Intake(rank="0", reader=TextReader(), source=source)])


def without_last(came: RelayedInput, own: RelayedInput) -> RelayedInput:
    return RelayedInput(own.step, own.state_digest, own.input_digest, came.frames[:-1])


def reversed_order(came: RelayedInput, own: RelayedInput) -> RelayedInput:
    return RelayedInput(own.step, own.state_digest, own.input_digest, came.frames[::-1])


def cut(came: RelayedInput, own: RelayedInput) -> RelayedInput:
    return RelayedInput(own.step, own.state_digest, own.input_digest, tuple(frame[:60_000] for frame in came.frames))


def believes_all(came: RelayedInput, own: RelayedInput) -> RelayedInput:
    return RelayedInput(own.step, own.state_digest, own.input_digest, came.frames)


def listens_for_itself(came: RelayedInput, own: RelayedInput) -> RelayedInput:
    return own


BROKEN = [
    (checks.check_all_ranks_receive_one_sequence, opener(without_last), "steps and messages of rank 1"),
    (checks.check_all_ranks_receive_one_sequence, opener(reversed_order), "steps and messages of rank 1"),
    (checks.check_all_ranks_receive_one_sequence, opener(listens_for_itself), "steps and messages of rank 1"),
    (checks.check_every_size_comes_whole, opener(cut), "messages of rank 1 that are not those that came"),
    (checks.check_a_rank_in_another_state_is_found, opener(believes_all), "an error of the rank that differs"),
]


@pytest.mark.parametrize("check, open_intakes, complaint", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_relay_fails_with_its_trace(
    check: Callable[[checks.OpenIntakes], None], open_intakes: checks.OpenIntakes, complaint: str
) -> None:
    with pytest.raises(ConformanceError, match=complaint):
        check(open_intakes)


def test_ranks_that_all_listen_fail() -> None:
    """Each takes what it hears first, as ranks on one work queue would."""
    with pytest.raises(ConformanceError):
        checks.check_all_ranks_receive_one_sequence(opener(listens_for_itself, source_for_all=True))


def test_an_intake_that_lets_blocked_requests_in_fails() -> None:
    class NeverBlocks(TextReader):
        def read(self, frame):  # type: ignore[no-untyped-def]
            return super().read(frame.replace(b"unblock", b"command").replace(b"block", b"command"))

    with pytest.raises(ConformanceError, match="messages of rank 0"):
        checks.check_blocked_input_waits_for_all(lambda source: [Intake(rank="0", reader=NeverBlocks(), source=source)])


def test_a_list_of_messages_is_taken_oldest_first_and_no_more_than_asked() -> None:
    source = ListInput([b"1", b"2", b"3"])
    assert source.take(2) == [b"1", b"2"]
    assert source.take(2) == [b"3"]
    assert source.take(2) == []
