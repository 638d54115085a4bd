"""Test kit for what looks at schedulers: checks for a metrics sink of yours, and the model of recovery.

- ``METRICS_SINK_CHECKS``: plain functions over a sink of yours and a reader of what it exposes.
- ``RecoverySimulation``: a publisher, subscribers and a faulty network, as a model that any list of steps can drive.
"""

from __future__ import annotations

from observability.testing.metrics_sink_checks import METRICS_SINK_CHECKS, OpenMetricsSink, make_scheduler_stats
from observability.testing.recovery_model import (
    RECOVERY_LIMIT_S,
    ModelPublisher,
    ModelSubscriber,
    RecoverySimulation,
    Steps,
)

__all__ = [
    "METRICS_SINK_CHECKS",
    "OpenMetricsSink",
    "make_scheduler_stats",
    "RecoverySimulation",
    "ModelPublisher",
    "ModelSubscriber",
    "Steps",
    "RECOVERY_LIMIT_S",
]
