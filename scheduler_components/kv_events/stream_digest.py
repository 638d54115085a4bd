"""The running digest of a stream, which the publisher and its readers both compute."""

from __future__ import annotations

from hashlib import blake2b
from zlib import crc32

__all__ = ["EPOCH_BYTES", "STREAM_DIGEST_BYTES", "digest_after", "initial_digest"]

EPOCH_BYTES = 16
STREAM_DIGEST_BYTES = 8


def initial_digest(epoch: bytes) -> bytes:
    """The digest before the first batch of an epoch."""
    return blake2b(epoch, digest_size=STREAM_DIGEST_BYTES).digest()


def digest_after(digest: bytes, sequence: int, payload: bytes) -> bytes:
    """The digest after one more batch: 8 bytes of BLAKE2b over digest, sequence (8 bytes) and CRC-32 of the payload
    (4).

    It proves that two sides have read the same, not who wrote it. A checksum is enough for that, and of a payload of
    40 KB it costs a sixth of what hashing all of it does.
    """
    return blake2b(
        digest + (sequence << 32 | crc32(payload)).to_bytes(12, "big"), digest_size=STREAM_DIGEST_BYTES
    ).digest()
