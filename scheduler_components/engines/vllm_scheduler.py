"""ComponentScheduler: a whole scheduler for vLLM, composed of this kit's components. See docs/how-to/vllm.md.

vLLM's engine calls a scheduler in three steps, and its worker computes in between:

    output = scheduler.schedule()                            # Batcher makes a batch, RequestKvCache allocates its pages
    result = executor.execute_model(output)                  # vLLM's worker
    scheduler.update_from_output(output, result)             # tokens are appended, pages cached, requests ended

The worker has a block table of its own and is sent what changed: a new request with all its pages, then new pages. A
page of a running request therefore never changes, which is what ``BlockTableCache`` promises. Page 0 is vLLM's null
block.

It serves models with one group of full attention. ``check_supported`` lists what it refuses when it starts, and
``refusal_of`` which requests it ends with an error. Tested with vLLM 0.32 on CPUs.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.request import RequestStatus

from scheduler_components.batcher import BatchConditions, Batcher
from scheduler_components.cache import BlockTableCache
from scheduler_components.checks.pool_stats_observer import BlockTablePool
from scheduler_components.engines.settings import SchedulerSettings, read_scheduler_settings
from scheduler_components.engines.vllm import open_event_stream
from scheduler_components.engines.vllm_request import VllmRequest
from scheduler_components.errors import CacheIntegrityError, ConfigError
from scheduler_components.invariant_checker import CheckPolicy
from scheduler_components.load_inquirer import LoadInquirer
from scheduler_components.metrics import open_shm_metrics_sink
from scheduler_components.metrics.shm_metrics_board import ShmMetricsSink
from scheduler_components.metrics_emitter import LiveStats
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import NullMetricsSink
from scheduler_components.scheduling.admission_budget import BatchLimits
from scheduler_components.scheduling.composition import (
    SchedulerSinks,
    compose_batcher,
    compose_checks,
    compose_reports,
)
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.values import (
    FinishReason,
    RequestState,
    ScheduledBatch,
    ScheduledChunk,
    SchedulerCounters,
)

if TYPE_CHECKING:
    from vllm.config import KVEventsConfig, VllmConfig
    from vllm.multimodal import MultiModalRegistry
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

__all__ = ["ComponentScheduler"]

_log = logging.getLogger("vllm.scheduler_components")


def check_supported(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Check that the engine asks for nothing that this scheduler does not do.

    Raises:
        ConfigError: naming the first feature that is not supported.
    """
    model, parallel, scheduler = config.model_config, config.parallel_config, config.scheduler_config
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    unsupported = {
        "async_scheduling": (scheduler.async_scheduling, "pass --no-async-scheduling"),
        "use_v2_model_runner": (config.use_v2_model_runner, "set VLLM_USE_V2_MODEL_RUNNER=0"),
        "speculative_config": (config.speculative_config is not None, "serve without speculation"),
        "kv_transfer_config": (config.kv_transfer_config is not None, "serve without a KV connector"),
        "ec_transfer_config": (config.ec_transfer_config is not None, "serve without an encoder-cache connector"),
        "lora_config": (config.lora_config is not None, "serve without adapters"),
        "runner_type": (model.runner_type != "generate", "serve a generative model"),
        "is_multimodal_model": (model.is_multimodal_model or model.is_encoder_decoder, "serve a text model"),
        "kv_cache_groups": (
            len(groups) != 1 or not isinstance(groups[0], FullAttentionSpec) or kv_cache_config.needs_kv_cache_zeroing,
            "serve a model with full attention in each layer",
        ),
        "enable_prefix_caching": (not config.cache_config.enable_prefix_caching, "pass --enable-prefix-caching"),
        "enable_chunked_prefill": (not scheduler.enable_chunked_prefill, "pass --enable-chunked-prefill"),
        "pipeline_parallel_size": (parallel.pipeline_parallel_size > 1, "use tensor parallelism"),
        "decode_context_parallel_size": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "use tensor parallelism",
        ),
    }
    for name, (is_asked, hint) in unsupported.items():
        if is_asked:
            raise ConfigError(name, "as configured", "is not supported by ComponentScheduler", hint)


