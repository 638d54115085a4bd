"""The patches lead from the first stage to the last one, and a faulty patch is an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from stages import GUIDE, PATCHES, STAGES, record_steps

pytestmark = pytest.mark.processes

CACHES = ignore_patterns("__pycache__", ".*_cache")


def source(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}


@pytest.mark.parametrize("stage", [STAGES[0], STAGES[-1]])
def test_the_steps_start_and_end_at_the_kept_stages(stage: str, written: Path) -> None:
    assert source(written / stage) == source(GUIDE / stage)
    assert [path.name for path in sorted(GUIDE.glob("stage_*"))] == [STAGES[0], STAGES[-1]]


def test_the_patches_are_as_they_would_be_recorded(written: Path, tmp_path: Path) -> None:
    record_steps(written, tmp_path)
    for patch in PATCHES:
        assert (tmp_path / patch.name).read_text() == patch.read_text(), patch.name
    for stage in (STAGES[0], STAGES[-1]):
        assert source(tmp_path / stage) == source(GUIDE / stage)


def test_each_patch_starts_with_its_description() -> None:
    for number, patch in enumerate(PATCHES, 1):
        words, _, difference = patch.read_text().partition("diff --git ")
        assert words.startswith(f"Step {number}: ")
        assert difference
        assert all(len(line) <= 120 for line in words.splitlines())


def run_guide(guide: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(guide / "run.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name}: {old!r}"
    file.write_text(text.replace(old, new))


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    """A copy of the guide, to break."""
    return copytree(GUIDE, tmp_path / "guide", ignore=CACHES)


def test_the_guide_runs_from_anywhere(guide: Path) -> None:
    ran = run_guide(guide)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        pytest.param(
            "step_1_explicit.patch", "\n-    def init_metrics(", "\n-    def init_metric(", id="a removed line"
        ),
        pytest.param(
            "step_3_moved.patch", "\n     load_sequence: int = 0", "\n     load_sequence: int = 1", id="context"
        ),
        pytest.param("stage_0_mixins/metrics_mixin.py", "def emit_metrics(", "def emit(", id="the first stage"),
    ],
)
def test_a_patch_that_does_not_apply_is_an_error(file: str, old: str, new: str, guide: Path) -> None:
    replace(guide / file, old, new)
    ran = run_guide(guide)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "patch does not apply" in ran.stderr


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        pytest.param(
            "step_5_composed.patch", "+        self.metrics.emit()", "+        self.metrics.emit( )", id="patch"
        ),
        pytest.param("stage_5_composed/scheduler.py", "Serves requests", "Runs requests", id="the last stage"),
    ],
)
def test_steps_that_end_elsewhere_are_an_error(file: str, old: str, new: str, guide: Path) -> None:
    replace(guide / file, old, new)
    ran = run_guide(guide)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "does not lead to stage_5_composed: scheduler.py differ" in ran.stderr


WRONG_TURNS = [
    ("stage_1_explicit/load_mixin.py", "timestamp=self.clock(),", "timestamp=self.clock() + 1,"),
    ("stage_2_prepared/scheduler.py", "get_running=lambda: self.running,", "get_running=self.running.copy,"),
    ("stage_2_prepared/output_mixin.py", "return running\n", "return batch.running\n"),
    ("stage_3_moved/metrics.py", "publisher=self.get_publisher_stats(),", "publisher=PublisherStats(),"),
    ("stage_4_ports/kv_events.py", "if events:", "if len(events) > 1:"),
]


@pytest.mark.parametrize(("file", "old", "new"), WRONG_TURNS)
def test_a_stage_with_other_output_is_an_error(
    file: str, old: str, new: str, guide: Path, written: Path, tmp_path: Path
) -> None:
    """One step goes wrong and the next one takes it back: every patch applies, and the last stage is right."""
    stages = copytree(written, tmp_path / "stages", ignore=CACHES)
    replace(stages / file, old, new)
    record_steps(stages, guide)
    ran = run_guide(guide)
    assert (ran.returncode, ran.stderr) == (1, "")
    said = {line.split()[0]: line.split("all it said: ")[1].split()[0] for line in ran.stdout.splitlines()}
    assert list(said) == list(STAGES)
    right = said[STAGES[0]]
    assert [stage for stage in STAGES if said[stage] != right] == [file.partition("/")[0]]
