"""Records of a log are read strictly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.kv_stream.log_records import LogHeartbeat, LogMessage, Snapshot, SnapshotPointer, read_message
from scheduler_components import DecodeError

EPOCH, CHAIN = b"e" * 16, b"c" * 8


def test_a_message_round_trips() -> None:
    message = LogMessage(7, EPOCH, 12, CHAIN, b"payload")
    assert read_message(7, message.headers, b"payload") == message


@given(st.dictionaries(st.sampled_from(["Nats-Msg-Id", "Kv-Chain"]), st.text(max_size=60)))
def test_malformed_headers_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(DecodeError):
        read_message(1, headers, b"")


@pytest.mark.parametrize(
    "value",
    [
        LogHeartbeat(EPOCH, 3, CHAIN, 2, "partial"),
        SnapshotPointer(EPOCH, 5, 1),
        Snapshot(EPOCH, 1, CHAIN, [b"x"], [b"y"], CHAIN, 9),
    ],
    ids=lambda value: type(value).__name__,
)
def test_records_round_trip_and_truncated_ones_are_refused(value: Any) -> None:
    data = value.encode()
    assert type(value).decode(data) == value
    for end in range(len(data)):
        with pytest.raises(DecodeError):
            type(value).decode(data[:end])


@given(data=st.binary(max_size=80), kind=st.sampled_from([LogHeartbeat, SnapshotPointer, Snapshot]))
def test_junk_raises_only_a_decode_error(data: bytes, kind: Any) -> None:
    try:
        kind.decode(data)
    except DecodeError:
        return


@pytest.mark.parametrize(
    "value",
    [
        LogHeartbeat(EPOCH, 1, CHAIN, 2),
        LogHeartbeat(EPOCH, 2**63, CHAIN, 2),
        LogHeartbeat(EPOCH[1:], 3, CHAIN, 2),
        SnapshotPointer(EPOCH, -1, 0),
        SnapshotPointer(EPOCH, 1, 2),
        Snapshot(EPOCH, -1, CHAIN, [], [], CHAIN, 0),
        Snapshot(EPOCH, 1, CHAIN, [], [], CHAIN[1:], 0),
        Snapshot(EPOCH, 2**63 - 1, CHAIN, [], [b""], CHAIN, 0),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(value: Any) -> None:
    with pytest.raises(DecodeError):
        type(value).decode(value.encode())
