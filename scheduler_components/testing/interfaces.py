"""Interfaces of the parts that the checks exercise. Read this page first.

A check is a plain function. It takes a part, or a function that opens one, uses it, and raises ``ConformanceError``
with the steps, the expectation and the finding.

| checks | a check takes | the part is |
| --- | --- | --- |
| ``PREFIX_CACHE_CHECKS`` | ``open_cache(num_pages)`` | a ``CheckedPrefixCache`` of pages of ``PAGE_SIZE`` tokens |
| ``BLOCK_TABLE_CACHE_CHECKS`` | the same | one that keeps the pages of its requests |
| ``RECORDER_CHECKS`` | ``open_recorder()`` | a ``BlockTableRecorder`` of blocks of ``BLOCK_SIZE`` tokens |
| ``PAGE_STORE_CHECKS`` | ``store, prefix`` | a ``PageStore``, open; no key of it begins with ``prefix`` |
| ``IN_PLACE_STORE_CHECKS`` | the same | a ``ZeroCopyPageStore`` |
| ``PUBLISHER_CHECKS`` | ``open_publisher()`` | a ``BoundPublisher`` |
| ``SUBSCRIBER_CHECKS`` | ``open_subscriber(place), deadline_s`` | a ``StreamSubscriber`` of the stream at ``place`` |
| ``SCHEDULER_CHECKS`` | ``open_scheduler(events, outputs), workload`` | a ``ServingScheduler`` over two sinks |
| ``POOL_STREAM_CHECKS`` | the same | a ``PooledScheduler``: one that can read its pool |
| ``QUIESCE_CHECKS`` | the same | a ``QuiescableScheduler``: one that also executes control requests |
| ``POOL_INVARIANT_CHECKS`` | the same | an ``AuditedScheduler``: one with auditable pools |
| ``BATCHER_CHECKS`` | ``open_batcher(limits, queues, kv_cache)`` | a ``BatcherUnderCheck`` of ``CheckedRequest`` |
| ``POLICY_CHECKS`` | ``open_policy(match_length), promises`` | a ``SchedulingPolicy`` of ``PolicyRequest`` |
| ``STATE_HOLDER_CHECKS`` | ``holder, change`` | a ``StateProvider``, and values that can be set in it |
| ``PROFILER_CHECKS`` | ``open_profiler()`` | a ``Profiler`` |
| ``RECEIVER_CHECKS`` | ``open_receivers(source)`` | one ``RequestReceiver`` per rank, the leading one first |
| ``TOPOLOGY_CHECKS`` | ``gate`` | a ``RankGate``, asked about every rank of every topology |
| ``ENDPOINT_CHECKS`` | ``planner, promises`` | a ``PortPlanner`` of the streams of an engine |
| ``AGREEMENT_CHECKS`` | ``open_rank(groups, clock, leads), ranks`` | a ``WaitingRank``; a ``RankRunner`` runs them |

``FollowerMachine`` drives a ``FollowerCore``. If your part has other names, wrap it. These interfaces have more members
than a component's ports, because a check examines the whole part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from hashlib import sha256
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from scheduler_components import EventBatch, KVCacheEvent, ParallelState
from scheduler_components._internal.old_names import old_names
from scheduler_components.agreement import ParallelGroups
from scheduler_components.checks.pool_stats_observer import AuditedPool
from scheduler_components.ports import HeldBlocksSource
from scheduler_components.scheduling import request_kv_cache
from scheduler_components.testing.topology_space import TopologyRank
from scheduler_components.values import ControlReply, ControlRequest, LoadSnapshot

__all__ = [
    # prefix caches
    "PAGE_SIZE",
    "CheckedPrefixCache",
    # recorders of block tables
    "BLOCK_SIZE",
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
    # waiting queues of ranks that agree
    "OpenWaitingRank",
    "RankRunner",
    "WaitingRank",
    # topologies
    "PortPlanner",
    "RankGate",
]

T = TypeVar("T")

# Prefix caches.

PAGE_SIZE = 2
"""Tokens per page of the caches under check."""


class CheckedPrefixCache(request_kv_cache.PrefixCache[Any], Protocol):
    """A prefix cache over a pool of pages, with the contract of ``RadixCache``."""

    @property
    def used_tokens(self) -> int: ...

    def evict(self, num_pages: int) -> int: ...

    def clear(self) -> None: ...

    def take_events(self) -> Sequence[KVCacheEvent]: ...

    def block_hashes(self) -> Iterable[int]: ...

    def check_integrity(self) -> None: ...


# Recorders of block tables, publishers and subscribers of KV events.

BLOCK_SIZE = 2
"""Tokens per block of the events that the checks record and publish."""

# Page stores.

PAGE_BYTES = 4096
"""Size of the pages that the checks store."""

MAX_BYTES = 256 * 2 * PAGE_BYTES
"""No check and no machine stores more, so a store of this size need not evict."""


def page_of(key: str) -> bytes:
    """Return the page of ``key``: no other key has it, and it contains every byte value."""
    name = sha256(key.encode()).digest()
    return b"".join(sha256(name + at.to_bytes(4, "big")).digest() for at in range(PAGE_BYTES // 32))


# Publishers and subscribers of KV events.

Frames = tuple[bytes, ...]
"""The frames of one ZeroMQ message."""


class BoundPublisher(Protocol):
    """An open publisher of KV events on ZeroMQ: rank 0 of its engine, without a topic."""

    @property
    def endpoint(self) -> str:
        """The bound PUB address."""
        ...

    @property
    def replay_endpoint(self) -> str | None:
        """The bound ROUTER address."""
        ...

    def publish(self, events: EventBatch) -> None: ...

    def idle(self) -> None:
        """Do background work; a check calls this repeatedly while it waits."""
        ...

    def shutdown(self) -> None: ...


class StreamEndpoints(msgspec.Struct, frozen=True):
    """Addresses of a stream: PUB address, replay ROUTER address, topic."""

    endpoint: str
    replay_endpoint: str
    topic: str


class StreamSubscriber(Protocol):
    """An open subscriber of one stream."""

    def poll(self, timeout_s: float) -> object:
        """Process the received messages, after waiting up to ``timeout_s`` for one."""
        ...

    def blocks(self) -> Set[int]:
        """Return the hashes of the device blocks in its view."""
        ...

    def is_live(self) -> bool:
        """Whether it reports that its view is the publisher's whole state."""
        ...

    def close(self) -> None: ...


