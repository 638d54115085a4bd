"""Load: how busy one replica is, as `/v1/loads`, a dispatcher and the load gauges read it.

Field and section names are SGLang's (`LoadSnapshot`, 0.5.23), so that a reader of its `/v1/loads` reads this one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from scheduler_components.values.metric import counter, gauge

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


# fmt: off
class QueueLoad(msgspec.Struct, frozen=True, gc=False):
    """Numbers of requests in special queues: neither running nor in the plain waiting queue."""

    waiting: int = 0
    grammar: Annotated[int, gauge("num_grammar_queue_reqs", "requests", "Requests that wait for their grammar.")] = 0
    paused: Annotated[int, gauge("num_paused_reqs", "requests", "Paused requests.")] = 0
    retracted: Annotated[int, gauge("num_retracted_reqs", "requests", "Retracted requests that wait to run again.")] = 0


class DisaggregationLoad(msgspec.Struct, frozen=True, gc=False):
    """Queues of a prefill or decode instance with prefill/decode disaggregation.

    `waiting_reqs` and `pending_tokens` are added to the plain counts. On a decode instance, requests in transfer
    already hold their pages: they wait but add no pending tokens.
    """

    mode: str = 'null'
    prefill_bootstrap_queue_reqs: Annotated[int, gauge("num_prefill_bootstrap_queue_reqs", "requests",
        "Prefill instance: requests that wait for their decode peer.")] = 0
    prefill_inflight_queue_reqs: Annotated[int, gauge("num_prefill_inflight_queue_reqs", "requests",
        "Prefill instance: requests whose KV is being sent.")] = 0
    decode_prealloc_queue_reqs: Annotated[int, gauge("num_decode_prealloc_queue_reqs", "requests",
        "Decode instance: requests that wait for pages.")] = 0
    decode_transfer_queue_reqs: Annotated[int, gauge("num_decode_transfer_queue_reqs", "requests",
        "Decode instance: requests whose KV is being received.")] = 0
    decode_retracted_queue_reqs: Annotated[int, gauge("num_decode_retracted_queue_reqs", "requests",
        "Decode instance: retracted requests.")] = 0
    kv_transfer_speed_gb_s: Annotated[float, gauge("kv_transfer_speed_gb_s", "GB/s", "Speed of KV transfers.")] = 0.0
    kv_transfer_latency_ms: Annotated[float, gauge("kv_transfer_latency_ms", "ms", "Latency of KV transfers.")] = 0.0
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

    slots_used: Annotated[int, gauge("lora_pool_slots_used", "slots", "LoRA adapter slots in use.")]
    slots_total: Annotated[int, gauge("lora_pool_slots_total", "slots", "LoRA adapter slots.")]
    utilization: Annotated[float, gauge("lora_pool_utilization", "share", "LoRA adapter slots in use / all, 0 to 1.")]
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    by_adapter: tuple[AdapterLoad, ...] = ()


class SpeculativeLoad(msgspec.Struct, frozen=True, gc=False):
    """Mean accepted tokens per verification step, and the share of accepted drafts."""

    accept_length: Annotated[float, gauge("spec_accept_length", "tokens", "Accepted tokens per verification step.")]
    accept_rate: Annotated[float, gauge("spec_accept_rate", "share", "Accepted / drafted tokens, 0 to 1.")]


class MemoryLoad(msgspec.Struct, frozen=True, gc=False):
    """Usage of device memory in GB, and the capacity of the KV pool in tokens."""

    weight_gb: Annotated[float, gauge("weight_memory_usage_gb", "GB", "Device memory of the weights.")]
    kv_cache_gb: Annotated[float, gauge("kv_cache_memory_usage_gb", "GB", "Device memory of the KV pool.")]
    graph_gb: Annotated[float, gauge("graph_memory_usage_gb", "GB", "Device memory of captured graphs.")]
    token_capacity: int


class DecodeMoments(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Sums over all decode steps without prefill since the start. A JSON array, in SGLang's order.

    Let a step with b requests take t microseconds. From the differences between two reports a reader computes the
    least-squares line t = t0 + t1 * b, which gives the cost of one more request.
    """

    steps: Annotated[int, counter("decode_steps_total", "steps", "Steps that decoded and prefilled nothing.")] = 0
    requests: Annotated[int, counter("decode_step_requests_total", "requests",
        "Requests in these steps, b of each.")] = 0
    time_us: Annotated[int, counter("decode_busy_us_total", "microseconds", "Time of these steps, t of each.")] = 0
    requests_squared: Annotated[int, counter("decode_step_requests_squared_total", "requests",
        "Sum of b * b, for the line t = t0 + t1 * b.")] = 0
    requests_time_us: Annotated[int, counter("decode_step_requests_us_total", "microseconds", "Sum of b * t.")] = 0
    tokens: Annotated[int, counter("decode_step_tokens_total", "tokens", "Tokens generated by these steps.")] = 0


