"""SGLang's queues, pool and statistics as ports, and the adapter of its load inquirer over ``LoadInquirer``.

SGLang counts all waiting requests in each report. Here the list of waiting requests updates its counts when a request
enters or leaves, so that a report iterates over nothing. Written for SGLang 0.5.23,
``managers/scheduler_components/load_inquirer.py``. Every field of a report equals that of SGLang's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, SupportsIndex

import msgspec
from msgspec.structs import astuple

from scheduler_components.load import CountedQueue
from scheduler_components.ports import LoadSource, QueuedRequest
from scheduler_components.values import LoadSections, LoadSnapshot, LoraLoad, MemoryLoad, QueueLoad, SpeculativeLoad

__all__ = [
    "CountedWaitingQueue",
    "SglangLoadInquirer",
    "SglangLoadSource",
    "SglangPoolSource",
    "SglangQueueSource",
    "SglangScheduler",
    "WaitingQueueDescriptor",
]


class SglangRequest(Protocol):
    """SGLang's ``Req``: its tokens, and the length of its cached prefix at the last match."""

    seqlen: int
    num_matched_prefix_tokens: int


class CountedWaitingQueue(list[Any], CountedQueue):
    """SGLang's list of waiting requests, with a count of their tokens.

    A request's tokens are counted when it enters, and the same count is subtracted when it leaves. ``recount`` counts
    it again after another match. After a write into the middle of the list, the next report counts the whole list once.
    """

    __slots__ = ("_counts", "_is_stale", "_lengths", "_miss", "_pending", "_rate", "_rated", "_unmatched")

    def __init__(self, requests: Iterable[SglangRequest], miss: SglangQueueSource) -> None:
        super().__init__(requests)
        self._miss = miss
        # By identity: (tokens, tokens that no match covered).
        self._counts: dict[int, tuple[int, int]] = {}
        # Number of requests by length, because the estimate rounds down for each request.
        self._lengths: Counter[int] = Counter()
        self._pending = self._unmatched = self._rated = 0
        self._rate = 0.0
        self._is_stale = True

    def totals(self) -> tuple[int, int, int]:
        """Return ``(requests, pending tokens, uncached tokens)``; the last is SGLang's estimate."""
        if self._is_stale:
            self._count_all()
        rate = self._miss.miss_rate
        if rate is None:
            return len(self), self._pending, self._unmatched
        if rate != self._rate:
            self._rate = rate
            self._rated = sum(int(length * rate) * count for length, count in self._lengths.items())
        return len(self), self._pending, self._rated

    def recount(self, request: SglangRequest) -> None:
        """Count a request again if it is in the queue, after its match has changed."""
        if id(request) in self._counts:
            self._left(id(request))
            self._entered(request)

    def take_over_counts(self, old: CountedWaitingQueue) -> None:
        """Take the counts from the queue that this one replaces, and count only the changed requests.

        Sets find the requests that have left, at a tenth of the cost of counting the others again.
        """
        if old._is_stale:
            return
        self._counts, self._lengths = old._counts, old._lengths
        self._pending, self._unmatched, self._rate, self._rated = old._pending, old._unmatched, old._rate, old._rated
        old._counts, old._lengths, old._is_stale = {}, Counter(), True
        self._is_stale = False
        for key in self._counts.keys() - set(map(id, self)):
            self._left(key)
        if len(self._counts) != len(self):
            for request in self:
                if id(request) not in self._counts:
                    self._entered(request)
            self._is_stale = len(self._counts) != len(self)

    def _count_all(self) -> None:
        self._counts.clear()
        self._lengths.clear()
        self._pending = self._unmatched = self._rated = 0
        for request in self:
            self._add(request)
        self._is_stale = len(self._counts) != len(self)  # A duplicate is counted twice, as in SGLang.

    def _entered(self, request: SglangRequest) -> None:
        if self._is_stale or id(request) in self._counts:
            self._is_stale = True
        else:
            self._add(request)

    def _add(self, request: SglangRequest) -> None:
        length = request.seqlen
        unmatched = max(0, length - request.num_matched_prefix_tokens)
        self._counts[id(request)] = (length, unmatched)
        self._lengths[length] += 1
        self._pending += length
        self._unmatched += unmatched
        self._rated += int(length * self._rate)

    def _left(self, key: int) -> None:
        counted = self._counts.pop(key, None)
        if self._is_stale or counted is None:
            self._is_stale = True
            return
        length, unmatched = counted
        if self._lengths[length] == 1:
            del self._lengths[length]
        else:
            self._lengths[length] -= 1
        self._pending -= length
        self._unmatched -= unmatched
        self._rated -= int(length * self._rate)

    # The operations that SGLang uses. Reordering (``sort``, ``reverse``) changes no count.

    def append(self, request: SglangRequest) -> None:
        super().append(request)
        self._entered(request)

    def extend(self, requests: Iterable[SglangRequest]) -> None:
        for request in requests:
            self.append(request)

    def insert(self, index: SupportsIndex, request: SglangRequest) -> None:
        super().insert(index, request)
        self._entered(request)

    def pop(self, index: SupportsIndex = -1) -> Any:
        request = super().pop(index)
        self._left(id(request))
        return request

    def remove(self, request: SglangRequest) -> None:
        self.pop(self.index(request))

    def clear(self) -> None:
        super().clear()
        self._is_stale = True

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        self._is_stale = True

    def __delitem__(self, index: Any) -> None:
        super().__delitem__(index)
        self._is_stale = True

    def __iadd__(self, requests: Iterable[SglangRequest]) -> CountedWaitingQueue:  # type: ignore[misc, override]
        self.extend(requests)
        return self

    def __imul__(self, count: SupportsIndex) -> CountedWaitingQueue:
        super().__imul__(count)
        self._is_stale = True
        return self


