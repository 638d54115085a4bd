"""The wire messages of replay: requests of 8 bytes and of 37 bytes, and the META in answers.

Plain (SGLang, vLLM): ``[b"", start]`` asks for everything from ``start``; every answer ends with the end marker, a
message whose sequence is -1.

Extended (this kit): ``start 8 + "KVX1" + verb 1 + token 8 + epoch 16``. A publisher without the extension reads it
as one huge number and answers a bare end marker. So a request is also the probe for the extension, and it is harmless.
Extended answers carry a msgpack META in the payload of messages whose sequence is -1.
"""

from __future__ import annotations

import enum

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES, STREAM_DIGEST_BYTES

__all__ = [
    "END_SEQ",
    "ReplayMeta",
    "ReplayMetaKind",
    "ReplayRequest",
    "ReplayVerb",
    "encode_plain_request",
]

END_SEQ = (-1).to_bytes(8, "big", signed=True)
MAGIC = b"KVX1"
TOKEN_BYTES = 8
_PLAIN_BYTES = 8
_EXTENDED_BYTES = 37
_U64 = 1 << 64


class ReplayVerb(enum.IntEnum):
    """What an extended request asks for."""

    STATUS = 1
    """Where the stream stands: one META."""
    SYNC = 2
    """Everything from ``start`` if epoch and window allow, else a snapshot."""
    SNAPSHOT = 3
    """The base and the window, whatever the client has."""


class ReplayMetaKind(enum.StrEnum):
    """What a META says."""

    STATUS = "status"
    BEGIN = "begin"
    END = "end"


class ReplayMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a publisher says about its stream, in answer to an extended request.

    Attributes:
        token: the request's token: an answer to another question is not taken for this one.
        epoch: the publisher's life.
        first: oldest number that its window holds; what is older is in the base.
        next: the number that its next batch will get.
        kind: ``begin`` opens a snapshot (``snap`` true: its chunks follow, numbered 0 and up) or a run of batches
            (``snap`` false: they follow from ``start``); ``end`` closes the answer.
        snap: see ``kind``.
        start: the number that the digest stands before.
        chain: the digest of everything below ``start``.
        chunks: how many chunks of the base went before; said where batches begin after a snapshot, None elsewhere.
        upstream: said by a relay while it does not know all of what it publishes: how far it does (a reader's
            ``StreamState``, such as ``partial``). None where the stream is its publisher's own cache, or known whole.
    """

    token: bytes
    epoch: bytes
    first: int
    next: int
    kind: ReplayMetaKind
    snap: bool
    start: int
    chain: bytes
    chunks: int | None = None
    upstream: str | None = None

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> ReplayMeta:
        """Read a META from a peer.

        Raises:
            DecodeError: not one, or its numbers contradict each other.
        """
        try:
            meta = _decode_meta(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"META: {error}") from error
        if len(meta.token) != TOKEN_BYTES or len(meta.epoch) != EPOCH_BYTES or len(meta.chain) != STREAM_DIGEST_BYTES:
            raise DecodeError("META: token, epoch or chain has a wrong length")
        if not 0 <= meta.first <= meta.start <= meta.next < _U64 // 2:
            raise DecodeError(f"META: first {meta.first}, start {meta.start}, next {meta.next} are not in order")
        return meta


_decode_meta = msgspec.msgpack.Decoder(ReplayMeta).decode


class ReplayRequest(msgspec.Struct, frozen=True):
    """A parsed replay request; ``verb`` is None for a plain one."""

    start: int
    verb: ReplayVerb | None = None
    token: bytes = bytes(TOKEN_BYTES)
    epoch: bytes = bytes(EPOCH_BYTES)

    def encode(self) -> bytes:
        """The frame that follows the empty delimiter."""
        if self.verb is None:
            return encode_plain_request(self.start)
        return encode_plain_request(self.start) + MAGIC + bytes([self.verb]) + self.token + self.epoch

    @classmethod
    def parse(cls, frame: bytes) -> ReplayRequest:
        """Read a request from a client.

        Raises:
            DecodeError: a wrong length, an unknown magic or an unknown verb.
        """
        if len(frame) == _PLAIN_BYTES:
            return cls(int.from_bytes(frame, "big"))
        if len(frame) != _EXTENDED_BYTES or frame[8:12] != MAGIC:
            raise DecodeError(f"a replay request of {len(frame)} bytes")
        try:
            verb = ReplayVerb(frame[12])
        except ValueError as error:
            raise DecodeError(f"unknown replay verb {frame[12]}") from error
        return cls(int.from_bytes(frame[:8], "big"), verb, frame[13:21], frame[21:37])


def encode_plain_request(start: int) -> bytes:
    """The frame that asks any publisher for everything from ``start``."""
    return start.to_bytes(_PLAIN_BYTES, "big")
