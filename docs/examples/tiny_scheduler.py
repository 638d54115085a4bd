"""A whole scheduler in eighty lines: first come, first served, all pages at admission, one token per step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from scheduler_components import (
    LoadInquirer,
    OutputStreamer,
    ParallelState,
    RadixCache,
    SchedulerKvEventsPublisher,
    TokenCountedQueue,
)
from scheduler_components.cache import RadixNode
from scheduler_components.ports import KvEventSink, OutputSink
from scheduler_components.values import FinishReason, LoadSnapshot, TokenOutput

PAGE_SIZE = 8
Forward = Callable[[Sequence[int], Sequence[int], int], int]  # tokens, their pages, first to compute: the next token


@dataclass(eq=False)
class Req:
    rid: str
    tokens: list[int]
    num_prompt_tokens: int
    max_new_tokens: int
    pages: list[int] = field(default_factory=list)
    node: RadixNode | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    finish_reason: FinishReason | None = None
    stream_interval: int = 1

    @property
    def num_input_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def output_since(self, start: int) -> TokenOutput:
        return TokenOutput(tuple(self.tokens[self.num_prompt_tokens + start :]), self.num_prompt_tokens)


class TinyScheduler:
    max_running_requests, num_chunked_tokens_left = 2, 0

    def __init__(self, events: KvEventSink, outputs: OutputSink, forward: Forward, capacity_tokens: int) -> None:
        parallel = ParallelState.trivial()
        self.forward = forward
        self.waiting: TokenCountedQueue[Req] = TokenCountedQueue()
        self.running: list[Req] = []
        self.ended: list[Req] = []
        self.cache = RadixCache(page_size=PAGE_SIZE, capacity_tokens=capacity_tokens, record=True)
        self.load = LoadInquirer(parallel=parallel, queues=self, pool=self.cache)
        self.kv_events = SchedulerKvEventsPublisher(parallel=parallel, source=self.cache, sink=events)
        self.output = OutputStreamer(sink=outputs)

    def submit(self, rid: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        self.waiting.append(Req(rid, list(prompt), len(prompt), max_new_tokens))

    def abort(self, rid: str) -> None:
        for queue in (self.waiting, self.running):
            for req in [req for req in queue if req.rid == rid]:
                queue.remove(req)
                self.end(req, FinishReason.ABORT)

    def step(self) -> None:
        while self.waiting and len(self.running) < self.max_running_requests and self.admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        for req in self.running:
            req.tokens.append(self.forward(req.tokens, req.pages, req.num_computed_tokens))
            req.num_computed_tokens = len(req.tokens) - 1  # the newest token has no KV yet
            if req.num_output_tokens == req.max_new_tokens:
                self.end(req, FinishReason.LENGTH)
        self.running = [req for req in self.running if req.finish_reason is None]
        ended, self.ended = self.ended, []
        self.output.stream([*self.running, *ended])
        self.kv_events.publish_kv_events()

    def admit(self, req: Req) -> bool:
        hit = self.cache.match_prefix(req.tokens[:-1])  # the last token must be computed, to give the next one
        self.cache.lock(hit.node)
        num_pages = -(-(len(req.tokens) + req.max_new_tokens - 1) // PAGE_SIZE) - len(hit.pages)
        if num_pages * PAGE_SIZE > self.cache.free_tokens + self.cache.evictable_tokens:
            self.cache.unlock(hit.node)
            return False
        req.pages, req.node = [*hit.pages, *self.cache.allocate(num_pages)], hit.node
        req.num_computed_tokens = req.num_cached_tokens = hit.num_tokens
        return True

    def end(self, req: Req, reason: FinishReason) -> None:
        req.finish_reason = reason
        if req.node is not None:
            num_full = req.num_computed_tokens // PAGE_SIZE
            self.cache.insert(req.tokens[: num_full * PAGE_SIZE], req.pages[:num_full])
            self.cache.free(req.pages[num_full:])
            self.cache.unlock(req.node)
        self.ended.append(req)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.ended)

    def get_loads(self) -> LoadSnapshot:
        return self.load.get_loads()

    def block_hashes(self) -> Iterator[int]:
        return self.cache.block_hashes()
