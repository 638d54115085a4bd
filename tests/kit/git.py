"""A git repository of a test, without any configuration of the machine."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ScratchRepository"]

_CONFIG = """
[user]
    name = Ada
    email = ada@example.org
[gc]
    auto = 0
[maintenance]
    auto = false
"""
"""Without maintenance, each commit starts one process less."""


class ScratchRepository:
    """A repository whose branch is ``main``, new if the folder does not exist. Ada writes its commits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.exists():
            folder.mkdir()
            self.git("init", "--quiet", "--initial-branch=main", "--template=")
            with (folder / ".git" / "config").open("a") as config:
                config.write(_CONFIG)

    def git(self, *arguments: str) -> str:
        """Run git; return what it prints."""
        return self._run(*arguments).decode()

    def _run(self, *arguments: str) -> bytes:
        plain = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        environment = {**os.environ, **plain}
        ran = subprocess.run(
            ["git", *arguments], cwd=self.folder, env=environment, capture_output=True, check=False, timeout=60
        )
        assert ran.returncode == 0, f"git {' '.join(arguments)}: {ran.stderr.decode()}"
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
        return self.head()

    def head(self) -> str:
        """Return the name of the current commit."""
        head = (self.folder / ".git" / "HEAD").read_text().strip()
        return (self.folder / ".git" / head.removeprefix("ref: ")).read_text().strip() if "ref: " in head else head

    def files(self, commit: str = "HEAD") -> dict[str, str]:
        """Return the text files of a commit."""
        with tarfile.open(fileobj=io.BytesIO(self._run("archive", "--format=tar", commit))) as archive:
            found = {each.name: archive.extractfile(each) for each in archive if each.isfile()}
            return {name: file.read().decode() for name, file in found.items() if file is not None}

    def hook(self, name: str, program: Path) -> None:
        """Make a program the hook of this name."""
        (self.folder / ".git" / "hooks").mkdir(exist_ok=True)
        (self.folder / ".git" / "hooks" / name).symlink_to(program)
