"""ProxyConfig: the URLs and the limits of a proxy are checked before anything starts."""

from __future__ import annotations

import pytest

from scheduler_components import ConfigError
from scheduler_engine.proxy.config import MAX_ENGINES, ProxyConfig

URL = "http://127.0.0.1:30000"


def test_a_final_slash_of_a_url_does_not_matter() -> None:
    assert ProxyConfig(urls=(f"{URL}/", "http://127.0.0.1:30001/api/")).urls == (URL, "http://127.0.0.1:30001/api")


@pytest.mark.parametrize(
    ("urls", "field"),
    [
        ((), "replica"),
        ((URL, f"{URL}/"), "replica"),
        (tuple(f"http://127.0.0.1:{port}" for port in range(1, MAX_ENGINES + 2)), "replica"),
        (("127.0.0.1:30000",), "url"),
        (("tcp://127.0.0.1:30000",), "url"),
        (("http://user:password@127.0.0.1:30000",), "replica"),
    ],
)
def test_urls_that_cannot_be_engines_are_refused(urls: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProxyConfig(urls=urls)
    assert caught.value.field == field
    assert "password@" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["max_requests", "max_attempts", "max_failed_polls", "max_pending_bytes", "max_answer_bytes"]
)
def test_a_limit_is_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProxyConfig(urls=(URL,), **{name: 0})
    assert caught.value.field == name


@pytest.mark.parametrize("name", ["answer_timeout_s", "connect_timeout_s", "poll_interval_s", "retry_min_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_is_finite_and_above_zero(name: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        ProxyConfig(urls=(URL,), **{name: value})
    assert caught.value.field == name


def test_the_longest_pause_is_not_shorter_than_the_shortest() -> None:
    with pytest.raises(ConfigError) as caught:
        ProxyConfig(urls=(URL,), retry_min_s=2.0, retry_max_s=1.0)
    assert caught.value.field == "retry_max_s"


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(ProxyConfig(urls=(URL,), api_key="secret"))
