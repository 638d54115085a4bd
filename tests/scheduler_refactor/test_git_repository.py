"""Commits are read without a checkout, whatever files are called and whatever the repository configures."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.git import ScratchRepository

from scheduler_components.errors import ConfigError
from scheduler_refactor.git_repository import (
    Commit,
    FileChange,
    GitError,
    open_repository,
)

pytestmark = pytest.mark.processes


@pytest.fixture
def scratch(tmp_path: Path) -> ScratchRepository:
    return ScratchRepository(tmp_path / "repository")


def test_changes_and_contents_are_exact(scratch: ScratchRepository) -> None:
    odd = "sub/ö\tname.py"
    first = scratch.commit("One", {"a.py": "a\r\n", odd: "b", "bytes.py": b"\xff", "t.txt": "t", "same.py": ""})
    (scratch.folder / "a.py").chmod(0o755)
    (scratch.folder / "link.py").symlink_to("a.py")
    second = scratch.commit("Two", {odd: None, "a.py": "a\n"})
    repository = open_repository(scratch.folder / "sub" if (scratch.folder / "sub").is_dir() else scratch.folder)
    changes = {each.path: each for each in repository.changes(first, second)}
    assert changes.keys() == {"a.py", odd, "link.py"}
    assert changes["a.py"].modes == ("100644", "100755")
    assert changes[odd] == FileChange(odd, ("100644", "000000"), (changes[odd].blobs[0], ""))
    assert repository.blobs([*changes["a.py"].blobs, changes[odd].blobs[0]]) == {
        changes["a.py"].blobs[0]: b"a\r\n",
        changes["a.py"].blobs[1]: b"a\n",
        changes[odd].blobs[0]: b"b",
    }
    assert repository.python_files(first) == {"a.py": "a\r\n", odd: "b", "same.py": ""}
    assert repository.python_files(second) == {"a.py": "a\n", "same.py": ""}
    assert repository.python_files(first, ["sub"]) == {odd: "b"}
    assert repository.python_files(first, ["*.py"]) == {}
    assert repository.commits(first, second) == [Commit(second, (first,), "Two")]
    assert repository.commits(second, second) == []


def test_an_object_is_what_its_name_says(scratch: ScratchRepository) -> None:
    first, second = scratch.commit("One", {"a.py": "a"}), scratch.commit("Two", {"a.py": "b"})
    scratch.git("replace", first, second)
    assert open_repository(scratch.folder).python_files(first) == {"a.py": "a"}


def test_nothing_of_the_repository_runs(scratch: ScratchRepository) -> None:
    """A hook, a filter or a monitor of the repository would leave a file."""
    trap, marker = scratch.folder / ".git" / "trap", scratch.folder / "ran"
    trap.write_text(f"#!/bin/sh\ntouch '{marker}'\ncat\n")
    trap.chmod(0o755)
    first = scratch.commit("One", {"a.py": "a", ".gitattributes": "*.py filter=trap diff=trap\n"})
    second = scratch.commit("Two", {"a.py": "A"})
    for key in ("filter.trap.clean", "filter.trap.smudge", "diff.trap.textconv", "diff.external", "core.fsmonitor"):
        scratch.git("config", key, str(trap))
    for hook in ("post-commit", "reference-transaction", "post-index-change"):
        scratch.hook(hook, trap)
    marker.unlink(missing_ok=True)
    repository = open_repository(scratch.folder)
    repository.python_files(first)
    repository.commits(first, second)
    repository.blobs(name for each in repository.changes(first, second) for name in each.blobs)
    assert not marker.exists()


@pytest.mark.parametrize("revision", ["nowhere", "--all", "HEAD:a.py", ""])
def test_a_wrong_revision_is_named(revision: str, scratch: ScratchRepository) -> None:
    scratch.commit("One", {"a.py": "a"})
    with pytest.raises(ConfigError, match="is no commit here"):
        open_repository(scratch.folder).resolve(revision)


def test_a_folder_outside_of_a_repository_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match="is none"):
        open_repository(tmp_path / "plain")
    with pytest.raises(ConfigError, match="is no folder"):
        open_repository(tmp_path / "missing")


def test_a_failure_of_git_has_its_text(scratch: ScratchRepository) -> None:
    first = scratch.commit("One", {"a.py": "a"})
    repository = open_repository(scratch.folder)
    with pytest.raises(GitError, match="git diff-tree failed"):
        repository.changes(first, "0" * 40)
