"""Hooks that replace components of SGLang's scheduler by this kit's.

SGLang's scheduler creates its components in methods such as ``init_kv_events_publisher``. The hooks here wrap these
methods and create the kit's components instead: with ports over SGLang's cache, queues and pool, and adapters with the
members that SGLang's call sites use. They read the parallel state once. After an error they log one sentence, and
SGLang's own component remains. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import msgspec

from scheduler_components.engines.sglang_load import (
    CountedWaitingQueue,
    SglangLoadInquirer,
    SglangLoadSource,
    SglangPoolSource,
    SglangQueueSource,
    SglangScheduler,
    WaitingQueueDescriptor,
)
from scheduler_components.engines.sglang_publisher import SglangEventPublisher, open_sglang_publisher
from scheduler_components.errors import ComponentError, ConfigError
from scheduler_components.kv_events import KVEventsConfig, NullEventPublisher
from scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
from scheduler_components.load_inquirer import LoadInquirer
from scheduler_components.load_publisher import LoadPublisher, open_load_publisher
from scheduler_components.parallel_state import ParallelState
from scheduler_components.values import KvMetrics, LoadSnapshot, MemoryLoad

__all__ = ["COMPONENTS", "SglangComponents", "SglangKvEvents", "SglangLoadPublisher", "read_parallel_state"]

_log = logging.getLogger("sglang.scheduler_components")

COMPONENTS = "components"
"""The switch of the plugin that replaces the components."""

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

_RANKS = (
    *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_tp_rank", "attn_tp_size", "attn_cp_rank", "attn_cp_size"),
    *("attn_dp_rank", "attn_dp_size", "moe_ep_rank", "moe_ep_size", "moe_dp_rank", "moe_dp_size", "dcp_size"),
)


def read_parallel_state(context: Any, *, gpu_id: int = 0) -> ParallelState:
    """Convert SGLang's parallel context (``get_parallel()``) to an immutable ``ParallelState``.

    Raises:
        ConfigError: ranks and sizes are inconsistent.
    """
    return ParallelState(
        **{name: getattr(context, name) for name in _RANKS},
        dp_rank=context.dp_rank,
        dp_size=context.num_dp_ranks,
        gpu_id=gpu_id,
    )


class SglangComponents:
    """The hooks and their shared state: the parallel state, and the load of both the inquirer and the publisher.

    Args:
        read_settings: reads ``--kv-events-config`` and the environment: ``SglangPlugin.publisher_settings``.
    """

    __slots__ = ("_kv_events", "_loads", "_parallel", "_queue", "_read_settings")

    def __init__(self, read_settings: Callable[[str | None], KVEventsConfig | None]) -> None:
        self._read_settings = read_settings
        self._parallel: ParallelState | None = None
        self._kv_events: SglangKvEvents | None = None
        self._loads: SglangLoadSource | None = None
        self._queue: WaitingQueueDescriptor | None = None

    def register(self, hooks: Any) -> None:
        """Register the hooks with SGLang's module of hooks."""
        around, after = hooks.HookType.AROUND, hooks.HookType.AFTER
        register = hooks.HookRegistry.register
        register(f"{_SCHEDULER}.init_kv_events_publisher", self.init_kv_events_publisher, around)
        register(f"{_SCHEDULER}.init_load_publisher", self.init_load_publisher, around)
        register(f"{_SCHEDULER}.init_load_inquirer", self.init_load_inquirer, around)
        register(f"{_SCHEDULER}.process_batch_result", self.after_step, after)
        register("sglang.srt.mem_cache.common.match_kv_cache", self.after_match, after)

    def init_kv_events_publisher(self, original: Callable[..., None], scheduler: Any) -> None:
        """Hook around the scheduler's method of this name."""
        try:
            self._parallel = _read_parallel_state()
        except ConfigError as error:
            _log.error("SGLang's scheduler keeps its own components: %s", error)
        try:
            settings = self._read_settings(_observability().kv_events_config)
        except ConfigError:
            settings = None  # SGLang's own component opens a publisher, and the plugin logs the error then.
        if self._parallel is None or settings is None:
            original(scheduler)
        else:
            self._kv_events = scheduler.kv_events_publisher = open_kv_events(scheduler, self._parallel, settings)

    def init_load_publisher(self, original: Callable[..., None], scheduler: Any) -> None:
        """Hook around the scheduler's method of this name."""
        reason = _why_not_counted(scheduler)
        if self._parallel is None or reason:
            if reason:
                _log.warning("SGLang's own load inquirer and publisher remain: %s", reason)
            original(scheduler)
            return
        self._loads = _compose_loads(scheduler, self._parallel)
        publisher = LoadPublisher(parallel=self._parallel, load=self._loads)
        try:
            endpoint, settings = _load_endpoint(), self._read_settings(_observability().kv_events_config)
            if endpoint is not None and settings is not None:
                gauge = settings.changed(load_endpoint=endpoint)
                publisher = open_load_publisher(gauge, parallel=self._parallel, load=self._loads)
        except ComponentError as error:
            _log.error("no load is published: %s", error)
        scheduler.load_publisher = SglangLoadPublisher(component=publisher)

    def init_load_inquirer(self, original: Callable[..., None], scheduler: Any) -> None:
        """Hook around the scheduler's method of this name, which also creates the counters of the report."""
        original(scheduler)
        if self._loads is None:
            return
        queues = self._loads.queues
        waiting = CountedWaitingQueue(scheduler.__dict__.pop("waiting_queue"), queues)
        self._queue = type(scheduler).waiting_queue = WaitingQueueDescriptor(waiting, queues)
        scheduler.load_inquirer = SglangLoadInquirer(
            loads=self._loads,
            shapes=import_module("sglang.srt.managers.load_snapshot"),
        )

    def after_step(self, *_: Any, **__: Any) -> None:
        """Publish events after each step: while it decodes, SGLang publishes only when it logs, every 40 steps."""
        if self._kv_events is not None:
            self._kv_events.publish_kv_events()

    def after_match(self, _result: Any, request: Any, *_: Any, **__: Any) -> None:
        """Count a request again after ``match_kv_cache``, because its cached prefix has changed."""
        if self._queue is not None:
            self._queue.queue.recount(request)


