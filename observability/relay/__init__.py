"""The relay: follows the streams of any engine with this wire, and publishes them again with the whole contract.

``open_relay`` with ``RelaySource`` and ``RelaySinks`` is the core of the command ``scheduler-components relay``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from observability.relay.source import RelaySource
    from observability.relay.status import RelayStatus, parse_relay_config
    from observability.relay.zmq_relay import RelayConfig, ZmqRelay, open_relay
    from observability.relay.zmq_sinks import RelaySinks

__all__ = [
    # running one
    "open_relay",
    "ZmqRelay",
    "RelayConfig",
    "RelaySource",
    "parse_relay_config",
    # where it publishes
    "RelaySinks",
    # its status
    "RelayStatus",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "observability.relay.source": "RelaySource",
        "observability.relay.status": "RelayStatus parse_relay_config",
        "observability.relay.zmq_relay": "RelayConfig ZmqRelay open_relay",
        "observability.relay.zmq_sinks": "RelaySinks",
    },
)
