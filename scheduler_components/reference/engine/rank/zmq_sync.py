"""Agreement of an engine's processes over ZMQ sockets of its own: no torch, no ports, and an end when the engine ends.

Every rank binds a PULL socket and connects a PUSH socket to each rank that it agrees with. In a collective each member
sends its vector to all others of the group and reduces what it gets: one way, in groups this small. A rank that waits
in vain says so to all, and everybody raises the same error.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import zmq

from scheduler_components.agreement import ParallelGroups, elementwise_min
from scheduler_components.errors import SyncTimeoutError
from scheduler_components.values import SyncCall
from scheduler_components.zmq_input_relay import StopRequestedError, WaitForSocket

__all__ = [
    "ZmqSyncHub",
    "open_zmq_groups",
    "open_zmq_sync_hub",
]

_Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]
_Ranks: TypeAlias = tuple[int, ...]


class _Vector(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """What one rank brings to the ``turn``-th collective of a group; int64, in the machine's byte order."""

    sender: int
    ranks: _Ranks
    turn: int
    values: bytes


class _Failure(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """A rank has waited in vain."""

    operation: str
    step: int
    missing: _Ranks


_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[_Vector | _Failure] = msgspec.msgpack.Decoder(_Vector | _Failure)


@dataclass(slots=True, kw_only=True)
class ZmqSyncHub:
    """One rank's sockets to the ranks that it agrees with, for one thread.

    Attributes:
        rank: this one.
        inbox: PULL, bound.
        peers: PUSH, connected, by rank.
        wait_for: waits for a socket or for the order to stop.
        timeout_s: longest wait for a collective of the first hop; for one of the n-th hop, n times as long, so that who
            waits for a waiting rank learns from it whom it waits for.
    """

    rank: int
    inbox: zmq.Socket[bytes]
    peers: dict[int, zmq.Socket[bytes]]
    wait_for: WaitForSocket
    timeout_s: float
    _brought: dict[tuple[_Ranks, int], dict[int, list[int]]] = field(default_factory=dict, init=False)
    _turns: dict[_Ranks, int] = field(default_factory=dict, init=False)

    def exchange(self, ranks: _Ranks, hop: int, values: Sequence[int], call: SyncCall) -> list[list[int]]:
        """Bring ``values`` to the next collective of ``ranks``; returns all members' values in rank order.

        Raises:
            SyncTimeoutError: members did not come in time, here or, as another rank says, elsewhere.
            StopRequestedError: the engine stops.
        """
        turn = self._turns[ranks] = self._turns.get(ranks, 0) + 1
        meeting = self._brought.setdefault((ranks, turn), {})
        meeting[self.rank] = list(values)
        self._send(_Vector(self.rank, ranks, turn, array("q", values).tobytes()), ranks)
        deadline_s = time.monotonic() + self.timeout_s * (hop + 1)
        while len(meeting) < len(ranks):
            self._receive(meeting, ranks, call, deadline_s)
        del self._brought[ranks, turn]
        return [meeting[rank] for rank in ranks]

    @property
    def is_peer_waiting(self) -> bool:
        """Another rank has come to a collective that this one has not come to yet, or has waited for it in vain."""
        return bool(self._brought) or bool(zmq.zmq_poll([(self.inbox, zmq.POLLIN)], 0))

    def parallel_groups(self, reduce_groups: Sequence[_Ranks]) -> ParallelGroups:
        """Return this rank's end of the agreement over ``reduce_groups``, whose members it has sockets to."""
        groups = tuple(_ZmqSyncGroup(hub=self, ranks=ranks, hop=hop) for hop, ranks in enumerate(reduce_groups))
        return ParallelGroups(rank=self.rank, groups=groups)

    def close(self) -> None:
        """Close the sockets; safe to call twice."""
        for socket in (self.inbox, *self.peers.values()):
            socket.close(linger=0)

    def _receive(self, meeting: dict[int, list[int]], ranks: _Ranks, call: SyncCall, deadline_s: float) -> None:
        """Take in one message, waiting for it up to the deadline."""
        try:
            frame = self.inbox.recv(zmq.DONTWAIT)
        except zmq.Again:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                missing = tuple(rank for rank in ranks if rank not in meeting)
                self._send(_Failure(call.operation, call.step, missing), tuple(self.peers))
                raise SyncTimeoutError(call.operation, call.step, missing, self.timeout_s) from None
            if not self.wait_for(self.inbox, zmq.POLLIN, int(left_s * 1000) + 1):
                raise StopRequestedError from None
            return
        message = _decoder.decode(frame)
        if isinstance(message, _Failure):
            raise SyncTimeoutError(message.operation, message.step, message.missing, self.timeout_s)
        vector = array("q")
        vector.frombytes(message.values)
        self._brought.setdefault((message.ranks, message.turn), {})[message.sender] = vector.tolist()

    def _send(self, message: _Vector | _Failure, ranks: _Ranks) -> None:
        frame = _encode(message)
        for rank in ranks:
            if rank != self.rank:
                self.peers[rank].send(frame)


@dataclass(slots=True, kw_only=True)
class _ZmqSyncGroup:
    """A ``SyncGroup`` of a hub."""

    hub: ZmqSyncHub
    ranks: _Ranks
    hop: int

    def all_reduce_min(self, values: Sequence[int], call: SyncCall) -> list[int]:
        return elementwise_min(self.hub.exchange(self.ranks, self.hop, values, call))

    def all_gather(self, values: Sequence[int], call: SyncCall) -> list[int]:
        return [value for brought in self.hub.exchange(self.ranks, self.hop, values, call) for value in brought]

    def close(self) -> None:
        self.hub.close()


def open_zmq_sync_hub(
    context: _Context,
    *,
    rank: int,
    reduce_groups: Sequence[_Ranks],
    address_of: Callable[[int], str],
    wait_for: WaitForSocket,
    timeout_s: float,
) -> ZmqSyncHub:
    """Bind and connect one rank's sockets. Ranks may open in any order.

    Args:
        reduce_groups: this rank's groups, as ``RankGroups.reduce_groups`` gives them.
        address_of: where a rank listens.
        wait_for: see ``WaitForSocket``.
        timeout_s: longest wait for the other ranks.
    """
    inbox = context.socket(zmq.PULL)
    inbox.rcvhwm = 0  # bounded by the ranks' lockstep: nobody is more than one collective ahead
    inbox.bind(address_of(rank))
    peers: dict[int, zmq.Socket[bytes]] = {}
    for peer in sorted({peer for ranks in reduce_groups for peer in ranks} - {rank}):
        socket = peers[peer] = context.socket(zmq.PUSH)
        socket.sndhwm = 0
        socket.reconnect_ivl = 10
        socket.connect(address_of(peer))
    return ZmqSyncHub(rank=rank, inbox=inbox, peers=peers, wait_for=wait_for, timeout_s=timeout_s)


def open_zmq_groups(
    context: _Context,
    *,
    rank: int,
    reduce_groups: Sequence[_Ranks],
    address_of: Callable[[int], str],
    wait_for: WaitForSocket,
    timeout_s: float,
) -> ParallelGroups:
    """Open a hub as ``open_zmq_sync_hub`` does, and return the agreement over ``reduce_groups``; closing that closes
    the hub.
    """
    hub = open_zmq_sync_hub(
        context, rank=rank, reduce_groups=reduce_groups, address_of=address_of, wait_for=wait_for, timeout_s=timeout_s
    )
    return hub.parallel_groups(reduce_groups)
