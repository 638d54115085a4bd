"""The relay: streams of any engine on this wire, followed and published again with the whole contract.

``open_relay`` with ``RelaySource`` and ``ZmqSinks`` is what the command ``scheduler-components relay`` runs. A sink of
another kind is a ``RelaySinks``. ``SourceMerger`` is the core, without sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names

if TYPE_CHECKING:
    from observability.relay.jetstream import JetStreamSinks
    from observability.relay.merge import SourceMerger, worst_state
    from observability.relay.source import RelaySource
    from observability.relay.status import RelayStatus, relay_settings
    from observability.relay.stream import RelayedStream, RelaySink, RelaySinks, SourceListener
    from observability.relay.zmq_relay import (
        RelayConfig,
        RelayedStats,
        SourceStats,
        ZmqRelay,
        ZmqSinks,
        open_relay,
    )

__all__ = [
    # running one
    "open_relay",
    "ZmqRelay",
    "RelayConfig",
    "RelaySource",
    "relay_settings",
    # where it publishes
    "RelaySinks",
    "RelaySink",
    "ZmqSinks",
    "JetStreamSinks",
    # what it says of itself
    "RelayStatus",
    "SourceStats",
    "RelayedStats",
    # the core
    "SourceMerger",
    "worst_state",
    "RelayedStream",
    "SourceListener",
]

__getattr__ = lazy_names(
    __name__,
    {
        "observability.relay.jetstream": "JetStreamSinks",
        "observability.relay.merge": "SourceMerger worst_state",
        "observability.relay.source": "RelaySource",
        "observability.relay.status": "RelayStatus relay_settings",
        "observability.relay.stream": "RelaySink RelaySinks RelayedStream SourceListener",
        "observability.relay.zmq_relay": "RelayConfig RelayedStats SourceStats ZmqRelay ZmqSinks open_relay",
    },
)
