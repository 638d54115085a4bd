"""The words of the replay conversation: lengths, golden bytes, and refusal of everything else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import DecodeError
from scheduler_components.kv_events import Kind, Meta, Request, Verb
from scheduler_components.testing.golden import replay_frame_vectors

TOKEN, EPOCH = bytes(range(8)), bytes(range(16))


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("plain request from 258", Request(258)),
        ("extended request: sync from 258", Request(258, Verb.SYNC, TOKEN, EPOCH)),
    ],
)
def test_requests_are_the_golden_bytes(name: str, request_: Request) -> None:
    _, frame = replay_frame_vectors()[name].message
    assert request_.encode() == frame
    assert Request.parse(frame) == request_
    assert len(frame) == (8 if request_.verb is None else 37)


@pytest.mark.parametrize(
    "frame",
    [b"", b"1234567", b"123456789", bytes(36), bytes(37), bytes(38), bytes(8) + b"KVX2\x01" + bytes(24),
     bytes(8) + b"KVX1\x00" + bytes(24), bytes(8) + b"KVX1\x04" + bytes(24)],
)  # fmt: skip
def test_other_requests_are_refused(frame: bytes) -> None:
    with pytest.raises(DecodeError):
        Request.parse(frame)


def meta(**changes: object) -> Meta:
    fields: dict[str, object] = {
        "token": TOKEN, "epoch": EPOCH, "first": 1, "next": 9, "kind": Kind.BEGIN, "snap": True, "start": 4,
        "chain": bytes(8),
    }  # fmt: skip
    return Meta(**(fields | changes))  # type: ignore[arg-type]


def test_meta_is_a_map_of_the_named_fields() -> None:
    assert msgspec.msgpack.decode(meta().encode()) == {
        "token": TOKEN, "epoch": EPOCH, "first": 1, "next": 9, "kind": "begin", "snap": True, "start": 4,
        "chain": bytes(8),
    }  # fmt: skip
    assert Meta.decode(meta().encode()) == meta()


@pytest.mark.parametrize(
    "changes",
    [{"token": b""}, {"epoch": bytes(15)}, {"chain": bytes(9)}, {"first": -1}, {"start": 0}, {"start": 10}, {"next": 3},
     {"next": 2**63}, {"kind": "middle"}, {"snap": 1}],
)  # fmt: skip
def test_a_meta_that_contradicts_itself_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(DecodeError):
        Meta.decode(meta(**changes).encode())


@settings(deadline=None)
@given(payload=st.binary(max_size=60))
def test_no_bytes_raise_anything_but_a_decode_error(payload: bytes) -> None:
    for read in (Meta.decode, Request.parse):
        try:
            read(payload)
        except DecodeError:
            continue
