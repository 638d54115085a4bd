"""Settings of the log parse from URLs and JSON, and an error names the invalid one."""

from __future__ import annotations

import pytest

from observability.jetstream import JetStreamConfig
from scheduler_components import ConfigError


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
