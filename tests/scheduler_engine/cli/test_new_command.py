"""``scheduler-components new``: the project passes its own property suite and the linter as it is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_components.scheduling.scheduling_policy import make_policy
from scheduler_engine.cli.commands import run_command
from scheduler_engine.cli.new_command import project_files

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "compose-a-scheduler.md"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("new")
    assert run_command(["new", "my_scheduler", "--directory", str(directory)]) == (0, "")
    return directory / "my_scheduler"


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(project)]), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, check=False)


def test_the_project_passes_its_property_suite(project: Path) -> None:
    done = run(project, "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_suite_finds_a_broken_policy(tmp_path: Path) -> None:
    assert run_command(["new", "broken", "--directory", str(tmp_path)]) == (0, "")
    policy = tmp_path / "broken" / "broken" / "policy.py"
    policy.write_text(policy.read_text().replace("self._waiting.discard(request)", "pass"))
    done = run(tmp_path / "broken", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:schemathesis")
    assert done.returncode == 1
    assert "ConformanceError" in done.stdout


def test_the_suite_finds_a_broken_preemption_policy(tmp_path: Path) -> None:
    """The batcher replaces it and serves on, so no check of its batches can fail."""
    assert run_command(["new", "broken", "--directory", str(tmp_path)]) == (0, "")
    project = tmp_path / "broken"
    policy, test = project / "broken" / "policy.py", project / "tests" / "test_scheduler.py"
    policy.write_text(policy.read_text() + "\n\nclass NoVictim:\n    def select_victim(self, candidates): ...\n")
    text = test.read_text().replace("import LeastRecomputation", "import LeastRecomputation as _")
    assert "LeastRecomputation()" in text
    test.write_text(
        text.replace("import Short", "import NoVictim, Short").replace("LeastRecomputation()", "NoVictim()")
    )
    done = run(project, "pytest", "-q", "-k", "test_batcher", "-p", "no:cacheprovider", "-p", "no:schemathesis")
    assert done.returncode == 1
    assert "the preemption policy NoVictim failed: select_victim() returned None, which is no candidate" in done.stdout


def test_the_project_passes_the_linter(project: Path) -> None:
    done = run(
        project, "ruff", "check", "--isolated", "--no-cache", "--select", "E,F,I,UP,B", "--line-length", "120", "."
    )
    assert done.returncode == 0, done.stdout
    assert all(len(line) <= 120 for text in project_files("x").values() for line in text.splitlines())


def test_the_policy_of_a_project_is_chosen_by_its_path(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project))
    policy = make_policy("my_scheduler.policy:ShortPromptsFirst")
    assert type(policy).__name__ == "ShortPromptsFirst"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("my-scheduler", "name='my-scheduler': is not a Python identifier"),
        ("class", "name='class': is not a Python identifier"),
        ("tests", "name='tests': is the name of another package"),
        ("there", "name='there': exists in "),
    ],
)
def test_a_wrong_name_is_one_sentence_and_writes_nothing(name: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    code, line = run_command(["new", name, "--directory", str(tmp_path)])
    assert code == 2
    assert sentence in line
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "there"]
    code, line = run_command(["new", "fine", "--directory", str(tmp_path / "nowhere")])
    assert (code, "is not a directory" in line) == (2, True)


def test_the_page_shows_the_files_as_they_are_written() -> None:
    page = PAGE.read_text()
    for path, text in project_files("my_scheduler").items():
        if path.parts[0] == "my_scheduler" and path.name in ("policy.py", "scheduler.py"):
            assert text in page, f"copy {path} into {PAGE.name}"
