"""Simulated delivery: publishers, readers, networks and disks in virtual time, drawn from one seed.

All parts of a stream that decide are the kit's real cores. The actors bring their messages and know the truth, so that
the promises which docs/explanation/simulated-delivery.md lists can be judged while the world runs.

- ``DeliveryWorld``: draws a history from a seed, carries it out and judges it.
- ``PublisherActor``, ``SubscriberActor``: the cores with the truth next to them, for a world or a test of yours.
- ``FaultyLink``, ``TimedLink``, ``FaultyDisk``: what fails between and below them.
"""

from __future__ import annotations

from worlds.delivery_world import (
    WORLD_KINDS,
    DeliveryReport,
    DeliverySummary,
    DeliveryWorld,
    Violation,
    WorldKind,
    WorldPart,
    encode_delivery_report,
    run_world,
    summarize_deliveries,
)
from worlds.faults import PERFECT, DiskFaults, FaultyDisk, FaultyLink, LinkCounters, LinkFault, LinkQuality, TimedLink
from worlds.publisher_actor import (
    FORGED_PAYLOAD,
    OTHER_TOPIC,
    TOPIC,
    LiveFrame,
    PublisherActor,
    PublisherShape,
    State,
)
from worlds.stream_world import StreamPart
from worlds.subscriber_actor import Answer, SubscriberActor, begins_chunks
from worlds.timeline import BrokenPromise, Measure, Timeline

__all__ = [
    # a world
    "DeliveryWorld",
    "run_world",
    "WORLD_KINDS",
    "WorldKind",
    "WorldPart",
    "StreamPart",
    "DeliveryReport",
    "DeliverySummary",
    "Measure",
    "Violation",
    "encode_delivery_report",
    "summarize_deliveries",
    # actors
    "PublisherActor",
    "PublisherShape",
    "SubscriberActor",
    "State",
    "Answer",
    "LiveFrame",
    "begins_chunks",
    "TOPIC",
    "OTHER_TOPIC",
    "FORGED_PAYLOAD",
    # what fails
    "FaultyLink",
    "TimedLink",
    "LinkFault",
    "LinkQuality",
    "LinkCounters",
    "PERFECT",
    "FaultyDisk",
    "DiskFaults",
    # time
    "Timeline",
    "BrokenPromise",
]
