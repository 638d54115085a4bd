"""A whole vLLM in the process of the tests, on a CPU."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scheduler_components.cache import signed_block_hash
from scheduler_components.engines.settings import KV_EVENTS_VARIABLE
from scheduler_components.engines.vllm import VllmEventPublisher, register

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_PLUGINS": "scheduler_components",
}
TRACE_BLOCK_TOKENS, POOL_BLOCKS, WINDOW = 32, 64, 20


@dataclass
class Engine:
    """A vLLM in this process. Tests replace the publisher of its events."""

    llm: Any
    folder: Path
    num_streams: int = 0

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def pool(self) -> set[int]:
        """Return the wire hashes of the blocks that the pool can reuse now."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

        cached = self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        return {signed_block_hash(maybe_convert_block_hash(get_block_hash(key))) for key in cached._cache}

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 4, report: str = "incremental"
    ) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_cache_report_mode": report},
        )
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(each.outputs[0].token_ids) for each in self.llm.generate(asked, params, use_tqdm=False)]

    def open(self, variable: dict[str, Any] | None = None, **changes: Any) -> VllmEventPublisher:
        """Open another stream of the plugin as vLLM's scheduler does."""
        from vllm.distributed.kv_events import EventPublisherFactory

        register({KV_EVENTS_VARIABLE: json.dumps(variable or {})})
        return EventPublisherFactory.create(self.settings(**changes), 0)

    def open_vllms_own(self, **changes: Any) -> Any:
        from vllm.distributed.kv_events import ZmqEventPublisher

        settings = dataclasses.asdict(self.settings(**changes))
        del settings["enable_kv_cache_events"], settings["publisher"]
        return ZmqEventPublisher(0, **settings)

    def settings(self, **changes: Any) -> Any:
        """Return vLLM's configuration of a stream with new addresses."""
        from vllm.config import KVEventsConfig

        self.num_streams += 1
        address = f"ipc://{self.folder}/{self.num_streams}"
        standard = {"endpoint": address, "replay_endpoint": f"{address}r", "buffer_steps": WINDOW}
        return KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **(standard | changes))

    def publish_by(self, publisher: Any) -> None:
        """Empty the cache, and publish with ``publisher`` from now on."""
        self.scheduler.kv_event_publisher.shutdown()
        self.scheduler.kv_event_publisher = publisher
        assert self.llm.reset_prefix_cache()
        self.scheduler.kv_cache_manager.take_events()


def start_engine(model: Path, folder: Path, **options: Any) -> Engine:
    """Start vLLM with the plugin, enabled by environment variables that are restored afterwards.

    Args:
        options: arguments of vLLM's ``LLM``, in addition to those here or instead of them.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        from vllm import LLM

        started = Engine(llm=None, folder=folder)
        standard = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": TRACE_BLOCK_TOKENS,
            "max_model_len": 1024,
            "num_gpu_blocks_override": POOL_BLOCKS,
            "kv_events_config": started.settings(),
        }
        started.llm = LLM(model=str(model), **(standard | options))
        return started


def prompts(seed: int) -> Iterator[list[int]]:
    """Yield prompts of up to eight blocks. About every third one extends a prefix of an earlier one."""
    chance = random.Random(seed)
    before: list[list[int]] = [[]]
    while True:
        start = chance.choice(before) if chance.random() < 0.3 else []
        prompt = start[: chance.randrange(0, 200)] + [chance.randrange(1_000) for _ in range(chance.randrange(20, 150))]
        before.append(prompt)
        yield prompt
