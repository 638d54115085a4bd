"""A git repository of a test, without any configuration of the machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ScratchRepository"]


class ScratchRepository:
    """A new repository whose branch is ``main``. Ada writes its commits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.name", "Ada")
        self.git("config", "user.email", "ada@example.org")

    def git(self, *arguments: str) -> str:
        """Run git; return what it prints."""
        plain = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        ran = subprocess.run(
            ["git", *arguments],
            cwd=self.folder,
            env={**os.environ, **plain},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert ran.returncode == 0, f"git {' '.join(arguments)}: {ran.stderr}"
        return ran.stdout

    def commit(self, message: str, files: Mapping[str, str | bytes | None]) -> str:
        """Write files (None deletes one), commit everything, and return the commit's name."""
        for name, content in files.items():
            path = self.folder / name
            if content is None:
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.git("add", "--all")
        self.git("commit", "--quiet", f"--message={message}")
        return self.git("rev-parse", "HEAD").strip()

    def files(self, commit: str = "HEAD") -> dict[str, str]:
        """Return the text files of a commit."""
        names = self.git("ls-tree", "-r", "--name-only", commit).splitlines()
        return {name: self.git("show", f"{commit}:{name}") for name in names}

    def hook(self, name: str, program: Path) -> None:
        """Make a program the hook of this name."""
        (self.folder / ".git" / "hooks").mkdir(exist_ok=True)
        (self.folder / ".git" / "hooks" / name).symlink_to(program)
