"""What the checks ask of the parts that they are run on, and how a check fails. Read this page first.

A check is a plain function. It takes a part of yours, or a function that opens one, uses it, and raises
``ConformanceError`` with what was done, what was expected and what came.

| checks | a check takes | the part is |
| --- | --- | --- |
| ``PREFIX_CACHE_CHECKS`` | ``open_cache(num_pages)`` | a ``PrefixCache`` of pages of ``PAGE_SIZE`` tokens |
| ``RECORDER_CHECKS`` | ``open_recorder()`` | a ``BlockRecorder`` of blocks of ``BLOCK_SIZE`` tokens |
| ``PAGE_STORE_CHECKS`` | ``store, prefix`` | a ``PageStore``, open; no key of it begins with ``prefix`` |
| ``IN_PLACE_STORE_CHECKS`` | the same | an ``ZeroCopyPageStore`` |
| ``PUBLISHER_CHECKS`` | ``open_publisher()`` | a ``BoundPublisher`` |
| ``SUBSCRIBER_CHECKS`` | ``open_subscriber(place), deadline_s`` | a ``StreamSubscriber`` of what is at ``place`` |
| ``SCHEDULER_CHECKS`` | ``open_scheduler(events, outputs), workload`` | a ``ServingScheduler`` over two sinks |
| ``POOL_STREAM_CHECKS`` | the same | a ``PooledScheduler``: one that can read its pool |
| ``QUIESCE_CHECKS`` | the same | a ``QuiescableScheduler``: one that also takes orders to pause, flush and the like |
| ``POOL_INVARIANT_CHECKS`` | the same | an ``AuditedScheduler``: one whose pools can be counted |
| ``STATE_HOLDER_CHECKS`` | ``holder, change`` | a ``StateProvider``, and values that can be set in it |
| ``PROFILER_CHECKS`` | ``open_profiler()`` | a ``Profiler`` |
| ``RECEIVER_CHECKS`` | ``open_receivers(source)`` | one ``ReceivingRank`` per rank, the leading one first |

``FollowerMachine`` drives a ``FollowerCore``. Where your part has other names, wrap it. These ports have more members
than a component's: a check looks at the whole part, a component never does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from hashlib import sha256
from typing import Any, Protocol

import msgspec

from scheduler_components import EventBatch, KVCacheEvent
from scheduler_components.cache import DEFAULT_NAMESPACE, PrefixNamespace
from scheduler_components.pool_stats_observer import AuditedPool
from scheduler_components.ports import HeldBlocksSource
from scheduler_components.values import ControlReply, ControlRequest, ForwardMode, LoadSnapshot

__all__ = [
    # prefix caches
    "PAGE_SIZE",
    "CachedPrefix",
    "PrefixCache",
    # recorders of block tables
    "BLOCK_SIZE",
    "BlockRecorder",
    # page stores
    "MAX_BYTES",
    "PAGE_BYTES",
    "page_of",
    # publishers and subscribers
    "FollowerCore",
    "StreamSubscriber",
    "Frames",
    "BoundPublisher",
    "StreamEndpoints",
    # schedulers
    "MIN_POOL_TOKENS",
    "AuditedScheduler",
    "PooledScheduler",
    "QuiescableScheduler",
    "ServingScheduler",
    "Workload",
    # intakes
    "ReceivingRank",
]

# Prefix caches.

PAGE_SIZE = 2
"""Tokens per page of the caches under check."""


class CachedPrefix(Protocol):
    """What a cache says of a prompt."""

    @property
    def num_tokens(self) -> int:
        """Tokens covered, whole pages only."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """One page index per whole page, in order."""
        ...

    @property
    def node(self) -> Any:
        """Whatever the cache wants back in ``lock`` and ``unlock``."""
        ...


class PrefixCache(Protocol):
    """A prefix cache over a pool of pages; what ``RadixCache`` promises."""

    @property
    def page_size(self) -> int: ...

    @property
    def capacity_tokens(self) -> int: ...

    @property
    def used_tokens(self) -> int: ...

    @property
    def free_tokens(self) -> int: ...

    @property
    def evictable_tokens(self) -> int: ...

    def match_prefix(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> CachedPrefix: ...

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace | None = None
    ) -> CachedPrefix: ...

    def lock(self, node: Any) -> None: ...

    def unlock(self, node: Any) -> None: ...

    def allocate(self, num_pages: int) -> Sequence[int]: ...

    def free(self, pages: Sequence[int]) -> None: ...

    def evict(self, num_pages: int) -> int: ...

    def clear(self) -> None: ...

    def take_events(self) -> Sequence[KVCacheEvent]: ...

    def block_hashes(self) -> Iterable[int]: ...

    def check_integrity(self) -> None: ...


# Recorders of block tables, publishers and subscribers of KV events.

BLOCK_SIZE = 2
"""Tokens per block of the events that the checks record and publish."""


class BlockRecorder(Protocol):
    """A recorder for an engine with a table of hashed blocks; what ``BlockTableRecorder`` promises."""

    def store(
        self,
        block_hashes: Sequence[int | bytes],
        token_ids: Sequence[int],
        parent_block_hash: int | bytes | None = None,
        *,
        medium: str | None = None,
        group_idx: int | None = None,
        namespace: PrefixNamespace = DEFAULT_NAMESPACE,
        extra_keys: Sequence[Sequence[str | int] | None] | None = None,
    ) -> None:
        """One more copy of each block, parents first; their parent may be unknown."""
        ...

    def remove(
        self, block_hashes: Sequence[int | bytes], *, medium: str | None = None, group_idx: int | None = None
    ) -> None:
        """One copy less of each block, in any order; what is not there changes nothing."""
        ...

    def clear(self) -> None:
        """Every copy is gone."""
        ...

    def take_events(self) -> Sequence[KVCacheEvent]:
        """The events since the last call."""
        ...


# Page stores.

PAGE_BYTES = 4096
"""Size of the pages that the checks store."""

MAX_BYTES = 256 * 2 * PAGE_BYTES
"""A store with room for this need not evict: no check and no machine stores more."""


def page_of(key: str) -> bytes:
    """Return a page that belongs to ``key`` alone and has every byte value in it."""
    name = sha256(key.encode()).digest()
    return b"".join(sha256(name + at.to_bytes(4, "big")).digest() for at in range(PAGE_BYTES // 32))


# Publishers and subscribers of KV events.

Frames = tuple[bytes, ...]
"""One message of a socket."""


class BoundPublisher(Protocol):
    """A publisher of KV events on ZeroMQ, open: rank 0 of its engine, without a topic."""

    @property
    def endpoint(self) -> str:
        """The really bound PUB address."""
        ...

    @property
    def replay_endpoint(self) -> str | None:
        """The really bound ROUTER address."""
        ...

    def publish(self, events: EventBatch) -> None: ...

    def idle(self) -> None:
        """Called again and again while a check waits: a publisher without a thread works here."""
        ...

    def shutdown(self) -> None: ...


class StreamEndpoints(msgspec.Struct, frozen=True):
    """Where the stream to follow is: PUB address, replay ROUTER address, topic."""

    endpoint: str
    replay_endpoint: str
    topic: str


class StreamSubscriber(Protocol):
    """A subscriber that follows one stream, open."""

    def poll(self, timeout_s: float) -> object:
        """Take in what has come, waiting up to ``timeout_s``."""
        ...

    def blocks(self) -> Set[int]:
        """Hashes on the device that it believes in."""
        ...

    def is_live(self) -> bool:
        """Whether it claims to know the publisher's whole state."""
        ...

    def close(self) -> None: ...


