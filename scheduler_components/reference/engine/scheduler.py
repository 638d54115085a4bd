"""The reference scheduler: continuous batching, composed of small parts. One process, one thread, no sockets here.

One ``step()``:

    tiers.step()                              where pages are kept beyond the device: agree on what has moved
    batch    = batcher.next_batch()           who computes what; pages are taken, the latest arrivals retracted
    device.launch(batch)
    kv_events.idle()                          the last step's events go out while the device computes
    news     = results.process(device.wait())     tokens to requests, pages to the cache, outputs to the front
    kv_events.publish_kv_events()             what the cache stored and removed in this step
    metrics.emit()

All ranks of a replica run this with the same calls in the same order and so take the same decisions: nothing
here depends on a clock or on the rank, and ``state_digest`` lets them check it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from zlib import crc32

from scheduler_components import (
    NO_KV_METRICS,
    BatchResultProcessor,
    ConfigError,
    KvEventSink,
    KvMetricsSink,
    LoadInquirer,
    LoadWithTotals,
    MetricsEmitter,
    MetricsSink,
    NullEventPublisher,
    OutputBatch,
    OutputSink,
    OutputStreamer,
    ParallelState,
    SchedulerKvEventsPublisher,
    SchedulerStats,
    SchedulerTotals,
    WorkResult,
    WorkTotals,
)
from scheduler_components.cache import RadixCache
from scheduler_components.metrics import RateMeter, RequestLatencies
from scheduler_components.reference.device import Device, Request, RequestState, ScheduledBatch, StepResult
from scheduler_components.reference.engine.batcher import Batcher, RequestPages, RequestQueues
from scheduler_components.reference.engine.bookkeeping import RequestBook, RunningTotals
from scheduler_components.reference.engine.cache_tiers import NO_TIERS, CacheTiers, PrefixCache
from scheduler_components.reference.engine.policy import SchedulerConfig, check_request_fits

__all__ = [
    "Scheduler",
]


class _NoMetrics:
    """The sink of a scheduler whose metrics nobody reads."""

    def record(self, stats: SchedulerStats) -> None:
        pass


class _NoOutputs:
    """The sink of a rank that answers nobody."""

    def is_ready(self) -> bool:
        return True

    def send(self, batch: OutputBatch) -> bool:  # noqa: ARG002
        return True

    def close(self) -> None:
        pass


class Scheduler:
    """Serves requests in steps. Not thread-safe: one thread calls everything.

    Args:
        config: sizes.
        parallel: this process's rank; the owner of the KV stream records events, the others only decide alike.
        device: computes batches.
        cache: the prefix cache over the KV pool; by default a ``RadixCache`` of ``config``'s sizes.
        tiers: what is behind it; nothing by default. ``close`` closes it.
        event_sink: where KV events go; made by ``open_event_publisher``. ``close`` shuts it down.
        output_sink: where the tokens of requests go; nowhere by default. ``close`` closes it.
        metrics_sink: where each step's statistics go.
        kv_metrics_sink: where slots and blocks go, for the serving process. ``close`` closes it.
        wall_clock: seconds since the epoch, for time stamps.
        monotonic_clock: seconds from any origin, for rates and the times of requests.

    Attributes:
        cache, queues, load, work, output, kv_events, metrics: the parts that others may read, or call between two
            steps: ``work.took_in()`` for a request that was dispatched with a ticket, and ``load.get_loads()``,
            ``output.flush()``, ``kv_events.idle()`` and ``metrics.emit()`` while there is no work.
        num_steps: steps done.
        state_digest: 32 bits over every decision and result so far. Equal on all ranks of a replica after the
            same calls; a rank that parts from the others differs from then on.
    """

    def __init__(  # noqa: SCH010 the engine's one place of composition takes each replaceable part by name
        self,
        config: SchedulerConfig,
        parallel: ParallelState,
        device: Device,
        *,
        cache: PrefixCache | None = None,
        tiers: CacheTiers = NO_TIERS,
        event_sink: KvEventSink | None = None,
        output_sink: OutputSink | None = None,
        metrics_sink: MetricsSink | None = None,
        kv_metrics_sink: KvMetricsSink = NO_KV_METRICS,
        wall_clock: Callable[[], float] = time.time,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.device = device
        self.cache: PrefixCache = cache if cache is not None else _device_cache(config, parallel)
        self.tiers = tiers
        self.queues = queues = RequestQueues(max_running_requests=config.max_running_requests)
        counters, rates = RunningTotals(), RateMeter(clock=monotonic_clock)
        self.book = book = RequestBook(
            counters=counters, rates=rates, latencies=RequestLatencies(clock=monotonic_clock), tiers=tiers
        )
        self.pages = pages = RequestPages(cache=self.cache, totals=counters)
        self.batcher = Batcher(config=config, queues=queues, pages=pages, book=book, tiers=tiers)
        self.output = OutputStreamer(sink=output_sink if output_sink is not None else _NoOutputs())
        self.results = BatchResultProcessor(
            kv=pages,
            requests=queues,
            output=self.output,
            observer=book,
            eos_token_ids=frozenset() if config.eos_token_id is None else frozenset({config.eos_token_id}),
        )
        self.work = WorkTotals()
        self.load = LoadWithTotals(
            load=LoadInquirer(parallel=parallel, queues=queues, pool=self.cache, rates=rates, clock=wall_clock),
            work=self.work,
        )
        self.kv_events = SchedulerKvEventsPublisher(
            parallel=parallel,
            source=self.cache,
            sink=event_sink if event_sink is not None else NullEventPublisher(),
            load=self.load,
            metrics_sink=kv_metrics_sink,
            clock=wall_clock,
        )
        self.metrics = MetricsEmitter(
            parallel=parallel,
            load=self.load,
            sink=metrics_sink if metrics_sink is not None else _NoMetrics(),
            totals=book,
            publisher=self.kv_events,
        )
        self.num_steps = 0
        self.state_digest = 0
        self._clock = monotonic_clock
        self._untold_rids: set[str] = set()

    @property
    def has_work(self) -> bool:
        """True while a step has something to do: requests in flight, aborts to tell of, pages on their way."""
        return bool(self.queues or self.results.has_news or self.tiers.num_operations)

    def submit(self, request: Request) -> None:
        """Queue a request. A refusal changes nothing.

        Raises:
            ConfigError: the whole pool could not hold it, its id is in flight (or its abort is still to be told),
                or it has been served before.
        """
        check_request_fits(self.config, request.num_input_tokens, request.limits.max_new_tokens)
        if self.queues.find(request.rid) is not None or request.rid in self._untold_rids:
            raise ConfigError("rid", request.rid, "is already in flight", "give each request an id of its own")
        if request.state is not RequestState.WAITING or request.num_output_tokens:
            raise ConfigError("rid", request.rid, "has been served before", "make a new Request")
        self.tiers.expect(request.rid, request.token_ids[:-1])
        request.num_cached_tokens = self.pages.look_up(request)
        self.queues.enter(request)
        self.book.queued(request)
        self._chain(crc32(request.rid.encode()), request.num_prompt_tokens, request.num_cached_tokens)

    def abort(self, rid: str) -> bool:
        """End a request now, wherever it stands; the next step tells of it. False when it is not in flight."""
        request = self.queues.find(rid)
        if request is None:
            return False
        self.tiers.forget(rid)
        self.results.abort(request)
        self._untold_rids.add(rid)
        self._chain(request.arrival, self.cache.used_tokens)
        return True

    def step(self) -> StepResult:
        """Compute one batch, book it, and say what happened.

        What the device raises ends the requests of the batch with ``FinishReason.ERROR``, and nothing else. A rank
        that is alone with it parts from the others, which they notice before the next step.

        Raises:
            SyncTimeoutError, SyncDivergenceError, TierDivergenceError: the ranks' tiers no longer go together.
        """
        self.tiers.step()
        batch = self.batcher.next_batch()
        if batch.works:
            news = self._compute(batch)
        else:
            self.tiers.wait()
            news = self.results.process()
        self._untold_rids.clear()
        self.num_steps += 1
        self._chain_step(batch, len(news))
        self.kv_events.publish_kv_events()
        self.metrics.emit()
        if self.num_steps % self.config.kv_metrics_every_steps == 0 or not self.has_work:
            self.kv_events.emit_kv_metrics()
        return StepResult(
            step=self.num_steps,
            num_news=len(news),
            num_prefill_tokens=batch.num_prefill_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            num_admitted=batch.num_admitted,
            num_retracted=batch.num_retracted,
            digest=self.state_digest,
        )

    def _compute(self, batch: ScheduledBatch) -> list[Request]:
        """Let the device compute a batch, and book it; returns the requests with news."""
        begun_s = self._clock()
        try:
            self.device.launch(batch)
            self.kv_events.idle()
            next_tokens = self.device.wait()
            if len(next_tokens) != len(batch.works):
                raise ValueError(f"the device gave {len(next_tokens)} tokens for {len(batch.works)} works")
        except Exception as error:  # noqa: BLE001 - counted and logged there, and told to each request's client
            return self.results.fail([work.request for work in batch.works], error)
        if batch.num_prefill_tokens:
            self.work.prefilled(batch.num_prefill_tokens, self._clock() - begun_s)
        return self.results.process(
            WorkResult(work.request, work.start, work.end, (token,), work.is_prefill)
            for work, token in zip(batch.works, next_tokens, strict=True)
        )

    def drain(self) -> Iterator[StepResult]:
        """Step until there is nothing left to do."""
        while self.has_work:
            yield self.step()

    def flush_cache(self) -> bool:
        """Forget every cached prefix and say so on the stream; False, and nothing done, with work in flight."""
        if self.queues or self.tiers.num_operations:
            return False
        self.cache.clear()
        self._chain(self.cache.used_tokens, self.cache.free_tokens)
        self.kv_events.publish_kv_events()
        return True

    def totals(self) -> SchedulerTotals:
        """Return the running totals."""
        return self.book.totals()

    def close(self) -> None:
        """Send the last events and outputs, and close the sinks. Requests in flight are served no further.

        Safe to call twice.
        """
        self.kv_events.shutdown()
        self.output.close()
        self.tiers.close()

    def _chain_step(self, batch: ScheduledBatch, num_news: int) -> None:
        """Fold a step's decisions and results into the digest: who, where, on which page, and what came out."""
        facts = [self.num_steps, batch.num_admitted, batch.num_retracted]
        for work in batch.works:
            request = work.request
            facts += (request.arrival, work.start, work.end, request.token_ids[-1])
            facts.append(request.pages[-1] if request.pages else -1)
        cache = self.cache
        facts += (num_news, cache.used_tokens, cache.free_tokens, cache.evictable_tokens, self.tiers.state_digest)
        self._chain(*facts)

    def _chain(self, *facts: int) -> None:
        self.state_digest = crc32(array("q", facts).tobytes(), self.state_digest)


def _device_cache(config: SchedulerConfig, parallel: ParallelState) -> RadixCache:
    return RadixCache(page_size=config.page_size, capacity_tokens=config.kv_tokens, record=parallel.owns_kv_stream)