def refusal_of(request: Request) -> str:
    """Return what a request asks for that this scheduler does not do, or an empty text."""
    params = request.sampling_params
    asked = {
        "structured output": request.use_structured_output,
        "pooling": params is None,
        "logprobs of the prompt": params is not None and params.prompt_logprobs is not None,
        "a cache salt": request.cache_salt is not None,
        "an input of embeddings or media": request.prompt_embeds is not None or bool(request.mm_features),
        "streamed input": request.resumable,
        "a KV transfer": request.kv_transfer_params is not None,
    }
    return next((name for name, is_asked in asked.items() if is_asked), "")


@dataclass(slots=True)
class PauseGate:
    """The ``ComputeGate`` of the batcher: what vLLM's pause state allows."""

    state: PauseState = PauseState.UNPAUSED

    @property
    def can_admit(self) -> bool:
        return bool(self.state == PauseState.UNPAUSED)

    @property
    def can_compute(self) -> bool:
        return bool(self.state != PauseState.PAUSED_ALL)


class ComponentScheduler(SchedulerInterface):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """For ``--scheduler-cls scheduler_components.engines.vllm.ComponentScheduler``.

    Attributes:
        batcher: makes the batches; it has the policies and their counters.
        queues: the waiting and running requests.
        cache, kv_cache: the pages, and their assignment to requests.
        kv_events, load, metrics, checker: they read the parts above and decide nothing.
        connector, ec_connector: vLLM's engine reads them; there are none.

    Raises:
        ConfigError: a feature is not supported, a setting is unknown, or the pool cannot hold one request.
        StartError: an address of the event stream or the metrics board cannot be opened.
    """

    connector = None
    ec_connector = None

    def __init__(  # noqa: SCH010 vLLM calls it
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: MultiModalRegistry = MULTIMODAL_REGISTRY,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        check_supported(vllm_config, kv_cache_config)
        settings = read_scheduler_settings(vllm_config.additional_config)
        self.max_model_len = vllm_config.model_config.max_model_len
        self.log_stats = log_stats

        # The path of a request: queues, batcher, pages.
        self.cache = BlockTableCache(
            page_size=block_size,
            capacity_tokens=(kv_cache_config.num_blocks - 1) * block_size,
            reserves_page_0=True,
            record=vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events,
        )
        if self.cache.capacity_tokens < self.max_model_len:
            problem = f"is more than the {self.cache.capacity_tokens} tokens of the pool"
            raise ConfigError("max_model_len", self.max_model_len, problem, "give a smaller one, or more blocks")
        self.counters = SchedulerCounters()
        self.kv_cache = RequestKvCache(
            cache=self.cache, counters=self.counters, on_cached_prompt=VllmRequest.record_cached_prompt
        )
        self.gate = PauseGate()
        self.batcher: Batcher[VllmRequest] = compose_batcher(
            self.kv_cache,
            _limits_of(vllm_config),
            schedule_policy=settings.policy,
            preemption_policy=settings.preemption,
            conditions=BatchConditions(gate=self.gate),
            observer=self,
        )
        self.queues = self.batcher.queues
        self._batch = ScheduledBatch[VllmRequest]()
        self._finished_ids: set[str] = set()
        self._finished_by_client: dict[int, set[str]] | None = defaultdict(set) if include_finished_set else None
        self._refused: list[Request] = []
        self._prefix_cache_stats = PrefixCacheStats()
        self._observe(vllm_config, settings)

    def _observe(self, vllm_config: VllmConfig, settings: SchedulerSettings) -> None:
        """Compose what reads the parts and decides nothing."""
        parallel, events_config = _parallel_state_of(vllm_config), vllm_config.kv_events_config
        records_events = events_config is not None and events_config.enable_kv_cache_events
        checks = compose_checks(
            BlockTablePool(cache=self.cache, requests=self.queues),
            self.cache,
            CheckPolicy(action=settings.checks),
            follows_events=records_events,
        )
        self.checker = checks.checker
        self.load = LoadInquirer(parallel=parallel, queues=self.queues, pool=self.cache)
        stream = open_event_stream(events_config, parallel.kv_stream_index)  # noqa: SCH008 - vLLM makes no later call
        self._stream_config = stream.get_publisher_config()
        directory = settings.metrics_directory
        self._metrics_sink: ShmMetricsSink | NullMetricsSink = NullMetricsSink()
        if directory:
            self._metrics_sink = open_shm_metrics_sink(Path(directory), parallel)  # noqa: SCH008 - as above
        self.kv_events, self.metrics = compose_reports(
            self.load,
            checks.events,
            SchedulerSinks(events=stream.publisher, metrics=self._metrics_sink),
            {"counters": LiveStats(self.counters), "integrity": self.checker, "pools": checks.pools},
        )

    # --- a request begins and ends ---

    def add_request(self, request: Request) -> None:
        """Queue a request. One that asks for what is not supported ends with an error in the next step."""
        if problem := refusal_of(request):
            _log.error("request %s asks for %s, which ComponentScheduler does not support", request.request_id, problem)
            request.status = RequestStatus.FINISHED_ERROR
            self._refused.append(request)
            return
        own = VllmRequest(request, arrival=-1, max_model_len=self.max_model_len)
        self.kv_cache.start(own)
        self.batcher.add(own)
        self.counters.num_requests_total += 1
        self._record(request, EngineCoreEventType.QUEUED)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End requests of clients that went away; None ends all. Return those that were in flight."""
        if request_ids is None:
            ids: Iterable[str] = [request.rid for request in self.queues]
        else:
            ids = [request_ids] if isinstance(request_ids, str) else request_ids
        found = [request for rid in dict.fromkeys(ids) if (request := self.queues.find(rid)) is not None]
        for request in found:
            request.theirs.status = finished_status
            self._end(request)
        self.counters.num_aborted_requests_total += len(found)
        return [request.theirs for request in found]

    def _end(self, request: VllmRequest) -> None:
        """Free the slot and the pages of a request whose status says why it has ended."""
        self.batcher.finish(request, FinishReason.ABORT)
        self.queues.on_aborts_streamed()
        self.kv_cache.free(request)
        self._finished_ids.add(request.rid)
        if self._finished_by_client is not None:
            self._finished_by_client[request.theirs.client_index].add(request.rid)

    # --- a step: schedule, execute (vLLM's worker), update ---

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # DP balancing is not supported
        """Make a batch and describe it to the worker."""
        self.checker.progress.begin_step(self.batcher.num_steps + 1, "schedule")
        self._batch = self.batcher.next_batch()
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        for chunk in self._batch.chunks:
            _describe(chunk, new, cached)
        num_scheduled_tokens = {chunk.request.rid: chunk.num_tokens for chunk in self._batch.chunks}
        finished_ids, self._finished_ids = self._finished_ids, set()
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=num_scheduled_tokens,
            total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished_ids,
            free_encoder_mm_hashes=[],
        )

    def on_admitted(self, request: VllmRequest) -> None:
        """Record that a request got its first pages. The batcher calls this."""
        theirs, is_resumed = request.theirs, bool(request.num_retractions)
        theirs.status = RequestStatus.RUNNING
        self._record(theirs, EngineCoreEventType.SCHEDULED)
        self._prefix_cache_stats.record(theirs.num_tokens, request.num_cached_tokens, is_resumed)
        if not is_resumed:
            self.counters.prompt_tokens_total += theirs.num_prompt_tokens
            self.counters.cached_tokens_total += request.num_cached_tokens
            if theirs.prefill_stats is not None:
                theirs.prefill_stats.set(theirs.num_prompt_tokens, request.num_cached_tokens, 0)

    def on_retracted(self, request: VllmRequest) -> None:
        """Record that a request lost its pages. The batcher calls this."""
        request.num_sent_pages = 0
        request.theirs.status = RequestStatus.PREEMPTED
        request.theirs.num_preemptions += 1
        self.counters.num_retractions_total += 1
        self._record(request.theirs, EngineCoreEventType.PREEMPTED)

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,  # the batch that it describes is kept
        model_runner_output: ModelRunnerOutput,
    ) -> dict[int, EngineCoreOutputs]:
        """Apply what the worker computed, and return the new tokens and ends by client."""
        outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        for chunk in self._batch.chunks:
            if chunk.request.state is not RequestState.FINISHED:  # it may have been aborted while the worker computed
                output = self._apply(chunk, model_runner_output)
                if output is not None:
                    outputs[chunk.request.theirs.client_index].append(output)
        for refused in self._refused:
            reason = refused.get_finished_reason()
            outputs[refused.client_index].append(EngineCoreOutput(refused.request_id, [], finish_reason=reason))
        self._refused = []
        self.kv_events.publish_kv_events()
        self.metrics.emit()
        self.checker.after_step(is_idle=not self.queues.running)
        return self._by_client(outputs)

    def _apply(self, chunk: ScheduledChunk[VllmRequest], result: ModelRunnerOutput) -> EngineCoreOutput | None:
        """Append the tokens of one request. Return its output, or None while its prompt is not computed."""
        request, theirs = chunk.request, chunk.request.theirs
        index = result.req_id_to_index[request.rid]
        tokens = result.sampled_token_ids[index] if result.sampled_token_ids else []
        request.num_computed_tokens = theirs.num_computed_tokens = chunk.end
        if chunk.is_prefill:
            self.kv_cache.cache_unfinished(request)
            self.queues.update_prefill_tokens(request)
        is_stopped = False
        for number, token in enumerate(tokens, start=1):
            theirs.append_output_token_ids(token)
            is_stopped = check_stop(theirs, self.max_model_len)
            if is_stopped:
                del tokens[number:]
                break
        if not tokens:
            return None
        self.counters.generation_tokens_total += len(tokens)
        wants_logprobs = theirs.sampling_params.num_logprobs is not None and result.logprobs
        output = EngineCoreOutput(
            request.rid,
            tokens,
            finish_reason=theirs.get_finished_reason() if is_stopped else None,
            new_logprobs=result.logprobs.slice_request(index, len(tokens)) if wants_logprobs else None,
            stop_reason=theirs.stop_reason,
            events=theirs.take_events(),
            prefill_stats=theirs.take_prefill_stats(),
            trace_headers=theirs.trace_headers,
            num_nans_in_logits=(result.num_nans_in_logits or {}).get(request.rid, 0),
        )
        if output.prefill_stats is not None:
            output.prefill_stats.finalize(request.num_cached_pages * self.cache.page_size)
        if is_stopped:
            self._end(request)
        return output

    def _by_client(self, outputs: dict[int, list[EngineCoreOutput]]) -> dict[int, EngineCoreOutputs]:
        """Add the ids of ended requests, and the statistics for one of the clients."""
        by_client = {client: EngineCoreOutputs(outputs=each) for client, each in outputs.items()}
        for client, finished in (self._finished_by_client or {}).items():
            by_client.setdefault(client, EngineCoreOutputs()).finished_requests = finished
        if self._finished_by_client:
            self._finished_by_client = defaultdict(set)
        if (stats := self.make_stats()) is not None:
            first = next(iter(by_client.values()), None) or by_client.setdefault(0, EngineCoreOutputs())
            first.scheduler_stats = stats
        return by_client

    # --- what the engine asks ---

    def get_request_counts(self) -> tuple[int, int]:
        """Return the numbers of running and of waiting requests."""
        return len(self.queues.running), len(self.queues.waiting)

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests the engine must step for, as far as the pause state allows."""
        if not self.gate.can_compute:
            return 0
        return len(self.queues) if self.gate.can_admit else len(self.queues.running)

    def has_finished_requests(self) -> bool:
        """Return whether a step must report ended requests to the worker or to a client."""
        return bool(self._finished_ids or self._refused)

    @property
    def pause_state(self) -> PauseState:
        return self.gate.state

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.gate.state = pause_state

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the table of cached pages. Return False, without a change, while requests use some of them."""
        if reset_running_requests:
            self.batcher.retract_all()
        try:
            self.cache.clear()
        except CacheIntegrityError as error:
            _log.warning("the prefix cache is not reset: %s", error)
            return False
        self._prefix_cache_stats.reset = True
        self.kv_events.flush()  # an idle engine makes no step
        return True

    def get_kv_cache_usage(self) -> float:
        """Return the share of the pool that requests use."""
        return self.kv_cache.token_usage

    def make_stats(self) -> SchedulerStats | None:
        """Return the statistics since the last call, if vLLM logs any."""
        if not self.log_stats:
            return None
        prefix_cache_stats, self._prefix_cache_stats = self._prefix_cache_stats, PrefixCacheStats()
        num_running, num_waiting = self.get_request_counts()
        return SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            kv_cache_usage=self.get_kv_cache_usage(),
            prefix_cache_stats=prefix_cache_stats,
        )

    def get_kv_event_publisher_config(self) -> KVEventsConfig | None:
        """Return the addresses of the event stream, for ``/kv_event_sources``."""
        return self._stream_config

    def shutdown(self) -> None:
        """Send the last events and release the metrics board. Safe to call twice."""
        self.kv_events.shutdown()
        self._metrics_sink.close()

    def _record(self, request: Request, event: EngineCoreEventType) -> None:
        if self.log_stats:
            request.record_event(event, time.monotonic())

    # What is refused at the start needs no answer here.

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> None:
        pass

    def update_draft_token_ids(self, draft_token_ids: object) -> None:
        pass

    def update_draft_token_ids_in_output(self, draft_token_ids: object, scheduler_output: SchedulerOutput) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        pass


def _describe(chunk: ScheduledChunk[VllmRequest], new: list[NewRequestData], cached: CachedRequestData) -> None:
    """Describe one chunk to the worker: the whole request the first time, what changed from then on."""
    request, theirs = chunk.request, chunk.request.theirs
    pages = request.pages[request.num_sent_pages :]
    theirs.num_computed_tokens = chunk.start
    if not request.is_known:
        new.append(NewRequestData.from_request(theirs, (pages,)))
    else:
        cached.req_ids.append(request.rid)
        if not request.num_sent_pages:  # after a preemption its pages replace those that the worker knows
            cached.resumed_req_ids.add(request.rid)
        cached.new_block_ids.append((pages,) if pages else None)
        cached.num_computed_tokens.append(chunk.start)
        cached.num_output_tokens.append(theirs.num_output_tokens)
    request.is_known = True
    request.num_sent_pages = len(request.pages)


def _limits_of(vllm_config: VllmConfig) -> BatchLimits:
    """Return vLLM's sizes of a batch as the kit's. As in vLLM, a decode spends a token of the budget, too."""
    config = vllm_config.scheduler_config
    max_tokens = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    num_blocks = vllm_config.cache_config.num_gpu_blocks or 0
    return BatchLimits(
        max_running_requests=config.max_num_active_seqs or config.max_num_seqs,
        max_prefill_tokens=max_tokens,
        chunk_tokens=config.long_prefill_token_threshold or max_tokens,
        counts_decodes=True,
        watermark_pages=int(config.watermark * num_blocks),
    )


def _parallel_state_of(vllm_config: VllmConfig) -> ParallelState:
    """Return the rank of this engine. vLLM runs one scheduler per data-parallel replica."""
    config = vllm_config.parallel_config
    if config.data_parallel_size == 1:
        return ParallelState()
    return ParallelState(dp_rank=config.data_parallel_index, dp_size=config.data_parallel_size)
