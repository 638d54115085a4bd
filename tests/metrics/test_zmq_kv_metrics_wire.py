"""KvMetrics are decoded as they were encoded, and an invalid payload only raises DecodeError."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError, DecodeError
from scheduler_components.metrics.zmq_kv_metrics import decode_kv_metrics, encode_kv_metrics, parse_kv_metrics_endpoint
from scheduler_components.values import KvMetrics

counts = st.integers(0, 2**40)
shares = st.floats(0, 1)
reports = st.builds(KvMetrics, counts, counts, counts, counts, counts, shares, shares, counts)


@given(reports)
@settings(deadline=None)
def test_a_report_is_decoded_as_it_was_encoded(metrics: KvMetrics) -> None:
    assert decode_kv_metrics(encode_kv_metrics(metrics)) == metrics


def test_the_wire_is_a_map_of_the_field_names() -> None:
    fields = msgspec.msgpack.decode(encode_kv_metrics(KvMetrics(request_active_slots=3)))
    assert list(fields) == [
        "request_active_slots",
        "request_total_slots",
        "kv_active_blocks",
        "kv_total_blocks",
        "num_requests_waiting",
        "gpu_cache_usage_perc",
        "gpu_prefix_cache_hit_rate",
        "data_parallel_rank",
    ]
    assert fields["request_active_slots"] == 3


def test_fields_of_later_versions_are_skipped_and_missing_ones_are_zero() -> None:
    payload = msgspec.msgpack.encode({"kv_total_blocks": 7, "new_in_2031": [1, {"a": None}]})
    assert decode_kv_metrics(payload) == KvMetrics(kv_total_blocks=7)


@given(st.binary(max_size=300))
@example(b"")
@example(b"\x91" * 4000)
@example(b"\x81\xa1\xff\x00")
@example(b"\x80" + b"\x00" * 5000)
@settings(deadline=None)
def test_garbage_is_a_decode_error_or_a_report(payload: bytes) -> None:
    with suppress(DecodeError):
        assert isinstance(decode_kv_metrics(payload), KvMetrics)


@pytest.mark.parametrize(
    "fields",
    [
        {"request_active_slots": -1},
        {"gpu_cache_usage_perc": float("nan")},
        {"gpu_cache_usage_perc": float("inf")},
        {"data_parallel_rank": "0"},
        {"kv_total_blocks": 1.5},
        {"x": b"\x00" * 5000},
    ],
)
def test_values_that_no_scheduler_has_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(DecodeError):
        decode_kv_metrics(msgspec.msgpack.encode(fields))


def test_a_deeply_nested_payload_is_a_decode_error_or_skipped() -> None:
    with pytest.raises(DecodeError, match="at most 4096"):
        decode_kv_metrics(b"\x81\xa1x" + b"\x91" * 100_000 + b"\x00")
    with suppress(DecodeError):  # some Pythons read this depth, and skip the unknown field
        decode_kv_metrics(b"\x81\xa1x" + b"\x91" * 4_000 + b"\x00")


@pytest.mark.parametrize("endpoint", ["inproc://metrics", "tcp://127.0.0.1", "127.0.0.1:5", ""])
def test_an_endpoint_that_reaches_no_other_process_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="metrics_endpoint"):
        parse_kv_metrics_endpoint(endpoint, bind=True)
