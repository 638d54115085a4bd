"""vLLM's scheduler: what a reset of the prefix cache and a step do with events."""

from __future__ import annotations

import time

from vllm.distributed.kv_events import EventPublisher, KVEventBatch
from vllm.v1.core.block_pool import BlockPool


class Scheduler:
    def __init__(self, kv_cache_manager: BlockPool, kv_event_publisher: EventPublisher) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.kv_event_publisher = kv_event_publisher

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self.kv_cache_manager.reset_prefix_cache()

    def update_from_output(self) -> None:
        events = self.kv_cache_manager.take_events()
        if events:
            self.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))
