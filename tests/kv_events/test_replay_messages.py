"""Replay requests and META: lengths, golden bytes and refusals."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import DecodeError
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind, ReplayRequest, ReplayVerb
from scheduler_components.testing.golden import replay_frame_vectors

TOKEN, EPOCH = bytes(range(8)), bytes(range(16))


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("plain request from 258", ReplayRequest(258)),
        ("extended request: sync from 258", ReplayRequest(258, ReplayVerb.SYNC, TOKEN, EPOCH)),
    ],
)
def test_requests_are_the_golden_bytes(name: str, request_: ReplayRequest) -> None:
    _, frame = replay_frame_vectors()[name].message
    assert request_.encode() == frame
    assert ReplayRequest.parse(frame) == request_
    assert len(frame) == (8 if request_.verb is None else 37)


@pytest.mark.parametrize(
    "frame",
    [b"", b"1234567", b"123456789", bytes(36), bytes(37), bytes(38), bytes(8) + b"KVX2\x01" + bytes(24),
     bytes(8) + b"KVX1\x00" + bytes(24), bytes(8) + b"KVX1\x04" + bytes(24)],
)  # fmt: skip
def test_other_requests_are_refused(frame: bytes) -> None:
    with pytest.raises(DecodeError):
        ReplayRequest.parse(frame)


def meta(**changes: object) -> ReplayMeta:
    fields: dict[str, object] = {
        "token": TOKEN, "epoch": EPOCH, "first": 1, "next": 9, "kind": ReplayMetaKind.BEGIN, "snap": True, "start": 4,
        "chain": bytes(8),
    }  # fmt: skip
    return ReplayMeta(**(fields | changes))  # type: ignore[arg-type]


def test_meta_is_a_map_of_the_named_fields() -> None:
    assert msgspec.msgpack.decode(meta().encode()) == {
        "token": TOKEN, "epoch": EPOCH, "first": 1, "next": 9, "kind": "begin", "snap": True, "start": 4,
        "chain": bytes(8),
    }  # fmt: skip
    assert ReplayMeta.decode(meta().encode()) == meta()
    assert ReplayMeta.decode(meta().encode()).upstream is None


@pytest.mark.parametrize(
    "changes",
    [{"token": b""}, {"epoch": bytes(15)}, {"chain": bytes(9)}, {"first": -1}, {"start": 0}, {"start": 10}, {"next": 3},
     {"next": 2**63}, {"kind": "middle"}, {"snap": 1}],
)  # fmt: skip
def test_a_meta_that_contradicts_itself_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(DecodeError):
        ReplayMeta.decode(meta(**changes).encode())


@settings(deadline=None)
@given(payload=st.binary(max_size=60))
def test_no_bytes_raise_anything_but_a_decode_error(payload: bytes) -> None:
    for read in (ReplayMeta.decode, ReplayRequest.parse):
        try:
            read(payload)
        except DecodeError:
            continue