class FollowerCore(Protocol):
    """The core of a subscriber without sockets: messages and time in, requests and beliefs out."""

    def on_live_batch(self, sequence: int, payload: bytes) -> None:
        """A live batch came."""
        ...

    def pop_replay_request(self) -> bytes | None:
        """The replay request that it wants sent now, each given once; a new one makes an older one void."""
        ...

    def on_replay_message(self, sequence: bytes, payload: bytes) -> None:
        """A message of the answer to its newest request came, the end marker included."""
        ...

    def advance_time(self, seconds: float) -> None:
        """Time passes: what is due is done."""
        ...

    def blocks(self) -> Set[int]:
        """Hashes on the device that it believes in."""
        ...

    def is_live(self) -> bool:
        """Whether it claims to know the publisher's state."""
        ...


# Schedulers.

MIN_POOL_TOKENS = 256
"""Tokens that the cache of a scheduler under check must have room for. Give it no more: requests that overfill the pool
are what makes a scheduler retract, wait and evict, and in a larger one they fit.
"""

Workload = tuple[tuple[tuple[int, ...], int], ...]
"""Prompts, each with the most tokens to generate, in order of arrival."""


class ServingScheduler(Protocol):
    """A scheduler that was given the check's sinks of events and outputs when it was opened.

    Its model answers ``next_token`` and has no end-of-sequence token. What a step computes is told in that step: the
    tokens of each request and its end to the sink of outputs, blocks that came and went to the sink of events.
    """

    @property
    def has_work(self) -> bool:
        """True while a step has something to do or to tell."""
        ...

    def submit(self, rid: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Queue a request. It ends with ``FinishReason.LENGTH`` and exactly ``max_new_tokens`` tokens."""
        ...

    def abort(self, rid: str) -> object:
        """End a request with ``FinishReason.ABORT``; nothing happens when it has ended or never came."""
        ...

    def step(self) -> object: ...

    def get_loads(self) -> LoadSnapshot: ...

    def block_hashes(self) -> Iterable[int]:
        """Every block that its cache holds on the device."""
        ...


class PooledScheduler(ServingScheduler, HeldBlocksSource, Protocol):
    """A scheduler that can read its KV pool: ``held_blocks`` says what it holds, by medium and group."""


class QuiescableScheduler(PooledScheduler, Protocol):
    """A scheduler that takes the orders of ``quiesce``."""

    def execute(self, request: ControlRequest) -> ControlReply:
        """Carry an order out, stepping for as long as it takes, and return how it ended."""


class AuditedScheduler(ServingScheduler, Protocol):
    """A scheduler whose pools can be counted and read: of pages, of states, of request slots."""

    @property
    def pools(self) -> Sequence[AuditedPool]:
        """All of them."""
        ...


# Intakes.


class ReceivingRank(Protocol):
    """One rank's intake of messages like those of the fakes' ``TextInputReader``; what ``RequestReceiver`` promises."""

    def receive(self, step: int, state_digest: int, mode: ForwardMode) -> Sequence[str]:
        """The messages before a step: the same on every rank. Every rank calls it before each of its steps."""
        ...

    def close(self) -> None: ...