class SglangScheduler(Protocol):
    """The queues of SGLang's scheduler, its counters since its start, and the values that it logged last."""

    waiting_queue: Any
    running_batch: Any
    chunked_req: Any
    max_running_requests: int
    policy: Any
    total_prefill_uncached_tokens: int
    total_prefill_busy_us: int
    decode_moment_totals: list[float]
    metrics_reporter: Any


@dataclass(slots=True, kw_only=True)
class SglangQueueSource:
    """The ports ``QueueSource``, ``RateSource`` and ``LoadSectionsSource``, and SGLang's estimate of uncached tokens.

    SGLang rebinds its queues, so they are read late. Rates and sections have the values that SGLang logged last.

    Attributes:
        owner: the scheduler.
        memory: use of the device's memory; None if SGLang does not report it.
        has_lora, is_speculative: whether to report these parts.
    """

    owner: SglangScheduler  # noqa: SCH001 a port with the members that are read
    memory: MemoryLoad | None = None
    has_lora: bool = False
    is_speculative: bool = False

    @property
    def running(self) -> Sized:
        running: Sized = self.owner.running_batch.reqs
        return running

    @property
    def waiting(self) -> Sequence[QueuedRequest]:
        waiting: Sequence[QueuedRequest] = self.owner.waiting_queue
        return waiting

    @property
    def max_running_requests(self) -> int:
        return self.owner.max_running_requests

    @property
    def num_chunked_tokens_left(self) -> int:
        """Tokens of the chunked prefill that are not computed yet."""
        request = self.owner.chunked_req
        return 0 if request is None else max(0, request.seqlen - request.prefix_len)

    @property
    def miss_rate(self) -> float | None:
        """The recent share of tokens without a cached prefix; None if the policy matches each waiting request."""
        if self.owner.policy.waiting_queue_prefix_matched(self.owner.waiting_queue):
            return None
        hit_rate: float = self.owner.metrics_reporter.recent_cache_hit_rate
        return 1.0 - hit_rate

    @property
    def gen_throughput(self) -> float:
        """Generated tokens per second."""
        rate: float = self.owner.metrics_reporter.stats.gen_throughput
        return rate

    @property
    def cache_hit_rate(self) -> float:
        """Cache hit rate of the last prefill."""
        rate: float = self.owner.metrics_reporter.stats.cache_hit_rate
        return rate

    def load_sections(self) -> LoadSections:
        """Return the sections that this engine has."""
        reporter = self.owner.metrics_reporter
        stats = reporter.stats
        queues = QueueLoad(
            len(self.waiting), stats.num_grammar_queue_reqs, stats.num_paused_reqs, stats.num_retracted_reqs
        )
        lora = speculative = None
        if self.has_lora:
            lora = LoraLoad(stats.lora_pool_slots_used, stats.lora_pool_slots_total, stats.lora_pool_utilization)
        if self.is_speculative and reporter.spec_total_num_forward_ct > 0:
            accepted = reporter.spec_total_num_accept_tokens / reporter.spec_total_num_forward_ct
            speculative = SpeculativeLoad(accepted, stats.spec_accept_rate)
        return LoadSections(queues=queues, lora=lora, speculative=speculative, memory=self.memory)


class WaitingQueueDescriptor:
    """A descriptor for ``waiting_queue`` of the scheduler's class: it turns each assigned list into a counted one."""

    def __init__(self, queue: CountedWaitingQueue, miss: SglangQueueSource) -> None:
        self.queue = queue
        self._miss = miss

    def __get__(self, scheduler: object, owner: type | None = None) -> CountedWaitingQueue:
        return self.queue

    def __set__(self, scheduler: object, requests: Iterable[SglangRequest]) -> None:
        queue = CountedWaitingQueue(requests, self._miss)
        queue.take_over_counts(self.queue)
        self.queue = queue


