"""What a batcher's calls become at the tiers, for requests of any scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from scheduler_components.cache import PrefixNamespace, RadixCache, RadixNode
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.values import CachedTokens
from scheduler_engine.simulation import SimulatedRequest, TraceRequest

OURS = PrefixNamespace(cache_salt="ours")


@dataclass(slots=True, kw_only=True)
class RecordingTiers:
    """Tiers and their prefetch queue: records calls, and has found tokens 8 to 16 of each waiting request."""

    calls: list[tuple[object, ...]] = field(default_factory=list)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_look_ahead: int = 3
    num_pages_in_transfer: int = 5

    @property
    def prefetch_queue(self) -> RecordingTiers:
        return self

    def start(self, rid: str, token_ids: Sequence[int], namespace: PrefixNamespace) -> None:
        self.calls.append(("start", rid, len(token_ids), namespace))
        self.spans[rid] = (8, 16)

    def is_done(self, rid: str, token_ids: Sequence[int], namespace: PrefixNamespace, *, is_next: bool) -> bool:
        self.calls.append(("is_done", rid, len(token_ids), namespace, is_next))
        return is_next

    def cancel(self, rid: str) -> None:
        self.calls.append(("cancel", rid))

    def record_admission(self, rid: str, *, prompt_tokens: int, cached_tokens: int) -> CachedTokens:
        self.calls.append(("admit", rid, prompt_tokens, cached_tokens))
        return CachedTokens(1, 2, 3)

    def prefetched_spans(self) -> list[tuple[str, tuple[int, int]]]:
        return [*self.spans.items(), ("unknown", (0, 4))]

    def write_to_host(self, token_ids: Sequence[int], namespace: PrefixNamespace) -> None:
        self.calls.append(("write", len(token_ids), namespace))


@dataclass(slots=True, kw_only=True)
class Bench:
    tiers: RecordingTiers
    queues: RequestQueues[SimulatedRequest]
    kv_cache: RequestKvCache[RadixNode]


@pytest.fixture
def bench() -> Bench:
    tiers, queues = RecordingTiers(), RequestQueues[SimulatedRequest](max_running_requests=4)
    cache = RadixCache(page_size=4, capacity_tokens=64)
    kv_cache = RequestKvCache[RadixNode](
        cache=cache,
        tiers=tiers,  # type: ignore[arg-type]
        namespace=OURS,
        on_cached_prompt=SimulatedRequest.record_cached_prompt,
    )
    return Bench(tiers=tiers, queues=queues, kv_cache=kv_cache)


def request_of(index: int, prompt: int = 20) -> SimulatedRequest:
    return SimulatedRequest(
        TraceRequest(index=index, arrival_s=0.0, input_length=prompt, output_length=4, hash_ids=(index,))
    )


def test_the_last_token_is_always_computed(bench: Bench) -> None:
    request = request_of(0)
    bench.kv_cache.start(request)
    assert [bench.kv_cache.is_ready(request, is_next=is_next) for is_next in (False, True)] == [False, True]
    assert bench.tiers.calls == [
        ("start", "r0", 19, OURS),
        ("is_done", "r0", 19, OURS, False),
        ("is_done", "r0", 19, OURS, True),
    ]
    assert (bench.kv_cache.num_look_ahead, bench.kv_cache.num_pending_pages) == (3, 5)


def test_the_first_admission_is_counted_and_a_return_after_a_preemption_is_not(bench: Bench) -> None:
    request = request_of(0)
    request.num_cached_tokens = 6
    bench.kv_cache.on_admitted(request)
    bench.kv_cache.on_preempted(request)
    request.num_retractions = 1
    bench.kv_cache.on_admitted(request)
    assert bench.tiers.calls == [("admit", "r0", 20, 6), ("write", 20, OURS), ("cancel", "r0")]
    assert request.cached_prompt == CachedTokens(1, 2, 3)


def test_found_tokens_of_waiting_requests_do_not_count(bench: Bench) -> None:
    runs, waits = request_of(0), request_of(1)
    for request in (runs, waits):
        bench.queues.add(request)
        bench.kv_cache.start(request)
    bench.queues.admit(runs)
    bench.queues.recount_prefetched(bench.kv_cache.prefetched_spans())
    assert bench.queues.waiting.totals() == (1, 20, 12)


def test_a_cleared_cache_restarts_the_prefetches_of_waiting_requests(bench: Bench) -> None:
    request = request_of(0)
    request.num_cached_tokens = 8
    bench.queues.add(request)
    later = PrefixNamespace(cache_salt="later")
    bench.kv_cache.restart(bench.queues.waiting, later)
    assert bench.tiers.calls == [("cancel", "r0"), ("start", "r0", 19, later)]
    assert request.num_cached_tokens == 0
