"""The KV metrics of a load never report more used blocks than there are."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_components.metrics.kv_metrics import kv_metrics_of_load
from scheduler_components.values import LoadSnapshot


@given(page_size=st.integers(1, 64), capacity=st.integers(0, 10_000), used=st.integers(0, 10_000))
@example(page_size=16, capacity=16 * 512 + 3, used=16 * 512 + 3)
def test_no_more_blocks_are_in_use_than_there_are(page_size: int, capacity: int, used: int) -> None:
    used = min(used, capacity)
    metrics = kv_metrics_of_load(LoadSnapshot(page_size=page_size, max_total_num_tokens=capacity, num_used_tokens=used))
    assert metrics.kv_active_blocks <= metrics.kv_total_blocks == capacity // page_size
    assert metrics.kv_active_blocks * page_size >= min(used, metrics.kv_total_blocks * page_size)
