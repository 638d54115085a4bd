"""The reference scheduler over a real model in one process, verified by ``generate`` of the same weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from kit.ledger_sink import LedgerSink
from scheduler_components import CacheIntegrityError, ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.cache import RadixCache, RadixNode
from scheduler_components.cache.block_hash import DIGEST_BYTES
from scheduler_components.events import TIER_MEDIUM, Tier
from scheduler_components.hicache import (
    HiCachePolicy,
    HiCacheStepper,
    HiRadixCache,
    HostPool,
    KeySpace,
    Placement,
    ThreadPageMover,
    TorchDeviceMemory,
)
from scheduler_components.ports import CopyEvent, LayerDoneCounter, NullLayerDoneCounter, PageStore
from scheduler_components.scheduling.composition import SchedulerSinks
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier, NearTie
from scheduler_components.values import FinishReason, TierStats
from scheduler_components.values.page_operations import (
    BackupDone,
    CancelPrefetch,
    CopyToDevice,
    CopyToHost,
    DiscardLoadBack,
    Instruction,
    IoEvent,
    LoadBackDone,
    PagesRead,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    ReleaseStorage,
    WriteDone,
    WriteToStorage,
)
from scheduler_components.waiting.lora_queue import LoraQueue
from scheduler_engine.device.sampling import SamplingLimits, SamplingParams
from scheduler_engine.device.torch_device import TorchDevice
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.rank.hicache_tiers import HiCacheTiers, TierLayerDoneCounter
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

PAGE_SIZE = 4

Tokens = tuple[int, ...]

_draw = Random(0)


def _tokens(count: int) -> Tokens:
    return tuple(_draw.choices(range(6, 320), k=count))


SYSTEMS = tuple(_tokens(count) for count in (12, 13, 7))
"""Beginnings that prompts share; one ends with a page, the others within one."""

PROMPTS = tuple(
    (*system, *middle, *tail)
    for system in SYSTEMS
    for middle in (_tokens(6), _tokens(9))
    for tail in (_tokens(1), _tokens(4), _tokens(7))
)
"""Eighteen prompts of 14 to 29 tokens over three beginnings."""


@dataclass(slots=True, kw_only=True)
class LastMomentMover:
    """A ``PageMover`` on the scheduler's own thread that does everything at the last moment that it may.

    From the step in which a copy begins until the one in which it is said to have ended, its target holds rubbish: a
    page that is read too early, or given away too early on either side, shows in what the model says next. Of a load
    that requests read already, each layer comes when the forward waits for it.

    Attributes:
        host, device, keys, store: what it moves between.
        late_steps: asked for each instruction, how many steps later it ends.
    """

    host: HostPool
    device: TorchDeviceMemory
    keys: KeySpace
    store: PageStore | None = None
    late_steps: Callable[[], int] = lambda: 2
    load_back_budget_pages: int = 4096
    _under_way: deque[tuple[int, Instruction]] = field(default_factory=deque)
    _arriving: dict[int, Iterator[CopyEvent]] = field(default_factory=dict)
    _num_polls: int = 0

    @property
    def has_storage(self) -> bool:
        return self.store is not None

    def submit(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, CopyToDevice):
                self.spoil(instruction.device_pages)
                if instruction.by_layer:
                    pages = instruction.host_pages, instruction.device_pages
                    self._arriving[instruction.op] = self.host.copy_to_device_by_layer(pages[0], self.device, pages[1])
            if not isinstance(instruction, CancelPrefetch | ReleaseStorage | DiscardLoadBack):
                self._under_way.append((self._num_polls + 1 + self.late_steps(), instruction))

    def poll(self) -> list[IoEvent]:
        self._num_polls += 1
        events: list[IoEvent] = []
        while self._under_way and self._under_way[0][0] <= self._num_polls:
            events += self.carry_out(self._under_way.popleft()[1])
        return events

    def wait(self, timeout_s: float) -> None:
        """Nothing comes by waiting: the next poll brings it."""

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def bring_layer(self) -> None:
        """The forward waits for the next layer of what its requests read."""
        for layers in self._arriving.values():
            next(layers, None)

    def spoil(self, pages: Sequence[int]) -> None:
        """A copy that is under way leaves anything behind."""
        for layer in (*self.device.keys, *self.device.values):
            layer[list(pages)] = 7.0

    def carry_out(self, instruction: Instruction) -> list[IoEvent]:
        match instruction:
            case CopyToHost(op):
                self.host.copy_from_device(self.device, instruction.device_pages, instruction.host_pages)
                return [WriteDone(op, True)]
            case CopyToDevice(op, by_layer=True):
                for _ in self._arriving.pop(op):
                    pass
                return [LoadBackDone(op, True)]
            case CopyToDevice(op):
                self.host.copy_to_device(instruction.host_pages, self.device, instruction.device_pages)
                return [LoadBackDone(op, True)]
            case WriteToStorage(op):
                pages = [bytes(self.host.read(page)) for page in instruction.host_pages]
                return [BackupDone(op, all(self._store().batch_set(self._names(instruction.digests), pages)))]
            case QueryStorage(op):
                return [QueryDone(op, self._store().batch_exists(self._names(instruction.digests)))]
            case ReadFromStorage(op):
                return [*self._read(instruction), ReadDone(op)]
        raise AssertionError(instruction)

    def _read(self, read: ReadFromStorage) -> list[IoEvent]:
        found = self._store().batch_get(self._names(read.digests))
        num_pages = next((at for at, page in enumerate(found) if page is None), len(found))
        for page, content in zip(read.host_pages, found[:num_pages], strict=False):
            assert content is not None
            self.host.write(page, content)
        return [PagesRead(read.op, num_pages)]

    def _store(self) -> PageStore:
        assert self.store is not None
        return self.store

    def _names(self, digests: bytes) -> list[str]:
        return [self.keys.key(digests[at : at + DIGEST_BYTES]) for at in range(0, len(digests), DIGEST_BYTES)]


@dataclass(slots=True, kw_only=True)
class LateFence:
    """A ``LayerDoneCounter`` over a ``LastMomentMover``."""

    stepper: HiCacheStepper
    mover: LastMomentMover

    def start_batch(self) -> None:
        self.stepper.submit()

    def wait_until(self, layer: int) -> None:
        self.mover.bring_layer()


@dataclass(slots=True, kw_only=True)
class BenchTiers(HiCacheTiers):
    """Tiers over either mover."""

    mover: LastMomentMover | ThreadPageMover  # type: ignore[assignment]

    @property
    def layer_counter(self) -> LayerDoneCounter:
        if isinstance(self.mover, ThreadPageMover):
            return TierLayerDoneCounter(stepper=self.stepper, layer_counter=self.mover.layer_counter)
        return LateFence(stepper=self.stepper, mover=self.mover)

    def wait(self) -> None:
        self.mover.wait(0.01)


@dataclass(slots=True, kw_only=True)
class Tiers:
    """What is behind the device of a bench.

    Attributes:
        host_pages: of the host tier.
        store: behind it; the bench closes it.
        make_mover: the mover.
        policy: when to write and prefetch.
    """

    host_pages: int = 24
    store: PageStore | None = None
    make_mover: Callable[..., LastMomentMover | ThreadPageMover] = LastMomentMover
    policy: HiCachePolicy = field(
        default_factory=lambda: HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=1)
    )


def open_threads(*, host: HostPool, device: TorchDeviceMemory, keys: KeySpace, store: PageStore) -> ThreadPageMover:
    """What an engine has."""
    mover = ThreadPageMover(host=host, device=device, keys=keys)
    mover.attach(store, deadline_s=30.0)
    return mover


def open_tiers(pool: TorchDeviceMemory, tiers: Tiers) -> BenchTiers:
    host = HostPool(pool.shape, tiers.host_pages, verify=True)
    keys = KeySpace(
        model="tiny",
        dtype="float32",
        page_size=PAGE_SIZE,
        layout="page_first",
        placement=Placement(),
        parallel=ParallelState.trivial(),
    )
    mover = tiers.make_mover(host=host, device=pool, keys=keys, store=tiers.store)
    cache = HiRadixCache(
        page_size=PAGE_SIZE,
        capacity_tokens=pool.num_pages * PAGE_SIZE,
        host=host,
        num_host_pages=tiers.host_pages,
        policy=tiers.policy,
        record=True,
    )
    stepper = HiCacheStepper(cache=cache, groups=ParallelGroups(), mover=mover, clock=lambda: 0.0)
    return BenchTiers(stepper=stepper, mover=mover, host=host)


class ModelBench:
    """One scheduler over one model. ``model`` computes over pages, ``judge`` says what is right.

    Pages have ``PAGE_SIZE`` tokens, the pool 16 pages: five of these requests fill it.
    """

    def __init__(
        self,
        model: Any,
        judge: GreedyTextVerifier,
        *,
        tiers: Tiers | None = None,
        lora: LoraQueue[EngineRequest] | None = None,
        **sizes: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "page_size": PAGE_SIZE,
            "kv_tokens": 16 * PAGE_SIZE,
            "max_running_requests": 4,
            "max_prefill_tokens": 24,
            "chunk_tokens": 10,
            "new_token_ratio": 0.0,
            "min_new_token_ratio": 0.0,
        }
        self.config = SchedulerConfig(**defaults | sizes)
        self.judge = judge
        config = model.config
        self.pool = TorchDeviceMemory.allocate(
            num_layers=config.num_hidden_layers,
            num_pages=self.config.kv_pages,
            page_size=PAGE_SIZE,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device="cpu",
        )
        self.view = LedgerSink(PAGE_SIZE)
        self.requests: list[EngineRequest] = []
        self.num_chunks = 0
        self.ties: dict[tuple[str, int], NearTie] = {}  # tokens that the arithmetic cannot tell apart
        opened = None if tiers is None else open_tiers(self.pool, tiers)
        layer_counter = NullLayerDoneCounter() if opened is None else opened.layer_counter
        self.scheduler = Scheduler.compose(
            self.config,
            ParallelState.trivial(),
            TorchDevice(model=model, pool=self.pool, layer_counter=layer_counter),
            tiers=opened,
            sinks=SchedulerSinks(events=self.view),
            lora=lora,
        )

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 6,
        *,
        stop: Tokens = (),
        sampling: SamplingParams | None = None,
    ) -> EngineRequest:
        limits = SamplingLimits(max_new_tokens=max_new_tokens, stop_token_ids=stop)
        request = EngineRequest(f"r{len(self.requests)}", prompt, limits, sampling=sampling or SamplingParams())
        self.scheduler.submit(request)
        self.requests.append(request)
        return request

    def abort(self, request: EngineRequest) -> None:
        self.scheduler.abort(request.rid)

    def step(self) -> None:
        """Run one step, after which the blocks of the stream equal those of the cache."""
        self.scheduler.step()
        cache = self.scheduler.cache
        if isinstance(cache, HiRadixCache):
            for tier in Tier:
                assert self.view.ledger.hashes(TIER_MEDIUM[tier]) == set(cache.block_hashes(tier))
        else:
            assert self.view.ledger.hashes() == set(cache.block_hashes())
        self.num_chunks += sum(request.num_prefill_tokens_left > 0 for request in self.scheduler.queues.running)

    def drain(self, bound: int = 20_000) -> None:
        while self.scheduler.has_work:
            self.step()
            bound -= 1
            assert bound, "the scheduler does not come to an end"

    def run(self, *prompts: Sequence[int], max_new_tokens: int = 6) -> list[EngineRequest]:
        """Serve some prompts together, and judge all that was served so far."""
        requests = [self.submit(prompt, max_new_tokens) for prompt in prompts]
        self.drain()
        self.verify_texts()
        return requests

    def verify_texts(self) -> None:
        """Every request has the text that ``generate`` gives, as far as it came."""
        for request in self.requests:
            limits, reason = request.limits, request.finish_reason
            if reason in (None, FinishReason.ABORT, FinishReason.ERROR):
                ties = self.judge.expect_prefix(request.input_ids, request.output_ids)
            else:
                ties = self.judge.expect(
                    request.input_ids,
                    request.output_ids,
                    num_tokens=limits.max_new_tokens,
                    stop_token_ids=limits.stop_token_ids,
                )
            self.ties.update({(request.rid, tie.position): tie for tie in ties})
        failed = [request for request in self.requests if request.finish_reason is FinishReason.ERROR]
        assert not failed

    def judge_pages(self) -> int:
        """Every cached page of the device holds the keys and values that transformers computes; returns how many."""
        cache, num_pages = self.scheduler.cache, 0
        device = cache if isinstance(cache, RadixCache) else cache.device
        for node in device.tree.walk():
            if node.pages:
                self._judge_node(node)
                num_pages += len(node.pages)
        return num_pages

    def _judge_node(self, node: RadixNode) -> None:
        tokens = path_tokens(node)
        with torch.inference_mode():
            cached = self.judge.model(torch.tensor([tokens]), use_cache=True).past_key_values
        start, pages = len(tokens) - len(node.pages) * PAGE_SIZE, list(node.pages)
        for layer, right in enumerate(cached.layers):
            for own, expected in ((self.pool.keys, right.keys), (self.pool.values, right.values)):
                found = own[layer][pages].flatten(0, 1)
                if not torch.allclose(found, expected[0, :, start:].transpose(0, 1), rtol=0, atol=self.judge.noise):
                    raise CacheIntegrityError(f"pages {pages} of layer {layer} hold something else than their tokens")

    def tier_stats(self) -> TierStats:
        stats = self.scheduler.tiers.stats()
        assert stats is not None
        return stats

    def close(self) -> None:
        self.scheduler.close()


def path_tokens(node: RadixNode) -> list[int]:
    """The tokens from the root to the end of a node."""
    runs: list[list[int]] = []
    step: RadixNode | None = node
    while step is not None:
        runs.append(memoryview(step.tokens).cast("I").tolist())
        step = step.parent
    return [token for run in reversed(runs) for token in run]
