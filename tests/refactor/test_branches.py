"""The guide's advice for open branches: git follows a renamed file, and a move can be repeated on a branch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from move import move
from stages import GUIDE, STAGES

pytestmark = pytest.mark.processes

SCHEDULER = "engine/scheduler"
IN_A_BODY = ("        events = self.cache.take_events()\n", "        events = self.cache.take_events()[:100]\n")
NEW_METHOD = (
    "    @staticmethod\n    def close_kv_events(self: KvEvents) -> None:\n",
    "    @staticmethod\n    def flush(self: KvEvents) -> None:\n        KvEventsMixin.publish_kv_events(self)\n\n"
    "    @staticmethod\n    def close_kv_events(self: KvEvents) -> None:\n",
)


class Repository:
    """A repository in which ``main`` has made the move of step 3, and ``branch`` began before it."""

    def __init__(self, folder: Path, before: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        copytree(before, folder / SCHEDULER, ignore=ignore_patterns("__pycache__"))
        (folder / "notes").write_text("one\n")
        self.commit("Prepare")
        self.git("branch", "branch")
        (folder / "notes").write_text("two\n")
        self.commit("Go on before the move")
        move(folder)
        self.commit("Move")
        self.git("checkout", "--quiet", "branch")

    def git(self, *arguments: str) -> str:
        return self.run(["git", *arguments])

    def run(self, command: list[str], **more: str) -> str:
        who = {"GIT_AUTHOR_NAME": "Ada", "GIT_COMMITTER_NAME": "Bob"}
        mail = {"GIT_AUTHOR_EMAIL": "ada@example.org", "GIT_COMMITTER_EMAIL": "bob@example.org"}
        plain = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the guide says `python`
        env = {"PATH": path, **plain, **who, **mail, **more}
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder, env=env, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", f"--message={message}")

    def edit(self, name: str, change: tuple[str, str]) -> None:
        file = self.folder / SCHEDULER / name
        text = file.read_text()
        assert text.count(change[0]) == 1
        file.write_text(text.replace(*change))


@pytest.fixture
def repository(written: Path, tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository", written / STAGES[2])


def source(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.py")}


def test_the_program_makes_the_third_step(written: Path, tmp_path: Path) -> None:
    moved = copytree(written / STAGES[2], tmp_path / "moved", ignore=ignore_patterns("__pycache__"))
    move(moved)
    assert source(moved) == source(written / STAGES[3])


def test_git_merges_a_changed_body_into_the_renamed_file(repository: Repository) -> None:
    repository.edit("kv_events_mixin.py", IN_A_BODY)
    repository.commit("Take a hundred events")
    repository.git("merge", "--quiet", "--no-edit", "main")
    found = source(repository.folder / SCHEDULER)
    assert "kv_events_mixin.py" not in found
    assert IN_A_BODY[1] in found["kv_events.py"]


def test_a_branch_is_carried_over_the_move(repository: Repository, written: Path, tmp_path: Path) -> None:
    repository.edit("kv_events_mixin.py", IN_A_BODY)
    repository.commit("Take a hundred events")
    repository.edit("kv_events_mixin.py", NEW_METHOD)
    repository.commit("Flush")
    as_it_was = copytree(repository.folder / SCHEDULER, tmp_path / "as it was")

    (block,) = re.findall(r"```sh\n(# MOVE: .*?)```", (GUIDE / "README.md").read_text(), re.DOTALL)
    around = {"MOVE": repository.git("rev-parse", "main").strip(), "BRANCH": "branch", "SCRIPT": str(GUIDE / "move.py")}
    repository.run(["sh", "-e", "-u", "-c", block], GIT_AUTHOR_NAME="Another author", **around)

    move(as_it_was)
    assert source(repository.folder / SCHEDULER) == source(as_it_was)
    assert (repository.folder / "notes").read_text() == "two\n"
    assert repository.git("log", "--format=%an: %s", "main..branch").splitlines() == [
        "Ada: Flush",
        "Ada: Take a hundred events",
    ]
    changed = repository.git("diff", "--unified=0", "main", "branch").splitlines()
    assert [line[1:] + "\n" for line in changed if re.match(r"\+[^+]", line)] == [
        IN_A_BODY[1],
        "    def flush(self) -> None:\n",
        "        self.publish_kv_events()\n",
    ]
    assert repository.git("status", "--porcelain") == ""
