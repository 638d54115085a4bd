"""The plugin inside a whole vLLM on a CPU: what its pool holds is what every reader knows, late ones included."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="`make engines` makes an environment with vllm")

from observability.kv_stream import StreamState, Subscriber, open_subscriber
from scheduler_components.cache import signed_block_hash
from scheduler_components.engines.vllm import VllmEventPublisher
from scheduler_components.kv_events import Endpoint, StreamAddress

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_PLUGINS": "scheduler_components",
}
BLOCK_TOKENS, POOL_BLOCKS, WINDOW = 32, 64, 20


@dataclass
class Engine:
    """A vLLM in this process, its scheduler, and streams that take its events in turn."""

    llm: Any
    folder: Path
    num_streams: int = 0

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def pool(self) -> set[int]:
        """The blocks that the pool can reuse now, by the wire's hash."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

        cached = self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        return {signed_block_hash(maybe_convert_block_hash(get_block_hash(key))) for key in cached._cache}

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 4) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(each.outputs[0].token_ids) for each in self.llm.generate(asked, params, use_tqdm=False)]

    def settings(self, **changes: Any) -> Any:
        """vLLM's own configuration of a stream with addresses of its own."""
        from vllm.config import KVEventsConfig

        self.num_streams += 1
        address = f"ipc://{self.folder}/{self.num_streams}"
        standard = {"endpoint": address, "replay_endpoint": f"{address}r", "buffer_steps": WINDOW}
        return KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **(standard | changes))

    def publish_by(self, publisher: Any) -> None:
        """Empty the cache and let ``publisher`` take the engine's events from here on."""
        self.scheduler.kv_event_publisher.shutdown()
        self.scheduler.kv_event_publisher = publisher
        assert self.llm.reset_prefix_cache()
        self.scheduler.kv_cache_manager.take_events()


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for all tests: it takes some 40 seconds to start. It is started as an operator starts it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        from vllm import LLM

        started = Engine(llm=None, folder=tmp_path_factory.mktemp("s"))
        started.llm = LLM(
            model=str(tiny_llama),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=1024,
            num_gpu_blocks_override=POOL_BLOCKS,
            kv_events_config=started.settings(),
        )
        yield started
        started.scheduler.kv_event_publisher.shutdown()


def prompts(seed: int) -> Iterator[list[int]]:
    """Prompts of one to eight blocks; every third goes on where an earlier one stands."""
    chance = random.Random(seed)
    before: list[list[int]] = [[]]
    while True:
        start = chance.choice(before) if chance.random() < 0.3 else []
        prompt = start[: chance.randrange(0, 200)] + [chance.randrange(1_000) for _ in range(chance.randrange(20, 150))]
        before.append(prompt)
        yield prompt


def follow(publisher: VllmEventPublisher) -> Subscriber:
    told = publisher.get_publisher_config()
    replay = Endpoint.parse(told.replay_endpoint)
    return open_subscriber([StreamAddress(rank=0, events=Endpoint.parse(told.endpoint), replay=replay)])


def is_whole(subscriber: Subscriber, engine: Engine) -> bool:
    publisher = engine.scheduler.kv_event_publisher.publisher
    assert subscriber.wait_until(0, publisher.stats().last_sequence, timeout_s=20)
    return subscriber.stats()[0].state is StreamState.LIVE and subscriber.blocks(0) == engine.pool()


def test_a_late_joiner_has_the_whole_pool_although_the_window_has_passed(engine: Engine) -> None:
    """Then it stays equal, also while the pool evicts."""
    publisher = engine.scheduler.kv_event_publisher
    assert type(publisher) is VllmEventPublisher, "vLLM's own loader has not put the plugin in"
    asked = prompts(seed=1)
    while publisher.publisher.stats().batches_sent < 75:
        engine.generate([next(asked)])
    assert len(engine.pool()) > 40
    with follow(publisher) as late:
        assert is_whole(late, engine)
        for _ in range(20):
            engine.generate([next(asked) for _ in range(4)])
            assert is_whole(late, engine)
        stats = late.stats()[0]
    assert stats.blocks_removed > 100
    assert (stats.snapshots, stats.gaps, stats.decode_errors) == (1, 0, 0)
