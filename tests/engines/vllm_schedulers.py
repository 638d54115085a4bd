"""vLLM's scheduler classes without an engine: the tests play the worker, with tokens that follow from the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from hypothesis import strategies as st

BLOCK_SIZE = 4


def open_scheduler(
    scheduler_class: Any,
    model: Path,
    *,
    num_blocks: int = 16,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 48,
    block_size: int = BLOCK_SIZE,
    async_scheduling: bool = False,
    settings: Mapping[str, object] | None = None,
    kv_events_config: Any = None,
    enable_prefix_caching: bool = True,
    sliding_window: int | None = None,
    hf_overrides: Mapping[str, object] | None = None,
    **options: Any,
) -> Any:
    """Open a scheduler as vLLM's engine does; ``options`` are of ``SchedulerConfig``."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=max_model_len,
            enforce_eager=True,
            hf_overrides=dict(hf_overrides or {}),
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            **options,
        ),
        cache_config=CacheConfig(enable_prefix_caching=enable_prefix_caching),
        additional_config={} if settings is None else {"scheduler_components": dict(settings)},
        kv_events_config=kv_events_config,
    )
    config.scheduler_config.async_scheduling = async_scheduling  # the CPU platform turns it off
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = block_size
    sizes = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    spec = (
        FullAttentionSpec(**sizes)
        if sliding_window is None
        else SlidingWindowSpec(**sizes, sliding_window=sliding_window)
    )
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=block_size,
        log_stats=True,
    )


def make_request(
    rid: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    priority: int = 0,
    block_size: int = BLOCK_SIZE,
    stop_token_ids: Sequence[int] = (),
    **extra: object,
) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, temperature=0, stop_token_ids=list(stop_token_ids), extra_args=extra
    )
    return Request(
        request_id=rid,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        priority=priority,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


def next_token(rid: str, position: int) -> int:
    """Return the token that the played worker samples."""
    return crc32(f"{rid}/{position}".encode()) % 50


@dataclass
class PlayedWorker:
    """A scheduler and its worker: it computes a batch when the batch is taken, in order.

    With ``num_in_flight`` above 1 the scheduler makes further batches before it gets the tokens, as vLLM's engine does
    with async scheduling.
    """

    scheduler: Any
    num_in_flight: int = 1
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    _batches: list[tuple[Any, list[list[int]]]] = field(default_factory=list)

    def step(self) -> Any:
        """Schedule a batch, and apply the oldest one if enough are in flight. Return the batch."""
        requests = self.scheduler.requests if hasattr(self.scheduler, "requests") else None
        output = self.scheduler.schedule()
        sampled = [self._sample(output, rid, requests) for rid in output.num_scheduled_tokens]
        self._batches.append((output, sampled))
        while len(self._batches) >= self.num_in_flight:
            self.update()
        return output

    def _sample(self, output: Any, rid: str, requests: Any) -> list[int]:
        """Return the token after the chunk of a request; none inside its prompt. vLLM has advanced its requests."""
        if requests is not None:
            request = requests[rid]
            return [] if request.is_prefill_chunk else [next_token(rid, request.num_computed_tokens)]
        request = self.scheduler.queues.find(rid).theirs
        end = request.num_computed_tokens + output.num_scheduled_tokens[rid]
        return [] if end < request.num_tokens else [next_token(rid, end)]

    def update(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output, sampled = self._batches.pop(0)
        rids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=rids, req_id_to_index={rid: index for index, rid in enumerate(rids)}, sampled_token_ids=sampled
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                self.tokens.setdefault(each.request_id, []).extend(each.new_token_ids)
                if each.finish_reason is not None:
                    self.ended[each.request_id] = str(each.finish_reason)

    def drain(self, max_steps: int = 2_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._batches:
                return
            if self.scheduler.has_requests():
                self.step()
            else:
                self.update()
        raise AssertionError(f"requests are left after {max_steps} steps")


def comparable(output: Any) -> dict[str, object]:
    """Return what a batch says to the worker."""
    cached = output.scheduled_cached_reqs
    return {
        "new": [(each.req_id, each.block_ids, each.num_computed_tokens) for each in output.scheduled_new_reqs],
        "cached": list(
            zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        ),
        "resumed": cached.resumed_req_ids,
        "tokens": list(output.num_scheduled_tokens.items()),
        "finished": output.finished_req_ids,
        "preempted": output.preempted_req_ids,
    }


_PROMPTS = st.builds(
    lambda family, shared, own: [family] * shared + own,
    st.integers(0, 1),
    st.integers(0, 20),
    st.lists(st.integers(2, 9), min_size=1, max_size=12),
)
WORKLOADS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), _PROMPTS, st.integers(1, 12), st.integers(-1, 1)),
        st.tuples(st.just("add"), _PROMPTS, st.integers(1, 12), st.integers(-1, 1)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("reset"), st.booleans()),
    ),
    max_size=40,
)
"""Prompts of two families with shared prefixes, steps, aborts and resets of the prefix cache."""


def play(
    workload: Sequence[tuple[Any, ...]], workers: Sequence[PlayedWorker], compare: Callable[[list[Any]], None]
) -> None:
    """Play a workload on several schedulers, and compare their batches after each step."""
    from vllm.v1.request import RequestStatus

    count = 0
    for name, *arguments in workload:
        if name == "add":
            prompt, max_tokens, priority = arguments
            for worker in workers:
                worker.scheduler.add_request(make_request(f"r{count}", prompt, max_tokens, priority=priority))
            count += 1
        elif name == "step":
            for _ in range(arguments[0]):
                compare([worker.step() for worker in workers])
        elif name == "abort":
            for worker in workers:
                worker.scheduler.finish_requests(f"r{arguments[0]}", RequestStatus.FINISHED_ABORTED)
        elif name == "reset" and not arguments[0]:
            assert len({worker.scheduler.reset_prefix_cache() for worker in workers}) == 1
    for _ in range(2_000):
        if not any(worker.scheduler.has_requests() for worker in workers):
            break
        compare([worker.step() for worker in workers])
