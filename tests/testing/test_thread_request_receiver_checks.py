"""Every intake check passes on the kit's relays, and fails, with its trace, on one that breaks its promise."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue

import pytest

from scheduler_components import ParallelState
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.agreement.thread_sync import ThreadSyncHub
from scheduler_components.receiving.recv_skipper import RecvSkipper
from scheduler_components.receiving.sync_input_relay import SyncGroupRelay
from scheduler_components.request_receiver import InputSource, NullInputSource, RequestReceiver
from scheduler_components.testing import RECEIVER_CHECKS, ConformanceError
from scheduler_components.testing import thread_request_receiver_checks as checks
from scheduler_components.testing.fakes import ListInputSource, TextInputReader
from scheduler_components.values import RelayedInput

WAIT_S = 10.0


class QueueRelay:
    """One way, as over the engine's sockets: the leading rank fills the queues, and the others make something of it."""

    def __init__(self, wires, spoil=None):
        self.wires, self.spoil = wires, spoil

    def broadcast(self, own):
        if self.spoil is not None:
            return self.spoil(self.wires.get(timeout=WAIT_S), own)
        for wire in self.wires:
            wire.put(own)
        return own

    def close(self):
        pass


def changed_relay(came: RelayedInput, own: RelayedInput) -> RelayedInput:
    return came


def opener(
    spoil: Callable[[RelayedInput, RelayedInput], RelayedInput] = changed_relay, *, source_for_all: bool = False
) -> checks.OpenReceivers:
    """Three ranks over wires, which take input in after every second decode step."""

    def open_receivers(source: InputSource) -> list[RequestReceiver[str]]:
        wires = [Queue(), Queue()]
        relays = [QueueRelay(wires), *(QueueRelay(wire, spoil) for wire in wires)]
        others = source if source_for_all else NullInputSource()
        return [
            RequestReceiver(
                rank=str(number),
                reader=TextInputReader(),
                source=others if number else source,
                relay=relay,
                recv_skipper=RecvSkipper(recv_interval=2),
            )
            for number, relay in enumerate(relays)
        ]

    return open_receivers


def over_groups(source: InputSource) -> list[RequestReceiver[str]]:
    """CP 2 x PP 2 over groups by which ranks agree."""
    world = world_rank_groups(ParallelState.from_tp_rank(0, tp_size=2, attn_cp_size=2, pp_size=2))
    hub = ThreadSyncHub({sets.rank: sets.reduce_groups for sets in world}, timeout_s=WAIT_S)
    relays = [
        SyncGroupRelay(rank=sets.rank, leads=not sets.rank, groups=hub.parallel_groups(sets.rank).groups)
        for sets in world
    ]
    return [
        RequestReceiver(
            rank=str(relay.rank),
            reader=TextInputReader(),
            source=NullInputSource() if relay.rank else source,
            relay=relay,
        )
        for relay in relays
    ]


@pytest.mark.parametrize("check", RECEIVER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("open_receivers", [opener(), over_groups], ids=["wires", "groups"])
def test_the_kits_own_pass(check: Callable[[checks.OpenReceivers], None], open_receivers: checks.OpenReceivers) -> None:
    check(open_receivers)


def test_a_replica_of_one_rank_passes() -> None:
    for check in RECEIVER_CHECKS:
        check(lambda source: [RequestReceiver(rank="0", reader=TextInputReader(), source=source)])


def spoiling(change):
    """Return what a rank makes of the frames of the leading rank, with its own digests."""
    return lambda came, own: RelayedInput(own.step, own.state_digest, own.input_digest, change(came.frames))


def listens_for_itself(came, own):
    return own


SEQUENCE = checks.check_all_ranks_receive_the_same_sequence
BROKEN = {
    "without last": (SEQUENCE, spoiling(lambda frames: frames[:-1]), "steps and messages of rank 1"),
    "reversed order": (SEQUENCE, spoiling(lambda frames: frames[::-1]), "steps and messages of rank 1"),
    "listens for itself": (SEQUENCE, listens_for_itself, "steps and messages of rank 1"),
    "cut": (
        checks.check_messages_of_any_size_arrive_intact,
        spoiling(lambda frames: tuple(frame[:60_000] for frame in frames)),
        "messages of rank 1 that differ from the sent ones",
    ),
    "believes all": (
        checks.check_diverged_rank_is_detected,
        spoiling(lambda frames: frames),
        "an error on the diverged rank",
    ),
}


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_relay_fails_with_its_trace(name):
    check, spoil, complaint = BROKEN[name]
    with pytest.raises(ConformanceError, match=complaint):
        check(opener(spoil))


def test_ranks_that_all_listen_fail() -> None:
    """Each takes what it hears first, as ranks on one work queue would."""
    with pytest.raises(ConformanceError):
        checks.check_all_ranks_receive_the_same_sequence(opener(listens_for_itself, source_for_all=True))


def test_an_intake_that_lets_blocked_requests_in_fails() -> None:
    class NeverBlocks(TextInputReader):
        def read(self, frame):  # type: ignore[no-untyped-def]
            return super().read(frame.replace(b"unblock", b"command").replace(b"block", b"command"))

    with pytest.raises(ConformanceError, match="messages of rank 0"):
        checks.check_blocked_input_waits_for_all(
            lambda source: [RequestReceiver(rank="0", reader=NeverBlocks(), source=source)]
        )


def test_a_list_of_messages_is_taken_oldest_first_and_no_more_than_asked() -> None:
    source = ListInputSource([b"1", b"2", b"3"])
    assert source.poll(2) == [b"1", b"2"]
    assert source.poll(2) == [b"3"]
    assert source.poll(2) == []
