"""Test kit for observers of schedulers.

- ``METRICS_SINK_CHECKS``: plain functions that check a metrics sink of yours through a reader of what it exports.
- ``RecoverySimulation``: a publisher, subscribers and a faulty network, as a model that any list of steps can drive.
- ``TrafficSimulation``: the same with a publisher that never stops; every promise is judged during the traffic.
"""

from __future__ import annotations

from observability.testing.metrics_sink_checks import METRICS_SINK_CHECKS, OpenMetricsSink
from observability.testing.recovery_model import RecoverySimulation
from observability.testing.traffic_model import TrafficShape, TrafficSimulation

__all__ = ["METRICS_SINK_CHECKS", "OpenMetricsSink", "RecoverySimulation", "TrafficShape", "TrafficSimulation"]
