"""A whole scheduler in sixty lines: first come, first served, one token a request and step, no retraction."""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_components import (
    KvEventSink,
    LoadInquirer,
    LoadSnapshot,
    ParallelState,
    RadixCache,
    SchedulerKvEventsPublisher,
    TokenCountedQueue,
)
from scheduler_components.cache import RadixNode

PAGE_SIZE = 8


@dataclass(eq=False)
class Req:
    tokens: list[int]
    tokens_left: int
    node: RadixNode | None = None
    num_cached_tokens: int = 0

    @property
    def num_input_tokens(self) -> int:
        return len(self.tokens)


class TinyScheduler:
    max_running_requests, num_chunked_tokens_left = 2, 0

    def __init__(self, sink: KvEventSink, capacity_tokens: int) -> None:
        parallel = ParallelState.trivial()
        self.waiting: TokenCountedQueue[Req] = TokenCountedQueue()
        self.running: list[Req] = []
        self.cache = RadixCache(page_size=PAGE_SIZE, capacity_tokens=capacity_tokens, record=True)
        self.load = LoadInquirer(parallel=parallel, queues=self, pool=self.cache)
        self.kv_events = SchedulerKvEventsPublisher(parallel=parallel, source=self.cache, sink=sink)

    def submit(self, prompt: list[int], max_new_tokens: int) -> None:
        self.waiting.append(Req(list(prompt), max_new_tokens))

    def step(self) -> None:
        while self.waiting and len(self.running) < self.max_running_requests:
            self.running.append(self.prefill(self.waiting.popleft()))
        self.running = [req for req in self.running if self.decode(req)]
        self.kv_events.publish_kv_events()

    def prefill(self, req: Req) -> Req:
        hit = self.cache.match_prefix(req.tokens)
        self.cache.lock(hit.node)
        pages = self.cache.allocate(len(req.tokens) // PAGE_SIZE - len(hit.pages))
        stored = self.cache.insert(req.tokens, [*hit.pages, *pages])
        self.cache.lock(stored.node)
        self.cache.unlock(hit.node)
        req.node, req.num_cached_tokens = stored.node, hit.num_tokens
        return req

    def decode(self, req: Req) -> bool:
        req.tokens_left -= 1
        if not req.tokens_left and req.node is not None:
            self.cache.unlock(req.node)
        return req.tokens_left > 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def get_loads(self) -> LoadSnapshot:
        return self.load.get_loads()

    def block_hashes(self) -> Iterator[int]:
        return self.cache.block_hashes()
