"""GitRepository: read commits without a checkout. The edge to git.

Every call passes a list of arguments to one `git` process. There is no shell, and no hook, filter or configuration of
the repository runs: files are read as blobs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from scheduler_components.errors import ComponentError, ConfigError

_SETTINGS = (f"core.hooksPath={os.devnull}", "core.fsmonitor=false", "log.showSignature=false")
_OPTIONS = ("--no-replace-objects", *(option for setting in _SETTINGS for option in ("-c", setting)))
"""An object is what its name says, and no program of the repository runs."""


class GitError(ComponentError):
    """Git failed.

    Args:
        arguments: of git.
        problem: what git wrote.
    """

    def __init__(self, arguments: Sequence[str], problem: str) -> None:
        self.arguments = tuple(arguments)
        self.problem = problem
        super().__init__(f"git {arguments[0]} failed: {problem.strip() or 'no message'}")


class Commit(msgspec.Struct, frozen=True):
    """A commit.

    Attributes:
        name: its full name.
        parents: the names of its parents.
        subject: the first line of its message.
    """

    name: str
    parents: tuple[str, ...]
    subject: str


class FileChange(msgspec.Struct, frozen=True):
    """A file that differs between two commits.

    Attributes:
        path: from the root of the repository.
        modes: before and after, for example ``"100644"``; ``"000000"`` where there is no file.
        blobs: names of the contents before and after; empty where there is no file.
    """

    path: str
    modes: tuple[str, str]
    blobs: tuple[str, str]


class GitRepository:
    """A repository on this machine. `open_repository` finds it.

    Args:
        root: its uppermost folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def resolve(self, revision: str) -> str:
        """Return the full name of a commit.

        Raises:
            ConfigError: the repository has no such commit.
        """
        try:
            return self._text("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
        except GitError as error:
            raise ConfigError("revision", revision, "is no commit here", "give a commit, branch or tag") from error

    def commits(self, base: str, head: str) -> list[Commit]:
        """Return the commits that `head` has and `base` has not, oldest first. Merges are among them."""
        listed = self._text("log", "--reverse", "--topo-order", "-z", "--format=%H %P%n%s", f"{base}..{head}")
        found = []
        for entry in listed.split("\0"):
            names, _, subject = entry.partition("\n")
            if names:
                name, *parents = names.split()
                found.append(Commit(name, tuple(parents), subject))
        return found

    def changes(self, before: str, after: str) -> list[FileChange]:
        """Return the files in which two commits differ, renames as one deleted and one added file."""
        fields = self._git("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", before, after).split(b"\0")
        found = []
        for facts, path in zip(fields[::2], fields[1::2], strict=False):
            mode_before, mode_after, before_name, after_name, _ = facts.decode().lstrip(":").split()
            blobs = (before_name.replace("0" * len(before_name), ""), after_name.replace("0" * len(after_name), ""))
            found.append(FileChange(_path_text(path), (mode_before, mode_after), blobs))
        return found

    def blobs(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return contents by name.

        Raises:
            GitError: the repository lacks one, as a partial clone may.
        """
        wanted = list(dict.fromkeys(names))
        out = self._git("cat-file", "--batch", stdin="".join(f"{name}\n" for name in wanted).encode())
        found: dict[str, bytes] = {}
        for name in wanted:
            head, _, out = out.partition(b"\n")
            if head.endswith(b" missing"):
                raise GitError(["cat-file"], f"{name} is not in this repository")
            size = int(head.split()[2])
            found[name], out = out[:size], out[size + 1 :]
        return found

    def python_files(self, commit: str, paths: Sequence[str] = ()) -> dict[str, str]:
        """Return the Python files of a commit below some paths, by path. A file that is not UTF-8 is left out."""
        listed = self._git("ls-tree", "-r", "-z", "--full-tree", commit, "--", *paths)
        names: dict[str, str] = {}
        for line in listed.split(b"\0"):
            facts, _, path = line.partition(b"\t")
            if path.endswith(b".py") and facts.startswith(b"100"):
                names[_path_text(path)] = facts.split()[2].decode()
        contents = self.blobs(names.values())
        return {path: text for path, name in names.items() if (text := _text_of(contents[name])) is not None}

    def _text(self, *arguments: str, stdin: bytes = b"") -> str:
        return self._git(*arguments, stdin=stdin).decode(errors="surrogateescape")

    def _git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        ran = subprocess.run(  # a list of arguments, no shell
            ["git", *_OPTIONS, *arguments],  # the user's git
            input=stdin,
            cwd=self.root,
            capture_output=True,
            check=False,
        )
        if ran.returncode:
            raise GitError(arguments, ran.stderr.decode(errors="replace"))
        return ran.stdout


def open_repository(folder: Path) -> GitRepository:
    """Return the repository that a folder belongs to.

    Raises:
        ConfigError: the folder is in no repository, or git is not installed.
    """
    if not folder.is_dir():
        raise ConfigError("repository", str(folder), "is no folder", "give a folder of a git repository")
    try:
        root = GitRepository(folder)._git("rev-parse", "--show-toplevel")
    except GitError as error:
        raise ConfigError("repository", str(folder), f"is none ({error})", "give one of its folders") from error
    except FileNotFoundError as error:
        raise ConfigError("repository", str(folder), "needs git, which is not installed", "install git") from error
    return GitRepository(Path(os.fsdecode(root.rstrip(b"\n"))))


def _path_text(path: bytes) -> str:
    return path.decode(errors="surrogateescape")


def _text_of(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None
