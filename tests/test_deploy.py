"""The compose file fits together: files, ports, services and options that it names exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from observability.grafana import DASHBOARD_FILE
from scheduler_engine.cli.commands import make_app
from scheduler_engine.cli.engine_commands import engine_config

DEPLOY = Path(__file__).parent.parent / "deploy"
ROOT = DEPLOY.parent


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


SERVICES: dict[str, dict[str, Any]] = read("compose.yaml")["services"]


def mounts(service: str) -> dict[str, Path]:
    """Path in the container -> file or folder here."""
    parts = (volume.split(":") for volume in SERVICES[service]["volumes"])
    return {inside: (DEPLOY / here).resolve() for here, inside, mode in parts if mode == "ro"}


@pytest.mark.parametrize("service", ["prometheus", "grafana"])
def test_every_mounted_file_exists(service: str) -> None:
    assert len(mounts(service)) == len(SERVICES[service]["volumes"])
    for path in mounts(service).values():
        assert path.exists(), path


def test_every_port_is_published_on_loopback_only() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items()}
    assert published == {
        "engine": ["127.0.0.1:30000:30000"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


def test_the_engine_runs_a_valid_command_at_the_scraped_port() -> None:
    name, *arguments = SERVICES["engine"]["command"].split()
    assert name == "scheduler-components"
    command, bound, _ = make_app().parse_args(arguments)
    assert command.__name__ == "demo"
    options = bound.arguments["options"]
    assert engine_config(options, bound.arguments["hicache"]).world_size == 8
    [job] = read("prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"engine:{options.port}"]}]
    assert options.host == "0.0.0.0"
    assert "engine" in bound.arguments["server"].allowed_host, "Prometheus names the service in its Host header"


def test_the_image_is_built_from_what_a_build_needs() -> None:
    build = SERVICES["engine"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    copied = [
        path for line in re.findall(r"^COPY (.+) \S+$", build["dockerfile_inline"], re.M) for path in line.split()
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(copied) == {"pyproject.toml", "README.md", *project["project"]["license-files"], *packages}
    [extras] = re.findall(r"'/kit\[([\w,]+)\]'", build["dockerfile_inline"])
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()
    [version] = re.findall(r"FROM python:([\d.]+)-slim", build["dockerfile_inline"])
    assert f"Programming Language :: Python :: {version}" in project["project"]["classifiers"]


def test_prometheus_loads_the_alerts_that_the_wheel_has() -> None:
    files = mounts("prometheus")
    assert "/etc/prometheus/prometheus.yml" in files
    [rules] = read("prometheus.yml")["rule_files"]
    assert files[rules] == ROOT / "observability" / "alerts.yml"


def test_grafana_reads_prometheus_and_shows_the_dashboard() -> None:
    files = mounts("grafana")
    [source] = read("grafana/datasources/prometheus.yaml")["datasources"]
    url = urlsplit(source["url"])
    assert (source["type"], source["isDefault"], url.hostname in SERVICES, url.port) == ("prometheus", True, True, 9090)
    [provider] = read("grafana/dashboards/schedulers.yaml")["providers"]
    shown = [here for inside, here in files.items() if inside.startswith(provider["options"]["path"] + "/")]
    assert shown == [DASHBOARD_FILE]
    assert {"/etc/grafana/provisioning/datasources", "/etc/grafana/provisioning/dashboards"} <= files.keys()
