"""Load: how busy one replica is, as `/v1/loads`, a dispatcher and the load gauges read it.

Field and section names are SGLang's (`LoadSnapshot`, 0.5.23), so that a reader of its `/v1/loads` reads this one.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "AdapterLoad",
    "QueueLoad",
    "DisaggregationLoad",
    "LoraLoad",
    "SpeculativeLoad",
    "MemoryLoad",
    "DecodeMoments",
    "LoadSections",
    "LoadSnapshot",
]


class QueueLoad(msgspec.Struct, frozen=True, gc=False):
    """Numbers of requests in special queues: neither running nor in the plain waiting queue."""

    waiting: int = 0
    grammar: int = 0
    paused: int = 0
    retracted: int = 0


class DisaggregationLoad(msgspec.Struct, frozen=True, gc=False):
    """Queues of a prefill or decode instance with prefill/decode disaggregation.

    `waiting_reqs` and `pending_tokens` are added to the plain counts. On a decode instance, requests in transfer
    already hold their pages: they wait but add no pending tokens.
    """

    mode: str = "null"
    prefill_bootstrap_queue_reqs: int = 0
    prefill_inflight_queue_reqs: int = 0
    decode_prealloc_queue_reqs: int = 0
    decode_transfer_queue_reqs: int = 0
    decode_retracted_queue_reqs: int = 0
    kv_transfer_speed_gb_s: float = 0.0
    kv_transfer_latency_ms: float = 0.0
    waiting_reqs: int = 0
    pending_tokens: int = 0


class AdapterLoad(msgspec.Struct, frozen=True, gc=False):
    """The requests of one registered adapter.

    Attributes:
        name: of the adapter.
        num_running_reqs: requests that use it: they run, or wait for pages only.
        num_waiting_reqs: requests that wait until it is loaded.
        is_loaded: whether all ranks have loaded it.
    """

    name: str
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    is_loaded: bool = False


class LoraLoad(msgspec.Struct, frozen=True, gc=False):
    """Adapter slots in use, and the names of the adapters of running and waiting requests.

    Every report contains the names, and a metric has them in one label, joined by commas. Give each adapter once, and
    only the first few dozen of the waiting ones.
    """

    slots_used: int
    slots_total: int
    utilization: float
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    by_adapter: tuple[AdapterLoad, ...] = ()


class SpeculativeLoad(msgspec.Struct, frozen=True, gc=False):
    """Mean accepted tokens per verification step, and the share of accepted drafts."""

    accept_length: float
    accept_rate: float


class MemoryLoad(msgspec.Struct, frozen=True, gc=False):
    """Usage of device memory in GB, and the capacity of the KV pool in tokens."""

    weight_gb: float
    kv_cache_gb: float
    graph_gb: float
    token_capacity: int


class DecodeMoments(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Sums over all decode steps without prefill since the start. A JSON array, in SGLang's order.

    Let a step with b requests take t microseconds. From the differences between two reports a reader computes the
    least-squares line t = t0 + t1 * b, which gives the cost of one more request.

    Attributes:
        steps: number of steps.
        requests: sum of b.
        time_us: sum of t.
        requests_squared: sum of b * b.
        requests_time_us: sum of b * t.
        tokens: tokens generated.
    """

    steps: int = 0
    requests: int = 0
    time_us: int = 0
    requests_squared: int = 0
    requests_time_us: int = 0
    tokens: int = 0


class LoadSections(msgspec.Struct, frozen=True, gc=False):
    """The optional sections of a load snapshot; None for those that this engine does not have."""

    queues: QueueLoad | None = None
    disaggregation: DisaggregationLoad | None = None
    lora: LoraLoad | None = None
    speculative: SpeculativeLoad | None = None
    memory: MemoryLoad | None = None


class LoadSnapshot(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A snapshot of one replica's load.

    Attributes:
        sequence: increases by one with each snapshot. A reader drops a report that is older than its last one.
        timestamp: when the counts were read, in seconds since the epoch.
        dp_rank: index of the replica (`ParallelState.kv_stream_index`).
        num_running_reqs, num_waiting_reqs: running and waiting requests.
        num_pending_tokens: input tokens of waiting requests, and the remaining tokens of a chunked prefill.
        num_waiting_uncached_tokens: pending tokens that no cached prefix covers.
        num_used_tokens: KV tokens held by running requests; evictable cache is not counted.
        num_total_tokens: used plus pending tokens. A dispatcher balances this number.
        max_total_num_tokens: capacity of the KV pool, in tokens.
        page_size: tokens per page of that pool.
        max_running_requests: request slots.
        token_usage: used / capacity, 0 to 1.
        gen_throughput: generated tokens per second, over the recent window.
        cache_hit_rate: cached / input tokens, over the recent window, 0 to 1.
        utilization: usage of request slots or of tokens, whichever is higher, 0 to 1.
        total_prefill_uncached_tokens: tokens computed by prefill since the start.
        total_prefill_busy_us: duration of those steps in microseconds. The differences of both between two reports give
            the prefill rate (SGLang 0.5.16 and later).
        decode_moments: sums over the decode steps; None before the first (SGLang 0.5.23).
        dispatched_watermarks: (dispatcher, ticket) pairs. This report counts every request of the dispatcher with that
            ticket or a lower one.
    """

    sequence: int = 0
    timestamp: float = 0.0
    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_pending_tokens: int = 0
    num_waiting_uncached_tokens: int = 0
    num_used_tokens: int = 0
    num_total_tokens: int = 0
    max_total_num_tokens: int = 0
    page_size: int = 1
    max_running_requests: int = 0
    token_usage: float = 0.0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    utilization: float = 0.0
    queues: QueueLoad | None = None
    disaggregation: DisaggregationLoad | None = None
    lora: LoraLoad | None = None
    speculative: SpeculativeLoad | None = None
    memory: MemoryLoad | None = None
    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0
    decode_moments: DecodeMoments | None = None
    dispatched_watermarks: tuple[tuple[str, int], ...] = ()

    @property
    def num_pages(self) -> int:
        """Pages of the KV pool."""
        return self.max_total_num_tokens // self.page_size if self.page_size > 0 else 0
