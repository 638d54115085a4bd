"""What a scheduler learns of its batches: chunks of equal time, and how far off forecasts of first tokens were."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_components.scheduling.dynamic_chunk_sizer import PrefillLatencyModel
from scheduler_components.testing import VirtualClock


def timed(bench: object, base_s: float, token_s: float) -> VirtualClock:
    """Let the duration of every step follow a linear model."""
    clock = VirtualClock(0.0)
    request_metrics = bench.scheduler.request_metrics
    request_metrics.clock = request_metrics.predictor.clock = clock
    launch = bench.device.launch

    def slow(batch: object) -> None:
        clock.now_s += base_s + token_s * batch.num_prefill_tokens
        launch(batch)

    bench.device.launch = slow
    return clock


def test_the_errors_of_forecasts_are_reported(make_bench: Callable) -> None:
    bench = make_bench(kv_tokens=4096, chunk_tokens=64, max_prefill_tokens=64)
    timed(bench, 0.010, 0.0001)
    for number in range(12):
        bench.submit(f"a{number}", range(number * 1000, number * 1000 + 8 + 9 * number))
        bench.drain()
    for number in range(6):
        bench.submit(f"b{number}", range(50_000 + number * 1000, 50_000 + number * 1000 + 60))
    bench.drain()
    stats = bench.sink.stats[-1].batching
    assert stats.first_tokens_predicted >= 6
    assert stats.first_token_error_p50_s <= stats.first_token_error_p90_s < 0.02
    assert stats.new_token_ratio == bench.scheduler.batcher.conditions.new_token_ratio.current


def test_a_model_shortens_the_later_chunks_of_a_prompt_and_every_token_is_computed(make_bench: Callable) -> None:
    bench = make_bench(page_size=4, kv_tokens=4096, chunk_tokens=256, max_prefill_tokens=256)
    bench.scheduler.batcher.conditions.chunk_sizer.model = PrefillLatencyModel(1_000, 1, 10_000)
    bench.submit("long", range(3000))
    chunks = [result.num_prefill_tokens for result in bench.drain()]
    assert sum(chunks) == 3000
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
    assert chunks[0] == 256 and chunks[-2] < 128
    assert min(chunks[:-1]) >= 256 // 4
