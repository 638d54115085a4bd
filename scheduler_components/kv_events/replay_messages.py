"""The wire messages of replay: plain and extended requests, and the META in extended answers.

Plain (SGLang, vLLM): the frames ``[b"", start]`` request everything from ``start``, 8 bytes. Every answer ends with the
end marker, a message whose sequence is -1.

Extended (this kit): ``start 8 + "KVX1" + verb 1 + token 8 + epoch 16``, 37 bytes. A publisher without the extension
reads the request as one huge number and answers with a bare end marker. So a request safely probes for the extension.
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
    """The kind of an extended request."""

    STATUS = 1
    """Request the position of the stream: one META."""
    SYNC = 2
    """Request everything from ``start`` if epoch and replay buffer allow it, otherwise a snapshot."""
    SNAPSHOT = 3
    """Request the snapshot and the replay buffer, whatever the client has."""


class ReplayMetaKind(enum.StrEnum):
    """The kind of a META."""

    STATUS = "status"
    BEGIN = "begin"
    END = "end"


class ReplayMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The position of a publisher's stream, in an answer to an extended request.

    Attributes:
        token: the request's token, by which a client recognises the answer to its own request.
        epoch: the publisher's epoch.
        first: oldest sequence in the replay buffer; the snapshot contains everything older.
        next: the sequence that the next batch will get.
        kind: ``begin`` opens a snapshot (``snap`` is true: its chunks follow, numbered 0 and up) or a run of batches
            (``snap`` is false: they follow from ``start``); ``end`` closes the answer.
        snap: see ``kind``.
        start: the sequence before which the digest was taken.
        chain: the digest of everything below ``start``.
        chunks: number of snapshot chunks already sent; set where the batches begin after a snapshot, otherwise None.
        upstream: set by a relay that does not know all of its own sources: the relay's ``StreamState``, such as
            ``partial``. None if the stream is complete, or is the publisher's own cache.
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
        """Decode a META of a peer.

        Raises:
            DecodeError: the payload is no META, or its numbers contradict each other.
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
    """A parsed replay request. ``verb`` is None for a plain one."""

    start: int
    verb: ReplayVerb | None = None
    token: bytes = bytes(TOKEN_BYTES)
    epoch: bytes = bytes(EPOCH_BYTES)

    def encode(self) -> bytes:
        """Return the frame that follows the empty delimiter."""
        if self.verb is None:
            return encode_plain_request(self.start)
        return encode_plain_request(self.start) + MAGIC + bytes([self.verb]) + self.token + self.epoch

    @classmethod
    def parse(cls, frame: bytes) -> ReplayRequest:
        """Parse a request of a client.

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
    """Return the request that any publisher answers with everything from ``start``."""
    return start.to_bytes(_PLAIN_BYTES, "big")
