"""Strict decoding names the rule that a payload breaks and never raises."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.events import batch, stored

from scheduler_components.kv_events import BatchEncoder
from scheduler_components.testing.strict_decoding import decode_strictly

REMOVED = ["BlockRemoved", [1]]


@pytest.mark.parametrize(
    ("payload", "rules"),
    [
        ([1.0, [REMOVED], 2], []),
        ([1.0, [REMOVED]], ["batch"]),
        ([float("nan"), [REMOVED], 2], ["batch-time"]),
        ([1.0, [REMOVED], 3], ["batch-rank"]),
        ([1.0, [REMOVED], None], ["batch-rank"]),
        ([1.0, [["BlockRemoved", [b"\1" * 8]]], 2], ["hash-type"]),
        ([1.0, [["BlockMoved"], REMOVED], 2], ["event"]),
    ],
)
def test_each_violation_is_named(payload: list[object], rules: list[str]) -> None:
    decoded = decode_strictly(msgspec.msgpack.encode(payload), rank=2)
    assert [violation.rule for violation in decoded.violations] == rules


@pytest.mark.parametrize("dialect", ["array", "vllm"])
def test_a_batch_of_the_kit_breaks_no_rule(dialect: str) -> None:
    layout = "map" if dialect == "vllm" else "array"
    encoded = BatchEncoder(dialect).encode(batch(stored(1)), 2)
    decoded = decode_strictly(encoded, rank=2)
    assert (decoded.events, decoded.violations, decoded.dialects) == ((stored(1),), (), {layout})
    assert not decoded.is_snapshot


@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_or_reported(payload: bytes) -> None:
    decoded = decode_strictly(payload, rank=0)
    assert decoded.violations or msgspec.msgpack.decode(payload)
