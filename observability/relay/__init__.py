"""The relay: streams of any engine on this wire, followed and published again with the whole contract.

``open_relay`` with ``RelaySource`` and ``ZmqSinkFactory`` is what the command ``scheduler-components relay`` runs. A
sink of
another kind is a ``RelaySinkFactory``. ``SourceMerger`` is the core, without sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports

if TYPE_CHECKING:
    from observability.relay.source import RelaySource
    from observability.relay.source_merger import SourceMerger, least_trusted_state
    from observability.relay.status import RelayStatus, parse_relay_config
    from observability.relay.stream import RelayedStream, RelaySink, RelaySinkFactory, SourceListener
    from observability.relay.tee_sink import TeeSinkFactory
    from observability.relay.zmq_relay import (
        RelayConfig,
        RelayedStreamStats,
        SourceStats,
        ZmqRelay,
        ZmqSinkFactory,
        open_relay,
    )

__all__ = [
    # running one
    "open_relay",
    "ZmqRelay",
    "RelayConfig",
    "RelaySource",
    "parse_relay_config",
    # where it publishes
    "RelaySinkFactory",
    "RelaySink",
    "ZmqSinkFactory",
    "TeeSinkFactory",
    # what it says of itself
    "RelayStatus",
    "SourceStats",
    "RelayedStreamStats",
    # the core
    "SourceMerger",
    "least_trusted_state",
    "RelayedStream",
    "SourceListener",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "observability.relay.tee_sink": "TeeSinkFactory",
        "observability.relay.source_merger": "SourceMerger least_trusted_state",
        "observability.relay.source": "RelaySource",
        "observability.relay.status": "RelayStatus parse_relay_config",
        "observability.relay.stream": "RelaySink RelaySinkFactory RelayedStream SourceListener",
        "observability.relay.zmq_relay": (
            "RelayConfig RelayedStreamStats SourceStats ZmqRelay ZmqSinkFactory open_relay"
        ),
    },
)
