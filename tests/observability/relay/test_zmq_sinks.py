"""The publishers of a relay are described with their bound ports."""

from __future__ import annotations

import pytest

from observability.relay import RelaySinks, parse_relay_config

pytestmark = pytest.mark.sockets


@pytest.mark.parametrize("block_size", [None, 16])
def test_the_description_has_the_bound_ports_and_the_known_block_size(block_size: int | None) -> None:
    sinks = RelaySinks(settings=parse_relay_config('{"endpoint": "tcp://127.0.0.1:0", "bind": true}'))
    (publisher,) = sinks.open(0)
    try:
        described = sinks.server_info(block_size, 1)["kv_events"]
        assert isinstance(described, dict)
        assert publisher.endpoint.endswith(f":{described['endpoint_port_base']}")
        assert described["block_size"] == block_size
    finally:
        publisher.close(0.0)
