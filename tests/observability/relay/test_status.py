"""The configuration of a relay has the defaults of a relay."""

from __future__ import annotations

import pytest

from observability.relay import (
    parse_relay_config,
)
from scheduler_components import ConfigError

pytestmark = pytest.mark.sockets


def test_the_default_config_publishes_by_zmq_at_clock_numbers() -> None:
    settings = parse_relay_config('{"endpoint": "tcp://*:5557"}')
    assert (settings.publisher, settings.seq_base) == ("zmq", "clock")
    assert settings.dialect == "native"
    assert parse_relay_config('{"seq_base": "zero", "dialect": "map"}').changed(publisher="zmq").dialect == "map"
    assert parse_relay_config('{"seq_base": "zero"}').seq_base == "zero"
    with pytest.raises(ConfigError, match="publisher='null'"):
        parse_relay_config('{"publisher": "null"}')