class FollowerCore(Protocol):
    """The core of a subscriber without sockets: it takes messages and time, and returns requests and its view."""

    def on_live_batch(self, sequence: int, payload: bytes) -> None:
        """Handle a live batch."""
        ...

    def pop_replay_request(self) -> bytes | None:
        """Return the replay request to send now, once; a new request replaces an older one."""
        ...

    def on_replay_message(self, sequence: bytes, payload: bytes) -> None:
        """Handle a message of the reply to the newest request, also its end marker."""
        ...

    def advance_time(self, seconds: float) -> None:
        """Advance the clock and do the work that is due."""
        ...

    def blocks(self) -> Set[int]:
        """Return the hashes of the device blocks in its view."""
        ...

    def is_live(self) -> bool:
        """Whether it reports that its view is the publisher's state."""
        ...


# Schedulers.

MIN_POOL_TOKENS = 256
"""Size of the cache of a scheduler under check, in tokens. Use exactly this size: the workload overfills it, so that
the scheduler must retract, wait and evict.
"""

Workload = tuple[tuple[tuple[int, ...], int], ...]
"""Prompts with their maximum numbers of tokens to generate, in order of arrival."""


class ServingScheduler(Protocol):
    """A scheduler over the check's sinks of events and outputs.

    Its model answers ``next_token`` and has no end-of-sequence token. Each step sends its results: the tokens and the
    end of each request to the sink of outputs, stored and removed blocks to the sink of events.
    """

    @property
    def has_work(self) -> bool:
        """Whether a step has work to do or outputs to send."""
        ...

    def submit(self, rid: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Queue a request; it ends with ``FinishReason.LENGTH`` and exactly ``max_new_tokens`` tokens."""
        ...

    def abort(self, rid: str) -> object:
        """End a request with ``FinishReason.ABORT``; ignore ended and unknown requests."""
        ...

    def step(self) -> object: ...

    def get_loads(self) -> LoadSnapshot: ...

    def block_hashes(self) -> Iterable[int]:
        """Return the hashes of all device blocks in its cache."""
        ...


class PooledScheduler(ServingScheduler, HeldBlocksSource, Protocol):
    """A scheduler that can read its KV pool: ``held_blocks`` returns its blocks by medium and group."""


class QuiescableScheduler(PooledScheduler, Protocol):
    """A scheduler that executes control requests."""

    def execute(self, request: ControlRequest) -> ControlReply:
        """Step until the request is done, and return the reply."""


class AuditedScheduler(ServingScheduler, Protocol):
    """A scheduler with auditable pools: of pages, of states, of request slots."""

    @property
    def pools(self) -> Sequence[AuditedPool]: ...


# Topologies.


RankGate: TypeAlias = Callable[[TopologyRank], int | None]
"""The rule by which a rank publishes, reports or leads, with the contract of ``ParallelState``.

It returns the number of the rank's stream, or of its replica in a label; None for a rank that does not speak for its KV
cache. Each rank is asked in a process of its own.
"""


class PortPlanner(Protocol):
    """The addresses of the streams of an engine, with the contract of ``PortPlan``.

    ``bases`` are the addresses that an operator configures, by kind: ``events``, ``replay`` and ``load``.
    """

    def bind(self, rank: TopologyRank, bases: Mapping[str, str]) -> Mapping[str, str]:
        """Return the address of each kind that this rank listens on; empty for a rank that does not speak.

        Raises:
            ValueError: the addresses are refused.
        """
        ...

    def dial(self, bases: Mapping[str, str], stream: int, num_streams: int, host: str) -> Mapping[str, str]:
        """Return the address of each kind to which a reader connects, for a stream whose process runs on ``host``."""
        ...


# Waiting queues of ranks that agree.


class WaitingRank(Protocol):
    """One rank's queue of requests that wait for something local, with the contract of ``AgreedQueue``.

    All ranks make the same calls between the same two steps, except ``report``.
    """

    def add(self, rid: str, timeout_s: float) -> bool:
        """Let a request wait; it expires after ``timeout_s`` on the leading rank's clock. Return False to refuse it."""
        ...

    def report(self, rid: str, is_ready: bool) -> None:
        """Record what only this rank knows: it is ready for the request, or it has failed. Unknown ids are ignored."""
        ...

    def cancel(self, rid: str) -> object:
        """Remove a request, whether it waits or not."""
        ...

    def step(self, step: int) -> Iterable[tuple[str, str]]:
        """Agree with the other ranks. Return (id, reason) of each request that leaves, in order.

        A reason is ``ready``, ``failed`` or ``expired``.
        """
        ...


OpenWaitingRank: TypeAlias = Callable[[ParallelGroups, Callable[[], float], bool], WaitingRank]
"""Opens the queue of one rank: ``open_rank(groups, clock, leads)``. The clocks of the ranks differ; one rank leads."""


class RankRunner(Protocol):
    """Runs all ranks of a replica: ``ThreadRanks`` or ``TorchRanks``."""

    @property
    def worlds(self) -> Sequence[ParallelState]:
        """The replicas to run, each by the state of its rank 0."""
        ...

    @property
    def short_timeout_s(self) -> float:
        """Longest wait for the others in a collective, in a check that waits for it."""
        ...

    def run(
        self, world: ParallelState, work: Callable[[ParallelGroups], T], *, timeout_s: float | None = None
    ) -> Mapping[int, T]:
        """Run ``work`` on each rank; return the results by rank, without those of ranks that did not end in time.

        Raises:
            Exception: ``work`` raised it on some rank.
        """
        ...


__getattr__ = old_names(__name__)
