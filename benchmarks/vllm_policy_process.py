"""Run vLLM's ``Scheduler.schedule`` for ``bench_policies``, in a Python with vLLM.

``python -m benchmarks.vllm_policy_process``: for each line of standard input, ``POLICY NUM_WAITING NUM_CALLS``, print
``answer``, the microseconds of processor time per call, and the requests admitted per call. Between two calls, which is
not timed, the scheduler gets the tokens of the batch, and as many requests arrive as have been admitted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.policy_workload import (
    KV_TOKENS,
    NUM_RUNNING,
    OUTPUT_TOKENS,
    PAGE_SIZE,
    PREFILL_TOKENS,
    cached_families,
    prompt,
)

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 32_000,
    "max_position_embeddings": 2_048,
    "torch_dtype": "float32",
}


def open_scheduler(model: Path, policy: str) -> Any:
    """Open a scheduler as vLLM's engine does, over a block pool without memory."""
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=1_024, enforce_eager=True
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=NUM_RUNNING,
            max_num_batched_tokens=PREFILL_TOKENS + NUM_RUNNING,
            max_model_len=1_024,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            policy=policy,
        ),
        cache_config=CacheConfig(enable_prefix_caching=True),
    )
    config.scheduler_config.async_scheduling = False
    num_blocks = KV_TOKENS // PAGE_SIZE
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = PAGE_SIZE
    spec = FullAttentionSpec(block_size=PAGE_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=PAGE_SIZE,
        hash_block_size=PAGE_SIZE,
        log_stats=True,
    )


class Case:
    """A scheduler in a steady state.

    Args:
        model: folder of the model's configuration.
        policy: vLLM's name.
        num_waiting: requests that wait, besides those that run.
    """

    def __init__(self, model: Path, policy: str, num_waiting: int) -> None:
        self.scheduler = open_scheduler(model, policy)
        self.hasher = get_request_block_hasher(PAGE_SIZE, sha256)
        self.num_requests = NUM_RUNNING + num_waiting
        self.count = 0
        for tokens in cached_families():
            self._add([*tokens, 1], 1)
        while self.scheduler.has_requests():
            self._update(self.scheduler.schedule())
        self.spent_ns = self.num_admitted = 0
        for number in range(OUTPUT_TOKENS + NUM_RUNNING):  # until 64 requests of different ages run
            self._fill(min(self.num_requests, NUM_RUNNING * (number + 1) // OUTPUT_TOKENS))
            self.step()

    def step(self) -> None:
        """Time one call of ``schedule``."""
        started_ns = time.thread_time_ns()
        output = self.scheduler.schedule()
        self.spent_ns += time.thread_time_ns() - started_ns
        self.num_admitted += len(output.scheduled_new_reqs)
        self._update(output)
        self._fill(self.num_requests)

    def _fill(self, num_requests: int) -> None:
        while sum(self.scheduler.get_request_counts()) < num_requests:
            self._add(prompt(self.count), OUTPUT_TOKENS)

    def _add(self, tokens: list[int], num_output_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True, temperature=0)
        request = Request(
            request_id=f"r{self.count}",
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(self.count),
            priority=self.count % 5,
            block_hasher=self.hasher,
        )
        self.count += 1
        self.scheduler.add_request(request)

    def _update(self, output: Any) -> None:
        rids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [[7] if requests[rid].num_computed_tokens >= requests[rid].num_tokens else [] for rid in rids]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=rids,
                req_id_to_index={rid: place for place, rid in enumerate(rids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )


def main() -> None:
    """Answer until the end of standard input."""
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory(prefix="policies-") as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(_MODEL))
        cases: dict[tuple[str, int], Case] = {}
        for line in sys.stdin:
            policy, waiting, num_calls = line.split()
            key = policy, int(waiting)
            if key not in cases:
                cases[key] = Case(model, *key)
            case = cases[key]
            case.spent_ns = case.num_admitted = 0
            for _ in range(int(num_calls)):
                case.step()
            print("answer", case.spent_ns / 1e3 / int(num_calls), case.num_admitted / int(num_calls), flush=True)


if __name__ == "__main__":
    main()
