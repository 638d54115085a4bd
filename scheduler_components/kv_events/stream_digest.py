"""The running digest of a stream, which the publisher and its readers compute. ``stream.py`` explains its purpose."""

from __future__ import annotations

from hashlib import blake2b
from zlib import crc32

__all__ = ["EPOCH_BYTES", "STREAM_DIGEST_BYTES", "digest_after", "initial_digest"]

EPOCH_BYTES = 16
STREAM_DIGEST_BYTES = 8


def initial_digest(epoch: bytes) -> bytes:
    """Return the digest before the first batch of an epoch."""
    return blake2b(epoch, digest_size=STREAM_DIGEST_BYTES).digest()


def digest_after(digest: bytes, sequence: int, payload: bytes) -> bytes:
    """Return the digest after one more batch.

    It is BLAKE2b-64 of the digest, the sequence (8 bytes) and the payload's CRC-32 (4 bytes). The digest finds
    accidents, not attackers, so a checksum of the payload is enough. For a payload of 40 KB it costs a sixth of hashing
    all bytes.
    """
    return blake2b(
        digest + (sequence << 32 | crc32(payload)).to_bytes(12, "big"), digest_size=STREAM_DIGEST_BYTES
    ).digest()
