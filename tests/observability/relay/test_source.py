"""What an operator gives as a source: a URL that is asked, or the endpoints of one stream."""

from __future__ import annotations

import re

import pytest

from observability.kv_stream import static_address
from observability.relay import RelaySource
from observability.relay import source as source_module
from scheduler_components import ConfigError
from scheduler_components.kv_events import StreamAddress


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://a:1", static_address("tcp://a:1")),
        ("tcp://a:1,tcp://a:2", static_address("tcp://a:1", replay="tcp://a:2")),
        ("7=tcp://a:1,tcp://a:2", static_address("tcp://a:1", replay="tcp://a:2", rank=7)),
        ("1023=ipc:///tmp/kv", static_address("ipc:///tmp/kv", rank=1023)),
        ("ipc:///tmp/a=b", static_address("ipc:///tmp/a=b")),
    ],
)
def test_endpoints_are_one_stream_and_nothing_is_asked(text: str, address: StreamAddress) -> None:
    source = RelaySource.parse(text)
    assert (source.text, source.url) == (text, "")
    assert source.find(timeout_s=0.0) == (address,)


def test_a_topic_belongs_to_the_stream_of_endpoints() -> None:
    assert RelaySource.parse("tcp://a:1", topic="kv").find(timeout_s=0.0)[0].topic == "kv"


@pytest.mark.parametrize(("topic", "topics"), [(None, ["kv@0", "kv@1"]), ("mine", ["mine", "mine"]), ("", ["", ""])])
def test_a_url_is_asked_and_a_given_topic_replaces_the_advertised_one(
    monkeypatch: pytest.MonkeyPatch, topic: str | None, topics: list[str]
) -> None:
    advertised = tuple(static_address(f"tcp://a:{1 + rank}", topic=f"kv@{rank}", rank=rank) for rank in range(2))
    asked: list[tuple[str, float, str | None]] = []

    def discover(url: str, *, timeout_s: float, api_key: str | None) -> tuple[StreamAddress, ...]:
        asked.append((url, timeout_s, api_key))
        return advertised

    monkeypatch.setattr(source_module, "discover", discover)
    found = RelaySource.parse("http://pod:30000", topic=topic, api_key="secret").find(timeout_s=2.5)
    assert asked == [("http://pod:30000", 2.5, "secret")]
    assert [address.topic for address in found] == topics
    assert [address.rank for address in found] == [0, 1]


@pytest.mark.parametrize(
    ("text", "named"),
    [("host:1", "neither a URL"), ("1=", "neither"), ("=tcp://127.0.0.1:1", "neither"), ("http://", "http://"),
     ("tcp://127.0.0.1:0", "cannot be dialled"), ("2000=tcp://127.0.0.1:1", "rank 2000"),
     ("tcp://127.0.0.1:1,http://127.0.0.1", "replay_endpoint")],
)  # fmt: skip
def test_an_error_names_the_invalid_source(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        RelaySource.parse(text)
