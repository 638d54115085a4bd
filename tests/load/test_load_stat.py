"""A load sample on the wire is SGLang's array; any other payload raises one kind of error."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import DecodeError, server_info
from scheduler_components.load.load_stat import (
    LOAD_TOPIC,
    MAX_LOAD_STAT_BYTES,
    LoadStat,
    decode_load_stat,
    encode_load_stat,
    to_load_stat,
)
from scheduler_components.load.work_counters import MAX_DISPATCHERS
from scheduler_components.values import LoadSnapshot

counts = st.integers(0, 2**63 - 1)
GOLDEN = bytes.fromhex("9ba84c6f6164537461740203cd0190cd06400105cd02bc0809cd03e8")
"""[LoadStat, 2, 3, 400, 1600, 1, 5, 700, 8, 9, 1000], as SGLang 0.5.23 writes it."""


def test_the_array_starts_with_sglangs_fields() -> None:
    load = LoadSnapshot(
        sequence=77,
        timestamp=1234.5,
        dp_rank=1,
        num_running_reqs=2,
        num_waiting_reqs=3,
        num_pending_tokens=300,
        num_waiting_uncached_tokens=5,
        num_used_tokens=400,
        num_total_tokens=700,
        max_total_num_tokens=1600,
        max_running_requests=8,
        total_prefill_uncached_tokens=9,
        total_prefill_busy_us=1000,
        dispatched_watermarks=(("a", 4),),
    )
    payload = encode_load_stat(to_load_stat(load, sequence=6, epoch=5))
    array = msgspec.msgpack.decode(payload)
    assert array == ["LoadStat", 2, 3, 400, 1600, 1, 5, 700, 8, 9, 1000, 6, 1234.5, 5, [["a", 4]]]
    assert payload[1 : len(GOLDEN)] == GOLDEN[1:]


def test_sglangs_own_samples_are_read() -> None:
    assert decode_load_stat(GOLDEN) == LoadStat(2, 3, 400, 1600, 1, 5, 700, 8, 9, 1000)
    assert decode_load_stat(msgspec.msgpack.encode(["LoadStat", 2, 3, 400, 1600, None])).num_tokens == 400
    future = [*msgspec.msgpack.decode(GOLDEN), 0, 0.0, 0, [], "news", {"of": "tomorrow"}]
    assert decode_load_stat(msgspec.msgpack.encode(future)).num_running_reqs == 2


@settings(deadline=None)
@given(st.builds(LoadStat, *[counts] * 11, st.floats(allow_nan=False, allow_infinity=False), counts))
def test_a_sample_is_decoded_as_it_was_encoded(stat: LoadStat) -> None:
    assert decode_load_stat(encode_load_stat(stat)) == stat


@settings(deadline=None)
@given(st.builds(LoadSnapshot, **{name: st.integers(-(2**63), 2**63 - 1) for name in ("num_used_tokens", "dp_rank")}))
@example(LoadSnapshot(num_running_reqs=-1, num_waiting_uncached_tokens=-5))
def test_no_count_below_zero_is_sent(load: LoadSnapshot) -> None:
    stat = to_load_stat(load, sequence=0, epoch=0)
    assert min(stat.num_running_reqs, stat.num_tokens, stat.num_waiting_uncached_tokens) >= 0


@settings(deadline=None)
@given(st.binary(max_size=60))
@example(b"")
@example(msgspec.msgpack.encode(["LoadStat", 2, 3, 400]))
@example(msgspec.msgpack.encode(["LoadStat", 2, 3, 400, -1, 0]))
@example(msgspec.msgpack.encode(["LoadStat", 2, 3, 400, 1600, -1]))
@example(msgspec.msgpack.encode(["LoadStat", 2, 3, 400, 1600, 0, 0, 0, 0, 0, 0, 0, math.nan]))
@example(msgspec.msgpack.encode(["Other", 2, 3, 400, 1600, 0]))
@example(b"\x91" * 5000)
@example(b"\x96\xa8LoadStat\x01\x01\x01\x01\xa1\xff")
@example(GOLDEN + b"\x00" * MAX_LOAD_STAT_BYTES)
def test_an_invalid_sample_is_a_decode_error(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_load_stat(payload)


def test_the_topic_is_the_one_that_is_advertised() -> None:
    assert LOAD_TOPIC.decode() == server_info.LOAD_TOPIC


def test_the_largest_sample_is_read() -> None:
    watermarks = tuple((f"{index:064}", 2**63 - 1) for index in range(MAX_DISPATCHERS))
    stat = to_load_stat(LoadSnapshot(dispatched_watermarks=watermarks), sequence=2**63, epoch=2**63 - 1)
    assert decode_load_stat(encode_load_stat(stat)) == stat
