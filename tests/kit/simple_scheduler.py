"""A simple scheduler over a block-hash prefix cache: continuous batching with chunked prefills and retractions.

It shares no code with the reference scheduler, and each decision is a short method, so that a test can break one.
``BlockCache`` works like vLLM's: a dictionary from the hash of a page and its prefix to the page. It evicts the block
that was unlocked first; a request unlocks its last block first, so children leave before their parents.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import ClassVar

from scheduler_components import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from scheduler_components.cache import RadixNode
from scheduler_components.cache.block_hash import pack_tokens
from scheduler_components.checks.pool_stats_observer import AuditedPool
from scheduler_components.events import MediumGroup, medium_group
from scheduler_components.ports import KvEventSink, OutputSink
from scheduler_components.testing import PagedModel, interfaces
from scheduler_components.values import (
    FinishReason,
    LoadSnapshot,
    OutputBatch,
    OutputDelta,
    PageHolding,
    PoolCount,
    TokenOutput,
)

__all__ = ["CHUNK_TOKENS", "MAX_RUNNING", "PAGE_SIZE", "Block", "BlockCache", "SimpleRequest", "SimpleScheduler"]

PAGE_SIZE = 4
CHUNK_TOKENS = 16
MAX_RUNNING = 3


@dataclass(slots=True, eq=False)
class Block(RadixNode):
    """One cached page. An ``AuditedPool`` lists it as a node of a tree."""

    block_hash: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class SimpleRequest:
    """A request.

    Attributes:
        num_prefill_tokens: tokens to compute before the next output: all tokens at the last admission.
        pages: all its pages, in order; the first ``len(blocks)`` are pages of the cache.
    """

    rid: str
    tokens: list[int]
    num_prompt_tokens: int
    max_new_tokens: int
    num_prefill_tokens: int = 0
    num_computed: int = 0
    num_sent: int = 0
    blocks: list[Block] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class BlockCache:
    """Pages of KV: free, cached under the hash of their prefix, or owned by a request.

    Attributes:
        idle: blocks that no request locks, first to evict first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = deque(range(num_pages))
        self.root = Block()
        self.blocks: dict[int, Block] = {}
        self.idle: dict[int, Block] = {}
        self.events: list[KVCacheEvent] = []

    def block_hash(self, parent: Block, tokens: Sequence[int]) -> int:
        """Return the hash of a page, which covers its prefix by the hash of its parent."""
        content = parent.block_hash.to_bytes(8, "big", signed=True) + pack_tokens(tokens)
        return int.from_bytes(sha256(content).digest()[:8], "big", signed=True)

    def match(self, tokens: Sequence[int]) -> list[Block]:
        """Return the cached blocks of a prefix. The last token is left out, because it must be computed."""
        found = [self.root]
        for start in range(0, (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE, PAGE_SIZE):
            block = self.blocks.get(self.block_hash(found[-1], tokens[start : start + PAGE_SIZE]))
            if block is None:
                break
            found.append(block)
        return found[1:]

    def lock(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.idle.pop(block.block_hash, None)
            block.lock_count += 1

    def unlock(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):
            block.lock_count -= 1
            if not block.lock_count:
                self.idle[block.block_hash] = block

    def allocate(self, num_pages: int) -> list[int] | None:
        """Return pages, after evictions if necessary; None if the pool has too few."""
        if num_pages > len(self.free) + len(self.idle):
            return None
        while len(self.free) < num_pages:
            self.evict(next(iter(self.idle.values())))
        return [self.free.popleft() for _ in range(num_pages)]

    def evict(self, block: Block) -> None:
        del self.idle[block.block_hash], self.blocks[block.block_hash]
        self.free.append(block.pages[0])
        self.events.append(BlockRemoved((block.block_hash,)))

    def insert(self, parent: Block, tokens: Sequence[int], page: int) -> Block:
        """Cache a page of a request, and lock its block. If the block is cached already, free the page."""
        block_hash = self.block_hash(parent, tokens)
        block = self.blocks.get(block_hash)
        if block is None:
            block = Block(parent=parent, pages=array("q", (page,)), block_hash=block_hash)
            self.blocks[block_hash] = block
            above = None if parent is self.root else parent.block_hash
            self.events.append(BlockStored((block_hash,), above, tuple(tokens), PAGE_SIZE, None))
        else:
            self.free.append(page)
        self.lock((block,))
        return block


class SimpleScheduler:
    """First come, first served. The latest request loses its pages if the pool is full."""

    cache_type: ClassVar[type[BlockCache]] = BlockCache

    def __init__(self, events: KvEventSink, outputs: OutputSink) -> None:
        self.events, self.outputs = events, outputs
        self.model = PagedModel(PAGE_SIZE)
        self.cache = self.cache_type(interfaces.MIN_POOL_TOKENS // PAGE_SIZE)
        self.waiting: deque[SimpleRequest] = deque()
        self.running: list[SimpleRequest] = []
        self.ended: list[SimpleRequest] = []
        self.num_steps = self.num_reports = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.ended)

    def submit(self, rid: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        self.waiting.append(
            SimpleRequest(
                rid=rid, tokens=list(prompt), num_prompt_tokens=len(prompt), max_new_tokens=max_new_tokens
            )
        )  # fmt: skip

    def abort(self, rid: str) -> None:
        for request in [each for each in (*self.waiting, *self.running) if each.rid == rid]:
            (self.running if request in self.running else self.waiting).remove(request)
            self.end(request, FinishReason.ABORT)

    def step(self) -> None:
        self.num_steps += 1
        self.compute(self.schedule())
        self.send()
        self.publish()

    def schedule(self) -> list[tuple[SimpleRequest, int]]:
        """Return the requests of the next batch, each with the end of its chunk, and reserve their pages."""
        batch: list[tuple[SimpleRequest, int]] = []
        budget, num_before = CHUNK_TOKENS, len(self.running)
        for request in tuple(self.running):
            if request not in self.running or not budget:
                continue
            end = self.chunk_end(request, budget)
            while not self.grow(request, end):
                victim = self.pick_victim()
                self.retract(victim)
                if victim is request:
                    break
            else:
                batch.append((request, end))
                budget -= end - request.num_computed
        if len(self.running) < num_before:
            return batch  # What a retraction has just freed is for those that run.
        while self.waiting and budget and self.has_slot():
            request = self.waiting[0]
            self.match(request)
            end = self.chunk_end(request, budget)
            if not self.grow(request, end):
                self.release(request)
                break
            self.waiting.popleft()
            self.running.append(request)
            batch.append((request, end))
            budget -= end - request.num_computed
        return batch

    def has_slot(self) -> bool:
        return len(self.running) < MAX_RUNNING

    def chunk_end(self, request: SimpleRequest, budget: int) -> int:
        return min(len(request.tokens), request.num_computed + budget)

    def match(self, request: SimpleRequest) -> None:
        """Begin a prefill behind the cached prefix of a request, and lock the prefix."""
        request.num_prefill_tokens = len(request.tokens)
        request.blocks = self.cache.match(request.tokens)
        self.cache.lock(request.blocks)
        request.pages = [block.pages[0] for block in request.blocks]
        request.num_computed = len(request.pages) * PAGE_SIZE

    def grow(self, request: SimpleRequest, num_tokens: int) -> bool:
        """Allocate the pages of the first ``num_tokens`` tokens; return whether the pool had them."""
        pages = self.cache.allocate(max(0, -(-num_tokens // PAGE_SIZE) - len(request.pages)))
        request.pages += pages or ()
        return pages is not None

    def pick_victim(self) -> SimpleRequest:
        return self.running[-1]

    def retract(self, request: SimpleRequest) -> None:
        self.release(request)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def release(self, request: SimpleRequest) -> None:
        """Return all pages of a request."""
        self.cache.free.extend(request.pages[len(request.blocks) :])
        self.cache.unlock(request.blocks)
        request.blocks, request.pages, request.num_computed = [], [], 0

    def compute(self, batch: Sequence[tuple[SimpleRequest, int]]) -> None:
        for request, end in batch:
            token = self.forward(request, end)
            request.num_computed = end
            self.share(request)
            if end == len(request.tokens):
                self.append(request, token)

    def forward(self, request: SimpleRequest, end: int) -> int:
        return self.model.forward(request.tokens[:end], request.pages, request.num_computed)

    def share(self, request: SimpleRequest) -> None:
        """Cache the computed whole pages of a request."""
        for index in range(len(request.blocks), request.num_computed // PAGE_SIZE):
            parent = request.blocks[-1] if request.blocks else self.cache.root
            page_tokens = request.tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            block = self.cache.insert(parent, page_tokens, request.pages[index])
            request.blocks.append(block)
            request.pages[index] = block.pages[0]

    def append(self, request: SimpleRequest, token: int) -> None:
        request.tokens.append(token)
        if len(request.output) == request.max_new_tokens:
            self.running.remove(request)
            self.end(request, FinishReason.LENGTH)

    def end(self, request: SimpleRequest, reason: FinishReason) -> None:
        self.release(request)
        request.finish_reason = reason
        self.ended.append(request)

    def send(self) -> None:
        """Send the new tokens of all requests."""
        ended, self.ended = self.ended, []
        requests = (*self.running, *self.waiting, *ended)
        deltas = [self.delta(each) for each in requests if each.finish_reason or each.num_sent < len(each.output)]
        if deltas:
            self.outputs.send(OutputBatch(self.num_steps, tuple(deltas)))

    def delta(self, request: SimpleRequest) -> OutputDelta:
        start, output = request.num_sent, request.output
        request.num_sent = len(output)
        return OutputDelta(
            request.rid,
            start,
            len(output),
            request.finish_reason,
            TokenOutput(tuple(output[start:]), request.num_prompt_tokens),
        )

    def publish(self) -> None:
        events, self.cache.events = self.cache.events, []
        if events:
            self.events.publish(KVEventBatch(float(self.num_steps), tuple(events)))

    # What a scheduler reports.

    def get_loads(self) -> LoadSnapshot:
        self.num_reports += 1
        pending = self.num_pending_tokens()
        used = self.num_used_tokens()
        return LoadSnapshot(
            sequence=self.num_reports,
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            num_pending_tokens=pending,
            num_waiting_uncached_tokens=pending,
            num_used_tokens=used,
            num_total_tokens=used + pending,
            max_total_num_tokens=interfaces.MIN_POOL_TOKENS,
            page_size=PAGE_SIZE,
            max_running_requests=MAX_RUNNING,
            token_usage=used / interfaces.MIN_POOL_TOKENS,
        )

    def num_pending_tokens(self) -> int:
        waiting = sum(len(request.tokens) for request in self.waiting)
        return waiting + sum(max(0, each.num_prefill_tokens - each.num_computed) for each in self.running)

    def num_used_tokens(self) -> int:
        return (self.cache.num_pages - len(self.cache.free) - len(self.cache.idle)) * PAGE_SIZE

    def block_hashes(self) -> Iterable[int]:
        return self.cache.blocks

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        return {medium_group(None): self.cache.blocks.keys()}

    @property
    def pools(self) -> Sequence[AuditedPool]:
        return (_Pool(self),)


@dataclass(slots=True)
class _Pool:
    """The ``AuditedPool`` of a simple scheduler."""

    scheduler: SimpleScheduler
    name: str = "full"

    def count(self) -> PoolCount:
        cache = self.scheduler.cache
        num_uncached = sum(len(each.pages) - len(each.blocks) for each in self.scheduler.running)
        num_idle = len(cache.idle)
        return PoolCount(
            self.name, cache.num_pages, len(cache.free), num_idle, len(cache.blocks) - num_idle, uncached=num_uncached
        )

    def free_pages(self) -> Sequence[int]:
        return tuple(self.scheduler.cache.free)

    def holdings(self) -> Iterator[PageHolding]:
        for request in self.scheduler.running:
            num_shared = len(request.blocks)
            node = request.blocks[-1] if request.blocks else None
            pages = request.pages
            yield PageHolding(request.rid, "request", pages[num_shared:], pages[:num_shared], node)

    def tree_nodes(self) -> Iterable[RadixNode]:
        return self.scheduler.cache.blocks.values()
