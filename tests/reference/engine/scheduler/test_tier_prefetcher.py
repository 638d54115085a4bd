"""Tokens that come from storage do not count as waiting."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_components.values import CachedTokens


class ComingFromStorage:
    """PrefetchQueue of a cache whose storage brings tokens 8 to 40 of one request, and lets it wait until then."""

    def __init__(self) -> None:
        self.spans = [("waits", (8, 40)), ("never-came", (0, 4))]

    def start(self, *_: object) -> None:
        pass

    def is_done(self, rid: str, *_: object, is_next: bool) -> bool:
        return not self.spans

    def record_admission(self, rid: str, *, cached_tokens: int, **_: int) -> CachedTokens:
        return CachedTokens(device=cached_tokens)

    def prefetched_spans(self) -> list[tuple[str, tuple[int, int]]]:
        return self.spans

    def cancel(self, rid: str) -> None:
        pass


def test_prefetched_tokens_are_not_counted_as_waiting(make_bench: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(kv_tokens=256)
    coming = ComingFromStorage()
    monkeypatch.setattr(type(bench.scheduler.tiers), "prefetch_queue", coming)
    bench.submit("waits", range(100))
    bench.scheduler.step()
    assert bench.sink.stats[-1].load.num_waiting_uncached_tokens == 100 - 32
    coming.spans = []
    bench.drain()
    assert bench.sink.stats[-1].load.num_waiting_uncached_tokens == 0