@dataclass(slots=True, kw_only=True)
class SglangPoolSource:
    """The port ``PoolSource``.

    Attributes:
        read: returns the used tokens, and the usage of the fullest pool; None where the report computes the usage.
        capacity_tokens, page_size: of the pool.
    """

    read: Callable[[], tuple[int, float | None]]
    capacity_tokens: int
    page_size: int
    _token_usage: float | None = field(default=None, init=False)

    @property
    def used_tokens(self) -> int:
        """Tokens that are neither free nor evictable."""
        used_tokens, self._token_usage = self.read()
        return used_tokens

    def token_usage(self, load: LoadSnapshot) -> float:
        """Return the usage in a report: with several pools that of the fullest, whose capacity differs from it."""
        return load.token_usage if self._token_usage is None else self._token_usage


@dataclass(slots=True, kw_only=True)
class SglangLoadSource:
    """The port ``LoadSource``: the component's report, with the fields that SGLang counts in another way.

    ``num_total_tokens`` excludes the rest of a chunked prefill. The capacity is that of all ranks that share a pool.
    The usage is that of the fullest pool. ``utilization`` is SGLang's own value.
    """

    inquirer: LoadSource
    queues: SglangQueueSource
    pool: SglangPoolSource
    capacity_tokens: int

    def get_loads(self) -> LoadSnapshot:
        """Return the current load."""
        load = self.inquirer.get_loads()
        return msgspec.structs.replace(
            load,
            num_total_tokens=load.num_total_tokens - self.queues.num_chunked_tokens_left,
            max_total_num_tokens=self.capacity_tokens,
            token_usage=self.pool.token_usage(load),
            utilization=self.queues.owner.metrics_reporter.stats.utilization,
            total_prefill_uncached_tokens=self.queues.owner.total_prefill_uncached_tokens,
            total_prefill_busy_us=self.queues.owner.total_prefill_busy_us,
        )


@dataclass(slots=True, kw_only=True)
class SglangLoadInquirer:
    """The members of ``load_inquirer`` that SGLang's call sites use.

    Attributes:
        loads: source of the report. Its scheduler has the moments of decode steps, which this kit's report lacks.
        shapes: SGLang's module ``load_snapshot``: the structs for its other processes.
    """

    loads: SglangLoadSource
    shapes: ModuleType

    def get_loads(self) -> Any:
        """Return the current load as SGLang's ``LoadSnapshot``."""
        load, shapes, stats = self.loads.get_loads(), self.shapes, self.loads.queues.owner.metrics_reporter.stats
        moments = self.loads.queues.owner.decode_moment_totals
        memory, speculative, lora, queues = load.memory, load.speculative, load.lora, load.queues
        return shapes.LoadSnapshot(
            timestamp=load.timestamp,
            dp_rank=load.dp_rank,
            num_running_reqs=load.num_running_reqs,
            num_waiting_reqs=load.num_waiting_reqs,
            num_waiting_uncached_tokens=load.num_waiting_uncached_tokens,
            num_used_tokens=load.num_used_tokens,
            num_total_tokens=load.num_total_tokens,
            num_active_tokens=load.num_total_tokens,
            max_total_num_tokens=load.max_total_num_tokens,
            max_running_requests=load.max_running_requests,
            token_usage=round(load.token_usage, 4),
            gen_throughput=round(load.gen_throughput, 2),
            cache_hit_rate=round(load.cache_hit_rate, 4),
            utilization=round(load.utilization, 4),
            total_prefill_uncached_tokens=load.total_prefill_uncached_tokens,
            total_prefill_busy_us=load.total_prefill_busy_us,
            decode_moments=list(moments) if moments[0] > 0 else None,
            memory=memory and shapes.MemoryMetrics(*astuple(memory)),
            speculative=speculative and shapes.SpeculativeMetrics(*astuple(speculative)),
            lora=lora and shapes.LoRAMetrics(lora.slots_used, lora.slots_total, lora.utilization),
            disaggregation=shapes.DisaggregationMetrics(
                mode="null",
                kv_transfer_speed_gb_s=stats.kv_transfer_speed_gb_s,
                kv_transfer_latency_ms=stats.kv_transfer_latency_ms,
            ),
            queues=queues and shapes.QueueMetrics(*astuple(queues), 0),
        )

    def get_num_waiting_uncached_tokens(self) -> int:
        """Return the estimated number of uncached waiting tokens."""
        return self.loads.get_loads().num_waiting_uncached_tokens

    def _get_num_pending_tokens(self, chunk_deduct: int = 0) -> int:
        """Return the pending tokens; SGLang calls this before the chunk of this step is computed."""
        scheduler = self.loads.queues.owner
        pending_tokens: int = scheduler.waiting_queue.totals()[1]
        request = scheduler.chunked_req
        return (
            pending_tokens if request is None else pending_tokens + request.seqlen - request.prefix_len - chunk_deduct
        )
