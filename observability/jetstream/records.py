"""What a log of KV events says, as values: its names and messages, the writer's beat, the snapshot and its pointer.

A *log* is one worker's stream in JetStream. Each of the worker's KV-event streams has one subject in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import attrs
import msgspec

from scheduler_components import ConfigError, DecodeError
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES, STREAM_DIGEST_BYTES
from scheduler_components.validators import integer_validator

__all__ = [
    "DIGEST_HEADER",
    "ID_HEADER",
    "Snapshot",
    "LogHeartbeat",
    "SnapshotPointer",
    "LogAddress",
    "LogMessage",
    "check_prefix",
    "head_key_of",
    "read_message",
]

_U63 = 1 << 63

# --- names ---

_TOKEN_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_NAME_BYTES = 80
"""Of a worker or topic. The server refuses names of streams above 255 bytes, and a byte may be written as three."""


def _token_of(name: str) -> str:
    """``name`` as one token of a subject, key and stream name: other bytes as ``=`` and two digits; ``=`` if empty."""
    return "".join(chr(byte) if byte in _TOKEN_BYTES else f"={byte:02X}" for byte in name.encode()) or "="


def _name_of(token: str) -> str:
    """The name that a token was made from.

    Raises:
        ValueError: it was made from none.
    """
    parts = token.removesuffix("=").split("=")
    name = parts[0].encode() + b"".join(bytes.fromhex(part[:2]) + part[2:].encode() for part in parts[1:])
    if _token_of(name.decode()) != token:
        raise ValueError(token)
    return name.decode()


def check_prefix(field: str, prefix: object) -> None:
    """Refuse what cannot begin names of subjects and buckets.

    Raises:
        ConfigError: naming the field.
    """
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise ConfigError(field, prefix, "cannot begin the names of a broker", "give letters, digits, - or _, 1 to 64")


def _is_prefix(_: object, attribute: attrs.Attribute[str], value: object) -> None:
    check_prefix(attribute.name, value)


def _is_name(_: object, attribute: attrs.Attribute[str], value: object) -> None:
    if (
        not isinstance(value, str)
        or len(value.encode()) > _MAX_NAME_BYTES
        or (attribute.name == "worker" and not value)
    ):
        hint = f"give a text of at most {_MAX_NAME_BYTES} bytes"
        raise ConfigError(attribute.name, value, "is no name in a log", hint)


@attrs.frozen
class LogAddress:
    """Where one KV-event stream stands in JetStream.

    Attributes:
        worker: any text that names it in the fleet, such as its URL.
        topic, rank: the stream's.
        prefix: of every name; one per fleet.

    Raises:
        ConfigError: a name that is empty or too long, a rank below 0.
    """

    worker: str = attrs.field(validator=_is_name)
    rank: int = attrs.field(default=0, validator=integer_validator("is not a rank", at_least=0))
    topic: str = attrs.field(default="", validator=_is_name)
    prefix: str = attrs.field(default="kv-events", validator=_is_prefix)

    def __str__(self) -> str:
        return self.subject

    @property
    def log(self) -> str:
        """Name of the worker's stream in JetStream."""
        return f"{self.prefix}-log-{_token_of(self.worker)}"

    @property
    def wildcard_subject(self) -> str:
        """What the worker's stream takes."""
        return f"{self.prefix}.log.{_token_of(self.worker)}.>"

    @property
    def subject(self) -> str:
        """Of the messages."""
        return f"{self.prefix}.log.{self.pointer_key}"

    @property
    def heartbeat_subject(self) -> str:
        """Of the writer's beats, which no stream keeps."""
        return f"{self.prefix}.beat.{self.pointer_key}"

    @property
    def snapshot_request_subject(self) -> str:
        """Of readers who cannot begin with the snapshot that there is, for the writer."""
        return f"{self.prefix}.wanted.{self.pointer_key}"

    @property
    def pointer_key(self) -> str:
        """Key of the pointer in its bucket."""
        return f"{_token_of(self.worker)}.{_token_of(self.topic)}.{self.rank}"

    @property
    def pointer_bucket(self) -> str:
        """Bucket of heads, one for all workers."""
        return f"{self.prefix}-heads"

    @property
    def snapshot_bucket(self) -> str:
        """Bucket of bases, one for all workers."""
        return f"{self.prefix}-bases"

    def snapshot_object(self, slot: int) -> str:
        """Name of one of the two objects that the snapshot is written to by turns."""
        return f"{self.pointer_key}.{slot}"