def _observability() -> Any:
    return import_module("sglang.srt.runtime_context").get_observability()


def _read_parallel_state() -> ParallelState:
    context: Any = import_module("sglang.srt.runtime_context")
    return read_parallel_state(context.get_parallel(), gpu_id=context.get_device().gpu_id)


# KV events.


def open_kv_events(scheduler: Any, parallel: ParallelState, settings: KVEventsConfig) -> SglangKvEvents:
    """Create the component and its adapter; a rank that owns no stream opens nothing.

    Raises:
        StartError: an address cannot be bound.
    """
    settings.port_plan(parallel.kv_stream_count)
    stream = open_sglang_publisher(settings, parallel.kv_stream_index) if parallel.owns_kv_stream else None
    socket = scheduler.ipc_channels.send_metrics_from_scheduler
    return SglangKvEvents(
        component=SchedulerKvEventsPublisher(
            parallel=parallel,
            source=scheduler.tree_cache,
            sink=stream or NullEventPublisher(parallel.kv_stream_index),
            load=SglangLoggedLoadSource(
                owner=scheduler,
                dp_rank=parallel.dp_rank or 0,
                max_running_requests=scheduler.max_running_requests,
                capacity_tokens=scheduler.max_total_num_tokens,
            ),
            metrics_sink=SglangKvMetricsSink(socket=socket) if stream and socket else None,
        ),
        stream=stream,
    )


@dataclass(slots=True, kw_only=True)
class SglangKvEvents:
    """The members of ``kv_events_publisher`` that SGLang's call sites use.

    Attributes:
        component: this kit's component.
        stream: its publisher; None on a rank that owns no stream.
    """

    component: SchedulerKvEventsPublisher
    stream: SglangEventPublisher | None

    @property
    def enable_kv_cache_events(self) -> bool:
        """Whether this rank publishes."""
        return self.stream is not None

    def publish_kv_events(self) -> None:
        self.component.publish_kv_events()

    def emit_kv_metrics(self) -> None:
        self.component.emit_kv_metrics()

    def local_kv_event_sources(self, block_size: int) -> list[dict[str, Any]]:
        """Return the endpoints of this rank's stream for a process on this machine."""
        source = self.stream.describe_local_source(block_size) if self.stream else None
        return [] if source is None else [source]


@dataclass(slots=True, kw_only=True)
class SglangLoggedLoadSource:
    """The port ``LoadSource`` of KvMetrics, from SGLang's last log line, in tokens."""

    owner: SglangScheduler  # noqa: SCH001 a port with the members that are read
    dp_rank: int
    max_running_requests: int
    capacity_tokens: int

    def get_loads(self) -> LoadSnapshot:
        """Return the load that SGLang logged last."""
        stats = self.owner.metrics_reporter.stats
        return LoadSnapshot(
            dp_rank=self.dp_rank,
            num_running_reqs=stats.num_running_reqs.total,
            num_waiting_reqs=stats.num_queue_reqs.total,
            num_used_tokens=int(stats.token_usage * self.capacity_tokens),
            max_total_num_tokens=self.capacity_tokens,
            max_running_requests=self.max_running_requests,
            token_usage=stats.token_usage,
            cache_hit_rate=stats.cache_hit_rate,
        )


