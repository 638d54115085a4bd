"""Input over the sync groups: CP x TP x PP, short and long. All ranks find a rank that differs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from math import prod

import pytest

from scheduler_components import ParallelState
from scheduler_components.agreement import MIN_NEUTRAL, ParallelGroups, SyncCall, elementwise_min
from scheduler_components.errors import SyncClosedError, SyncDivergenceError, SyncTimeoutError
from scheduler_components.receiving.sync_input_relay import SyncGroupRelay
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.testing import run_ranks
from scheduler_components.testing.fakes import ListInputSource, TextInputReader
from scheduler_components.values import ForwardMode, RelayedInput

TOPOLOGIES = [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2), (3, 1, 1)]
BATCHES = [
    [],
    [b"request:a"],
    [b"command:%d" % number for number in range(40)],
    [b"request:long:" + bytes(range(256)) * 2500],  # more than one reduction of the largest size
    [b"", b"command:"],
    [b"command:" + b"x" * size for size in range(1960 - 40, 1960)],
]


def world_of(pp: int, cp: int, tp: int) -> ParallelState:
    return ParallelState.from_tp_rank(0, tp_size=cp * tp, attn_cp_size=cp, pp_size=pp)


def relay_of(groups: ParallelGroups, *, leader: int = 0) -> SyncGroupRelay:
    return SyncGroupRelay(rank=groups.rank, leads=groups.rank == leader, groups=groups.groups)


@pytest.mark.parametrize("sizes", TOPOLOGIES, ids="pp{0[0]} cp{0[1]} tp{0[2]}".format)
def test_all_ranks_get_the_leading_ranks_input(sizes: tuple[int, int, int]) -> None:
    def work(groups: ParallelGroups) -> list[tuple[bytes, ...]]:
        relay = relay_of(groups)
        return [
            relay.broadcast(RelayedInput(step, 2**32 - 1, 0, tuple(frames) if relay.leads else ())).frames
            for step, frames in enumerate(BATCHES)
        ]

    assert run_ranks(world_of(*sizes), work) == [[tuple(frames) for frames in BATCHES]] * prod(sizes)


def test_every_size_around_the_first_block_arrives_complete() -> None:
    def work(groups: ParallelGroups) -> list[int]:
        relay = relay_of(groups)
        frames = [(b"x" * size,) if relay.leads else () for size in range(1930, 1990)]
        return [len(relay.broadcast(RelayedInput(step, 0, 0, given)).frames[0]) for step, given in enumerate(frames)]

    assert run_ranks(world_of(1, 1, 2), work) == [list(range(1930, 1990))] * 2


def test_a_receiver_over_groups_admits_one_sequence_on_all_stages() -> None:
    def work(groups: ParallelGroups) -> list[object]:
        source = ListInputSource()
        leads = groups.rank == 0
        intake = RequestReceiver(rank=str(groups.rank), reader=TextInputReader(), source=source, relay=relay_of(groups))
        admitted: list[object] = []
        for step in range(30):
            if leads and step % 3 != 1:
                source.frames += [f"request:{step}".encode(), f"abort:{step - 2}".encode()]
            admitted.append(tuple(intake.receive(step, len(admitted), ForwardMode.DECODE)))
        return admitted

    first, *others = run_ranks(world_of(2, 2, 1), work)
    assert sum(map(len, first)) == 20 + 10  # an abort of a request that never came is kept back
    assert all(each == first for each in others)


@pytest.mark.parametrize("field", ["step", "state_digest", "input_digest"])
def test_a_rank_with_a_different_value_is_found_by_all_ranks(field: str) -> None:
    def work(groups: ParallelGroups) -> str:
        relay = relay_of(groups)
        place = {"step": 7, "state_digest": 1, "input_digest": 2} | ({field: 9} if groups.rank == 2 else {})
        with pytest.raises(SyncDivergenceError) as raised:
            relay.broadcast(RelayedInput(**place))
        with pytest.raises(SyncDivergenceError):
            relay.broadcast(RelayedInput(8, 0, 0))  # ranks that parted once are not in step
        return str(raised.value)

    messages = run_ranks(world_of(2, 1, 2), work)
    assert len(set(messages)) == 1
    assert "rank 0: 'input 00000002, state 00000001, leads' at step 7, call 0; rank 1: 'input" in messages[0]


@pytest.mark.parametrize("leaders", [(), (0, 1)], ids=["no leader", "two lead"])
def test_none_or_two_leading_ranks_are_found(leaders: tuple[int, ...]) -> None:
    def work(groups: ParallelGroups) -> None:
        relay = SyncGroupRelay(rank=groups.rank, leads=groups.rank in leaders, groups=groups.groups)
        with pytest.raises(SyncDivergenceError, match="rank 0: 'input 0"):
            relay.broadcast(RelayedInput(1, 0, 0, (b"request:a",) if relay.leads else ()))

    run_ranks(world_of(1, 1, 2), work)


def test_a_missing_rank_is_waited_for_until_the_timeout_of_the_groups() -> None:
    def work(groups: ParallelGroups) -> None:
        if groups.rank:
            return
        relay = relay_of(groups)
        for _ in range(2):
            with pytest.raises(SyncTimeoutError, match="missing ranks: 1"):
                relay.broadcast(RelayedInput(1, 0, 0))

    run_ranks(world_of(1, 1, 2), work, timeout_s=0.05)


def test_a_relay_is_closed_with_its_groups() -> None:
    class Group:
        ranks = (0,)
        is_open = True

        def all_reduce_min(self, values: list[int], call: object) -> list[int]:
            if not self.is_open:
                raise SyncClosedError("closed")
            return values

        def all_gather(self, values: list[int], call: object) -> list[int]:
            return values

        def close(self) -> None:
            self.is_open = False

    relay = SyncGroupRelay(rank=0, leads=True, groups=(Group(),))
    own = RelayedInput(1, 0, 0, (b"command:",))
    assert relay.broadcast(own) is own
    relay.close()
    relay.close()
    with pytest.raises(SyncClosedError):
        relay.broadcast(own)


class WithFollower:
    """A group of the leading rank and one other, in one call: the other contributes neutral values."""

    ranks = (0, 1)

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_closed = 0
        self.error: Exception | None = None

    def all_reduce_min(self, values: Sequence[int], call: SyncCall) -> list[int]:
        self.num_calls += 1
        return elementwise_min([list(values), list(values) if self.num_calls == 1 else [MIN_NEUTRAL] * len(values)])

    def all_gather(self, values: Sequence[int], call: SyncCall) -> list[int]:
        return [*values, *values]

    def close(self) -> None:
        self.num_closed += 1
        if self.error is not None:
            raise self.error


def test_a_long_input_takes_memory_for_its_bytes_and_not_for_its_integers() -> None:
    """A Python integer takes 36 bytes in a list; a request of 64 MiB took 620 MB of each rank."""
    size = 2 << 20
    own = RelayedInput(1, 0, 0, (bytes(range(256)) * (size // 256),))
    relay = SyncGroupRelay(rank=0, leads=True, groups=(WithFollower(),))
    tracemalloc.start()
    try:
        assert relay.broadcast(own) is own
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * size + 8_000_000, "the encoded bytes, and the integers of one piece"


def test_all_groups_are_closed_if_one_cannot_be() -> None:
    for kind in (SyncGroupRelay(rank=0, leads=True, groups=()), ParallelGroups()):
        groups = [WithFollower() for _ in range(3)]
        groups[0].error = OSError("the first")
        kind.groups = tuple(groups)
        with pytest.raises(OSError, match="the first"):
            kind.close()
        assert [group.num_closed for group in groups] == [1, 1, 1]
