"""Records in the broker are read strictly, names are unique, and errors name the invalid setting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.jetstream import JetStreamConfig, LogAddress
from observability.kv_stream.log_records import LogHeartbeat, LogMessage, Snapshot, SnapshotPointer, read_message
from scheduler_components import ConfigError, DecodeError

EPOCH, CHAIN = b"e" * 16, b"c" * 8
NAMES = st.text(st.characters(codec="utf-8"), max_size=20)
ADDRESSES = st.builds(LogAddress, NAMES.filter(bool), st.integers(0, 10**6), NAMES)


@given(first=ADDRESSES, second=ADDRESSES)
def test_different_addresses_have_different_names(first: LogAddress, second: LogAddress) -> None:
    names = [(address.pointer_key, address.subject, address.heartbeat_subject) for address in (first, second)]
    assert all((mine == other) is (first == second) for mine, other in zip(*names, strict=True))


def test_separators_in_names_are_escaped() -> None:
    names = [("a", "b.c"), ("a.b", "c"), ("a.b.c", ""), ("a=2Eb", "c"), ("a", ""), ("a", "="), ("=", "a"), ("=3D", "a")]
    assert len({LogAddress(worker, 0, topic).pointer_key for worker, topic in names}) == len(names)


@given(address=ADDRESSES)
def test_names_are_valid_subjects(address: LogAddress) -> None:
    assert address.subject.count(".") == 4
    assert not set(address.subject + address.log) & set(" *>/\\\t\r\n")
    assert "." not in address.log


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


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "servers"),
        ("http://broker:4222", "servers"),
        ("nats://", "servers"),
        ("nats://a:4222,", "servers"),
        ("nats://a:99999", "servers"),
        ("{", "jetstream"),
        ('{"replicas": 3}', "servers"),
        ('{"servers": 4222}', "servers"),
        ('{"servers": "nats://a", "replicas": 6}', "replicas"),
        ('{"servers": "nats://a", "replicas": true}', "replicas"),
        ('{"servers": "nats://a", "max_msgs": 1}', "max_msgs"),
        ('{"servers": "nats://a", "max_bytes": "much"}', "max_bytes"),
        ('{"servers": "nats://a", "max_age_s": 0}', "max_age_s"),
        ('{"servers": "nats://a", "prefix": "a.b"}', "prefix"),
        ('{"servers": "nats://a", "stream": "x"}', "stream"),
        ('{"servers": "nats://a", "credentials_file": "/nowhere/user.creds"}', "credentials_file"),
    ],
)
def test_an_error_names_the_invalid_setting(text: str, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        JetStreamConfig.from_cli(text)
    assert raised.value.field == field


def test_settings_parse_from_urls_and_json() -> None:
    assert JetStreamConfig.from_cli("nats://a:1, tls://b").servers == ("nats://a:1", "tls://b")
    config = JetStreamConfig.from_cli('{"servers": ["nats://a"], "replicas": 3, "max_age_s": 60}')
    assert (config.servers, config.replicas, config.max_age_s) == (("nats://a",), 3, 60)


@pytest.mark.parametrize("given_", [{"worker": ""}, {"worker": "w" * 81}, {"worker": "w", "rank": -1}])
def test_an_invalid_address_is_refused(given_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LogAddress(**given_)