@dataclass(slots=True, kw_only=True)
class SglangKvMetricsSink:
    """The port ``ReportSink`` of ``KvMetrics`` over SGLang's socket, with SGLang's own struct and serialization."""

    socket: Any

    @property
    def wants_reports(self) -> bool:
        """False once SGLang has closed its socket."""
        return not self.socket.closed

    def send(self, metrics: KvMetrics) -> None:
        shape = import_module("sglang.srt.managers.scheduler_components.kv_events_publisher").KvMetrics
        io_struct = import_module("sglang.srt.managers.io_struct")
        io_struct.sock_send(self.socket, shape(**msgspec.structs.asdict(metrics)))

    def close(self) -> None:
        """Do nothing, because SGLang owns the socket."""


# Load.


def _why_not_counted(scheduler: Any) -> str | None:
    """Return why SGLang's own counting must remain: some queues change without the scheduler's list."""
    if scheduler.disaggregation_mode.value != "null":
        return "with disaggregated prefill and decode, the kit does not count the queues of transfers"
    if scheduler.enable_hierarchical_cache:
        return "the hierarchical cache counts prefetches from storage as cached tokens"
    return None


def _load_endpoint() -> str | None:
    """Return the endpoint of ``--load-publish-endpoint``, resolved by the function that ``/server_info`` uses."""
    context: Any = import_module("sglang.srt.runtime_context")
    theirs: Any = import_module("sglang.srt.disaggregation.kv_events")
    observability = context.get_observability()
    if not observability.kv_events_config:
        return None
    events = theirs.KVEventsConfig.from_cli(observability.kv_events_config)
    resolved, reason = theirs.resolve_load_pub_range(
        kv_endpoint=events.endpoint,
        replay_endpoint=events.replay_endpoint,
        dp_size=context.get_parallel().num_dp_ranks,
        load_publish_endpoint=observability.load_publish_endpoint,
    )
    if resolved is None:
        if reason:
            _log.warning("no load is published: %s", reason)
        return None
    network: Any = import_module("sglang.srt.utils.network")
    endpoint: str = network.NetworkAddress(*resolved).to_tcp()
    return endpoint


def _compose_loads(scheduler: Any, parallel: ParallelState) -> SglangLoadSource:
    """Compose the component over the scheduler's queues, pool and statistics."""
    lora = import_module("sglang.srt.runtime_context").get_lora()
    capacity_tokens = scheduler.max_total_num_tokens * scheduler.kv_shard_widening
    queues = SglangQueueSource(
        owner=scheduler,
        memory=_memory(scheduler, capacity_tokens),
        has_lora=lora.enable_lora,
        is_speculative=not scheduler.spec_algorithm.is_none(),
    )
    pool = SglangPoolSource(
        read=_pool_reader(scheduler), capacity_tokens=scheduler.max_total_num_tokens, page_size=scheduler.page_size
    )
    return SglangLoadSource(
        inquirer=LoadInquirer(parallel=parallel, queues=queues, pool=pool, rates=queues, sections=queues.load_sections),
        queues=queues,
        pool=pool,
        capacity_tokens=capacity_tokens,
    )


def _pool_reader(scheduler: Any) -> Callable[[], tuple[int, float | None]]:
    """Return what reads the plain KV pool, or the fullest of several pools (sliding windows, state spaces)."""
    if scheduler.is_hybrid_swa or scheduler.is_hybrid_ssm or scheduler.enable_hisparse:
        return lambda: scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    capacity_tokens = scheduler.max_total_num_tokens
    return lambda: (capacity_tokens - allocator.available_size() - cache.evictable_size(), None)


def _memory(scheduler: Any, capacity_tokens: int) -> MemoryLoad | None:
    worker = scheduler.tp_worker
    try:
        return MemoryLoad(
            round(worker.model_runner.weight_load_mem_usage, 3),
            round(scheduler.token_to_kv_pool_allocator.get_kvcache().mem_usage, 3),
            round(sum(worker.graph_memory_usage.values()), 3),
            int(capacity_tokens),
        )
    except (AttributeError, TypeError) as error:  # As in SGLang: some platforms' runners lack these.
        _log.debug("SGLang does not report its memory: %s", error)
        return None


@dataclass(slots=True, kw_only=True)
class SglangLoadPublisher:
    """The members of ``load_publisher`` that SGLang's call sites use."""

    component: LoadPublisher

    @property
    def enable(self) -> bool:
        """Return whether a sink wants the load."""
        return any(sink.wants_reports for sink in self.component.sinks)

    def publish_load_stat(self, *_: Callable[[], Any], force: bool = False, **__: Any) -> None:
        """Publish the load. The component reads its own report and ignores the one that SGLang passes."""
        if force:
            self.component.flush()
        else:
            self.component.publish_load()

    def close(self) -> None:
        """Close the load gauge."""
        self.component.close()
