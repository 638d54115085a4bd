"""What the checks ask of the parts that they are run on, as ports. Read this first; wrap your part where it differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

from scheduler_components.cache.namespace import PrefixNamespace
from scheduler_components.kv_events.events import EventBatch, KVCacheEvent
from scheduler_components.load.snapshot import LoadSnapshot

__all__ = [
    "CachedPrefix",
    "FollowerCore",
    "FollowingSubscriber",
    "ListeningPublisher",
    "MetricReader",
    "PrefixCache",
    "ServingScheduler",
]


class CachedPrefix(Protocol):
    """What a cache says of a prompt: ``ports`` of the reference cache's ``PrefixMatch``."""

    @property
    def num_tokens(self) -> int:
        """Tokens covered, whole pages only."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """One page index for each whole page, in order."""
        ...

    @property
    def node(self) -> Any:
        """Whatever the cache wants back in ``lock`` and ``unlock``."""
        ...


class PrefixCache(Protocol):
    """A prefix cache over a pool of pages; what ``RadixCache`` promises. More members than a port of the kit: a check
    looks at the whole part, a component never does.
    """

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


class ListeningPublisher(Protocol):
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


class FollowingSubscriber(Protocol):
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

    def live(self, sequence: int, payload: bytes) -> None:
        """A live batch came."""
        ...

    def request(self) -> bytes | None:
        """The replay request that it wants sent now, each given once; a new one makes an older one void."""
        ...

    def answered(self, sequence: bytes, payload: bytes) -> None:
        """A message of the answer to its newest request came, the end marker included."""
        ...

    def advance(self, seconds: float) -> None:
        """Time passes: what is due is done."""
        ...

    def blocks(self) -> Set[int]:
        """Hashes on the device that it believes in."""
        ...

    def is_live(self) -> bool:
        """Whether it claims to know the publisher's state."""
        ...


class MetricReader(Protocol):
    """Whoever can say what a metrics sink exposes: a scrape, usually."""

    def value(self, metric: str, labels: Mapping[str, str]) -> float | None:
        """The newest value under a name of the catalogue, without prefix; None where there is none."""
        ...


class ServingScheduler(Protocol):
    """A scheduler that was given the check's event sink when it was opened."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> None: ...

    def step(self) -> object: ...

    def get_loads(self) -> LoadSnapshot: ...

    def block_hashes(self) -> Iterable[int]:
        """Every block that its cache holds on the device."""
        ...
