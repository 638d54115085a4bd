"""The words of the replay conversation: lengths, golden bytes, and refusal of everything else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components.errors import DecodeError
from scheduler_components.kv_events.replay_wire import Kind, Meta, Request, Verb

TOKEN, EPOCH = bytes(range(8)), bytes(range(16))


def test_plain_request_is_eight_bytes() -> None:
    assert Request(258).encode() == bytes.fromhex("0000000000000102")
    assert Request.parse(bytes.fromhex("0000000000000102")) == Request(258)


def test_extended_request_is_the_37_bytes_of_the_wire() -> None:
    expected = bytes.fromhex("0000000000000102" + "4b565831" + "02" + "0001020304050607") + EPOCH
    assert len(expected) == 37
    assert Request(258, Verb.SYNC, TOKEN, EPOCH).encode() == expected
    assert Request.parse(expected) == Request(258, Verb.SYNC, TOKEN, EPOCH)


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
