"""The frame of a stored page: length and checksum in front, so that a torn, changed or swapped page is never taken.

``magic 4 | length 8, big-endian | BLAKE2b-128 of (key, page) | page``. The key is part of the checksum: a store that
answers with another key's page is found out too. It is no signature: whoever may write to a store can forge its pages.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

from scheduler_components.ports import PageBytes

__all__ = ["FRAME_BYTES", "seal_page", "unseal_page"]

_HEADER = Struct(">4sQ16s")
_MAGIC = b"KVP1"

FRAME_BYTES = _HEADER.size
"""How much longer a framed page is."""


def seal_page(key: str, page: PageBytes) -> bytes:
    """Return a framed copy of the page: what happens to the page's memory afterwards cannot reach the store."""
    return b"".join((_HEADER.pack(_MAGIC, len(page), _checksum(key, page)), page))


def unseal_page(key: str, framed: PageBytes) -> memoryview | None:
    """Return a view of the page in ``framed``, or None when it is not exactly what was stored under ``key``."""
    view = memoryview(framed)
    if len(view) < FRAME_BYTES:
        return None
    magic, length, checksum = _HEADER.unpack_from(view)
    page = view[FRAME_BYTES:]
    if magic != _MAGIC or length != len(page) or checksum != _checksum(key, page):
        return None
    return page


def _checksum(key: str, page: PageBytes) -> bytes:
    name = key.encode()
    digest = blake2b(len(name).to_bytes(4, "big") + name, digest_size=16)
    digest.update(page)
    return digest.digest()
