"""The patches lead from the first stage to the last one, and a faulty patch is an error."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from run import WORKLOAD
from serving_parts.harness import harness, stage_tree
from stages import GUIDE, PATCHES, STAGES, GuideError, record_steps, write_stages

from scheduler_refactor import first_difference, play

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


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name}: {old!r}"
    file.write_text(text.replace(old, new))


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    """A copy of the guide, to break."""
    return copytree(GUIDE, tmp_path / "guide", ignore=CACHES)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        pytest.param(
            "step_1_explicit.patch", "\n-    def init_metrics(", "\n-    def init_metric(", id="a removed line"
        ),
        pytest.param(
            "step_3_moved.patch",
            "\n     load_sequence: int = field(",
            "\n     load_sequence: int = file(",
            id="context",
        ),
        pytest.param("stage_0_mixins/metrics_mixin.py", "def emit_metrics(", "def emit(", id="the first stage"),
    ],
)
def test_a_patch_that_does_not_apply_is_an_error(file: str, old: str, new: str, guide: Path, tmp_path: Path) -> None:
    replace(guide / file, old, new)
    with pytest.raises(GuideError, match="patch does not apply"):
        write_stages(tmp_path / "stages", guide)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        pytest.param("step_6_policies.patch", "+        self.num_steps = 0", "+        self.num_steps = 1", id="patch"),
        pytest.param("stage_6_policies/scheduler.py", "Serves requests", "Runs requests", id="the last stage"),
    ],
)
def test_steps_that_end_elsewhere_are_an_error(file: str, old: str, new: str, guide: Path, tmp_path: Path) -> None:
    replace(guide / file, old, new)
    with pytest.raises(GuideError, match=r"does not lead to stage_6_policies: scheduler\.py differ"):
        write_stages(tmp_path / "stages", guide)


WRONG_TURNS = [
    ("stage_1_explicit/load_mixin.py", "timestamp=self.clock(),", "timestamp=self.clock() + 1,"),
    ("stage_2_prepared/output_mixin.py", "num_generated += 1", "num_generated += 2"),
    ("stage_3_moved/scheduler.py", "            queues=self,", "            queues=copy(self),"),
    ("stage_3_moved/metrics.py", "counters=copy(self.totals)", "counters=self.totals.__class__()"),
    ("stage_4_ports/kv_events.py", "if events:", "if len(events) > 1:"),
    (
        "stage_6_policies/scheduler.py",
        "import FirstComeFirstServed",
        "import LongestPrefixMatch as FirstComeFirstServed",
    ),
    ("stage_6_policies/scheduler.py", "select_victim(staying[1:] or staying)", "select_victim(staying[:1])"),
    ("stage_6_policies/scheduler.py", "            self.policies.scheduling.add(victim, self.num_steps)\n", ""),
]


@pytest.mark.parametrize(("file", "old", "new"), WRONG_TURNS)
def test_a_stage_with_other_output_is_found(file: str, old: str, new: str, written: Path, tmp_path: Path) -> None:
    stage = file.partition("/")[0]
    wrong = copytree(written / stage, tmp_path / stage, ignore=CACHES)
    replace(wrong / file.partition("/")[2], old, new)
    right, found = (play(harness, stage_tree(folder), WORKLOAD) for folder in (written / STAGES[0], wrong))
    assert first_difference(right, found, harness.exits) is not None
