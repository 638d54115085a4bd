"""``hicache-sim`` shows what it says, and its picture is a picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from scheduler_components import ConfigError
from scheduler_components.reference.cli import app
from scheduler_components.reference.device import SimulationConfig, run_simulation
from scheduler_components.reference.device.divergence_picture import Curve, divergence_svg


def test_ranks_part_over_tp_and_never_over_cp_x_tp(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "picture.svg"
    found = CliRunner().invoke(app, ["hicache-sim", "--seeds", "3", "--steps", "100", "--picture", str(picture)])
    lines = found.stdout.splitlines()
    assert found.exit_code == 0
    assert lines[0].startswith("agreement over TP: 3 runs of 100 steps")
    assert "ranks parted in 3 of 3 runs, after " in lines[1]
    assert lines[-3].startswith("agreement over CP X TP: 3 runs of 100 steps")
    assert lines[-2] == "  ranks never parted"
    assert "CP 2 x TP 2 ranks" in picture.read_text()


def test_without_cp_there_is_nothing_to_leave_out() -> None:
    config = SimulationConfig(attn_cp_size=1, attn_tp_size=2, scope="tp")
    [run] = run_simulation(config, seeds=[0], num_steps=100, sample_steps=50)
    assert run.parted_at is None
    assert run.differing_pages == [0, 0]
    assert run.num_served > 0


def test_a_run_is_told_by_its_seed() -> None:
    config = SimulationConfig(scope="tp")
    assert run_simulation(config, seeds=[3], num_steps=60, sample_steps=10) == run_simulation(
        config, seeds=[3], num_steps=60, sample_steps=10
    )


def test_a_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="device_pages=0: is not a size"):
        SimulationConfig(device_pages=0)


def test_the_picture_has_a_line_a_run_and_a_mean_within_its_frame() -> None:
    curves = {"<a>": Curve(((0, 5), (10, 3))), "b": Curve(((0, 0),))}
    root = ElementTree.fromstring(divergence_svg(curves, sample_steps=10, title="a & b", unit="pages"))
    lines = root.findall("{*}polyline")
    assert [line.get("stroke") for line in lines] == ["#c2410c"] * 3 + ["#1d4ed8"] * 2
    points = [tuple(map(float, point.split(","))) for line in lines for point in line.get("points", "").split()]
    assert all(0 <= x <= 760 and 0 <= y <= 360 for x, y in points)
    [highest] = {y for _, y in points if y == min(y for _, y in points)}
    assert highest == 56.0
    assert "<a>" in [text.text for text in root.findall("{*}text")]
