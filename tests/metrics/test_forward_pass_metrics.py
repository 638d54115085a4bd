"""Forward-pass metrics have the bytes of SGLang; any other payload raises one kind of error."""

from __future__ import annotations

import math
from contextlib import suppress

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError, DecodeError
from scheduler_components.kv_events import Endpoint
from scheduler_components.metrics.forward_pass_metrics import (
    MAX_FORWARD_PASS_BYTES,
    decode_forward_pass,
    encode_forward_pass,
    forward_pass_endpoint,
    parse_forward_pass_endpoint,
)
from scheduler_components.testing.golden import ForwardPassVector, forward_pass_vectors
from scheduler_components.values import ForwardPassMetrics, QueuedRequestMetrics, ScheduledRequestMetrics


@pytest.mark.parametrize("vector", forward_pass_vectors(), ids=str)
def test_the_golden_bytes_are_written_and_read(vector: ForwardPassVector) -> None:
    assert encode_forward_pass(vector.metrics) == vector.payload
    assert decode_forward_pass(vector.payload) == vector.metrics


counts = st.integers(0, 2**63 - 1)
spans = st.floats(0, allow_infinity=False)
messages = st.builds(
    ForwardPassMetrics,
    worker_id=st.text(max_size=40),
    dp_rank=counts,
    counter_id=counts,
    wall_time=spans,
    scheduled_requests=st.builds(ScheduledRequestMetrics, counts, counts, spans, counts, counts, counts, spans),
    queued_requests=st.builds(QueuedRequestMetrics, counts, counts, spans, counts, counts, spans),
)


@settings(max_examples=20)
@given(messages)
def test_a_message_survives_the_wire(metrics: ForwardPassMetrics) -> None:
    assert decode_forward_pass(encode_forward_pass(metrics)) == metrics


def test_fields_of_a_later_minor_version_are_skipped_and_missing_ones_are_zero() -> None:
    later = {"version": 1, "dp_rank": 3, "news": [1, {"of": "tomorrow"}], "scheduled_requests": {"num_drafts": 2}}
    assert decode_forward_pass(msgspec.msgpack.encode(later)) == ForwardPassMetrics(dp_rank=3)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"version": 2}, "version 2, this reader knows 1"),
        ({"dp_rank": -1}, "ForwardPassMetrics.dp_rank is -1"),
        ({"wall_time": math.inf}, "wall_time is inf"),
        ({"wall_time": math.nan}, "wall_time is nan"),
        ({"scheduled_requests": {"sum_prefill_tokens": -5}}, "ScheduledRequestMetrics.sum_prefill_tokens is -5"),
        ({"queued_requests": {"var_prefill_length": -0.5}}, "QueuedRequestMetrics.var_prefill_length is -0.5"),
        ({"worker_id": 7}, "not ForwardPassMetrics"),
        ([1, "w", 0], "not ForwardPassMetrics"),
        ({"worker_id": "w" * MAX_FORWARD_PASS_BYTES}, "at most 4096 are read"),
    ],
)
def test_a_message_that_is_not_one_is_refused(content: object, problem: str) -> None:
    with pytest.raises(DecodeError, match=problem):
        decode_forward_pass(msgspec.msgpack.encode(content))


@given(st.binary(max_size=200))
@example(b"\x81\xa9worker_id\xa1\xff")
@example(b"\x91" * 190)
def test_any_bytes_are_a_message_or_one_kind_of_error(payload: bytes) -> None:
    with suppress(DecodeError):
        assert isinstance(decode_forward_pass(payload), ForwardPassMetrics)


@pytest.mark.parametrize(
    ("base", "addresses"),
    [
        ("tcp://127.0.0.1:20380", ["tcp://127.0.0.1:20380", "tcp://127.0.0.1:20381", "tcp://127.0.0.1:20382"]),
        ("tcp://127.0.0.1:0", ["tcp://127.0.0.1:0"] * 3),
        ("ipc:///run/fpm", ["ipc:///run/fpm.0", "ipc:///run/fpm.1", "ipc:///run/fpm.2"]),
    ],
)
def test_the_addresses_are_those_that_dynamos_relays_dial(base: str, addresses: list[str]) -> None:
    parsed = parse_forward_pass_endpoint(base, num_ranks=3)
    assert [str(forward_pass_endpoint(parsed, rank)) for rank in range(3)] == addresses
    assert parsed == Endpoint.parse(base)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("inproc://fpm", "does not leave the process"),
        ("tcp://127.0.0.1:65534", "gives rank 2 the port 65536"),
        ("udp://127.0.0.1:1", "has the transport"),
    ],
)
def test_a_base_without_an_address_for_each_replica_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        parse_forward_pass_endpoint(text, num_ranks=3)
    assert raised.value.field == "forward_pass_endpoint"
