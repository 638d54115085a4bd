"""Traces: every line is checked, arrivals are spread within the recorded time, equal hash ids give equal tokens."""

from __future__ import annotations

import json
import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.values import RequestHints
from scheduler_engine.engine.messages import unpack_tokens
from scheduler_engine.simulation.trace import (
    TRACE_BLOCK_TOKENS,
    TraceRequest,
    TraceSummary,
    check_trace,
    open_trace,
    parse_trace,
    prompt_tokens,
    spread_arrivals,
)


def line(
    timestamp: object = 0, input_length: object = 600, output_length: object = 5, hash_ids: object = (1, 2)
) -> bytes:
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": input_length,
            "output_length": output_length,
            "hash_ids": hash_ids,
        }
    ).encode()


def request(
    arrival_s: float, index: int = 0, input_length: int = 600, hash_ids: tuple[int, ...] = (1, 2)
) -> TraceRequest:
    return TraceRequest(index=index, arrival_s=arrival_s, input_length=input_length, output_length=5, hash_ids=hash_ids)


def test_a_line_becomes_a_request() -> None:
    (parsed,) = parse_trace([line(timestamp=3000)])
    assert parsed == TraceRequest(index=0, arrival_s=3.0, input_length=600, output_length=5, hash_ids=(1, 2))


def test_a_line_may_have_what_a_policy_reads() -> None:
    text = json.loads(line(timestamp=3000)) | {"tenant": "acme", "priority": -2, "deadline_ms": 500.0, "other": [1]}
    (parsed,) = parse_trace([json.dumps(text).encode()])
    assert (parsed.tenant, parsed.priority, parsed.deadline_s) == ("acme", -2, 0.5)
    assert parsed.hints == RequestHints(tenant="acme", priority=-2, deadline_s=3.5)
    (plain,) = parse_trace([line()])
    assert plain.hints == RequestHints()


def test_a_deadline_moves_with_its_arrival() -> None:
    one = TraceRequest(index=0, arrival_s=0.0, input_length=1, output_length=1, hash_ids=(1,), deadline_s=2.0)
    assert [each.hints.deadline_s for each in spread_arrivals([one, one], quantum_s=3.0)] == [2.0, 3.5]


def test_blank_lines_are_skipped_and_not_numbered_as_requests() -> None:
    assert [parsed.index for parsed in parse_trace([line(), b"\n", b"", line()])] == [0, 1]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b"{}", "timestamp"),
        (b"\xff\xfe", ""),
        (b'{"x":' + b"[" * 100_000, ""),
        (line(timestamp=-1), "timestamp"),
        (line(timestamp="now"), "timestamp"),
        (line(timestamp=None), "timestamp"),
        (line(input_length=0), "input_length"),
        (line(output_length=0), "output_length"),
        (line(input_length=1.5), "input_length"),
        (line(hash_ids=[]), "hash_ids"),
        (line(hash_ids=[1]), "needs 2 hash_ids, there are 1"),
        (line(hash_ids=[1, 2, 3]), "needs 2 hash_ids, there are 3"),
        (line(hash_ids=[1, -2]), "hash_ids"),
        (line(timestamp=1999), "before the previous"),
        (line(timestamp=1e300), "timestamp 1e+300 is more than a year after the start"),
        (line(timestamp=1.7e12), "more than a year after the start"),
        (line()[:-1] + b', "tenant": 7}', "tenant"),
        (line()[:-1] + b', "tenant": "' + b"x" * 257 + b'"}', "tenant"),
        (line()[:-1] + b', "priority": "high"}', "priority"),
        (line()[:-1] + b', "priority": 1e300}', "priority"),
        (line()[:-1] + b', "priority": 2147483648}', "priority"),
        (line()[:-1] + b', "deadline_ms": 0}', "deadline_ms"),
        (line()[:-1] + b', "deadline_ms": NaN}', ""),
    ],
)
def test_a_bad_line_is_named(bad: bytes, complaint: str) -> None:
    requests = parse_trace([line(timestamp=2000), bad], name="my.jsonl")
    next(requests)
    with pytest.raises(ConfigError, match=r"my\.jsonl:2") as refused:
        next(requests)
    assert complaint in str(refused.value)


def test_requests_of_one_timestamp_are_spread_evenly_up_to_the_next() -> None:
    spread = spread_arrivals([request(0.0)] * 4 + [request(3.0)] * 2 + [request(4.0)], quantum_s=3.0)
    assert [each.arrival_s for each in spread] == [0.0, 0.75, 1.5, 2.25, 3.0, 3.5, 4.0]


