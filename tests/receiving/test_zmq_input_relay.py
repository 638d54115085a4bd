"""Input over real sockets: the leading rank relays it, and no rank waits forever."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import zmq

from scheduler_components import DecodeError
from scheduler_components.receiving.zmq_input_relay import (
    StopRequestedError,
    ZmqFollowerRelay,
    ZmqInputSource,
    ZmqLeaderRelay,
)
from scheduler_components.values import RelayedInput

pytestmark = pytest.mark.sockets

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


class Pairs:
    """PUSH and PULL sockets of one process."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def open(self, high_water_mark: int = 0) -> Pair:
        push, pull = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        push.sndhwm = pull.rcvhwm = high_water_mark
        self.sockets += (push, pull)
        pull.bind(f"inproc://{len(self.sockets)}")
        push.connect(f"inproc://{len(self.sockets)}")
        return push, pull


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    opened = Pairs()
    yield opened
    opened.context.destroy(linger=0)


def wait(socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
    return bool(socket.poll(10_000, event))


def stopped(socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
    return False


def test_a_source_returns_at_most_the_requested_number_of_messages(pairs: Pairs) -> None:
    push, pull = pairs.open()
    for number in range(5):
        push.send(b"%d" % number)
    assert pull.poll(10_000)
    source = ZmqInputSource(socket=pull)
    assert list(source.poll(3)) == [b"0", b"1", b"2"]
    assert list(source.poll(3)) == [b"3", b"4"]
    assert list(source.poll(3)) == []


def test_the_leading_ranks_input_reaches_every_other_rank(pairs: Pairs) -> None:
    wires = [pairs.open() for _ in range(3)]
    leader = ZmqLeaderRelay(followers=[push for push, _ in wires], wait_for=wait)
    inputs = [RelayedInput(number, 2**32 - 1, number, (b"", bytes(range(256)) * 1000)) for number in range(3)]
    assert [leader.broadcast(each) for each in inputs] == inputs
    for _, pull in wires:
        follower = ZmqFollowerRelay(steps=pull, wait_for=wait)
        assert [follower.broadcast(RelayedInput(0, 0, 0)) for _ in inputs] == inputs
        follower.close()
    leader.close()


def test_both_ends_stop_with_the_engine(pairs: Pairs) -> None:
    push, pull = pairs.open(high_water_mark=1)
    leader = ZmqLeaderRelay(followers=[push], wait_for=stopped)
    with pytest.raises(StopRequestedError):
        for number in range(100):  # without a reader
            leader.broadcast(RelayedInput(number, 0, 0))
    _, silent = pairs.open()
    with pytest.raises(StopRequestedError):
        ZmqFollowerRelay(steps=silent, wait_for=stopped).broadcast(RelayedInput(0, 0, 0))
    assert pull.poll(10_000)


@pytest.mark.parametrize("noise", [b"", b"\xc1", msgspec.msgpack.encode([1, 2])])
def test_a_frame_that_is_no_relayed_input_is_rejected(pairs: Pairs, noise: bytes) -> None:
    push, pull = pairs.open()
    push.send(noise)
    with pytest.raises(DecodeError, match="is no relayed input"):
        ZmqFollowerRelay(steps=pull, wait_for=wait).broadcast(RelayedInput(0, 0, 0))
