"""A new metric needs one edit: a field. Everything else follows from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent

BEFORE = "    evicted_tokens_total: Annotated["
FIELD = (BEFORE, '    num_naps_total: Annotated[int, counter("naps_total", "naps", "Naps.")] = 0\n' + BEFORE)
SCRIPT = """
import json, tempfile
from pathlib import Path
from prometheus_client import CollectorRegistry
from observability import MetricsBoardCollector, PrometheusSink, render_metrics
from observability.catalog import render_markdown
from observability.grafana.dashboard import render_dashboard
from observability.metrics_sink_checks import METRICS_SINK_CHECKS
from scheduler_components import LiveStats, MetricsEmitter, ParallelState
from scheduler_components.values import LoadSnapshot, SchedulerCounters
from scheduler_components.metrics import open_shm_metrics_board, open_shm_metrics_sink

class Load:
    def get_loads(self):
        return LoadSnapshot()

counters = SchedulerCounters()
counters.num_naps_total += 3
with tempfile.TemporaryDirectory() as directory:
    inside, outside = CollectorRegistry(), CollectorRegistry()
    MetricsBoardCollector(outside, board=open_shm_metrics_board(Path(directory), 1))
    for sink in (PrometheusSink(inside), open_shm_metrics_sink(Path(directory), ParallelState())):
        sources = {"counters": LiveStats(counters)}
        MetricsEmitter(parallel=ParallelState(), load=Load(), sink=sink, sources=sources).emit()
    for registry in (inside, outside):
        assert 'sglang:naps_total{dp_rank="0",pp_rank="0",tp_rank="0"} 3.0' in render_metrics(registry)[0].decode()
assert "| `sglang:naps_total` | counter | naps | Naps. |" in render_markdown()
assert "rate(sglang:naps_total{" in json.dumps(render_dashboard())

class Reader:
    def __init__(self, registry):
        self.registry = registry

    def __call__(self, metric, labels):
        return self.registry.get_sample_value(f"sglang:{metric}", dict(labels))

def open_sink():
    registry = CollectorRegistry()
    return PrometheusSink(registry), Reader(registry)

for check in METRICS_SINK_CHECKS:
    check(open_sink)
"""


def insert(file: Path, edit: tuple[str, str]) -> None:
    text = file.read_text()
    assert text.count(edit[0]) == 1
    file.write_text(text.replace(*edit))


def test_a_field_adds_a_metric_to_every_export_the_dashboard_and_the_documentation(tmp_path: Path) -> None:
    for package in ("scheduler_components", "observability"):
        copytree(ROOT / package, tmp_path / package, ignore=ignore_patterns("__pycache__", "reference", "engines"))
    insert(tmp_path / "scheduler_components" / "values" / "stats.py", FIELD)
    command = [sys.executable, "-c", SCRIPT]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, check=False, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
