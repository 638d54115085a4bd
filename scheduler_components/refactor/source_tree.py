"""Read and write the files of a refactor: a folder, a commit, the commit of a recipe. Only this module runs git."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scheduler_components.errors import ConfigError
from scheduler_components.refactor.recipe import Recipe, recipe_path, write_recipe

__all__ = [
    "commit_files",
    "find_module_file",
    "python_files",
    "read_commit",
    "read_folder",
    "run_git",
    "write_changes",
]


def python_files(path: Path) -> list[Path]:
    """Return a file, or the Python files below a folder, sorted, without hidden folders.

    Raises:
        ConfigError: there is none.
    """
    if path.is_file():
        return [path]
    found = [
        file
        for file in sorted(path.rglob("*.py"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not found:
        raise ConfigError("path", str(path), "has no Python file", "name a file or a folder of Python source")
    return found


def read_text(path: Path) -> str:
    """Return a file's text with its newlines as they are.

    Raises:
        ConfigError: it cannot be read, or it is not UTF-8.
    """
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ConfigError("path", str(path), f"cannot be read ({error.strerror})", "name another file") from error
    except UnicodeDecodeError as error:
        raise ConfigError("path", str(path), "is not UTF-8", "convert it or leave it out") from error


def find_module_file(module: str, importer: str) -> tuple[str, str] | None:
    """Return path and text of a module's file, searched from the folder of the importing file upwards."""
    relative = Path(*module.strip(".").split("."))
    for folder in Path(importer).resolve().parents:
        for candidate in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py"):
            if candidate.is_file():
                return str(candidate), read_text(candidate)
    return None


def read_folder(root: Path, paths: Sequence[str] = ()) -> dict[str, str]:
    """Return the text of the Python files below `root`, by their paths from there.

    Args:
        root: the root of the repository.
        paths: files and folders to read; empty for all.

    Raises:
        ConfigError: a path has no Python file, or a file cannot be read.
    """
    files = [file for path in paths or (".",) for file in python_files(root / path)]
    return {file.relative_to(root).as_posix(): read_text(file) for file in files}


def read_commit(repository: Path, revision: str, paths: Sequence[str] = ()) -> dict[str, str]:
    """Return the text of the Python files of a commit, by their paths from the root of the repository.

    Raises:
        ConfigError: git does not know the revision, or a file is not UTF-8.
    """
    listed = run_git(repository, "ls-tree", "-r", "-z", "--name-only", revision, "--", *paths)
    names = [name for name in listed.split("\0") if name.endswith(".py")]
    return dict(zip(names, _blobs(repository, revision, names), strict=True))


def write_changes(root: Path, before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """Write what differs between two trees below `root`, and return the changed paths, sorted."""
    changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    for path in changed:
        if path in after:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(after[path].encode())
        else:
            (root / path).unlink()
    return tuple(changed)


def commit_files(repository: Path, recipe: Recipe, changed: Sequence[str]) -> str:
    """Commit changed files together with their recipe, and return the hash of the commit.

    Raises:
        ConfigError: git refuses, for example because the index has other changes.
    """
    path = recipe_path(recipe)
    (repository / path).parent.mkdir(exist_ok=True)
    (repository / path).write_bytes(write_recipe(recipe))
    run_git(repository, "add", "--", path, *changed)
    message = (
        f"{recipe.title}\n\n{recipe.why}\n\nRecipe: {path}\n" if recipe.why else f"{recipe.title}\n\nRecipe: {path}\n"
    )
    run_git(repository, "commit", "--quiet", "--message", message, "--", path, *changed)
    return run_git(repository, "rev-parse", "HEAD").strip()


def run_git(repository: Path, *arguments: str) -> str:
    """Run git in a repository and return what it prints.

    Raises:
        ConfigError: git fails; the error has its message.
    """
    return _git(repository, arguments, b"").decode()


def _blobs(repository: Path, revision: str, names: Sequence[str]) -> Iterator[str]:
    asked = "".join(f"{revision}:{name}\n" for name in names).encode()
    answer = _git(repository, ("cat-file", "--batch"), asked)
    place = 0
    for name in names:
        end = answer.index(b"\n", place)
        size = int(answer[place:end].rsplit(b" ", 1)[1])
        data = answer[end + 1 : end + 1 + size]
        place = end + size + 2
        try:
            yield data.decode()
        except UnicodeDecodeError as error:
            raise ConfigError("path", name, f"is not UTF-8 in {revision}", "leave it out of `paths`") from error


def _git(repository: Path, arguments: Sequence[str], given: bytes) -> bytes:
    command = ["git", *arguments]
    try:
        ran = subprocess.run(command, cwd=repository, input=given, capture_output=True, check=False)  # noqa: S603
    except OSError as error:
        raise ConfigError("repository", str(repository), f"git does not run there ({error})", "install git") from error
    if ran.returncode:
        problem = ran.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        shown = " ".join(command[:3])
        raise ConfigError("repository", str(repository), f"`{shown}` failed: {problem[-1]}", "check revision and index")
    return ran.stdout
