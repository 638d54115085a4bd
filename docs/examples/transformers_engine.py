"""KV events, load and metrics of transformers' continuous batching (5.23), from outside: no file of it changes.

``attach`` offers a scheduler by the name ``attached``, which ``ContinuousBatchingConfig`` chooses; ``main`` tries it.
"""

from collections.abc import Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from transformers import ContinuousBatchingConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, CacheAllocator
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from observability import PrometheusSink
from observability.kv_stream import open_subscriber, static_address
from scheduler_components import LoadInquirer, MetricsEmitter, ParallelState, SchedulerKvEventsPublisher
from scheduler_components.cache import BlockTableRecorder
from scheduler_components.kv_events import KVEventsConfig, open_event_publisher
from scheduler_components.ports import KvEventSink, MetricsSink


class RecordedLedger(BlockLedger):  # the engine's table of hashed blocks
    def __init__(self, recorder: BlockTableRecorder) -> None:
        super().__init__()
        self.recorder, self.new_hashes = recorder, set[int]()

    def register_new_hash(self, block_id: int, block_hash: int) -> int | None:
        twin = super().register_new_hash(block_id, block_hash)
        if twin is None:
            self.new_hashes.add(block_hash)  # ``record_new`` records them with their tokens
        return twin

    def record_new(self, block_ids: Sequence[int], tokens: Sequence[int], size: int) -> None:
        parent = None
        for index, block_hash in enumerate(map(self.block_to_hash.get, block_ids)):
            if block_hash in self.new_hashes:
                self.recorder.store([block_hash], tokens[index * size : (index + 1) * size], parent)
            parent = block_hash
        self.new_hashes.clear()

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        block_hash = self.block_to_hash.get(block_id)
        is_free = super().release(block_id, no_cache)
        if block_hash is not None and block_id not in self.block_to_hash:
            self.recorder.remove([block_hash])
        return is_free

    def evict_cached_blocks(self) -> list[int]:
        self.recorder.remove([self.block_to_hash[block_id] for block_id in self.cached_blocks])
        return super().evict_cached_blocks()

    def reset(self) -> None:
        super().reset()
        self.recorder.clear()


def record(allocator: CacheAllocator) -> BlockTableRecorder:
    size, complete = allocator.tokens_per_page, allocator.mark_complete_blocks
    allocator.ledger = ledger = RecordedLedger(BlockTableRecorder(size))
    ledger.recorder.clear()  # readers may still have the blocks of an engine before this one

    def mark_complete_blocks(request_id: str, tokens: list[int], num_new: int) -> None:
        complete(request_id, tokens, num_new)
        ledger.record_new(allocator.block_table[request_id], tokens, size)

    allocator.mark_complete_blocks = mark_complete_blocks
    return ledger.recorder


class CountedRequest(NamedTuple):
    num_input_tokens: int
    num_cached_tokens: int


class AttachedScheduler(FIFOScheduler):
    def __init__(self, sink: KvEventSink, metrics: MetricsSink, parallel: ParallelState, **of_engine: Any) -> None:
        super().__init__(**of_engine)
        self.allocator = self.cache.cache_allocators[FULL_ATTENTION]
        self.kv_events = SchedulerKvEventsPublisher(parallel=parallel, source=record(self.allocator), sink=sink)
        self.load = LoadInquirer(parallel=parallel, queues=self, pool=self)
        sources = {"publisher": self.kv_events}
        self.metrics = MetricsEmitter(parallel=parallel, load=self.load, sink=metrics, sources=sources)

    # The loop calls this first in each turn, with work or without.
    def clear_cancelled_requests(self) -> list[RequestState]:
        cancelled = super().clear_cancelled_requests()
        self.kv_events.publish_kv_events()
        self.metrics.emit()
        return cancelled

    @property
    def running(self) -> dict[str, RequestState]:
        return self.active_requests

    @property
    def waiting(self) -> Sequence[CountedRequest]:
        waiting = self.waiting_requests.values()
        return [CountedRequest(len(each.initial_tokens), each.position_offset) for each in waiting]

    @property
    def max_running_requests(self) -> int:
        return self.max_requests_per_batch

    @property
    def num_chunked_tokens_left(self) -> int:
        return sum(len(each.remaining_prefill_tokens) for each in self.running.values())

    @property
    def page_size(self) -> int:
        return self.allocator.tokens_per_page

    @property
    def capacity_tokens(self) -> int:
        return self.allocator.num_blocks * self.page_size

    @property
    def used_tokens(self) -> int:  # a cached prefix that no request uses is free
        pool, of = self.cache.pool, self.allocator
        free = pool.num_free_sectors * of.blocks_per_sector + pool.count_free_blocks(of.index)
        return (of.num_blocks - free - len(of.ledger.cached_blocks)) * self.page_size


def attach(sink: KvEventSink, metrics: MetricsSink, parallel: ParallelState) -> None:
    SCHEDULER_MAPPING["attached"] = partial(AttachedScheduler, sink, metrics, parallel)


def main() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1_000, **sizes)).eval()
    batching = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=128, scheduler_type="attached")
    prompts = [[*range(80), *[number] * 20] for number in range(8)]  # 5 blocks are shared
    with TemporaryDirectory() as folder:  # an engine that serves has tcp endpoints, from --kv-events-config
        events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        config = KVEventsConfig(publisher="zmq", endpoint=events, replay_endpoint=replay)
        sink = open_event_publisher(config, parallel=ParallelState.trivial())
        attach(sink, PrometheusSink(CollectorRegistry()), ParallelState.trivial())
        outputs = model.generate_batch(prompts, continuous_batching_config=batching, max_new_tokens=8)
        with open_subscriber([static_address(events, replay=replay)]) as reader:
            reader.wait_until(0, sink.stats().batches_sent - 1, timeout_s=10)
            print(f"{len(outputs)} requests, {len(reader.blocks(0))} blocks, {reader.stats()[0].state.value}")
        sink.shutdown()


if __name__ == "__main__":
    main()
