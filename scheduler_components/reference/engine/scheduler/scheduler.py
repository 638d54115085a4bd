"""The reference scheduler: continuous batching, composed of small parts. One process, one thread, no sockets here.

One ``step()``:

    tiers.step()                              where pages are kept beyond the device: agree on what has moved
    batch    = batcher.next_batch()           who computes what; pages are taken, the latest arrivals retracted
    device.launch(batch)
    kv_events.idle()                          the last step's events go out while the device computes
    news     = results.process(device.wait())     tokens to requests, pages to the cache, outputs to the front
    kv_events.publish_kv_events()             what the cache stored and removed in this step
    metrics.emit()
    guard.checker.after_step()                every few steps: do the pools still add up?

All ranks of a replica run this with the same calls in the same order and so take the same decisions: nothing
here depends on a clock or on the rank, and ``state_digest`` lets them check it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from zlib import crc32

import msgspec

from scheduler_components import (
    BatchResultProcessor,
    ConfigError,
    KvEventSink,
    KvMetricsSink,
    LiveStats,
    LoadInquirer,
    LoadSource,
    MetricsEmitter,
    MetricsSink,
    NullKvMetricsSink,
    NullMetricsSink,
    OutputBatch,
    OutputSink,
    OutputStreamer,
    ParallelState,
    RequestResult,
    SchedulerKvEventsPublisher,
)
from scheduler_components.cache import RadixCache
from scheduler_components.dp_attn import DpBatchSync
from scheduler_components.dynamic_chunk_sizer import DynamicChunkSizer
from scheduler_components.kv_events import NullEventPublisher
from scheduler_components.quiesce import QuiesceState, weight_namespace
from scheduler_components.reference.device.device import Device, ScheduledBatch
from scheduler_components.reference.engine.config import SchedulerConfig
from scheduler_components.reference.engine.scheduler.admission_budget import AdmissionBudget
from scheduler_components.reference.engine.scheduler.batcher import Batcher, check_request_fits, check_tokens_known
from scheduler_components.reference.engine.scheduler.cache_tiers import (
    CacheTiers,
    DeviceOnlyTiers,
    PrefixCache,
)
from scheduler_components.reference.engine.scheduler.integrity import SchedulerIntegrity
from scheduler_components.reference.engine.scheduler.queues import RequestQueues
from scheduler_components.reference.engine.scheduler.request import Request, RequestState
from scheduler_components.reference.engine.scheduler.request_kv_cache import RequestKvCache
from scheduler_components.reference.engine.scheduler.request_metrics import RequestMetrics
from scheduler_components.values import DEFAULT_WEIGHT_VERSION, ForwardMode
from scheduler_components.watchdog import IDLE_PHASE

__all__ = [
    "Clocks",
    "Scheduler",
    "SchedulerSinks",
    "StepResult",
]


class _NoOutputs:
    """The sink of a rank that answers nobody."""

    def is_ready(self) -> bool:
        return True

    def send(self, batch: OutputBatch) -> bool:  # noqa: ARG002
        return True

    def close(self) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class SchedulerSinks:
    """What a scheduler writes to, each of which may be nowhere. ``Scheduler.close`` closes them.

    Attributes:
        events: KV events; made by ``open_event_publisher``.
        outputs: the tokens of requests.
        metrics: each step's statistics; its owner closes it.
        kv_metrics: slots and blocks, for the serving process.
    """

    events: KvEventSink = field(default_factory=NullEventPublisher)
    outputs: OutputSink = field(default_factory=_NoOutputs)
    metrics: MetricsSink = field(default_factory=NullMetricsSink)
    kv_metrics: KvMetricsSink = field(default_factory=NullKvMetricsSink)


@dataclass(slots=True, kw_only=True, frozen=True)
class Clocks:
    """Where time comes from.

    Attributes:
        wall: seconds since the epoch, for time stamps.
        monotonic: seconds from any origin, for rates and the times of requests.
    """

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """What one ``Scheduler.step`` did.

    Attributes:
        step: number of the step, from 1.
        num_updated_requests: requests that got tokens or ended; the tokens themselves go to the scheduler's output
            sink.
        num_prefill_tokens, num_decode_tokens: positions computed, by kind.
        num_admitted, num_retracted: requests that got and lost their pages.
        digest: ``Scheduler.state_digest`` after the step.
    """

    step: int
    num_updated_requests: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_admitted: int
    num_retracted: int
    digest: int

    @property
    def mode(self) -> ForwardMode:
        """What kinds of positions were computed."""
        if self.num_prefill_tokens:
            return ForwardMode.MIXED if self.num_decode_tokens else ForwardMode.EXTEND
        return ForwardMode.DECODE if self.num_decode_tokens else ForwardMode.IDLE


@dataclass(slots=True, kw_only=True)
class StateDigest:
    """32 bits over every decision and result so far: equal on ranks that were called alike.

    Attributes:
        value: the digest.
        num_steps: steps that are in it.
    """

    value: int = 0
    num_steps: int = 0

    def add(self, *facts: int) -> None:
        """Fold signed 64-bit numbers in."""
        self.value = crc32(array("q", facts).tobytes(), self.value)

    def add_step(self, batch: ScheduledBatch[Request], num_updated_requests: int, tiers: CacheTiers) -> None:
        """Fold a step's decisions and results in: who, where, on which page, and what came out."""
        self.num_steps += 1
        facts = [self.num_steps, batch.num_admitted, batch.num_retracted]
        for work in batch.works:
            request = work.request
            facts += (request.arrival, work.start, work.end, request.token_ids[-1])
            facts.append(request.pages[-1] if request.pages else -1)
        facts += (shape.num_tokens for shape in batch.replicas)
        cache = tiers.cache
        facts += (num_updated_requests, cache.used_tokens, cache.free_tokens, cache.evictable_tokens)
        self.add(*facts, tiers.state_digest - 2**63)


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Serves requests in steps. Made by ``Scheduler.compose``. Not thread-safe: one thread calls everything.

    Attributes:
        device: computes batches.
        batcher: makes them; has the queues, the pages, the tiers of the cache, and the book of what happened.
        results: gives each result to its request.
        output: sends the tokens of requests.
        kv_events: tells what the cache stored and removed.
        metrics: each step's statistics.
        guard: looks at the pools between two steps, and knows where the step stands.

    Others may call ``load.get_loads()``, ``output.flush()``, ``kv_events.idle()`` and ``metrics.emit()`` between two
    steps and while there is no work, and ``request_metrics.work.on_request_received()`` for a request that was
    dispatched with a ticket.
    """

    device: Device
    batcher: Batcher
    results: BatchResultProcessor[Request]
    output: OutputStreamer
    kv_events: SchedulerKvEventsPublisher
    metrics: MetricsEmitter
    integrity: SchedulerIntegrity
    _decisions: StateDigest = field(default_factory=StateDigest, init=False)

    @classmethod
    def compose(
        cls,
        config: SchedulerConfig,
        parallel: ParallelState,
        device: Device,
        *,
        tiers: CacheTiers | None = None,
        sinks: SchedulerSinks | None = None,
        clocks: Clocks | None = None,
        quiesce: QuiesceState | None = None,
        dp: DpBatchSync | None = None,
    ) -> Scheduler:
        """Wire one.

        Args:
            config: sizes.
            parallel: this process's rank; the owner of the KV stream records events, the others only decide alike.
            device: computes batches.
            tiers: the prefix cache and what is behind it; by default a ``RadixCache`` of ``config``'s sizes alone.
            sinks: where everything goes; by default nowhere.
            clocks: where time comes from.
            quiesce: what may be done now; by default everything.
            dp: under DP attention, the exchange with the other replicas; by default there are none.
        """
        sinks, clocks = sinks or SchedulerSinks(), clocks or Clocks()
        tiers = tiers or DeviceOnlyTiers(cache=_device_cache(config, parallel))
        queues = RequestQueues(max_running_requests=config.max_running_requests)
        quiesce = quiesce or QuiesceState()
        budget = AdmissionBudget(
            gate=quiesce, dp=dp or DpBatchSync(), chunk_sizer=DynamicChunkSizer(page_size=config.page_size)
        )
        budget.forecast.clock = clocks.monotonic
        request_metrics = RequestMetrics(clock=clocks.monotonic, budget=budget)
        guard = SchedulerIntegrity.compose(config.integrity, parallel, tiers.cache, queues)
        kv_cache = RequestKvCache(cache=tiers.cache, counters=request_metrics.counters, owners=guard.owners)
        load = LoadInquirer(
            parallel=parallel,
            queues=queues,
            pool=tiers.cache,
            rates=request_metrics.rates,
            work=request_metrics.work,
            clock=clocks.wall,
        )
        kv_events = SchedulerKvEventsPublisher(
            parallel=parallel,
            source=guard.events,
            sink=sinks.events,
            load=load,
            metrics_sink=sinks.kv_metrics,
            clock=clocks.wall,
        )
        output = OutputStreamer(sink=sinks.outputs)
        return cls(
            device=device,
            batcher=Batcher(
                config=config,
                queues=queues,
                kv_cache=kv_cache,
                request_metrics=request_metrics,
                tiers=tiers,
                budget=budget,
            ),
            results=BatchResultProcessor(
                kv=kv_cache,
                requests=queues,
                output=output,
                observer=request_metrics,
                eos_token_ids=frozenset(config.tokens.eos_token_ids),
            ),
            output=output,
            kv_events=kv_events,
            metrics=MetricsEmitter(
                parallel=parallel,
                load=load,
                sink=sinks.metrics,
                sources={
                    "counters": request_metrics,
                    "publisher": kv_events,
                    "latencies": request_metrics.latencies,
                    "tiers": tiers,
                    "receiver": LiveStats(request_metrics.receiver),
                    "quiesce": quiesce,
                    "integrity": guard.checker,
                    "pools": guard.pools,
                    "batching": budget,
                    "outputs": output,
                },
            ),
            integrity=guard,
        )

    @property
    def queues(self) -> RequestQueues:
        """Requests in flight."""
        return self.batcher.queues

    @property
    def request_metrics(self) -> RequestMetrics:
        """What the requests have gone through."""
        return self.batcher.request_metrics

    @property
    def tiers(self) -> CacheTiers:
        """The cache and what is behind it."""
        return self.batcher.tiers

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache over the KV pool."""
        return self.batcher.tiers.cache

    @property
    def load(self) -> LoadSource:
        """How loaded this replica is, with the totals of ``request_metrics.work``."""
        return self.metrics.load

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return self._decisions.num_steps

    @property
    def state_digest(self) -> int:
        """32 bits over every decision and result so far. Equal on all ranks of a replica after the same calls; a rank
        that decides otherwise differs from then on.
        """
        return self._decisions.value

    @property
    def has_work(self) -> bool:
        """True while a step has something to do: requests that may run, aborts to tell of, pages on their way; and
        under DP attention while other replicas have requests.
        """
        is_busy = self.batcher.has_work or self.results.has_pending_outputs or self.tiers.num_operations
        return bool(is_busy or self.batcher.budget.dp.last.any_work)

    def submit(self, request: Request) -> None:
        """Queue a request. A refusal changes nothing.

        Raises:
            ConfigError: the whole pool or the model's context could not hold it, a token is not the model's, its id is
                in flight (or its abort is still to be told), or it has been served before.
        """
        check_request_fits(self.batcher.config, request.num_input_tokens, request.limits.max_new_tokens)
        check_tokens_known(self.batcher.config, request.token_ids)
        if request.rid in self.queues:
            raise ConfigError("rid", request.rid, "is already in flight", "give each request an id of its own")
        if request.state is not RequestState.WAITING or request.num_output_tokens:
            raise ConfigError("rid", request.rid, "has been served before", "make a new Request")
        self.integrity.progress.enter_phase("submit", request.rid)
        self.batcher.start_prefetch(request)
        request.num_cached_tokens = self.batcher.kv_cache.match_length(request)
        self.batcher.predict_first_token(request)
        self.queues.add(request)
        self.request_metrics.on_queued(request)
        self._decisions.add(crc32(request.rid.encode()), request.num_prompt_tokens, request.num_cached_tokens)
        self.integrity.progress.enter_phase(IDLE_PHASE)

    def abort(self, rid: str) -> bool:
        """End a request now, wherever it stands; the next step tells of it. False when it is not in flight."""
        request = self.queues.find(rid)
        if request is None:
            return False
        self.integrity.progress.enter_phase("abort", rid)
        self.tiers.prefetch_queue.cancel(rid)
        self.results.abort(request)
        self.integrity.progress.enter_phase(IDLE_PHASE)
        self._decisions.add(request.arrival, self.cache.used_tokens)
        return True

    def step(self) -> StepResult:
        """Compute one batch, book it, and say what happened.

        What the device raises ends the requests of the batch with ``FinishReason.ERROR``, and nothing else. A rank
        that is alone with it differs from the others from then on, which they notice before the next step.

        Raises:
            SyncTimeoutError, SyncDivergenceError, TierDivergenceError: the ranks' tiers are no longer the same.
        """
        progress = self.integrity.progress
        progress.begin_step(self.num_steps + 1, "tiers")
        self.tiers.step()
        self.batcher.update_prefetched_spans()
        progress.enter_phase("batch")
        batch = self.batcher.next_batch()
        if batch.has_work:
            news = self._compute(batch)
        else:
            self.tiers.wait()
            news = self.results.process()
        self.queues.on_aborts_streamed()
        self._decisions.add_step(batch, len(news), self.tiers)
        progress.enter_phase("report")
        self._report()
        nobody_holds = not self.queues.running and not self.tiers.num_operations
        self.integrity.checker.after_step(is_idle=nobody_holds)
        progress.enter_phase(IDLE_PHASE)
        return StepResult(
            step=self.num_steps,
            num_updated_requests=len(news),
            num_prefill_tokens=batch.num_prefill_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            num_admitted=batch.num_admitted,
            num_retracted=batch.num_retracted,
            digest=self.state_digest,
        )

    def _compute(self, batch: ScheduledBatch[Request]) -> list[Request]:
        """Let the device compute a batch, and book it; returns the requests with news."""
        begun_s = self.request_metrics.clock()
        self.integrity.progress.enter_phase("device", batch.works[0].request.rid if batch.works else "")
        try:
            self.device.launch(batch)
            self.kv_events.idle()
            output = self.device.wait()
            if len(output.token_ids) != len(batch.works):
                raise ValueError(f"the device gave {len(output.token_ids)} tokens for {len(batch.works)} works")
        except Exception as error:  # noqa: BLE001 - counted and logged there, and told to each request's client
            self.integrity.progress.enter_phase("results")
            return self.results.fail([work.request for work in batch.works], error)
        self.integrity.progress.enter_phase("results")
        self.request_metrics.on_batch_computed(batch, begun_s=begun_s)
        for place, logprobs in output.logprobs.items():
            batch.works[place].request.append_logprobs(logprobs)
        errors = output.errors
        news = self.results.process(
            RequestResult(work.request, work.start, work.end, (token,), work.is_prefill, errors.get(place, ""))
            for place, (work, token) in enumerate(zip(batch.works, output.token_ids, strict=True))
        )
        if batch.num_prefill_tokens:
            self.batcher.budget.on_first_tokens(batch)
            for work in batch.works:
                if work.is_prefill:
                    self.queues.update_prefill_tokens(work.request)
        return news

    def _report(self) -> None:
        """Tell what the step did: events and statistics every step, slots and blocks now and then."""
        self.kv_events.publish_kv_events()
        self.metrics.emit()
        if self.num_steps % self.batcher.config.kv_metrics_every_steps == 0 or not self.has_work:
            self.kv_events.emit_kv_metrics()

    def drain(self) -> Iterator[StepResult]:
        """Step until there is nothing left to do."""
        while self.has_work:
            yield self.step()

    def retract_all(self) -> int:
        """Let every running request wait again, its output kept; returns how many there were."""
        num_retracted = self.batcher.retract_all()
        self._decisions.add(num_retracted, self.cache.used_tokens)
        self.kv_events.flush()
        return num_retracted

    def clear_cache(self, weight_version: str = DEFAULT_WEIGHT_VERSION) -> None:
        """Forget every cached prefix on device and host, and send so at once, also while no step follows.

        Args:
            weight_version: of the weights that compute what is cached from now on.

        Raises:
            CacheIntegrityError: a request runs, or pages are on their way; nothing has changed.
        """
        self.cache.clear()
        self.batcher.reset_cached_tokens(weight_namespace(weight_version))
        self._decisions.add(self.cache.free_tokens, crc32(weight_version.encode()))
        self.kv_events.flush()

    def clear_storage_index(self) -> None:
        """Count nothing as stored any more, and send so at once.

        Raises:
            CacheIntegrityError: pages are on their way; nothing has changed.
        """
        self.tiers.clear_storage_index()
        self.kv_events.flush()

    def close(self) -> None:
        """Send the last events and outputs, and close the sinks. Requests in flight are served no further.

        Safe to call twice.
        """
        self.kv_events.shutdown()
        self.output.close()
        self.tiers.close()


def _device_cache(config: SchedulerConfig, parallel: ParallelState) -> RadixCache:
    return RadixCache(page_size=config.page_size, capacity_tokens=config.kv_tokens, record=parallel.owns_kv_stream)
