"""The memory of a position follows from the shape and the type of its keys and values."""

from __future__ import annotations

import pytest

from scheduler_engine.device.model_spec import KvShape, ModelSpec, TokenSpec


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_a_position_takes_keys_and_values_in_all_layers(dtype: str, num_bytes: int) -> None:
    kv = KvShape(num_layers=3, kv_heads=2, head_dim=8)
    spec = ModelSpec(path="/model", dtype=dtype, kv=kv, tokens=TokenSpec(), weight_bytes=1, identity="x")  # type: ignore[arg-type]
    assert spec.kv_bytes_per_token == 2 * 3 * 2 * 8 * num_bytes
