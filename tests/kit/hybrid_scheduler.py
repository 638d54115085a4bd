"""The reference scheduler with the pools of a hybrid model: KV of full attention, a sliding window, and mamba states.

As in SGLang: a window page per KV page, given back when it slides out of the window; one state per request, taken when
a prefix is matched, so that a request may hold one while it waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kit.replaced_parts import replace_kv_cache
from scheduler_components import ParallelState
from scheduler_components.cache import PagePool, RadixNode
from scheduler_components.checks.allocation_log import AllocationLog
from scheduler_components.checks.pool_stats_observer import RadixCachePool, SlotPool
from scheduler_components.invariant_checker import CheckPolicy, PoolInvariantChecker, PoolReport
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.values import HeldCount, PageHolding
from scheduler_engine.device.device import SimulatedDevice, SimulatedModel
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import IntegrityConfig, SchedulerConfig
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

WINDOW_PAGES = 2
STRICT = CheckPolicy(action="log", count_every_steps=1, full_check_every_steps=1, is_full_check_in_steps=True)
SMALL = SchedulerConfig(
    page_size=2,
    kv_tokens=64,
    max_running_requests=6,
    max_prefill_tokens=24,
    chunk_tokens=8,
    new_token_ratio=0.2,
    min_new_token_ratio=0.0,
    integrity=IntegrityConfig(checks=STRICT, owners_one_in=1, follows_events=True),
)


class FreeList(list[int]):
    """The free list of a pool without states, as an engine has it: whatever is given back is taken back."""

    def take(self, count: int) -> list[int]:
        taken, self[:] = self[-count:] if count else [], self[: len(self) - count]
        return taken


@dataclass
class Held:
    """The pages of one request in one side pool."""

    pages: list[int] = field(default_factory=list)


@dataclass
class SideHolders:
    """The ``PageHolders`` of one side pool: running and waiting requests."""

    held: dict[str, Held]
    queues: RequestQueues[EngineRequest]

    def count_held(self) -> HeldCount:
        return HeldCount(sum(len(each.pages) for each in self.held.values()))

    def holdings(self) -> Iterator[PageHolding]:
        for rid, each in self.held.items():
            yield PageHolding(rid, "request", each.pages)


class HybridPages:
    """``RequestKvCache`` and two side pools. Tests override one method to break it."""

    def __init__(self, base: RequestKvCache[RadixNode], scheduler: Scheduler, num_window_pages: int = 64) -> None:
        self.base = base
        self.cache = base.cache
        self.scheduler = scheduler
        self.progress = scheduler.integrity.progress
        self.allocation_log = scheduler.integrity.allocation_log
        self.window = FreeList(range(num_window_pages))
        self.states = FreeList(range(32))
        self.window_of: dict[str, Held] = {}
        self.state_of: dict[str, Held] = {}

    # what the scheduler calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def start(self, request: EngineRequest) -> None:
        self.base.start(request)
        self.match_length(request)

    def match_length(self, request: EngineRequest) -> int:
        num_tokens = self.base.match_length(request)
        if num_tokens and len(self.states) > 16:  # copied on the match, while the request waits
            self.take_state(request, "HybridPages.match_length")
        return num_tokens

    def match(self, request: EngineRequest) -> None:
        self.base.match(request)
        self.take_state(request, "HybridPages.attach")

    def grow(self, request: EngineRequest, num_tokens: int) -> bool:
        before = len(request.pages)
        if not self.base.grow(request, num_tokens):
            return False
        self.slide(request, len(request.pages) - before)
        return True

    def free(self, request: EngineRequest) -> None:
        self.base.free(request)
        self.give_window(request)
        self.give_state(request)

    # what breaks

    def take_state(self, request: EngineRequest, component: str) -> None:
        if request.rid not in self.state_of:
            self.state_of[request.rid] = Held(self.states.take(1))
            self.allocation_log.record("allocated", "mamba", request.rid, component, self.state_of[request.rid].pages)

    def give_state(self, request: EngineRequest) -> None:
        held = self.state_of.pop(request.rid, None)
        if held is not None:
            self.states += held.pages
            self.allocation_log.record("freed", "mamba", request.rid, "HybridPages.give_state", held.pages)

    def slide(self, request: EngineRequest, num_pages: int) -> None:
        """Take a window page per new page; give back what slid out of the window."""
        taken = self.window.take(num_pages)
        held = self.window_of.setdefault(request.rid, Held())
        held.pages = held.pages + taken
        self.allocation_log.record("allocated", "swa", request.rid, "HybridPages.slide", taken)
        out, held.pages = held.pages[:-WINDOW_PAGES], held.pages[-WINDOW_PAGES:]
        self.give_out(request, out)

    def give_out(self, request: EngineRequest, pages: list[int]) -> None:
        self.window += pages
        self.allocation_log.record("freed", "swa", request.rid, "HybridPages.slide", pages)

    def give_window(self, request: EngineRequest) -> None:
        held = self.window_of.pop(request.rid, None)
        if held is not None:
            self.window += held.pages
            self.allocation_log.record("freed", "swa", request.rid, "HybridPages.give_window", held.pages)


def hybrid_scheduler(
    pages_class: type[HybridPages] = HybridPages,
    config: SchedulerConfig = SMALL,
    tiers: CacheTiers | None = None,
    *,
    num_window_pages: int = 64,
) -> tuple[Scheduler, HybridPages]:
    """A reference scheduler over three pools of pages and one of slots, all of them checked after every step."""
    device = SimulatedDevice(model=SimulatedModel(vocab_size=3), clock=lambda: 0.0, sleep=lambda _: None)
    scheduler = Scheduler.compose(config, ParallelState.trivial(), device, tiers=tiers)
    pages = pages_class(scheduler.kv_cache, scheduler, num_window_pages)
    replace_kv_cache(scheduler, pages)
    checker, queues = scheduler.integrity.checker, scheduler.queues
    checker.pools = (
        *checker.pools,
        SlotPool(name="swa", total=num_window_pages, free=pages.window, holders=SideHolders(pages.window_of, queues)),
        SlotPool(name="mamba", total=32, free=pages.states, holders=SideHolders(pages.state_of, queues)),
    )
    return scheduler, pages


def ledger_of(scheduler: Scheduler) -> AllocationLog:
    ledger = scheduler.integrity.allocation_log
    assert isinstance(ledger, AllocationLog)
    return ledger


def checker_of(scheduler: Scheduler) -> PoolInvariantChecker:
    return scheduler.integrity.checker


def kv_pool_of(scheduler: Scheduler) -> PagePool:
    pool = checker_of(scheduler).pools[0]
    assert isinstance(pool, RadixCachePool)
    return pool.cache.pool


def request(number: int, num_prompt: int, max_new: int) -> EngineRequest:
    prompt = [(number % 3 + place) % 3 for place in range(num_prompt)]
    return EngineRequest(f"r{number}", prompt, SamplingLimits(max_new_tokens=max_new, ignore_eos=True))


def serve(scheduler: Scheduler, num_requests: int = 60) -> PoolReport | None:
    """Serve a mixed load with aborts, retractions and refusals; stops at the first report that has problems."""
    for number in range(num_requests):
        scheduler.submit(request(number, 3 + number * 7 % 17, 4 + number * 5 % 23))
        if number % 5 == 4:
            scheduler.abort(f"r{number - 1}")  # it mostly waits still
        scheduler.step()
        if checker_of(scheduler).last_report is not None:
            break
    else:
        for _ in scheduler.drain():
            if checker_of(scheduler).last_report is not None:
                break
    return checker_of(scheduler).last_report


class LosesWindowPages(HybridPages):
    """#36081: the sliding window's pool lacks 256 tokens, full attention's none: what slides out of the window of a
    request that was retracted once is not given back."""

    def give_out(self, request: EngineRequest, pages: list[int]) -> None:
        if not request.num_retractions:
            super().give_out(request, pages)


class KeepsStateOfAborted(HybridPages):
    """#20010: a state is taken when a waiting request is matched; its abort takes the request out and not the state."""

    def give_state(self, request: EngineRequest) -> None:
        if self.progress.phase == "abort" and not request.num_computed_tokens:
            self.state_of.pop(request.rid, None)
        else:
            super().give_state(request)