@given(st.lists(st.integers(0, 40), max_size=30).map(sorted), st.floats(0.1, 10))
def test_spreading_keeps_order_and_stays_within_the_quantum(arrivals: list[int], quantum_s: float) -> None:
    recorded = [request(float(arrival), index) for index, arrival in enumerate(arrivals)]
    spread = list(spread_arrivals(recorded, quantum_s=quantum_s))
    assert [each.index for each in spread] == list(range(len(recorded)))
    assert [each.arrival_s for each in spread] == sorted(each.arrival_s for each in spread)
    for before, after in zip(recorded, spread, strict=True):
        assert before.arrival_s <= after.arrival_s < before.arrival_s + quantum_s


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, TRACE_BLOCK_TOKENS))
def test_a_prompt_has_its_length_and_equal_ids_give_equal_blocks(hash_ids: list[int], last_tokens: int) -> None:
    length = (len(hash_ids) - 1) * TRACE_BLOCK_TOKENS + last_tokens
    prompt = unpack_tokens(prompt_tokens(request(0.0, input_length=length, hash_ids=tuple(hash_ids))))
    assert len(prompt) == length
    assert all(0 <= token < 32_768 for token in prompt)
    for place, hash_id in enumerate(hash_ids):
        block = unpack_tokens(prompt_tokens(request(0.0, input_length=TRACE_BLOCK_TOKENS, hash_ids=(hash_id,))))
        found = prompt[place * TRACE_BLOCK_TOKENS : (place + 1) * TRACE_BLOCK_TOKENS]
        assert found == block[: len(found)]


def test_different_ids_give_different_blocks() -> None:
    blocks = {
        prompt_tokens(request(0.0, input_length=TRACE_BLOCK_TOKENS, hash_ids=(hash_id,))) for hash_id in range(500)
    }
    assert len(blocks) == 500


def test_only_requests_of_a_conversation_share_more_than_the_system_prompt() -> None:
    def conversation(*hash_ids: int) -> str:
        return request(0.0, hash_ids=hash_ids).conversation

    assert conversation(0, 7, 8) == conversation(0, 7, 9)
    assert conversation(0, 7) != conversation(0, 8)
    assert conversation(0) == "0"


def test_a_file_is_read_little_further_than_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join([*(line(timestamp=1000 * second) for second in range(4)), b"nonsense"]))
    assert [each.arrival_s for each in open_trace(path, limit=2)] == [0.0, 1.0]


def test_a_missing_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        open_trace(tmp_path / "none.jsonl")


def test_a_trace_is_checked_to_its_end_before_anything_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join([*(line(timestamp=1000 * second) for second in range(500)), b"nonsense"]))
    with pytest.raises(ConfigError, match=r"trace\.jsonl:501"):
        check_trace(path)
    assert check_trace(path, limit=500) == TraceSummary(num_requests=500, duration_s=499.0)


@pytest.mark.parametrize("text", [b"", b"\n \n", b"\xef\xbb\xbf\n"])
def test_a_trace_without_requests_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="has no requests"):
        check_trace(path)


def test_a_byte_order_mark_is_accepted_only_before_the_first_line() -> None:
    mark = b"\xef\xbb\xbf"
    assert len(list(parse_trace([mark + line(), line()]))) == 2
    with pytest.raises(ConfigError, match="trace:2"):
        list(parse_trace([line(), mark + line()]))


def test_a_file_without_line_breaks_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with path.open("wb") as file:
        file.truncate(2**30)  # a hole: no bytes on the disk
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"trace\.jsonl:1.*longer than"):
            check_trace(path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"good", b"bad", b""]), max_size=40), st.none() | st.integers(1, 50))
@example([b"good", b"bad"], 1)
def test_the_checked_file_is_the_replayed_file(kinds: list[bytes], limit: int | None) -> None:
    """Lines of a trace: the check counts what a replay sends, and refuses what would end it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(b"\n".join(line() if kind == b"good" else kind for kind in kinds))
        try:
            facts = check_trace(path, limit=limit)
        except ConfigError:
            with pytest.raises((ConfigError, StopIteration)):
                sent = list(open_trace(path, limit=limit))
                next(iter(sent))
        else:
            assert len(list(open_trace(path, limit=limit))) == facts.num_requests


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="read twice"):
        check_trace(pipe)
