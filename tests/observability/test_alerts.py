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

from observability.catalog import render_markdown

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
RULES_FILE = ROOT / "observability" / "alerts.yml"
RULES: list[dict[str, Any]] = yaml.safe_load(RULES_FILE.read_text())["groups"][0]["rules"]
BY_NAME = {rule["alert"]: rule for rule in RULES}
GUIDE = (ROOT / "docs" / "how-to" / "prometheus-and-grafana.md").read_text()

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian package prometheus)")


def test_the_guide_lists_each_alert_with_its_condition() -> None:
    _, _, section = GUIDE.partition("## Alert\n")
    rows = re.findall(r"^\| `([^`]+)` \| .* \| `(\w+)`, (\w+) \|$", section.partition("\n## ")[0], re.MULTILINE)
    assert rows == [(rule["expr"], rule["alert"], rule["labels"]["severity"]) for rule in RULES]


def test_each_alert_reads_a_metric_of_the_catalogue() -> None:
    known = render_markdown()
    for rule in RULES:
        [name] = re.findall(r"sglang:\w+", rule["expr"])
        assert f"`{name}`" in known, name


def broken_series(rule: dict[str, Any]) -> str:
    """Values, one per minute, at which the rule fires: a counter that grows by 120, or a gauge above its limit."""
    limit = float(rule["expr"].rpartition(" ")[2])
    return "0+120x30" if "rate(" in rule["expr"] else f"{limit:g}x30" if "==" in rule["expr"] else f"{limit + 1:g}x30"


def unit_tests() -> dict[str, Any]:
    """A test per rule: it fires on a broken scheduler, names the engine, and does not fire on one that is fine."""
    tests = []
    for rule in RULES:
        [metric] = re.findall(r"sglang:\w+", rule["expr"])
        for instance, values in (("broken:1", broken_series(rule)), ("fine:1", "0x30")):
            labels = {"severity": rule["labels"]["severity"], "instance": instance}
            text = rule["annotations"]["summary"].replace("{{ $labels.instance }}", instance)
            fires = [{"exp_labels": labels, "exp_annotations": {"summary": text}}] if instance == "broken:1" else []
            check = {"eval_time": "20m", "alertname": rule["alert"], "exp_alerts": fires}
            series = [{"series": f'{metric}{{instance="{instance}"}}', "values": values}]
            tests.append({"interval": "1m", "input_series": series, "alert_rule_test": [check]})
    return {"rule_files": [str(RULES_FILE)], "tests": tests}


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
