"""Records of a KV-event log: messages, the writer's heartbeat, the snapshot and its pointer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from scheduler_components import DecodeError
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES, STREAM_DIGEST_BYTES

__all__ = [
    "DIGEST_HEADER",
    "ID_HEADER",
    "LogHeartbeat",
    "LogMessage",
    "Snapshot",
    "SnapshotPointer",
    "read_message",
]

_U63 = 1 << 63

ID_HEADER = "Nats-Msg-Id"
"""Epoch (32 hexadecimal digits), a hyphen, number."""

DIGEST_HEADER = "Kv-Chain"
"""The digest after the message, 16 hexadecimal digits."""

_ID = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]{0,18})")
_DIGEST = re.compile(r"[0-9a-f]{16}")


class LogMessage(msgspec.Struct, frozen=True, gc=False):
    """One batch in the log.

    Attributes:
        log_seq: its number in the log, which the worker's other streams share; 0 before the log has it.
        epoch: 16 random bytes per epoch of the writer's stream.
        seq: its number in that epoch, without gaps from 0.
        digest: the stream's digest after it.
        payload: the batch, as on the ZeroMQ wire.
    """

    log_seq: int
    epoch: bytes
    seq: int
    digest: bytes
    payload: bytes

    @property
    def headers(self) -> dict[str, str]:
        """The NATS headers of the message. The broker drops a message whose id it has already stored."""
        return {ID_HEADER: f"{self.epoch.hex()}-{self.seq}", DIGEST_HEADER: self.digest.hex()}


def read_message(log_seq: int, headers: Mapping[str, str] | None, payload: bytes) -> LogMessage:
    """Read a message of a log.

    Raises:
        DecodeError: a header is missing or malformed.
    """
    named = _ID.fullmatch((headers or {}).get(ID_HEADER, ""))
    digest = _DIGEST.fullmatch((headers or {}).get(DIGEST_HEADER, ""))
    if named is None or digest is None or int(named[2]) >= _U63:
        raise DecodeError("a message of a log without epoch, number or digest")
    return LogMessage(log_seq, bytes.fromhex(named[1]), int(named[2]), bytes.fromhex(digest[0]), payload)


class LogHeartbeat(msgspec.Struct, frozen=True, array_like=True):
    """The writer's position. The writer publishes it twice per second, and the broker does not store it.

    Attributes:
        epoch: of the writer's stream.
        next: number of the writer's next batch.
        digest: digest of every batch below ``next``.
        snapshot_end: the newest stored snapshot covers every batch below this number.
        upstream: a ``StreamState`` when the writer does not know all of the stream; None when it does.
    """

    epoch: bytes
    next: int
    digest: bytes
    snapshot_end: int
    upstream: str | None = None

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> LogHeartbeat:
        """Read a heartbeat.

        Raises:
            DecodeError: the bytes are not a heartbeat, or its numbers contradict each other.
        """
        heartbeat = _decode(cls, data)
        _check_position(cls, heartbeat.epoch, heartbeat.digest)
        if not 0 <= heartbeat.snapshot_end <= heartbeat.next < _U63:
            raise DecodeError(
                f"LogHeartbeat: snapshot_end {heartbeat.snapshot_end} and next {heartbeat.next} are not in order"
            )
        return heartbeat


class SnapshotPointer(msgspec.Struct, frozen=True, array_like=True):
    """Names the newest snapshot. Readers believe the writer that wrote the pointer last.

    Attributes:
        epoch: of the snapshot.
        end: the snapshot covers every batch below this number.
        slot: which of the two objects has the snapshot.
    """

    epoch: bytes
    end: int
    slot: int

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> SnapshotPointer:
        """Read a pointer.

        Raises:
            DecodeError: the bytes are not a pointer.
        """
        pointer = _decode(cls, data)
        if len(pointer.epoch) != EPOCH_BYTES or not 0 <= pointer.end < _U63 or pointer.slot not in (0, 1):
            raise DecodeError("SnapshotPointer: a wrong epoch, number or slot")
        return pointer


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The whole state at one number: the blocks held before ``first``, then the batches since, as they were sent.

    Attributes:
        epoch: of the stream.
        first, digest: number of the first of ``batches``, and the digest of every batch below it.
        chunks: batches that store the blocks held before ``first``; the first chunk clears.
        batches: those numbered from ``first`` on.
        end_digest: the digest after them.
        log_seq: later batches come after this number of the log.
    """

    epoch: bytes
    first: int
    digest: bytes
    chunks: list[bytes]
    batches: list[bytes]
    end_digest: bytes
    log_seq: int

    @property
    def end(self) -> int:
        """One above the last batch that the snapshot covers."""
        return self.first + len(self.batches)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Snapshot:
        """Read a snapshot.

        Raises:
            DecodeError: the bytes are not a snapshot, or a number is out of range.
        """
        snapshot = _decode(cls, data)
        _check_position(cls, snapshot.epoch, snapshot.digest)
        if (
            len(snapshot.end_digest) != STREAM_DIGEST_BYTES
            or min(snapshot.first, snapshot.log_seq) < 0
            or max(snapshot.end, snapshot.log_seq) >= _U63
        ):
            raise DecodeError("Snapshot: a wrong digest or number")
        return snapshot


_Record = TypeVar("_Record", LogHeartbeat, SnapshotPointer, Snapshot)


def _decode(kind: type[_Record], data: bytes) -> _Record:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"{kind.__name__}: {error}") from error


def _check_position(kind: type[_Record], epoch: bytes, digest: bytes) -> None:
    if len(epoch) != EPOCH_BYTES or len(digest) != STREAM_DIGEST_BYTES:
        raise DecodeError(f"{kind.__name__}: epoch or digest has a wrong length")
