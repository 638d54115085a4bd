"""Test kit for what looks at schedulers: checks for a metrics sink of yours, and the model of recovery.

- ``METRICS_SINK_CHECKS``: plain functions over a sink of yours and a reader of what it exposes.
- ``FaultyWorld``: a publisher, subscribers and a faulty network, as a model that any list of steps can drive.
"""

from __future__ import annotations

from observability.testing.metrics_sink_checks import METRICS_SINK_CHECKS, OpenMetricsSink, stats_of
from observability.testing.recovery_model import HEAL_S, FaultyWorld, ModelPublisher, ModelSubscriber, Steps

__all__ = [
    "METRICS_SINK_CHECKS",
    "OpenMetricsSink",
    "stats_of",
    "FaultyWorld",
    "ModelPublisher",
    "ModelSubscriber",
    "Steps",
    "HEAL_S",
]
