"""ZmqSyncHub: collectives between the rank processes of an engine, over ipc sockets and without torch.

Every rank binds a PULL socket and connects a PUSH socket to each rank of its groups. In a collective each member sends
its vector to all other members and reduces what it receives; the groups are small enough for that. A rank whose wait
times out sends a failure to all ranks, so that all of them raise the same error. The end of the engine ends every wait.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import zmq

from scheduler_components.agreement import ParallelGroups, SyncCall, elementwise_min
from scheduler_components.agreement.sync import describe_calls
from scheduler_components.errors import SyncDivergenceError, SyncTimeoutError
from scheduler_components.receiving.zmq_input_relay import StopRequestedError, WaitForSocket

_Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]
_Ranks: TypeAlias = tuple[int, ...]


class _Vector(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """The vector of one rank in collective number ``turn`` of a group: int64 in native byte order."""

    sender: int
    ranks: _Ranks
    turn: int
    values: bytes


class _Failure(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """A collective of the ``sender`` timed out because of the ``missing`` ranks."""

    operation: str
    step: int
    missing: _Ranks
    sender: int


_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[_Vector | _Failure] = msgspec.msgpack.Decoder(_Vector | _Failure)


@dataclass(slots=True, kw_only=True)
class ZmqSyncHub:
    """One rank's sockets to the other ranks of its groups. Use it from one thread.

    Attributes:
        rank: this rank.
        inbox: bound PULL socket.
        peers: connected PUSH sockets, by rank.
        wait_for: waits for a socket or for the signal to stop.
        timeout_s: longest wait in a collective of the first hop. The n-th hop waits n times as long, so that a rank
            that waits for a waiting rank receives the failure from it, which names the missing rank.
    """

    rank: int
    inbox: zmq.Socket[bytes]
    peers: dict[int, zmq.Socket[bytes]]
    wait_for: WaitForSocket
    timeout_s: float
    _vectors: dict[tuple[_Ranks, int], dict[int, list[int]]] = field(default_factory=dict, init=False)
    _turns: dict[_Ranks, int] = field(default_factory=dict, init=False)

    def exchange(self, ranks: _Ranks, hop: int, values: Sequence[int], call: SyncCall) -> list[list[int]]:
        """Contribute ``values`` to the next collective of ``ranks`` and return the values of all members, by rank.

        Raises:
            SyncTimeoutError: a member did not contribute in time, in this collective or in one of another rank.
            SyncDivergenceError: another rank has waited for this one in another call.
            StopRequestedError: the engine stops.
        """
        turn = self._turns[ranks] = self._turns.get(ranks, 0) + 1
        vectors = self._vectors.setdefault((ranks, turn), {})
        vectors[self.rank] = list(values)
        self._send(_Vector(self.rank, ranks, turn, array("q", values).tobytes()), ranks)
        deadline_s = time.monotonic() + self.timeout_s * (hop + 1)
        while len(vectors) < len(ranks):
            self._receive(vectors, ranks, call, deadline_s)
        del self._vectors[ranks, turn]
        return [vectors[rank] for rank in ranks]

    def is_peer_waiting(self) -> bool:
        """Return whether another rank has entered a collective that this one has not, or has timed out in one."""
        return bool(self._vectors) or bool(zmq.zmq_poll([(self.inbox, zmq.POLLIN)], 0))

    def parallel_groups(self, reduce_groups: Sequence[_Ranks]) -> ParallelGroups:
        """Return this rank's ``ParallelGroups`` over ``reduce_groups``. The hub must have sockets to all members.

        Closing the groups closes the hub.
        """
        groups = tuple(_ZmqSyncGroup(hub=self, ranks=ranks, hop=hop) for hop, ranks in enumerate(reduce_groups))
        return ParallelGroups(rank=self.rank, groups=groups)

    def close(self) -> None:
        """Close the sockets; safe to call twice."""
        for socket in (self.inbox, *self.peers.values()):
            socket.close(linger=0)

    def _receive(self, vectors: dict[int, list[int]], ranks: _Ranks, call: SyncCall, deadline_s: float) -> None:
        """Receive one message, or wait for one up to the deadline."""
        try:
            frame = self.inbox.recv(zmq.DONTWAIT)
        except zmq.Again:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                missing = tuple(rank for rank in ranks if rank not in vectors)
                self._send(_Failure(call.operation, call.step, missing, self.rank), tuple(self.peers))
                raise SyncTimeoutError(call.operation, call.step, missing, self.timeout_s) from None
            if not self.wait_for(self.inbox, zmq.POLLIN, int(left_s * 1000) + 1):
                raise StopRequestedError from None
            return
        message = _decoder.decode(frame)
        if isinstance(message, _Failure):
            if self.rank in message.missing and message.operation != call.operation:
                failed = SyncCall(message.sender, call.number, message.step, message.operation)
                raise SyncDivergenceError(call.number, describe_calls((failed, call)))
            raise SyncTimeoutError(message.operation, message.step, message.missing, self.timeout_s)
        vector = array("q")
        vector.frombytes(message.values)
        self._vectors.setdefault((message.ranks, message.turn), {})[message.sender] = vector.tolist()

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
        return [value for vector in self.hub.exchange(self.ranks, self.hop, values, call) for value in vector]

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
    """Bind and connect the sockets of one rank. Ranks may open in any order.

    Args:
        context: context of the sockets.
        rank: this rank.
        reduce_groups: ``RankGroups.reduce_groups`` of this rank.
        address_of: returns the address of a rank.
        wait_for: see ``WaitForSocket``.
        timeout_s: see ``ZmqSyncHub``.
    """
    inbox = context.socket(zmq.PULL)
    inbox.rcvhwm = 0  # lockstep bounds the queue: no rank is more than one collective ahead
    inbox.bind(address_of(rank))
    peers: dict[int, zmq.Socket[bytes]] = {}
    for peer in sorted({peer for ranks in reduce_groups for peer in ranks} - {rank}):
        socket = peers[peer] = context.socket(zmq.PUSH)
        socket.sndhwm = 0
        socket.reconnect_ivl = 10
        socket.connect(address_of(peer))
    return ZmqSyncHub(rank=rank, inbox=inbox, peers=peers, wait_for=wait_for, timeout_s=timeout_s)
