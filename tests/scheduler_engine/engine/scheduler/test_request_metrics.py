"""Requests are counted and timed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count


def test_decode_moments_and_preemptions_are_reported(make_bench: Callable) -> None:
    bench = make_bench(kv_tokens=32, new_token_ratio=0.0, min_new_token_ratio=0.0)
    ticks = count()
    bench.scheduler.request_metrics.clock = lambda: next(ticks) * 0.25
    for name in "ab":
        bench.submit(name, range(8), 16)
    results = bench.drain()
    assert sum(result.num_retracted for result in results) > 0
    decoded = [each.num_decode_tokens for each in results if each.num_decode_tokens and not each.num_prefill_tokens]
    load, totals = bench.sink.stats[-1].load, bench.sink.stats[-1].counters
    moments = load.decode_moments
    assert moments.steps == len(decoded)
    assert moments.requests == moments.tokens == sum(decoded)
    assert moments.time_us > 0
    assert totals.preemptions_per_s > 0


def test_times_of_requests_and_of_prefill_are_in_the_reports(make_bench: Callable) -> None:
    bench = make_bench(chunk_tokens=6)
    bench.submit("r", range(10), 3)
    bench.submit("gone", range(10), 3)
    bench.scheduler.abort("gone")
    bench.drain()
    stats = bench.sink.stats[-1]
    latencies = stats.latencies
    assert (latencies.time_to_first_token.count, latencies.inter_token.count) == (1, 2)
    assert (latencies.queue.count, latencies.e2e.count) == (1, 2)
    assert stats.load.total_prefill_uncached_tokens == 10