class LoadSections(msgspec.Struct, frozen=True, gc=False):
    """The optional sections of a load snapshot; None for those that this engine does not have."""

    queues: QueueLoad | None = None
    disaggregation: DisaggregationLoad | None = None
    lora: LoraLoad | None = None
    speculative: SpeculativeLoad | None = None
    memory: MemoryLoad | None = None


class LoadSnapshot(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A snapshot of one replica's load.

    The annotations describe fields that are metrics.

    Attributes:
        sequence: increases by one with each snapshot. A reader drops a report that is older than its last one.
        timestamp: when the counts were read, in seconds since the epoch.
        dp_rank: index of the replica (`ParallelState.kv_stream_index`).
        num_pending_tokens: input tokens of waiting requests, and the remaining tokens of a chunked prefill.
        num_used_tokens: KV tokens held by running requests; evictable cache is not counted.
        num_total_tokens: used plus pending tokens. A dispatcher balances this number.
        total_prefill_uncached_tokens, total_prefill_busy_us: the differences of both between two reports give the
            prefill rate (SGLang 0.5.16 and later).
        decode_moments: sums over the decode steps; None before the first (SGLang 0.5.23).
        dispatched_watermarks: (dispatcher, ticket) pairs. This report counts every request of the dispatcher with that
            ticket or a lower one.
    """

    num_running_reqs: Annotated[int, gauge("num_running_reqs", "requests",
        "Running requests.", "num_requests_running")] = 0
    num_waiting_reqs: Annotated[int, gauge("num_queue_reqs", "requests",
        "Waiting requests.", "num_requests_waiting")] = 0
    token_usage: Annotated[float, gauge("token_usage", "share",
        "KV tokens in use / capacity, 0 to 1.", "kv_cache_usage_perc")] = 0.0
    gen_throughput: Annotated[float, gauge("gen_throughput", "tokens/s",
        "Generated tokens per second, recently.")] = 0.0
    cache_hit_rate: Annotated[float, gauge("cache_hit_rate", "share", "Cached / input tokens, recently, 0 to 1.")] = 0.0
    utilization: Annotated[float, gauge("utilization", "share",
        "The fuller of request slots and KV tokens, 0 to 1.")] = 0.0
    num_used_tokens: Annotated[int, gauge("num_used_tokens", "tokens", "KV tokens of running requests.")] = 0
    num_pending_tokens: Annotated[int, gauge("num_pending_tokens", "tokens", "Input tokens that wait for prefill.")] = 0
    num_waiting_uncached_tokens: Annotated[int, gauge("num_waiting_uncached_tokens", "tokens",
        "Input tokens that wait for prefill and are not in a cached prefix.")] = 0
    num_total_tokens: Annotated[int, gauge("num_total_tokens", "tokens", "KV tokens in use plus pending tokens.")] = 0
    max_total_num_tokens: Annotated[int, gauge("max_total_num_tokens", "tokens", "Capacity of the KV pool.")] = 0
    page_size: Annotated[int, gauge("page_size", "tokens", "Tokens per page of the KV pool.")] = 1
    max_running_requests: Annotated[int, gauge("max_running_requests", "requests", "Request slots.")] = 0
    sequence: Annotated[int, gauge("load_sequence", "reports", "Number of the load snapshot of the gauges.")] = 0
    total_prefill_uncached_tokens: Annotated[int, counter("prefill_uncached_tokens_total", "tokens",
        "Tokens computed by prefill, as load reports count them.")] = 0
    total_prefill_busy_us: Annotated[int, counter("prefill_busy_us_total", "microseconds",
        "Time of the steps that computed these tokens.")] = 0
    timestamp: float = 0.0
    dp_rank: int = 0
    queues: QueueLoad | None = None
    disaggregation: DisaggregationLoad | None = None
    lora: LoraLoad | None = None
    speculative: SpeculativeLoad | None = None
    memory: MemoryLoad | None = None
    decode_moments: DecodeMoments | None = None
    dispatched_watermarks: tuple[tuple[str, int], ...] = ()

    @property
    def num_pages(self) -> int:
        """Pages of the KV pool."""
        return self.max_total_num_tokens // self.page_size if self.page_size > 0 else 0
