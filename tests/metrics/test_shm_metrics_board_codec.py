"""A report is decoded as it was encoded; the writer or the reader refuses an invalid one."""

from __future__ import annotations

from contextlib import suppress
from types import UnionType
from typing import TypeVar, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import DecodeError, ParallelState
from scheduler_components.metrics import RequestLatencyRecorder
from scheduler_components.metrics.request_times import Histogram, LatencyHistograms
from scheduler_components.metrics.shm_metrics_board import decode_report, encode_report
from scheduler_components.values import AdapterLoad, HistogramSnapshot, LoadSnapshot, LoraLoad, SchedulerStats

LABELS = ParallelState().metric_labels
S = TypeVar("S", bound=msgspec.Struct)


def report(load: LoadSnapshot | None = None, **parts: object) -> SchedulerStats:
    return SchedulerStats(labels=LABELS, load=load or LoadSnapshot(), **parts)


ADAPTER = AdapterLoad("a", 1, 2, True)


def whole(kind: type[S], **given: object) -> S:
    """Return a struct in which every part is there, and no two numbers of a struct are equal."""
    values: dict[str, object] = {}
    for at, (name, hint) in enumerate(get_type_hints(kind).items()):
        part = get_args(hint)[0] if isinstance(hint, UnionType) else hint
        if part in (int, float):
            values[name] = at + 1 if part is int else at + 0.5
        elif isinstance(part, type) and issubclass(part, msgspec.Struct) and name not in given:
            values[name] = whole(part)
    return kind(**values | given)


def whole_report() -> SchedulerStats:
    lora = LoraLoad(1, 2, 0.5, ("a", "b"), ("c",), (ADAPTER,))
    latencies = RequestLatencyRecorder()
    for at, name in enumerate(latencies.stats().__struct_fields__):
        getattr(latencies.histograms, name).observe(0.01 * at, at + 1)
    return whole(SchedulerStats, labels=LABELS, load=whole(LoadSnapshot, lora=lora), latencies=latencies.stats())


def test_every_part_is_decoded_as_it_was_encoded() -> None:
    assert decode_report(encode_report(whole_report())) == whole_report()
    assert decode_report(encode_report(report())) == report()


def test_watermarks_are_decoded_as_they_were_encoded() -> None:
    stats = report(LoadSnapshot(dispatched_watermarks=(("front", 7),), total_prefill_busy_us=5))
    assert decode_report(encode_report(stats)) == stats


def test_the_known_fields_of_a_report_of_another_version_are_read() -> None:
    fields = msgspec.msgpack.decode(encode_report(report(LoadSnapshot(num_running_reqs=3))))
    fields["later_part"] = {"x": 1}
    fields["load"]["later_field"] = 7
    del fields["publisher"], fields["counters"]["num_requests_total"]
    assert decode_report(msgspec.msgpack.encode(fields)) == report(LoadSnapshot(num_running_reqs=3))


def test_histograms_that_change_alternately_are_decoded_as_they_are() -> None:
    latencies = RequestLatencyRecorder()
    histograms = [getattr(latencies.histograms, name) for name in latencies.stats().__struct_fields__]
    for number in range(30):
        histograms[number * 5 % 6].observe(number * 0.1)
        stats = report(latencies=latencies.stats())
        assert decode_report(encode_report(stats)) == stats
    assert decode_report(encode_report(report())) == report()
    assert decode_report(encode_report(stats)) == stats


def test_bounds_are_the_engines_own() -> None:
    latencies = RequestLatencyRecorder(histograms=LatencyHistograms(queue=Histogram([0.5])))
    assert decode_report(encode_report(report(latencies=latencies.stats()))).latencies == latencies.stats()


def test_scalars_of_numpy_are_numbers() -> None:
    load = LoadSnapshot(num_running_reqs=np.int64(3), token_usage=np.float32(0.5), num_used_tokens=np.uint8(7))
    expected = LoadSnapshot(num_running_reqs=3, token_usage=0.5, num_used_tokens=7)
    assert decode_report(encode_report(report(load))) == report(expected)


@pytest.mark.parametrize(
    "load",
    [
        LoadSnapshot(num_running_reqs=1 << 64),
        LoadSnapshot(num_running_reqs=-(1 << 63) - 1),
        LoadSnapshot(num_running_reqs=object()),
        LoadSnapshot(num_running_reqs=1j),
    ],
)
def test_a_number_beyond_64_bits_is_refused(load: LoadSnapshot) -> None:
    with pytest.raises((TypeError, OverflowError)):
        encode_report(report(load))
    assert decode_report(encode_report(report())) == report()


@settings(deadline=None)
@given(st.binary(max_size=300))
@example(b"")
@example(b"\x91" * 4000)
@example(b"\x96" + b"\xc0" * 6)
def test_garbage_is_a_decode_error(body: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_report(body)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(6))
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=3))
@example(encode_report(whole_report()).index(b"dp_rank"), b"\xff")
@example(0, b"\xc1")
def test_a_damaged_report_is_refused_or_still_a_whole_one(place: int, damage: bytes) -> None:
    body = bytearray(encode_report(whole_report()))
    at = place % len(body)
    body[at : at + len(damage)] = damage
    with suppress(DecodeError):
        read = decode_report(bytes(body))
        assert read.latencies is None or all(
            len(each.counts) == len(each.bounds) + 1 for each in msgspec.structs.astuple(read.latencies)
        )


def test_parts_that_do_not_fit_together_are_refused() -> None:
    uneven = msgspec.structs.replace(
        RequestLatencyRecorder().stats(), queue=HistogramSnapshot(bounds=(1.0, 2.0), counts=(1, 2), total=3.0)
    )
    with pytest.raises(DecodeError, match="2 counts for 2 bounds"):
        decode_report(encode_report(report(latencies=uneven)))
    with pytest.raises(DecodeError, match="not a label name"):
        decode_report(encode_report(SchedulerStats((('a="1"} 5', "x"),), LoadSnapshot())))
