"""Reads the golden bytes: what every dialect writes, what every measured peer sends, page hashes, replays, digests.

All were made by hand from the wire's description, part by part, and none by this kit's own code; each part says what it
is. The data files are plain JSON, so that a kit in another language can read them too:

- ``batches.json``: batches in the dialects that this kit writes. Writing must give these bytes, reading the events.
- ``peers.json``: batches in shapes that released peers send, by peer and version. Reading must give the events.
- ``page_hashes.json``: token ids, page size and seed to block hashes. SGLang seeds a salted prefix with SHA-256 of
  ``sglang-cache-salt-v1``, a zero byte and the salt.
- ``namespaced_hashes.json``: a plain hash, put into SGLang's namespace of an extra key and a salt.
- ``replay_frames.json``: requests and answers of replay channels.
- ``digests.json``: a stream's payloads to the digest before the first and after each.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch

__all__ = [
    "BatchVector",
    "DigestVector",
    "FrameVector",
    "NamespacedHashVector",
    "PageHashVector",
    "PeerVector",
    "batch_vectors",
    "digest_vectors",
    "namespaced_hash_vectors",
    "page_hash_vectors",
    "peer_vectors",
    "replay_frame_vectors",
]

_EVENTS = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved, "AllBlocksCleared": AllBlocksCleared}


class _Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in parts: (hexadecimal, what it is) pairs."""

    name: str
    parts: tuple[tuple[str, str], ...]

    @property
    def payload(self) -> bytes:
        """The parts, joined."""
        return b"".join(bytes.fromhex(part) for part, _ in self.parts)

    def __str__(self) -> str:
        return self.name


class _Described(msgspec.Struct, frozen=True):
    ts: float
    rank: int | None
    events: tuple[dict[str, object], ...]


class PeerVector(_Parts, frozen=True, kw_only=True):
    """What a peer sends, and what it must be read as.

    Attributes:
        name: what is special about it.
        peer: engine and versions that send this shape, for example ``"vLLM >= 0.2x"``.
        parts: its bytes.
        batch: what it says.
    """

    peer: str
    batch: _Described

    @property
    def rank(self) -> int | None:
        """The rank on the wire."""
        return self.batch.rank

    @property
    def events(self) -> tuple[KVCacheEvent, ...]:
        """The events, hashes as signed integers."""
        return tuple(_event(described) for described in self.batch.events)

    @property
    def event_batch(self) -> KVEventBatch:
        """The batch as a scheduler publishes it: without a rank of its own."""
        return KVEventBatch(self.batch.ts, self.events)


class BatchVector(PeerVector, frozen=True, kw_only=True):
    """What this kit writes in one dialect, and reads back."""

    dialect: str
    peer: str = "scheduler-components"


class PageHashVector(msgspec.Struct, frozen=True):
    """``hash_pages(token_ids, page_size, bytes.fromhex(prior))`` is ``block_hashes``."""

    name: str
    token_ids: tuple[int, ...]
    page_size: int
    prior: str
    block_hashes: tuple[int, ...]


class NamespacedHashVector(msgspec.Struct, frozen=True):
    """What SGLang (0.5.23) publishes for the block of a prefix in a namespace; ``seed`` in hexadecimal, "" for none."""

    name: str
    extra_key: str | None
    cache_salt: str | None
    block_hash: int
    seed: str
    namespaced_hash: int

    def __str__(self) -> str:
        return self.name


class FrameVector(msgspec.Struct, frozen=True):
    """One message of a replay conversation as a DEALER sends or gets it: frames in hexadecimal with their meaning."""

    name: str
    frames: tuple[tuple[str, str], ...]

    @property
    def message(self) -> tuple[bytes, ...]:
        """The frames."""
        return tuple(bytes.fromhex(frame) for frame, _ in self.frames)


class DigestVector(msgspec.Struct, frozen=True):
    """A stream's life; bytes in hexadecimal.

    Attributes:
        name: what it shows.
        epoch: 16 bytes.
        first_sequence: number of the first payload.
        payloads: in order.
        chains: the digest before the first payload, then after each.
    """

    name: str
    epoch: str
    first_sequence: int
    payloads: tuple[str, ...]
    chains: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


@cache
def batch_vectors() -> tuple[BatchVector, ...]:
    """``batches.json``."""
    return msgspec.json.decode(_read("batches.json"), type=tuple[BatchVector, ...])


@cache
def peer_vectors() -> tuple[PeerVector, ...]:
    """``peers.json``."""
    return msgspec.json.decode(_read("peers.json"), type=tuple[PeerVector, ...])


@cache
def page_hash_vectors() -> tuple[PageHashVector, ...]:
    """``page_hashes.json``."""
    return msgspec.json.decode(_read("page_hashes.json"), type=tuple[PageHashVector, ...])


@cache
def replay_frame_vectors() -> dict[str, FrameVector]:
    """``replay_frames.json``, by name."""
    return {each.name: each for each in msgspec.json.decode(_read("replay_frames.json"), type=list[FrameVector])}


@cache
def namespaced_hash_vectors() -> tuple[NamespacedHashVector, ...]:
    """``namespaced_hashes.json``."""
    return msgspec.json.decode(_read("namespaced_hashes.json"), type=tuple[NamespacedHashVector, ...])


@cache
def digest_vectors() -> tuple[DigestVector, ...]:
    """``digests.json``."""
    return msgspec.json.decode(_read("digests.json"), type=tuple[DigestVector, ...])


def _read(name: str) -> bytes:
    return (files("scheduler_components.testing.golden") / name).read_bytes()


def _event(described: dict[str, object]) -> KVCacheEvent:
    fields = {name: value for name, value in described.items() if name != "type"}
    keys = fields.get("extra_keys")
    if isinstance(keys, list):
        fields["extra_keys"] = tuple(None if each is None else tuple(each) for each in keys)
    event: KVCacheEvent = _EVENTS[str(described["type"])](**fields)
    return event
