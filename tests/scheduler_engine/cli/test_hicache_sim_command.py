"""``simulate ranks`` shows where ranks diverge, and its picture shows the runs. ``hicache-sim`` is its older name."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kit.imported_later import ImportedLater

from scheduler_engine.cli.hicache_sim_command import RunProgress, draw_divergence
from scheduler_engine.device.hicache_sim import SimulationRun

matplotlib_figure = ImportedLater("matplotlib.figure", reason="pip install scheduler-components[plot]")


def test_the_report_shows_divergence_over_tp_only(command_line: Callable, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "picture.svg"
    found = command_line("hicache-sim", "--seeds", "2", "--steps", "100", "--picture", str(picture))
    lines = found.out.splitlines()
    assert found.code == 0
    assert lines[0].startswith("agreement over TP: 2 runs of 100 steps")
    assert "ranks diverged in 2 of 2 runs, after " in lines[1]
    assert lines[4].startswith("  first decision that differed with seed 0: step 1: the ranks decided differently at")
    assert lines[-3].startswith("agreement over CP X TP: 2 runs of 100 steps")
    assert lines[-2] == "  ranks never diverged"
    assert "CP 2 x TP 2 ranks" in picture.read_text()
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_the_report_shows_divergence_without_pipeline_stages(command_line: Callable) -> None:
    found = command_line("hicache-sim", "--attn-cp-size", "1", "--pp-size", "2", "--seeds", "1", "--steps", "100")
    assert found.code == 0
    shown = [line for line in found.out.splitlines() if line.startswith(("agreement", "  ranks"))]
    assert [line.split(":")[0].split(",")[0] for line in shown] == [
        "agreement over TP",
        "  ranks diverged in 1 of 1 runs",
        "agreement over CP X TP",
        "  ranks diverged in 1 of 1 runs",
        "agreement over CP X TP X PP",
        "  ranks never diverged",
    ]


def test_the_report_names_the_first_decision_that_differed_in_each_run(command_line: Callable) -> None:
    found = command_line("simulate", "ranks", "--without", "load-room", "--seeds", "2", "--steps", "100")
    assert found.code == 0
    first, *lines = found.out.splitlines()
    assert first == "without the agreement load-room: 2 runs of 100 steps, ranks diverged in 2"
    named = [line for line in lines if line.startswith("  seed")]
    assert [line.partition(" decided")[0] for line in named] == [
        "  seed 0: step 1: the ranks",
        "  seed 1: step 1: the ranks",
    ]
    assert all("apply(component='hicache', what='limits', value[0]=True, value[1]=" in line for line in named)
    assert "the run ended by TierDivergenceError: step 69: ranks hold different pages" in found.out


def test_the_page_about_diverging_ranks_shows_what_the_command_prints(command_line: Callable) -> None:
    page = Path(__file__).parents[3] / "docs" / "explanation" / "diverging-ranks.md"
    [command] = re.findall(r"^scheduler-components (simulate .*)$", page.read_text(), re.MULTILINE)
    assert command_line(*command.split()).out.strip() in page.read_text()


def test_a_picture_of_a_removed_agreement_is_refused(command_line: Callable, tmp_path: Path) -> None:
    found = command_line("simulate", "ranks", "--without", "storage", "--picture", str(tmp_path / "picture.svg"))
    assert (found.code, found.out) == (2, "")
    assert "leave it out with --without" in found.complaint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_progress_on_one_line() -> None:
    out = Terminal()
    progress = RunProgress(out=out, num_runs=2)
    progress.ran()
    progress.ran()
    progress.clear()
    assert out.getvalue() == "\r1 of 2 runs done\r2 of 2 runs done\r\033[K"


def test_a_log_has_a_line_every_ten_seconds() -> None:
    out, ticks = io.StringIO(), iter([0.0, 4.0, 8.0, 12.0, 16.0, 30.0])
    progress = RunProgress(out=out, num_runs=5, clock=lambda: next(ticks))
    for _ in range(5):
        progress.ran()
    progress.clear()
    assert out.getvalue() == "3 of 5 runs done\n5 of 5 runs done\n"


def test_the_picture_has_a_line_per_run_and_their_mean() -> None:
    runs = {
        "tp": [SimulationRun(seed=0, differing_pages=[0, 5]), SimulationRun(seed=1, differing_pages=[10, 3])],
        "cp x tp": [SimulationRun(seed=0, differing_pages=[0, 0])],
    }
    figure = matplotlib_figure.Figure()
    draw_divergence(figure, runs, sample_steps=10, title="a & b")
    (axes,) = figure.axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
    steps = [0, 10, 20]
    assert lines == [
        (steps, [0, 0, 5]),
        (steps, [0, 10, 3]),
        (steps, [0, 5, 4]),
        (steps, [0, 0, 0]),
        (steps, [0, 0, 0]),
    ]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "agreement over TP",
        "agreement over CP X TP",
    ]


def test_without_matplotlib_a_picture_is_refused_before_the_simulation(
    command_line: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = command_line("hicache-sim", "--picture", str(tmp_path / "picture.svg"))
    assert (found.code, found.out) == (1, "")
    assert found.complaint == (
        "matplotlib: is not installed; pip install 'scheduler-components[plot]', or leave --picture out"
    )