def head_key_of(key: str, prefix: str) -> LogAddress | None:
    """The address whose pointer has this key; None for a key that no writer made."""
    worker, _, rest = key.partition(".")
    topic, _, rank = rest.partition(".")
    try:
        return LogAddress(_name_of(worker), int(rank), _name_of(topic), prefix)
    except ValueError:
        return None


# --- values ---


class LogMessage(msgspec.Struct, frozen=True, gc=False):
    """One batch as it stands in the log.

    Attributes:
        log_seq: its place in the log, which other streams of the worker share; 0 before it has one.
        epoch: 16 random bytes per life of the writer's stream.
        seq: its number in that life, without gaps from 0.
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
        """What goes with the payload. The broker drops a message whose id it has stored already."""
        return {ID_HEADER: f"{self.epoch.hex()}-{self.seq}", DIGEST_HEADER: self.digest.hex()}


ID_HEADER = "Nats-Msg-Id"
"""Epoch (32 hexadecimal digits), a hyphen, number."""

DIGEST_HEADER = "Kv-Chain"
"""The digest after the message, 16 hexadecimal digits."""

_ID = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]{0,18})")
_CHAIN = re.compile(r"[0-9a-f]{16}")


def read_message(log_seq: int, headers: Mapping[str, str] | None, payload: bytes) -> LogMessage:
    """Read a message of a log.

    Raises:
        DecodeError: it has no number, or none that can be.
    """
    named = _ID.fullmatch((headers or {}).get(ID_HEADER, ""))
    digest = _CHAIN.fullmatch((headers or {}).get(DIGEST_HEADER, ""))
    if named is None or digest is None or int(named[2]) >= _U63:
        raise DecodeError("a message of a log without epoch, number or digest")
    return LogMessage(log_seq, bytes.fromhex(named[1]), int(named[2]), bytes.fromhex(digest[0]), payload)


class LogHeartbeat(msgspec.Struct, frozen=True, array_like=True):
    """Where the writer stands now; said twice a second, and kept by nobody.

    Attributes:
        epoch: the life of its stream.
        next: the number that its next batch will get.
        digest: its digest of everything below ``next``.
        snapshot_end: the newest snapshot in the bucket has everything below this number.
        upstream: how far the writer knows the stream (a reader's ``StreamState``); None for whole.
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
        """Read a beat.

        Raises:
            DecodeError: not one, or its numbers contradict each other.
        """
        beat = _decoded(cls, data)
        _check_place(cls, beat.epoch, beat.digest)
        if not 0 <= beat.snapshot_end <= beat.next < _U63:
            raise DecodeError(f"LogHeartbeat: snapshot_end {beat.snapshot_end} and next {beat.next} are not in order")
        return beat


class SnapshotPointer(msgspec.Struct, frozen=True, array_like=True):
    """Which snapshot is the newest. The writer that wrote it last is the one that readers believe.

    Attributes:
        epoch: the life that the snapshot is of.
        end: it has everything below this number.
        slot: which of its two objects it is in.
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
            DecodeError: not one.
        """
        pointer = _decoded(cls, data)
        if len(pointer.epoch) != EPOCH_BYTES or not 0 <= pointer.end < _U63 or pointer.slot not in (0, 1):
            raise DecodeError("SnapshotPointer: a wrong epoch, number or slot")
        return pointer


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The whole state at one number: blocks that stand before ``first``, then the batches up to it, as they were sent.

    Attributes:
        epoch, first, digest: the digest of everything below ``first``.
        chunks: batches that store what stands before ``first``; the first of them clears.
        batches: those numbered from ``first`` on.
        end_digest: the digest after them.
        log_seq: messages from the number after them on stand behind this place of the log.
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
        """The number that it has everything below of."""
        return self.first + len(self.batches)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Snapshot:
        """Read a snapshot.

        Raises:
            DecodeError: not one, or its numbers are none.
        """
        snapshot = _decoded(cls, data)
        _check_place(cls, snapshot.epoch, snapshot.digest)
        if (
            len(snapshot.end_digest) != STREAM_DIGEST_BYTES
            or min(snapshot.first, snapshot.log_seq) < 0
            or max(snapshot.end, snapshot.log_seq) >= _U63
        ):
            raise DecodeError("Snapshot: a wrong digest or number")
        return snapshot


_Value = TypeVar("_Value", LogHeartbeat, SnapshotPointer, Snapshot)


def _decoded(kind: type[_Value], data: bytes) -> _Value:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"{kind.__name__}: {error}") from error


def _check_place(kind: type[_Value], epoch: bytes, digest: bytes) -> None:
    if len(epoch) != EPOCH_BYTES or len(digest) != STREAM_DIGEST_BYTES:
        raise DecodeError(f"{kind.__name__}: epoch or digest has a wrong length")
