"""The alert rules are those of the guide, use metrics of the catalogue, and fire: promtool judges them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from observability.catalog import render_markdown, render_stream_markdown

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
RULES_FILE = ROOT / "observability" / "alerts.yml"
RULES: list[dict[str, Any]] = yaml.safe_load(RULES_FILE.read_text())["groups"][0]["rules"]
BY_NAME = {rule["alert"]: rule for rule in RULES}
GUIDE = (ROOT / "docs" / "how-to" / "prometheus-and-grafana.md").read_text()

METRIC = re.compile(r"(?:sglang:|kv_stream_)\w+")

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian package prometheus)")


def test_the_guide_lists_each_alert_with_its_condition() -> None:
    _, _, section = GUIDE.partition("## Alert\n")
    rows = re.findall(r"^\| `([^`]+)` \| .* \| `(\w+)`, (\w+) \|$", section.partition("\n## ")[0], re.MULTILINE)
    assert rows == [(rule["expr"], rule["alert"], rule["labels"]["severity"]) for rule in RULES]


def conditions_of(rule: dict[str, Any]) -> list[str]:
    """The comparisons of a rule, each of one metric."""
    return rule["expr"].split(" and ")


def test_each_alert_reads_metrics_of_the_catalogue() -> None:
    known = render_markdown() + render_stream_markdown()
    for rule in RULES:
        for condition in conditions_of(rule):
            [name] = METRIC.findall(condition)
            assert f"`{name}`" in known, name


INTERVAL = "15s"
FINE = "0x80"


def broken_series(condition: str) -> str:
    """Values at which a condition holds: a counter that grows by two per second, or a gauge above its limit."""
    limit = float(condition.rpartition(" ")[2])
    return "0+30x80" if "rate(" in condition else f"{limit:g}x80" if "==" in condition else f"{limit + 1:g}x80"


def unit_test(
    rule: dict[str, Any], instance: str, values: list[str], *, fires: bool, times: tuple[str, ...] = ("20m",)
) -> dict[str, Any]:
    """A test of promtool: does the rule fire at these times, and name the engine, if its metrics have these values?"""
    labels = {"severity": rule["labels"]["severity"], "instance": instance}
    text = rule["annotations"]["summary"].replace("{{ $labels.instance }}", instance)
    alerts = [{"exp_labels": labels, "exp_annotations": {"summary": text}}] if fires else []
    checks = [{"eval_time": each, "alertname": rule["alert"], "exp_alerts": alerts} for each in times]
    metrics = METRIC.findall(rule["expr"])
    series = [
        {"series": f'{metric}{{instance="{instance}"}}', "values": each}
        for metric, each in zip(metrics, values, strict=True)
    ]
    return {"interval": INTERVAL, "input_series": series, "alert_rule_test": checks}


def unit_tests() -> dict[str, Any]:
    """Tests per rule: it fires on a broken scheduler, not on one that is fine, and not if one condition fails."""
    tests = []
    for rule in RULES:
        broken = [broken_series(condition) for condition in conditions_of(rule)]
        tests.append(unit_test(rule, "broken:1", broken, fires=True))
        for number in range(len(broken)):
            values = [*broken[:number], FINE, *broken[number + 1 :]]
            tests.append(unit_test(rule, "fine:1", values, fires=False))
    idle_after_10m = ["0x40 15+15x40", "0+30x40 1200x40"]  # its age grows, and it has no new batches
    times = tuple(f"{minute}m" for minute in range(1, 21))
    tests.append(unit_test(BY_NAME["KvEventsReadLate"], "idle:1", idle_after_10m, fires=False, times=times))
    return {"rule_files": [str(RULES_FILE)], "evaluation_interval": INTERVAL, "tests": tests}


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    ran = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(RULES_FILE)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(RULES)} rules found" in ran.stdout


@needs_promtool
def test_each_alert_fires_on_a_broken_scheduler_and_on_no_other(tmp_path: Path) -> None:
    file = tmp_path / "tests.json"
    file.write_text(json.dumps(unit_tests()))  # JSON is YAML
    ran = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
