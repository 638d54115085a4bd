"""Load: how busy one replica is, as `/v1/loads`, a dispatcher and the load gauges read it.

Field and section names are SGLang's (`LoadSnapshot`, 0.5.23), so that a reader of its `/v1/loads` reads this one.
"""

from __future__ import annotations

import msgspec

__all__ = [
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
    """Requests that are neither running nor plainly waiting, counted."""

    waiting: int = 0
    grammar: int = 0
    paused: int = 0
    retracted: int = 0


class DisaggregationLoad(msgspec.Struct, frozen=True, gc=False):
    """Queues of a prefill or decode instance under prefill/decode disaggregation.

    ``waiting_reqs`` and ``pending_tokens`` are what these queues add to the plain counts: on a decode instance
    requests in transfer already hold their pages, so they wait but add no pending tokens.
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


class LoraLoad(msgspec.Struct, frozen=True, gc=False):
    """Adapter slots in use; adapters of running and of waiting requests, by name.

    The names travel with every report and are one label of a metric, joined by commas: give each adapter once, and of
    those that wait only the first few dozen, which is more than a router looks at.
    """

    slots_used: int
    slots_total: int
    utilization: float
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()


class SpeculativeLoad(msgspec.Struct, frozen=True, gc=False):
    """Mean accepted tokens per verification step, and the share of drafts that were accepted."""

    accept_length: float
    accept_rate: float


class MemoryLoad(msgspec.Struct, frozen=True, gc=False):
    """Where device memory went, in GB, and how many tokens the KV pool holds."""

    weight_gb: float
    kv_cache_gb: float
    graph_gb: float
    token_capacity: int


class DecodeMoments(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Sums over the steps that decoded and prefilled nothing, since the start. An array in JSON, in SGLang's order.

    With b requests and t microseconds of a step, a reader takes differences between two reports and has the
    least-squares line t = t0 + t1 * b of that time: what one more request costs those that run.

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
    """The parts of a load snapshot that not every engine has; None for those that this one has not."""

    queues: QueueLoad | None = None
    disaggregation: DisaggregationLoad | None = None
    lora: LoraLoad | None = None
    speculative: SpeculativeLoad | None = None
    memory: MemoryLoad | None = None


class LoadSnapshot(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One replica's load at one moment.

    Attributes:
        sequence: one more with each snapshot; a reader drops a report whose sequence it has passed.
        timestamp: wall-clock seconds since the epoch at which the counts were read.
        dp_rank: the replica (``ParallelState.kv_stream_index``).
        num_running_reqs, num_waiting_reqs: requests.
        num_pending_tokens: input tokens of waiting requests plus what is left of a chunked prefill.
        num_waiting_uncached_tokens: the part of them that no cached prefix covers.
        num_used_tokens: KV tokens held by running requests; evictable cache is not counted.
        num_total_tokens: used plus pending: what a dispatcher balances.
        max_total_num_tokens: capacity of the KV pool in tokens.
        page_size: tokens per page of that pool.
        max_running_requests: request slots.
        token_usage: used / capacity, 0 to 1.
        gen_throughput: generated tokens per second over the recent window.
        cache_hit_rate: cached / input tokens over the recent window, 0 to 1.
        utilization: the fuller of request slots and tokens, 0 to 1.
        total_prefill_uncached_tokens: tokens that prefill has computed since the start.
        total_prefill_busy_us: microseconds that those steps took; readers take differences of both between two
            reports and have the prefill rate (SGLang 0.5.16 and later).
        decode_moments: of the steps that decoded; None before the first (SGLang 0.5.23).
        dispatched_watermarks: (dispatcher, ticket) pairs: this report counts every request that the dispatcher gave
            that ticket or a lower one.
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
