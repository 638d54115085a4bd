"""Input: where messages come from, and how they reach every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from scheduler_components.values import InputMessage, RelayedInput, RequestRejection

__all__ = [
    "InputSource",
    "NullInputSource",
    "MessageDecoder",
    "InputRelay",
    "NullInputRelay",
    "RequestIds",
    "NullRequestIds",
    "RejectionSink",
    "NullRejectionSink",
]

Message_co = TypeVar("Message_co", covariant=True)


class InputSource(Protocol):
    """Where messages come in on the leading rank: ``intake.ZmqInputSource``, a queue, a ring of an embedded server."""

    def poll(self, most: int) -> Sequence[bytes]:
        """Return what has come, oldest first, at most ``most`` messages; never wait."""
        ...


class NullInputSource:
    """The source of a rank that does not lead: all it gets comes from the leading one."""

    def poll(self, most: int) -> Sequence[bytes]:  # noqa: ARG002
        return ()


class MessageDecoder(Protocol[Message_co]):
    """Reads the engine's messages; the same on every rank."""

    def read(self, frame: bytes) -> InputMessage[Message_co]:
        """Return what a frame says. Raises DecodeError for one that is no message of this engine."""
        ...


class InputRelay(Protocol):
    """Brings the leading rank's input to all ranks of the replica: ``intake.SyncGroupRelay``,
    ``intake.ZmqLeaderRelay``.
    """

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        """Return what the leading rank brings. Every rank calls it equally often; the leading one gets ``own`` back.

        Raises:
            SyncTimeoutError, SyncDivergenceError, StopRequestedError: the ranks did not come together.
        """
        ...

    def close(self) -> None:
        """Let go of sockets and groups; safe to call twice."""
        ...


class NullInputRelay:
    """The relay of a replica of one rank."""

    def broadcast(self, own: RelayedInput) -> RelayedInput:
        return own

    def close(self) -> None:
        pass


class RequestIds(Protocol):
    """Says which request ids are in use: a scheduler's queues."""

    def is_taken(self, rid: str) -> bool:
        """A request of this id is in flight, or its end is still to be told."""
        ...


class NullRequestIds:
    """Ids of a scheduler that cannot be asked: only what waits in the intake itself is in use."""

    def is_taken(self, rid: str) -> bool:  # noqa: ARG002
        return False


class RejectionSink(Protocol):
    """Takes the answers to requests that were not let in: the way back to the front."""

    def reject(self, refusal: RequestRejection, incoming: InputMessage[object]) -> None:
        """Take the answer to one request, which comes with it; store or send it without waiting."""
        ...


class NullRejectionSink:
    """The sink of a rank that answers nobody."""

    def reject(self, refusal: RequestRejection, incoming: InputMessage[object]) -> None:
        pass
